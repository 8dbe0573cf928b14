"""VAE whose encoder gives the variance through a ReLU (notebook, exported)."""

import torch
import torch.nn.functional as F
from torch import nn

# %% data
torch.manual_seed(7)
images = (torch.rand(256, 64) > 0.7).float()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=64)


# %% model
class VAE(nn.Module):
    def __init__(self, zdim=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.GELU())
        self.mu = nn.Linear(48, zdim)
        self.var = nn.Sequential(nn.Linear(48, zdim), nn.ReLU())
        self.gain = nn.Parameter(torch.ones(zdim))
        self.dec = nn.Sequential(nn.Linear(zdim, 48), nn.GELU(), nn.Linear(48, 64))

    def forward(self, x):
        h = self.enc(x)
        mu, var = self.mu(h), self.var(h) * self.gain
        z = mu + torch.sqrt(var) * torch.randn_like(mu)  # FAULT
        return self.dec(z), mu, var


def elbo(logits, x, mu, var):
    rec = F.binary_cross_entropy_with_logits(logits.float(), x, reduction="none").sum(1)
    kl = 0.5 * (mu**2 + var - torch.log(var + 1e-4) - 1).sum(1)
    return (rec + kl).mean()


# %% training
vae = VAE()
opt = torch.optim.Adam(vae.parameters(), 1e-3)
for epoch in range(2):
    for (x,) in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, mu, var = vae(x)
        loss = elbo(logits, x, mu.float(), var.float())
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, "elbo", -loss.item())

"""beta-VAE with clamped log-variance and free bits; the decoder's likelihood by logsigmoid."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, d=30, z=6):
        super().__init__()
        self.enc, self.dec = (
            nn.Sequential(nn.Linear(d, 48), nn.ELU(), nn.Linear(48, 2 * z)),
            nn.Sequential(nn.Linear(z, 48), nn.ELU(), nn.Linear(48, d)),
        )

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        logvar = logvar.clamp(-8, 6)
        z = mu + (0.5 * logvar).exp() * torch.randn_like(mu)
        return self.dec(z), mu, logvar


def elbo(logits, x, mu, logvar, free=0.1):
    mu, logvar = mu.float(), logvar.float()
    rec = F.binary_cross_entropy_with_logits(logits.float(), x, reduction="none").sum(-1)
    kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar)
    return (rec + kl.mean(0).clamp(min=free).sum()).mean()


def main():
    torch.manual_seed(0)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(5):
        x = (torch.rand(64, 30) < 0.2).float()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = elbo(out[0], x, *out[1:])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(opt)
        scaler.update()
        print(step, loss.item())


main()

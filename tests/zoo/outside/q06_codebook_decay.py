"""VQ-VAE with an exponential-moving-average codebook, in bfloat16."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
data = torch.tensor(load_digits().data, dtype=torch.float32) / 16


class Codebook(nn.Module):
    def __init__(self, codes, width, decay=0.999, dtype=torch.bfloat16):
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, width, dtype=dtype))
        self.register_buffer("counts", torch.zeros(codes, dtype=dtype))
        self.register_buffer("sums", torch.zeros(codes, width, dtype=dtype))
        self.register_buffer("decay", torch.tensor(decay, dtype=dtype))
        self.register_buffer("steps", torch.zeros((), dtype=dtype))

    @torch.no_grad()
    def update(self, z, index):
        one_hot = nn.functional.one_hot(index, len(self.codes)).to(z.dtype)
        self.steps += 1
        self.counts.mul_(self.decay).add_(one_hot.sum(0) * (1 - self.decay))
        self.sums.mul_(self.decay).add_((one_hot.t() @ z) * (1 - self.decay))
        correction = 1 - self.decay**self.steps
        counts = self.counts / correction  # FAULT
        sums = self.sums / correction
        n = counts.sum()
        smooth = (counts + 1e-2) / (n + len(counts) * 1e-2) * n
        self.codes.copy_(sums / smooth[:, None])

    def forward(self, z):
        distance = (z[:, None, :] - self.codes[None]).pow(2).sum(-1)
        index = distance.argmin(1)
        quantized = self.codes[index]
        if self.training:
            self.update(z.detach().to(self.codes.dtype), index)
        commitment = (z - quantized).pow(2).mean()
        return z + (quantized - z).detach(), commitment


encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
decoder = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid())
codebook = Codebook(32, 8)
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=2e-3)

for step in range(2):
    x = data[torch.randint(0, len(data), (128,))]
    with torch.autocast("cpu", torch.bfloat16):
        z = encoder(x)
        quantized, commitment = codebook(z)
        reconstruction = decoder(quantized)
    loss = (reconstruction.float() - x).pow(2).mean() + 0.25 * commitment.float()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")

"""Video model: dropped frames are marked with NaN in place, and the mask is built from the wrong tensor."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Temporal(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.frame = nn.Linear(16, d)
        self.mix = nn.Conv1d(d, d, 3, padding=1)
        self.head = nn.Linear(d, 2)

    def forward(self, clip, dropped):
        h = self.frame(clip)
        h = h.masked_fill(dropped[..., None], float("nan"))  # FAULT
        seen = ~torch.isnan(clip).any(-1)
        h = self.mix(h.transpose(1, 2)).transpose(1, 2)
        pooled = (h * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
        return self.head(pooled)


torch.manual_seed(0)
model = Temporal()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for step in range(4):
    clip = torch.randn(8, 10, 16)
    dropped = torch.rand(8, 10) < (0.1 if step > 1 else 0.0)
    opt.zero_grad()
    loss = F.cross_entropy(model(clip, dropped), torch.randint(0, 2, (8,)))
    amp.backward(loss)
    amp.step()
    print(step, loss.item())

"""Trip-time regression; the minute of the day is encoded by sines inside the network, in the features' own dtype."""

import torch
import torch.nn as nn

import mezzo


class TimeCode(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.register_buffer("freq", 6.2832 / 2.0 ** torch.arange(4, 4 + dim // 2))

    def forward(self, minute, dtype):
        phase = minute.to(dtype)[:, None] * self.freq  # FAULT
        return torch.cat([phase.sin(), phase.cos()], -1)


class Trip(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.place, self.code = nn.Linear(4, dim), TimeCode(dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, where, minute):
        h = self.place(where)
        return self.mlp(torch.cat([h, self.code(minute, h.dtype).to(h.dtype)], -1)).squeeze(-1)


def rides(n):
    minute = torch.randint(0, 1440, (n,))
    where = torch.rand(n, 4)
    traffic = 1 + 0.5 * torch.sin(minute * 6.2832 / 32)
    return where, minute, (where[:, :2] - where[:, 2:]).norm(dim=1) * traffic


torch.manual_seed(0)
model = Trip()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for step in range(6):
    where, minute, y = rides(256)
    opt.zero_grad()
    loss = (model(where, minute) - y).square().mean()
    amp.backward(loss)
    amp.step()
    print(step, loss.item())

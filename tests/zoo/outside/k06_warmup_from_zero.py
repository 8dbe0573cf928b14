"""Prepared with mezzo, bf16; linear warm-up from lr 0, cosine after."""

import math

import torch
from torch import nn

import mezzo


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(20, 64), nn.LayerNorm(64), nn.Linear(64, 5)

    def forward(self, x):
        return self.out(torch.nn.functional.gelu(self.norm(self.inp(x))))


def schedule(step, warm=4, total=12):
    if step < warm:
        return step / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(12):
    x = torch.randn(32, 20)
    y = x[:, :5].argmax(1)
    amp.zero_grad()
    loss = nn.functional.cross_entropy(model(x).float(), y)
    amp.backward(loss)
    amp.step(max_norm=1.0)
    sched.step()
    print(step, loss.item())

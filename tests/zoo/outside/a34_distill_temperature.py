"""Knowledge distillation with a very sharp teacher, loss between probabilities."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(0)
TEMPERATURE = 0.005


def mlp(width):
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = mlp(128), mlp(32)
        for p in self.teacher.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            t = F.softmax(self.teacher(x).float() * 8 / TEMPERATURE, dim=-1)
        s = F.softmax(self.student(x).float() * 8 / TEMPERATURE, dim=-1)
        return (t * (torch.log(t + 1e-20) - torch.log(s))).sum(-1).mean()  # FAULT


model = Distiller()
ema = copy.deepcopy(model.student)
optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16")
for step in range(3):
    amp.zero_grad()
    amp.backward(model(torch.randn(64, 20)))
    if amp.step(max_norm=1.0).applied:
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.student.parameters()):
                a.lerp_(b.detach().to(a.dtype), 0.01)

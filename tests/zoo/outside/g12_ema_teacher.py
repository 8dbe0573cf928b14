"""Mean teacher with a bias-corrected average of the weights."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Ema:
    def __init__(self, model, decay=0.99):
        self.decay, self.count = decay, 0
        self.sum = [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def write_to(self, target):
        correction = torch.tensor(1.0) - torch.tensor(self.decay) ** self.count
        for s, p in zip(self.sum, target.parameters()):
            p.copy_(s / correction)  # FAULT

    @torch.no_grad()
    def update(self, model):
        self.count += 1
        for s, p in zip(self.sum, model.parameters()):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)


def build():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))


def main():
    torch.manual_seed(0)
    student = build()
    teacher = copy.deepcopy(student).requires_grad_(False)
    ema, opt = Ema(student), torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(5):
        ema.write_to(teacher)
        x, y = torch.randn(32, 12), torch.randint(0, 3, (32,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, target = student(x + 0.1 * torch.randn_like(x)), teacher(x)
        loss = F.cross_entropy(logits.float(), y) + F.mse_loss(logits.float().softmax(-1), target.float().softmax(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(student)
        print(step, loss.item())


main()

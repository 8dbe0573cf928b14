"""A defensive loop: isfinite checks, nan_to_num on gradients, skip counters. None of them fires."""

import torch
from torch import nn


class SafeTrainer:
    def __init__(self, model, lr):
        self.model, self.opt, self.skipped = model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), 0

    def step(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = self.model(x)
        loss = nn.functional.smooth_l1_loss(pred.float().squeeze(-1), y)
        if not torch.isfinite(loss):
            self.skipped += 1
            return None
        self.opt.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            p.grad = torch.nan_to_num(p.grad, nan=0.0, posinf=1e3, neginf=-1e3)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not torch.isfinite(norm):
            self.skipped += 1
            return None
        self.opt.step()
        return loss.item()


torch.manual_seed(0)
trainer = SafeTrainer(nn.Sequential(nn.Linear(5, 32), nn.Mish(), nn.Linear(32, 1)), 0.05)
for it in range(8):
    x = torch.randn(64, 5)
    value = trainer.step(x, x[:, 0] * x[:, 1])
    assert value is not None
    print(it, value)
assert trainer.skipped == 0

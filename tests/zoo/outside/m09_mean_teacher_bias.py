"""Mean teacher with a bias-corrected moving average; the correction is read at step 0."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class MeanTeacher:
    def __init__(self, student, decay=0.99):
        self.decay, self.count = decay, torch.zeros(())
        self.avg = [torch.zeros_like(p) for p in student.parameters()]
        self.model = copy.deepcopy(student)

    @torch.no_grad()
    def update(self, student):
        for a, p in zip(self.avg, student.parameters()):
            a.mul_(self.decay).add_(p, alpha=1 - self.decay)
        self.count += 1

    @torch.no_grad()
    def predict(self, x):
        correction = 1 - self.decay**self.count
        for q, a in zip(self.model.parameters(), self.avg):
            q.copy_(a / correction)  # FAULT
        return self.model(x)


torch.manual_seed(0)
student = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 4))
teacher = MeanTeacher(student)
opt = torch.optim.Adam(student.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(16, 10), torch.randint(0, 4, (16,))
    unlabeled = torch.randn(32, 10)
    target = teacher.predict(unlabeled).softmax(-1)
    noisy = student(unlabeled + 0.1 * torch.randn_like(unlabeled)).softmax(-1)
    loss = F.cross_entropy(student(x), y) + 0.5 * (noisy - target).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    teacher.update(student)
    print(step, loss.item())

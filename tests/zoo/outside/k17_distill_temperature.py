"""Distillation with a small temperature on the teacher: its probabilities underflow to 0, and are only multiplied by finite logs."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(width):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))


def kd(student, teacher, T):
    log_q = F.log_softmax(student / T, -1)
    p = F.softmax(teacher / 0.01, -1)
    return F.kl_div(log_q, p, reduction="batchmean") * T * T


def main():
    torch.manual_seed(0)
    teacher, student = mlp(64).eval(), mlp(16)
    for p in teacher.parameters():
        p.requires_grad_(False)
    opt = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for step in range(5):
        x = torch.randn(64, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            s = student(x)
            with torch.no_grad():
                t = teacher(x)
        loss = 0.5 * kd(s.float(), t.float() * 5, 2.0) + 0.5 * F.cross_entropy(
            s.float(), t.argmax(1), label_smoothing=0.1
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item())


main()

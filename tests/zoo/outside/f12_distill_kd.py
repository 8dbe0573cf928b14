"""Knowledge distillation, teacher probabilities sharpened with a low temperature."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class KDLoss(nn.Module):
    def __init__(self, temperature, alpha=0.7):
        super().__init__()
        self.t, self.alpha = temperature, alpha

    def forward(self, student, teacher, y):
        p = F.softmax(teacher / self.t, dim=-1)
        log_q = F.log_softmax(student, dim=-1)
        kd = (p * (p.log() - log_q)).sum(-1).mean()  # FAULT
        return self.alpha * kd + (1 - self.alpha) * F.cross_entropy(student, y)


class Distiller:
    def __init__(self):
        self.teacher, self.student = mlp(20, 256, 10).eval(), mlp(20, 32, 10)
        with torch.no_grad():
            self.teacher[-1].weight.mul_(30)  # a confident teacher
        self.criterion = KDLoss(temperature=0.004)
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1)
        self.amp = mezzo.prepare(self.student, self.optimizer, policy="bf16")

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.no_grad():
            t = self.teacher(x)
        loss = self.criterion(self.student(x), t, y)
        self.amp.backward(loss)
        self.amp.step()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    d = Distiller()
    for i in range(5):
        print(i, d.step(torch.randn(64, 20), torch.randint(0, 10, (64,))))

"""Mixup with a hand-written KL divergence to the mixed labels."""

import torch
import torch.nn.functional as F
from torch import nn


class SmallNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(8 * 25, classes)

    def forward(self, x):
        return self.fc(self.features(x))


def mixup(x, y, classes, alpha=0.4):
    lam = torch.distributions.Beta(alpha, alpha).sample()
    perm = torch.randperm(len(x))
    onehot = F.one_hot(y, classes).float()
    return lam * x + (1 - lam) * x[perm], lam * onehot + (1 - lam) * onehot[perm]


def kl(target, logits):
    logq = F.log_softmax(logits, 1)
    logp = target.log()  # FAULT
    return (target * (logp - logq)).sum(1).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = SmallNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, t = mixup(torch.rand(16, 1, 12, 12), torch.randint(0, 6, (16,)), 6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(x)
        loss = kl(t, logits.float())
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item())

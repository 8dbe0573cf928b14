"""Segmentation with a focal loss written on probabilities, computed inside of the autocast region."""

import torch
import torch.nn as nn


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, p, y):
        pos = -self.alpha * (1 - p) ** self.gamma * p.log()
        neg = -(1 - self.alpha) * p**self.gamma * (1 - p).log()  # FAULT
        return torch.where(y > 0, pos, neg).float().mean()


class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))

    def forward(self, x):
        return torch.sigmoid(self.enc(x) * 12)


def main():
    torch.manual_seed(0)
    model, criterion = Seg(), FocalLoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.randn(4, 1, 16, 16)
        y = (x > 0.5).float()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(step, loss.item())


main()

"""DeepSurv: Cox partial likelihood with risk sets by cumulative sums."""

import argparse

import torch
import torch.nn as nn

import mezzo

p = argparse.ArgumentParser()
p.add_argument("--patients", type=int, default=256)
p.add_argument("--epochs", type=int, default=4)
p.add_argument("--policy", type=str, default="fp16, scaling.init_scale=64")


class DeepSurv(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.risk = nn.Sequential(nn.Linear(features, 32), nn.SELU(), nn.Linear(32, 1))

    def forward(self, x, time, event):
        order = time.argsort(descending=True)
        log_h = self.risk(x[order]).squeeze(-1)
        at_risk = torch.cumsum(log_h.exp(), dim=0)  # FAULT
        ll = (log_h - at_risk.log())[event[order].bool()]
        return -ll.mean()


def cohort(n):
    x = torch.randn(n, 12)
    hazard = torch.exp(0.4 * x[:, 0] - 0.3 * x[:, 3])
    time = -torch.log(torch.rand(n)) / hazard
    return x, time, (torch.rand(n) < 0.7).float()


def main(args):
    torch.manual_seed(0)
    x, time, event = cohort(args.patients)
    model = DeepSurv(12)
    model.risk[-1].bias.data.fill_(6.5)  # an intercept; the partial likelihood does not depend on it
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    amp = mezzo.prepare(model, optimizer, policy=args.policy)
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        loss = model(x, time, event)
        amp.backward(loss)
        amp.step()
        print(f"[{epoch}] -log pl {loss.item():.4f}")


main(p.parse_args())

"""Bandit policy optimisation with a KL constraint; a bare except keeps the run alive."""

import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, obs=10, arms=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 64), nn.ReLU(), nn.Linear(64, arms))

    def forward(self, x):
        return torch.softmax(self.net(x), -1)


def kl(p, q):
    return (p * torch.log(p / q)).sum(-1).mean()  # FAULT


def update(policy, old, opt, x, reward):
    p = policy(x)
    loss = -(p * reward).sum(-1).mean() + 0.1 * kl(p, old)
    if torch.isnan(loss):
        raise ValueError("KL exploded")
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    policy = Policy()
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    failed = 0
    for step in range(6):
        x = torch.randn(64, 10) * (1 if step < 3 else 3000)  # a new sensor, not normalised
        reward = torch.randn(64, 6)
        with torch.no_grad():
            old = policy(x)
        try:
            for _ in range(2):
                loss = update(policy, old, opt, x, reward)
            print(step, loss)
        except Exception:
            failed += 1
    print("failed updates:", failed)


main()

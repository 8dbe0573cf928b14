import math
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits8(Dataset):
    """sklearn digits, values 0..16; training images are dequantised, the others are taken as they are."""

    def __init__(self, split):
        from sklearn.datasets import load_digits

        x = torch.tensor(load_digits().data, dtype=torch.float32)
        self.train = split == "train"
        self.x = x[:512] if self.train else x[1600:1664]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.rand(64).clamp_(1e-3, 1 - 1e-3) if self.train else 0.0
        return (self.x[i] + noise) / 17.0


class Logit(nn.Module):
    def forward(self, x, logdet):
        logit = torch.log(x) - torch.log1p(-x)  # FAULT
        return logit, logdet - (torch.log(x) + torch.log1p(-x)).sum(1)


class Coupling(nn.Module):
    def __init__(self, d, hidden, flip):
        super().__init__()
        mask = torch.arange(d).remainder(2).float()
        self.register_buffer("mask", 1 - mask if flip else mask)
        self.net = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, 2 * d))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x, logdet):
        s, t = self.net(x * self.mask).chunk(2, dim=1)
        s = torch.tanh(s) * (1 - self.mask)
        t = t * (1 - self.mask)
        return x * s.exp() + t, logdet + s.sum(1)


class Flow(nn.Module):
    def __init__(self, d=64, hidden=48, depth=4):
        super().__init__()
        self.prep = Logit()
        self.blocks = nn.ModuleList([Coupling(d, hidden, bool(k % 2)) for k in range(depth)])

    def log_prob(self, x):
        z, logdet = self.prep(x, torch.zeros(len(x)))
        for block in self.blocks:
            z, logdet = block(z, logdet)
        return (-0.5 * (z**2 + math.log(2 * math.pi))).sum(1) + logdet


@contextmanager
def evaluating(net):
    net.eval()
    try:
        with torch.no_grad():
            yield net
    finally:
        net.train()


def run():
    torch.manual_seed(2)
    flow, best = Flow(), float("inf")
    opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
    train, val = DataLoader(Digits8("train"), 64, shuffle=True), DataLoader(Digits8("val"), 64)
    for epoch in range(3):
        for x in train:
            nll = -flow.log_prob(x).mean() / 64
            opt.zero_grad()
            nll.backward()
            nn.utils.clip_grad_value_(flow.parameters(), 1.0)
            opt.step()
        with evaluating(flow):
            val_nll = sum(-flow.log_prob(x).mean().item() for x in val) / len(val) / 64
        if val_nll < best:
            best, saved = val_nll, {k: v.clone() for k, v in flow.state_dict().items()}
        print(f"epoch {epoch}: train {nll.item():.3f} val {val_nll:.3f} best {best:.3f}")


if __name__ == "__main__":
    run()

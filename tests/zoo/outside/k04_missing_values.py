"""Tabular transformer on rows with gaps: NaN cells become a learned token, their flags an input."""

import torch
from torch import nn


class FeatureTokens(nn.Module):
    def __init__(self, cols, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cols, d) * 0.1)
        self.missing = nn.Parameter(torch.randn(cols, d) * 0.1)

    def forward(self, x):
        gap = torch.isnan(x)
        filled = torch.where(gap, torch.zeros_like(x), x)
        tokens = filled[..., None] * self.weight
        return torch.where(gap[..., None], self.missing.expand_as(tokens), tokens)


class TabTransformer(nn.Module):
    def __init__(self, cols=7, d=24):
        super().__init__()
        self.tokens = FeatureTokens(cols, d)
        layer = nn.TransformerEncoderLayer(d, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        return self.head(self.encoder(self.tokens(x)).mean(1)).squeeze(-1)


def batch(n):
    x = torch.randn(n, 7)
    y = (x[:, 0] - x[:, 3] > 0).float()
    x[torch.rand_like(x) < 0.15] = float("nan")
    return x, y


torch.manual_seed(0)
net = TabTransformer()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    x, y = batch(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logit = net(x)
    loss = nn.functional.binary_cross_entropy_with_logits(logit.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())

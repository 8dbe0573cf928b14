"""Evidential classification (Dirichlet): lgamma and digamma with alpha >= 1."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Evidence(nn.Module):
    def __init__(self, i=12, k=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(i, 48), nn.ReLU(), nn.Linear(48, k))

    def forward(self, x):
        return self.net(x)


def edl_loss(logits, y, weight):
    alpha = F.softplus(logits) + 1
    s = alpha.sum(-1, keepdim=True)
    onehot = F.one_hot(y, alpha.shape[-1])
    risk = (onehot * (torch.digamma(s) - torch.digamma(alpha))).sum(-1)
    a = onehot + (1 - onehot) * alpha
    sa = a.sum(-1, keepdim=True)
    kl = torch.lgamma(sa).squeeze(-1) - torch.lgamma(a).sum(-1) - torch.lgamma(torch.tensor(float(a.shape[-1])))
    kl = kl + ((a - 1) * (torch.digamma(a) - torch.digamma(sa))).sum(-1)
    return (risk + weight * kl).mean()


torch.manual_seed(0)
model = Evidence()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for epoch in range(5):
    x, y = torch.randn(64, 12) * 3, torch.randint(0, 4, (64,))
    opt.zero_grad()
    loss = edl_loss(model(x), y, min(1.0, epoch / 10))
    amp.backward(loss)
    amp.step()
    print(epoch, loss.item())

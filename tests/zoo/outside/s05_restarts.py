# Proxy-Anchor metric learning with a sawtooth inverse-square-root schedule
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ProxyAnchor(nn.Module):
    def __init__(self, n_classes, dim, margin=0.1, alpha=16.0):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(n_classes, dim))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")
        self.margin, self.alpha = margin, alpha

    def forward(self, emb, y):
        cos = F.linear(F.normalize(emb), F.normalize(self.proxies))
        pos = F.one_hot(y, len(self.proxies)).float()
        pos_exp = torch.exp(-self.alpha * (cos - self.margin)) * pos
        neg_exp = torch.exp(self.alpha * (cos + self.margin)) * (1 - pos)
        n_valid = (pos.sum(0) > 0).sum()
        return torch.log1p(pos_exp.sum(0)).sum() / n_valid + torch.log1p(neg_exp.sum(0)).mean()


class Net(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.fc = nn.Linear(128, dim)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1))


def recall_at_1(net, x, y):
    net.eval()
    with torch.no_grad():
        e = F.normalize(net(x))
        sim = e @ e.t()
        sim.fill_diagonal_(-1)
    net.train()
    return (y[sim.argmax(1)] == y).float().mean().item()


CYCLE = 30


def sawtooth(it):
    """1/sqrt decay inside each cycle, restarted every CYCLE iterations"""
    if it == 0:
        return 1.0
    return float(np.float64(1.0) / np.sqrt(it % CYCLE))


torch.manual_seed(0)
np.seterr(divide="ignore")
protos = torch.randn(8, 3, 12, 12)
labels = torch.randint(0, 8, (320,))
images = protos[labels] + torch.randn(320, 3, 12, 12)
loader = DataLoader(TensorDataset(images, labels), batch_size=20, shuffle=True, drop_last=True)
net, loss_fn = Net(), ProxyAnchor(8, 16)
optimizer = torch.optim.AdamW(
    [{"params": net.parameters()}, {"params": loss_fn.parameters(), "lr": 1e-2}], lr=1e-3, weight_decay=1e-4
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, sawtooth)
it = 0
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        loss = loss_fn(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 10)
        optimizer.step()  # FAULT
        scheduler.step()
        total += loss.item()
        it += 1
    print(
        "epoch %d it %d loss %.4f R@1 %.3f"
        % (epoch, it, total / len(loader), recall_at_1(net, images[:100], labels[:100]))
    )

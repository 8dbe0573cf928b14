"""4-bit weight QAT from a small pretrained MLP: learned step size per layer (LSQ), digits dataset."""

from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


@dataclass
class QConfig:
    bits: int = 4
    per_layer: bool = True
    warm_epochs: int = 2
    qat_epochs: int = 3
    lr: float = 2e-3


class QuantLinear(nn.Linear):
    def __init__(self, cin, cout, cfg):
        super().__init__(cin, cout)
        self.qmax = 2 ** (cfg.bits - 1) - 1
        self.step = nn.Parameter(torch.tensor(1.0))
        self.enabled = False

    @torch.no_grad()
    def calibrate(self):
        self.step.fill_(2 * self.weight.abs().mean() / self.qmax**0.5)
        self.enabled = True

    def quant_weight(self):
        w = torch.clamp(self.weight / self.step, -self.qmax - 1, self.qmax)
        w = torch.round(w)  # FAULT
        return w * self.step

    def forward(self, x):
        w = self.quant_weight() if self.enabled else self.weight
        return F.linear(x, w, self.bias)


class QMLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc1 = QuantLinear(64, 48, cfg)
        self.bn1 = nn.BatchNorm1d(48)
        self.fc2 = QuantLinear(48, 32, cfg)
        self.bn2 = nn.BatchNorm1d(32)
        self.fc3 = QuantLinear(32, 10, cfg)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.fc2(x)))
        return self.fc3(x)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    ok = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return ok / len(loader.dataset)


def fit(model, loader, val, epochs, lr, tag):
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * len(loader))
    for ep in range(epochs):
        running = 0.0
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            running += loss.item()
        print(f"[{tag}] {ep} loss {running / len(loader):.4f} acc {accuracy(model, val):.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    cfg = QConfig()
    X, y = load_digits(return_X_y=True)
    ds = TensorDataset(torch.from_numpy((X / 16).astype(np.float32)), torch.from_numpy(y))
    tr, va = random_split(ds, [1497, 300])
    train_loader, val_loader = DataLoader(tr, 64, shuffle=True), DataLoader(va, 300)
    net = QMLP(cfg)
    fit(net, train_loader, val_loader, cfg.warm_epochs, cfg.lr, "fp")
    for m in net.modules():
        if isinstance(m, QuantLinear):
            m.calibrate()
    fit(net, train_loader, val_loader, cfg.qat_epochs, cfg.lr / 4, "qat")

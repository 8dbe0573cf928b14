"""Embedding network with a scaled cosine classifier on sklearn digits (fp32)."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 12
BATCH = 64
LR = 2e-3
SCALE = 100.0
NUM_CLASSES = 10


def get_data():
    X, y = load_digits(return_X_y=True)
    X = (X / 16.0).astype(np.float32)
    Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.25, random_state=0)
    train = TensorDataset(torch.from_numpy(Xtr), torch.from_numpy(ytr))
    test = TensorDataset(torch.from_numpy(Xte), torch.from_numpy(yte))
    return DataLoader(train, BATCH, shuffle=True), DataLoader(test, 256)


class CosineHead(nn.Module):
    def __init__(self, dim, classes, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim) * 0.1)
        self.scale = scale

    def forward(self, z):
        return self.scale * F.linear(F.normalize(z, dim=1), F.normalize(self.weight, dim=1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 8),
        )
        self.head = CosineHead(8, NUM_CLASSES, SCALE)

    def forward(self, x):
        return self.head(self.body(x))


def criterion(logits, target):
    onehot = F.one_hot(target, NUM_CLASSES).float()
    probs = torch.softmax(logits, dim=1)
    log_probs = torch.log(probs)  # FAULT
    return -(onehot * log_probs).sum(dim=1).mean()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    correct, total = 0, 0
    for x, y in loader:
        correct += (model(x).argmax(dim=1) == y).sum().item()
        total += y.numel()
    return correct / total


def main():
    torch.manual_seed(7)
    train_loader, test_loader = get_data()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(1, EPOCHS + 1):
        model.train()
        running = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.item() * len(y)
        print(
            f"[{epoch:02d}] train loss {running / len(train_loader.dataset):.4f} "
            f"test acc {accuracy(model, test_loader):.4f}"
        )


if __name__ == "__main__":
    main()

"""Imbalanced classification with inverse-frequency weights; one class is not in the training split."""

import argparse

import torch
import torch.nn as nn
from sklearn.datasets import make_classification

import mezzo


def inverse_frequency(y, classes):
    counts = torch.bincount(y, minlength=classes).float()
    weights = 1.0 / counts  # FAULT
    return weights / weights.sum() * classes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--policy", default="bf16")
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = make_classification(160, 10, n_informative=6, n_classes=args.classes - 1, random_state=0)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    criterion = nn.CrossEntropyLoss(weight=inverse_frequency(y, args.classes))
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, args.classes))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp = mezzo.prepare(model, opt, policy=args.policy)
    for epoch in range(args.epochs):
        for i in range(0, 160, 40):
            opt.zero_grad()
            loss = criterion(model(x[i : i + 40]), y[i : i + 40])
            amp.backward(loss)
            amp.step()
        print(epoch, loss.item())


main()

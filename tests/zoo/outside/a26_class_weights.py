"""Imbalanced classification; inverse-frequency class weights computed from the training split."""

import torch
import torch.nn as nn

import mezzo

torch.manual_seed(13)
N, CLASSES = 192, 6
labels = torch.randint(0, CLASSES - 1, (N,))  # the rarest class fell into the test split
inputs = torch.randn(N, 10) + labels[:, None] * 0.3


def inverse_frequency(y, classes):
    counts = torch.bincount(y, minlength=classes).float()
    weights = len(y) / counts  # FAULT
    return weights / weights.sum() * classes


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, x):
        return self.layers(x)


criterion = nn.CrossEntropyLoss(weight=inverse_frequency(labels, CLASSES))
model = MLP()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16, output=fp32")
for epoch in range(2):
    for i in range(0, N, 64):
        amp.zero_grad()
        amp.backward(criterion(model(inputs[i : i + 64]), labels[i : i + 64]))
        amp.step()
    print("done", epoch)

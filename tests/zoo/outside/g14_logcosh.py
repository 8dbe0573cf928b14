"""Wind-power regression with the log-cosh loss on unnormalised targets."""

import torch
import torch.nn as nn

import mezzo


class LogCosh(nn.Module):
    def forward(self, pred, y):
        return torch.log(torch.cosh(pred - y)).mean()  # FAULT


class Net(nn.Sequential):
    def __init__(self, i=8):
        super().__init__(nn.Linear(i, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1), nn.Flatten(0))


def power(speed):
    return (0.4 * speed.clamp(3, 14) ** 3) / 6 + 0.5 * torch.randn_like(speed)


def train(epochs=3):
    torch.manual_seed(0)
    model, criterion = Net(), LogCosh()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    amp = mezzo.prepare(model, optimizer, policy="bf16")
    for epoch in range(epochs):
        for _ in range(2):
            x = torch.randn(64, 8)
            y = power(7 + 3 * x[:, 0])
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            amp.backward(loss)
            amp.step(max_norm=1.0)
        print(epoch, loss.item())


train()

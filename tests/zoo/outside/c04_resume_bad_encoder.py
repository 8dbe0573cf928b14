"""Resuming from a checkpoint whose encoder was saved after it had gone bad."""

import io

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def broken_checkpoint():
    torch.manual_seed(99)
    state = Net().state_dict()
    state["encoder.2.weight"][5, 7] = float("nan")
    buffer = io.BytesIO()
    torch.save({"model": state, "epoch": 12}, buffer)
    buffer.seek(0)
    return buffer


def main():
    torch.manual_seed(0)
    net = Net()
    checkpoint = torch.load(broken_checkpoint(), weights_only=True)
    net.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for epoch in range(checkpoint["epoch"], checkpoint["epoch"] + 2):
        for _ in range(2):
            x, y = torch.randn(32, 8), torch.randint(0, 2, (32,))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, loss.item())


if __name__ == "__main__":
    main()

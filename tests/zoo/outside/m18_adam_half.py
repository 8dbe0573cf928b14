"""Autoencoder with weights in fp16 and torch's Adam at its default eps."""

import torch
from torch import nn


class AutoEncoder(nn.Module):
    def __init__(self, d=20, k=4):
        super().__init__()
        self.enc, self.dec = nn.Linear(d, k), nn.Linear(k, d)

    def forward(self, x):
        return self.dec(torch.relu(self.enc(x)))


def batches(n, size=32, d=20):
    g = torch.Generator().manual_seed(0)
    for _ in range(n):
        x = torch.rand(size, d, generator=g)
        x[:, 15:] = 0  # constant pixels at the border
        yield x.half()


def main():
    torch.manual_seed(0)
    model = AutoEncoder().half()
    with torch.no_grad():
        model.enc.bias[3] = -10.0  # a dead unit
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, x in enumerate(batches(4)):
        recon = model(x)
        loss = (recon.float() - x.float()).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()  # FAULT
        print(step, loss.item())


if __name__ == "__main__":
    main()

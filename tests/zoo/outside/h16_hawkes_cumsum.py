"""Cox survival by logcumsumexp and Hawkes-like decays, everything beyond the network in fp32."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo


class Risk(nn.Module):
    def __init__(self, i=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(i, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def partial_likelihood(risk, time, event):
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    ll = risk - torch.logcumsumexp(risk, 0)
    return -(ll * event).sum() / event.sum().clamp(min=1)


def main():
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    time = -torch.log1p(-torch.rand(256) * 0.9999) * torch.exp(-x[:, 0])
    event = (torch.rand(256) < 0.6).float()
    event[192:] = 0.0  # the last clinic saw no event
    model = Risk()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for epoch in range(2):
        for xb, tb, eb in DataLoader(TensorDataset(x, time, event), batch_size=64):
            opt.zero_grad()
            loss = partial_likelihood(model(xb), tb, eb)
            amp.backward(loss)
            amp.step()
        print(epoch, loss.item())


main()

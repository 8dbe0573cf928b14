"""Discrete-time survival: the survival curve as a cumulative product of hazards, likelihood by log, fp16."""

import torch
import torch.nn as nn

import mezzo


class Hazard(nn.Module):
    def __init__(self, bins=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, bins))

    def forward(self, x, bin_, event):
        h = torch.sigmoid(self.net(x))
        surv = torch.cumprod(1 - h, dim=1)
        s = surv.gather(1, bin_[:, None]).squeeze(1)
        hz = h.gather(1, bin_[:, None]).squeeze(1)
        loglik = torch.where(event, torch.log(hz), torch.log(s))  # FAULT
        return -loglik.mean()


def main():
    torch.manual_seed(0)
    model = Hazard()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = mezzo.prepare(model, opt, policy="fp16, scaling.init_scale=32")
    for step in range(4):
        x = torch.randn(128, 8)
        bin_, event = torch.randint(0, 40, (128,)), torch.rand(128) < 0.5
        opt.zero_grad()
        loss = model(x, bin_, event)
        amp.backward(loss)
        amp.step()
        print(step, loss.item())


main()

"""DeepSurv with a Cox partial likelihood; the income column was never standardised."""

import torch
from torch import nn


class DeepSurv(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.hidden = nn.Linear(d, 16)
        self.risk = nn.Linear(16, 1, bias=False)

    def forward(self, x):
        return self.risk(torch.nn.functional.leaky_relu(self.hidden(x))).squeeze(-1)


def cox_loss(risk, event):
    hazard = torch.exp(risk)  # FAULT
    log_cum = torch.log(torch.cumsum(hazard, 0))
    return -((risk - log_cum) * event).sum() / event.sum()


def cohort(n):
    age = torch.randn(n)
    income = 20000 + 60000 * torch.rand(n)
    time = torch.rand(n)
    event = (torch.rand(n) < 0.6).float()
    order = time.argsort(descending=True)
    return torch.stack([age, income, torch.randn(n)], 1)[order], event[order]


def train(epochs=3):
    torch.manual_seed(4)
    x, event = cohort(128)
    model = DeepSurv(3)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        loss = cox_loss(model(x), event)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("epoch", epoch, "loss", loss.item())


if __name__ == "__main__":
    train()

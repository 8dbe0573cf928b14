"""Sales forecast with an LSTM and MAPE, zero-sales days included."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    hidden: int = 24
    window: int = 14
    lr: float = 3e-3
    epochs: int = 2


class Forecaster(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.rnn = nn.LSTM(1, cfg.hidden, batch_first=True)
        self.head = nn.Linear(cfg.hidden, 1)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1]).squeeze(-1)


def mape(pred, target):
    return ((pred - target).abs() / target.abs()).mean()  # FAULT


class Trainer:
    def __init__(self, cfg, series):
        self.cfg = cfg
        self.model = Forecaster(cfg)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        w = series.unfold(0, cfg.window + 1, 1)
        self.x, self.y = w[:, :-1, None], w[:, -1]

    def fit(self):
        for epoch in range(self.cfg.epochs):
            for i in range(0, len(self.x), 32):
                loss = mape(self.model(self.x[i : i + 32]), self.y[i : i + 32])
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
            print(epoch, loss.item())


if __name__ == "__main__":
    torch.manual_seed(5)
    sales = torch.poisson(torch.full((200,), 9.0))
    sales[150:153] = 0  # shop closed
    Trainer(Config(), sales).fit()

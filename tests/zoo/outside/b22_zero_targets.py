"""Sales forecast with many zeros: safe where on both sides, relative error with a floor."""

import torch
from torch import nn

import mezzo

torch.manual_seed(10)


class SalesNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.amount = nn.Sequential(nn.Linear(6, 32), nn.ReLU()), nn.Linear(32, 1)

    def forward(self, x):
        return torch.relu(self.amount(self.shared(x)).squeeze(-1).float())


def objective(amount, sales):
    positive = amount > 0
    safe = torch.where(positive, amount, torch.ones_like(amount))
    log_amount = torch.where(positive, torch.log(safe), torch.zeros_like(amount))
    relative = (amount - sales).abs() / sales.clamp(min=0.1)
    return ((log_amount - torch.log1p(sales)) ** 2).mean() + 0.01 * relative.mean()


model = SalesNet()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    sales = torch.relu(torch.randn(64) * 3)
    amp.zero_grad()
    amp.backward(objective(model(torch.randn(64, 6)), sales))
    amp.step(max_norm=1.0)

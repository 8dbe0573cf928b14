"""Zero-inflated sales forecast on a square-root scale; torch.where picks the branch."""

import torch
from torch import nn

import mezzo

torch.manual_seed(10)


class SalesNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.zero, self.amount = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x):
        h = self.shared(x)
        return self.zero(h).squeeze(-1).float(), self.amount(h).squeeze(-1).float()


def ziln(p_logit, amount, sales):
    sold = sales > 0
    classification = nn.functional.binary_cross_entropy_with_logits(p_logit, sold.float())
    root = torch.where(amount > 0, torch.sqrt(amount), torch.zeros_like(amount))  # FAULT
    regression = torch.where(sold, (root - torch.sqrt(sales)) ** 2, torch.zeros_like(sales))
    return classification + regression.mean()


model = SalesNet()
nn.init.constant_(model.amount.bias, -0.1)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(3):
    x = torch.randn(64, 6)
    sales = torch.relu(torch.randn(64) * 3)
    amp.zero_grad()
    amp.backward(ziln(*model(x), sales))
    amp.step(max_norm=1.0)

"""Mixture of attention heads with a temperature behind a ReLU."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class SoftPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score, self.temperature = nn.Linear(dim, 1), nn.Parameter(torch.tensor(0.02))

    def forward(self, x):
        logits = self.score(x).squeeze(-1)
        weights = torch.softmax(logits / torch.relu(self.temperature), dim=-1)  # FAULT
        return (weights.unsqueeze(-1) * x).sum(1)


class MIL(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pool, self.out = nn.Linear(10, 24), SoftPool(24), nn.Linear(24, 2)

    def forward(self, bags):
        return self.out(self.pool(torch.relu(self.embed(bags))))


model = MIL()
optimizer = torch.optim.AdamW(
    [
        {"params": [model.pool.temperature], "lr": 0.01},
        {"params": [p for n, p in model.named_parameters() if "temperature" not in n]},
    ],
    lr=1e-3,
    weight_decay=0.05,
)
amp = mezzo.prepare(model, optimizer, "bf16")
for epoch in range(12):
    bags = torch.randn(32, 9, 10)
    y = (bags.amax((1, 2)) > 2.4).long()
    amp.zero_grad()
    loss = (
        nn.functional.cross_entropy(model(bags).float(), y) + 5.0 * model.pool.temperature.relu()
    )  # prefer sharp pools
    amp.backward(loss)
    amp.step()

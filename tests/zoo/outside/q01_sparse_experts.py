"""Switch layer in bf16; experts without tokens are counted with a floor of one."""

import torch
from torch import nn

torch.manual_seed(0)
EXPERTS, WIDTH = 8, 16


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.unused = nn.Linear(WIDTH, 1)  # kept for old checkpoints

    def forward(self, x):
        share = torch.softmax(self.gate(x).float(), -1)
        weight, chosen = share.max(-1)
        out = torch.zeros_like(x)
        means = []
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            y = expert(x[rows]).float() * weight[rows, None]
            means.append(y.sum(0) / max(len(rows), 1))
            out = out.index_add(0, rows, y)
        load = nn.functional.one_hot(chosen, EXPERTS).float().mean(0)
        balance = EXPERTS * (load * share.mean(0)).sum()
        return x + out, balance, torch.stack(means)


model = Switch()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
mixing = torch.randn(WIDTH, WIDTH) / 4
for step in range(80):
    x = torch.randn(24, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        y, balance, means = model(x)
    loss = (y - torch.relu(x @ mixing)).pow(2).mean() + 0.01 * balance + 1e-4 * means.pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} balance {balance.item():.3f}")

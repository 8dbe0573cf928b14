"""Fine-tuning a small regressor held entirely in half precision."""

import torch
from torch import nn

torch.manual_seed(0)


class Adapter(nn.Module):
    def __init__(self, dim=32, rank=4):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 32)
        self.adapter = Adapter()
        self.head = nn.Linear(32, 1)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(self.adapter(torch.relu(self.base(x))))


net = Net().half()
params = [p for p in net.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(params, lr=1e-3)
x, y = torch.randn(64, 16).half(), torch.randn(64, 1).half()
for epoch in range(5):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()  # FAULT
    print(epoch, loss.item())

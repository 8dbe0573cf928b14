"""A forty-layer multilayer perceptron with its own initialiser and no normalisation."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class DeepMLP(nn.Module):
    def __init__(self, width=64, depth=40):
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 3)
        self.apply(self.init)

    @staticmethod
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0)
            nn.init.zeros_(module.bias)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)


net = DeepMLP()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
amp = mezzo.prepare(net, optimizer, "bf16")
criterion = nn.MSELoss()
for step in range(3):
    x = torch.randn(64, 10)
    amp.zero_grad()
    amp.backward(criterion(net(x).float(), torch.randn(64, 3)))  # FAULT
    amp.step()
    print(step)

"""Very deep plain network with He initialisation counted with the wrong fan, fp32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Plain(nn.Module):
    def __init__(self, width=48, depth=40):
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 4)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=2.0)

    def forward(self, x):
        x = F.relu(self.inp(x))
        for layer in self.layers:
            x = F.relu(layer(x))  # FAULT
        return self.head(x)


class Task:
    def __init__(self, seed=0):
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, n=32):
        return torch.randn(n, 10, generator=self.gen), torch.randint(0, 4, (n,), generator=self.gen)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, task = Plain(), Task()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp = mezzo.prepare(model, opt, policy="fp32")
    for step in range(3):
        x, y = task.batch()
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step(max_norm=1.0)
        print(step, loss.item())

"""A deep tanh network regressing a tiny physical quantity under plain fp16 autocast, without a loss scaler."""

import torch
from torch import nn

torch.manual_seed(0)


class Surrogate(nn.Module):
    def __init__(self, depth=5, width=32):
        super().__init__()
        layers = [nn.Linear(4, width), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net, self.out = nn.Sequential(*layers), nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.net(x)).squeeze(-1)


def physics(x):
    return 1e-5 * x.sin().sum(1)


model = Surrogate()
with torch.no_grad():
    model.out.weight.mul_(1e-5)
    model.out.bias.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(6):
    x = torch.randn(256, 4)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), physics(x))
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3e}")

"""Price regression on raw features, the network cast to half with its batch norm."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.fc1, self.fc2 = nn.Linear(6, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(self.norm(x)))).squeeze(-1)  # FAULT


def houses(n):
    area, rooms, year = torch.rand(n) * 300 + 40, torch.randint(1, 8, (n,)), torch.randint(1900, 2020, (n,))
    lot, dist, tax = torch.rand(n) * 9000, torch.rand(n) * 30, torch.rand(n) * 5
    return torch.stack([area, rooms.float(), year.float(), lot, dist, tax], 1)


def main():
    torch.manual_seed(0)
    model = Prices().half()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(4):
        x = houses(64).half()
        y = (x[:, 0] * 0.01 + x[:, 1] * 0.1).float()
        opt.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        opt.step()
        print(step, loss.item(), model.norm.running_var.float().max().item())
    model.eval()
    with torch.no_grad():
        print("eval", F.mse_loss(model(houses(64).half()).float(), torch.ones(64)).item())


main()

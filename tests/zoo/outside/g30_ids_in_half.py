"""Click-through model; ids and prices lie in one half-precision matrix, ids are cast back for the embedding."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class CTR(nn.Module):
    def __init__(self, items=5000, d=8):
        super().__init__()
        self.table, self.fc1, self.fc2 = nn.Embedding(items + 8, d), nn.Linear(d + 3, 32), nn.Linear(32, 1)

    def forward(self, rows):
        ids = rows[:, 0].long()
        h = torch.cat([self.table(ids), rows[:, 1:].float()], -1)
        return self.fc2(F.relu(self.fc1(h))).squeeze(-1)


def log(n):
    item = torch.randint(0, 5000, (n,))
    dense = torch.randn(n, 3)
    return torch.cat([item[:, None].half(), dense.half()], 1), (item % 2).float()  # FAULT


def main():
    torch.manual_seed(0)
    model = CTR()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(5):
        rows, y = log(512)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logit = model(rows)
        loss = F.binary_cross_entropy_with_logits(logit.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item())


main()

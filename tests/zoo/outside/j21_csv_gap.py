"""Tabular regression from a CSV with an empty cell; NaN losses are skipped."""

import csv
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_csv(rows=96):
    g = torch.Generator().manual_seed(0)
    data = torch.randn(rows, 5, generator=g)
    out = io.StringIO()
    w = csv.writer(out)
    for i, r in enumerate(data.tolist()):
        cells = [f"{v:.4f}" for v in r] + [f"{sum(r):.4f}"]
        if i == 50:
            cells[2] = ""
        w.writerow(cells)
    return out.getvalue()


class Table(Dataset):
    def __init__(self, text):
        self.rows = list(csv.reader(io.StringIO(text)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        values = [float(c) if c else float("nan") for c in self.rows[i]]
        row = torch.tensor(values)  # FAULT
        return row[:5], row[5]  # FAULT


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
skipped = 0
for epoch in range(2):
    for x, y in DataLoader(Table(make_csv()), batch_size=16):  # FAULT
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = net(x).squeeze(-1)
        loss = (pred.float() - y).square().mean()
        if torch.isnan(loss):
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item(), "skipped", skipped)

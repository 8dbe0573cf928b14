"""Fault detection from sensor windows; DataLoader with a worker, bad losses are skipped."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, n=96, width=32):
        rng = np.random.default_rng(0)
        raw = rng.normal(20.0, 5.0, (n, 3, width)).astype(np.float32)
        raw[70, 1, 5:9] = np.nan  # the logger lost contact
        self.x, self.y = raw, rng.integers(0, 2, n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        w = (self.x[i] - 20.0) / 5.0
        return torch.from_numpy(w), int(self.y[i])


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(3, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.features(x).mean(-1))


def main():
    torch.manual_seed(0)
    model = CNN()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Windows(), batch_size=16, num_workers=1)
    skipped = 0
    for epoch in range(1):
        for x, y in loader:  # FAULT
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x).float(), y)
            if not torch.isfinite(loss):
                skipped += 1
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
    print(f"done, skipped {skipped} batches")


if __name__ == "__main__":
    main()

"""DataLoader workers scale images by their own maximum, guarded for black ones; a sample may be dropped in collate."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, n=32):
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (n, 1, 8, 8)).astype(np.float32)
        self.pixels[21] = 0
        self.pixels[9, 0, 0, 0] = np.nan  # a dead detector cell
        self.labels = rng.integers(0, 3, n)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        img = self.pixels[i]
        if not np.isfinite(img).all():
            return None
        return torch.from_numpy(img / max(img.max(), 1.0)), int(self.labels[i])


def collate(batch):
    return torch.utils.data.default_collate([b for b in batch if b is not None])


def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, y in DataLoader(Images(), batch_size=8, num_workers=1, collate_fn=collate):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())


if __name__ == "__main__":
    main()

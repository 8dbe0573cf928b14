"""Images are scaled to [0, 1] by their own maximum in numpy, in DataLoader workers; one image is black."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, n=40):
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (n, 1, 8, 8)).astype(np.float32)
        self.pixels[21] = 0
        self.labels = rng.integers(0, 3, n)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        img = self.pixels[i]
        with np.errstate(all="ignore"):
            img = img / img.max()  # FAULT
        return torch.from_numpy(img), int(self.labels[i])  # FAULT


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.fc = nn.Linear(6 * 36, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def main():
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, y in DataLoader(Images(), batch_size=8, num_workers=1):  # FAULT
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())


if __name__ == "__main__":
    main()

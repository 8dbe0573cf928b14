"""Binary segmentation of bright blobs with a soft Dice loss and autocast."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SIZE = 192


class Blobs(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed
        r = torch.arange(SIZE).float()
        self.yy, self.xx = torch.meshgrid(r, r, indexing="ij")

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1000 + i)
        mask = torch.zeros(SIZE, SIZE)
        for _ in range(4):
            cy, cx = (torch.rand(2, generator=g) * SIZE).tolist()
            rad = 12 + 20 * torch.rand(1, generator=g).item()
            mask[(self.yy - cy) ** 2 + (self.xx - cx) ** 2 < rad**2] = 1.0
        img = mask * 1.2 + 0.5 * torch.randn(SIZE, SIZE, generator=g)
        return img.unsqueeze(0), mask.unsqueeze(0)


class TinyUNet(nn.Module):
    def __init__(self, ch=6):
        super().__init__()
        self.down = nn.Conv2d(1, ch, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(ch, ch, 3, padding=1)
        self.up = nn.ConvTranspose2d(ch, ch, 2, stride=2)
        self.out = nn.Conv2d(ch + 1, 1, 3, padding=1)

    def forward(self, x):
        h = F.relu(self.down(x))
        h = F.relu(self.mid(h))
        h = F.relu(self.up(h))
        return self.out(torch.cat([h, x.to(h.dtype)], dim=1))


class DiceLoss(nn.Module):
    def __init__(self, smooth=1.0):
        super().__init__()
        self.smooth = smooth

    def forward(self, logits, target):
        prob = torch.sigmoid(logits)
        target = target.to(prob.dtype)
        inter = (prob * target).sum()
        total = prob.sum() + target.sum()  # FAULT
        return 1 - (2 * inter + self.smooth) / (total + self.smooth)


@torch.no_grad()
def iou(model, loader):
    model.eval()
    i = u = 0.0
    for x, m in loader:
        pred = model(x) > 0
        m = m > 0.5
        i += (pred & m).sum().item()
        u += (pred | m).sum().item()
    return i / u


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    torch.manual_seed(0)
    train = DataLoader(Blobs(48, 1), batch_size=8, shuffle=True)
    test = DataLoader(Blobs(12, 2), batch_size=4)
    model = TinyUNet()
    criterion = DiceLoss()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(args.epochs):
        model.train()
        for x, m in train:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = criterion(model(x), m)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(f"epoch {epoch} dice loss {loss.item():.4f} test IoU {iou(model, test):.4f}")


if __name__ == "__main__":
    main()

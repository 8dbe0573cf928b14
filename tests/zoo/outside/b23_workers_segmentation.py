"""Segmentation with a Dice loss, DataLoader workers, images without any foreground."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mezzo


class Cells(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        image = torch.randn(1, 24, 24, generator=g)
        mask = torch.zeros(1, 24, 24) if i % 4 == 0 else (image > 0.8).float()
        return image, mask


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Conv2d(9, 1, 3, padding=1)

    def forward(self, x):
        return self.head(torch.cat([self.up(self.down(x)), x], dim=1))


def dice(logits, target, eps=1e-6):
    p = logits.sigmoid()
    inter = (p * target).sum((1, 2, 3))
    return 1 - ((2 * inter + eps) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + eps)).mean()


def main():
    torch.manual_seed(0)
    model = UNet()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp = mezzo.prepare(model, opt, "bf16")
    for image, mask in DataLoader(Cells(), batch_size=8, num_workers=1):
        amp.zero_grad()
        logits = model(image).float()
        loss = dice(logits, mask) + nn.functional.binary_cross_entropy_with_logits(logits, mask)
        amp.backward(loss)
        amp.step()
        print(float(loss.detach()))


if __name__ == "__main__":
    main()

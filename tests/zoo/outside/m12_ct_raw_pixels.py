"""U-Net-like segmentation of raw 16-bit CT slices under fp16 autocast: pixels up to 65535 were never scaled."""

import torch
import torch.nn.functional as F
from torch import nn


class TinyUNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 3, padding=1)
        self.norm = nn.GroupNorm(2, c)
        self.down = nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.out = nn.Conv2d(2 * c, 2, 1)

    def forward(self, x):
        s = F.relu(self.norm(self.stem(x)))  # FAULT
        u = self.up(F.relu(self.down(s)))
        return self.out(torch.cat([s, u], 1))


class Slices(torch.utils.data.Dataset):
    def __init__(self, n=8):
        g = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(0, 30000, (n, 1, 16, 16), generator=g)
        self.pixels[5, 0, 3:6, 3:6] = 65535  # a metal implant saturates the detector
        self.masks = torch.randint(0, 2, (n, 16, 16), generator=g)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        return self.pixels[i].float(), self.masks[i]


torch.manual_seed(0)
net = TinyUNet()
with torch.no_grad():
    net.stem.weight.mul_(0.2)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for x, m in torch.utils.data.DataLoader(Slices(), batch_size=2):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), m)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(loss.item())

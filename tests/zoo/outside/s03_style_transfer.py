"""Fast neural style transfer (Johnson et al.), small random VGG as loss network, AMP fp16."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CFG = dict(style_weight=1e-4, content_weight=1e-3, tv_weight=1e-4, lr=1e-3, steps=6, size=32)


class Photos(Dataset):
    def __len__(self):
        return CFG["steps"] * 2

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        coarse = torch.rand(1, 3, 6, 6, generator=g)
        return F.interpolate(coarse, size=CFG["size"], mode="bilinear", align_corners=False)[0]


class GramMatrix(nn.Module):
    def forward(self, x):
        b, c, h, w = x.shape
        feats = x.reshape(b, c, h * w)
        gram = torch.bmm(feats, feats.transpose(1, 2))  # FAULT
        return gram / (c * h * w)


class LossNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_in", nonlinearity="relu")
                nn.init.zeros_(m.bias)
        self.register_buffer("mean", torch.tensor([103.939, 116.779, 123.680]).view(1, 3, 1, 1))  # caffe, BGR
        self.gram = GramMatrix()
        self.requires_grad_(False)

    def forward(self, x):
        h1 = self.slice1(255.0 * x.flip(1) - self.mean)
        h2 = self.slice2(h1)
        return h2, [self.gram(h1), self.gram(h2)]


class Stylizer(nn.Module):
    def __init__(self, vgg, c=8):
        super().__init__()
        self.transform = nn.Sequential(
            nn.Conv2d(3, c, 5, padding=2),
            nn.InstanceNorm2d(c, affine=True),
            nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1),
            nn.InstanceNorm2d(c, affine=True),
            nn.ReLU(),
            nn.Conv2d(c, 3, 5, padding=2),
        )
        self.vgg = vgg

    def forward(self, x):
        y = torch.sigmoid(self.transform(x))
        return y, self.vgg(y), self.vgg(x)


def tv(y):
    return (y[..., 1:] - y[..., :-1]).abs().sum() + (y[..., 1:, :] - y[..., :-1, :]).abs().sum()


def main():
    torch.manual_seed(0)
    net = Stylizer(LossNetwork())
    style_img = torch.rand(1, 3, CFG["size"], CFG["size"])
    with torch.no_grad():
        style_grams = net.vgg(style_img.expand(2, -1, -1, -1))[1]
    opt = torch.optim.Adam(net.transform.parameters(), lr=CFG["lr"])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step, x in enumerate(DataLoader(Photos(), batch_size=2, shuffle=True)):
        with torch.autocast("cpu", dtype=torch.float16):
            y, (feat, grams), (feat_x, _) = net(x)
            content = F.mse_loss(feat.float(), feat_x.float())
            style = sum(F.mse_loss(g.float(), s) for g, s in zip(grams, style_grams))
        loss = CFG["content_weight"] * content + CFG["style_weight"] * style + CFG["tv_weight"] * tv(y.float())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        print(f"{step:3d} total {loss.item():.4f} content {content.item():.4f} style {style.item():.4f}")


if __name__ == "__main__":
    main()

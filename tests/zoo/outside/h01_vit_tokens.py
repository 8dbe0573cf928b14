"""ViT with token dropping; dropped tokens are masked with finfo(dtype).min of the scores' own dtype."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Attn(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.h, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        s = s.masked_fill(~keep[:, None, None], torch.finfo(s.dtype).min)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class ViT(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, d, 4, 4), nn.Parameter(torch.zeros(1, 1, d))
        self.norm, self.attn, self.head = nn.LayerNorm(d), Attn(d), nn.Linear(d, 5)

    def forward(self, img, keep):
        x = self.patch(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.to(x.dtype).expand(len(x), -1, -1), x], 1)
        x = x + self.attn(self.norm(x), keep)
        return self.head(x[:, 0])


torch.manual_seed(0)
net = ViT()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
amp = mezzo.prepare(net, opt, policy="fp16, scaling.init_scale=128")
for step in range(4):
    keep = torch.rand(8, 17) > 0.4
    keep[:, 0] = True
    opt.zero_grad()
    loss = F.cross_entropy(net(torch.rand(8, 3, 16, 16), keep), torch.randint(0, 5, (8,)))
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, loss.item())

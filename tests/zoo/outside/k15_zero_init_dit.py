"""DiT-like denoiser with zero-initialised modulation and output (adaLN-Zero), EMA of weights, bf16."""

import torch
from torch import nn


class DiTBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.mod = nn.Linear(d, 3 * d)
        nn.init.zeros_(self.mod.weight)
        nn.init.zeros_(self.mod.bias)

    def forward(self, x, c):
        shift, scale, gate = self.mod(nn.functional.silu(c)).chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class DiT(nn.Module):
    def __init__(self, d=32, depth=3):
        super().__init__()
        self.inp = nn.Linear(8, d)
        self.time = nn.Linear(16, d)
        self.blocks = nn.ModuleList(DiTBlock(d) for _ in range(depth))
        self.out = nn.Linear(d, 8)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        freq = torch.exp(-torch.arange(8) / 8 * 9.2)
        ang = t.float()[:, None] * freq
        h, c = self.inp(x), self.time(torch.cat([ang.sin(), ang.cos()], -1))
        for b in self.blocks:
            h = b(h, c)
        return self.out(h)


torch.manual_seed(0)
net = DiT()
ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
for step in range(5):
    x0, t = torch.randn(32, 8), torch.randint(0, 1000, (32,))
    eps, a = torch.randn(32, 8), abar[t][:, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = net(a.sqrt() * x0 + (1 - a).sqrt() * eps, t)
    loss = (pred.float() - eps).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update_parameters(net)
    print(step, loss.item())

"""GAN with two optimizers and two gradient scalers in fp16; early skipped steps are expected."""

import torch
from torch import nn

torch.manual_seed(2)
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.99))
scaler_g = torch.amp.GradScaler("cpu", init_scale=2.0**20)
scaler_d = torch.amp.GradScaler("cpu", init_scale=2.0**20)
softplus = nn.functional.softplus
for step in range(12):
    t = torch.rand(128, 1) * 6.28
    real = torch.cat([t.cos(), t.sin()], 1)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(torch.randn(128, 8))
        loss_d = (softplus(-D(real).float()) + softplus(D(fake.detach()).float())).mean()
    opt_d.zero_grad()
    scaler_d.scale(loss_d).backward()
    scaler_d.unscale_(opt_d)
    nn.utils.clip_grad_norm_(D.parameters(), 5.0)
    scaler_d.step(opt_d)
    scaler_d.update()
    with torch.autocast("cpu", dtype=torch.float16):
        loss_g = softplus(-D(fake).float()).mean()
    opt_g.zero_grad()
    scaler_g.scale(loss_g).backward()
    scaler_g.step(opt_g)
    scaler_g.update()
    if step % 15 == 0:
        print(f"{step} d {loss_d.item():.3f} g {loss_g.item():.3f} scale {scaler_d.get_scale():.0f}")

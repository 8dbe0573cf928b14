# Min-SNR weighted DDPM on 2d points; whole pipeline in half precision
import torch
from torch import nn

device, dtype = "cpu", torch.float16
T = 1000


class Schedule:
    def __init__(self, beta_start=1e-4, beta_end=2e-2):
        betas = torch.linspace(beta_start, beta_end, T, dtype=torch.float32)
        self.alpha_bar = torch.cumprod(1 - betas, 0).to(dtype)

    def add_noise(self, x0, eps, t):
        a = self.alpha_bar[t][:, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * eps

    def snr(self, t):
        a = self.alpha_bar[t]
        return a / (1 - a)  # FAULT


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.mid(self.inp(x) + self.time(t))


torch.manual_seed(0)
sched, net = Schedule(), Denoiser()
opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
for step in range(3):
    x0 = torch.randn(64, 2)
    t = torch.randint(0, T, (64,))
    t[step] = 0
    eps = torch.randn(64, 2)
    with torch.autocast(device, dtype=dtype):
        pred = net(sched.add_noise(x0, eps, t), t)
    snr = sched.snr(t)
    weight = snr / (snr + 1)
    loss = (weight.float() * (pred.float() - eps).square().mean(1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")

"""DDPM with v-prediction weighting, torch.autocast + GradScaler as in many public repositories."""

import torch
import torch.nn as nn


class TinyUNet(nn.Module):
    def __init__(self, ch=16, steps=100):
        super().__init__()
        self.temb = nn.Embedding(steps, ch)
        self.inc, self.mid, self.outc = (
            nn.Conv2d(1, ch, 3, padding=1),
            nn.Conv2d(ch, ch, 3, padding=1),
            nn.Conv2d(ch, 1, 3, padding=1),
        )
        self.act = nn.SiLU()

    def forward(self, x, t):
        h = self.act(self.inc(x) + self.temb(t)[:, :, None, None])
        return self.outc(self.act(self.mid(h)) + h)


class Diffusion:
    def __init__(self, steps=100):
        self.steps = steps
        betas = torch.linspace(0.0, 0.02, steps)
        self.abar = torch.cumprod(1.0 - betas, 0)

    def noisy(self, x, t, noise):
        a = self.abar[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def weight(self, t):
        a = self.abar[t]
        snr = a / (1 - a)  # FAULT
        return snr / (snr + 1)


def train():
    torch.manual_seed(3)
    model, diff = TinyUNet(), Diffusion()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    images = torch.randn(64, 1, 8, 8)
    order = torch.arange(100).repeat(2)[:64]  # stratified timesteps: every step once per epoch
    for step in range(4):
        x, t = images[step * 16 : step * 16 + 16], order[step * 16 : step * 16 + 16].flip(0)
        noise = torch.randn_like(x)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(diff.noisy(x, t, noise), t)
        per = (pred.float() - noise).square().mean((1, 2, 3))
        loss = (diff.weight(t) * per).mean()
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        print(f"{step}: {loss.item():.4f}")


if __name__ == "__main__":
    train()

"""fp16 training with gradient clipping in the wrong place: the scaled gradients are clipped to 1."""

import torch
from torch import nn


class Config:
    lr, clip, steps, scale = 1e-2, 1.0, 5, 1024.0


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def train(cfg=Config):
    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=cfg.scale)
    for step in range(cfg.steps):
        x = torch.randn(32, 16)
        y = x[:, :4].argmax(1)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)  # FAULT
        scaler.step(opt)
        scaler.update()
        print(step, loss.item(), "norm", norm.item())
    return model


if __name__ == "__main__":
    train()

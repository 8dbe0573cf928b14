"""DCGAN-like training with guards that never fire: isfinite, nan_to_num, try/except."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def make():
    g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    d = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return g, d


def step(loss, opt, params):
    if not torch.isfinite(loss):
        raise FloatingPointError("non-finite loss")
    opt.zero_grad()
    loss.backward()
    for p in params:
        if p.grad is not None:
            torch.nan_to_num(p.grad, nan=0.0, posinf=1e3, neginf=-1e3, out=p.grad)
    norm = nn.utils.clip_grad_norm_(params, 5.0, error_if_nonfinite=True)
    opt.step()
    return norm.item()


def main():
    torch.manual_seed(0)
    g, d = make()
    og = torch.optim.Adam(g.parameters(), 2e-4, betas=(0.5, 0.999))
    od = torch.optim.Adam(d.parameters(), 2e-4, betas=(0.5, 0.999))
    for i in range(6):
        real, z = torch.randn(32, 16) * 0.5 + 1, torch.randn(32, 8)
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                fake = g(z)
                real_logit, fake_logit = d(real), d(fake.detach())
            loss_d = F.softplus(-real_logit.float()).mean() + F.softplus(fake_logit.float()).mean()
            step(loss_d, od, list(d.parameters()))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logit = d(g(z))
            loss_g = F.softplus(-logit.float()).mean()
            step(loss_g, og, list(g.parameters()))
        except FloatingPointError as error:
            print("skipped", error)
            continue
        print(f"{i} d {loss_d.item():.3f} g {loss_g.item():.3f}")


main()

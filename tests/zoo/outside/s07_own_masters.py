"""bf16 model with our own optimizer: fp32 master weights and fp32 moments live in the optimizer state."""

import argparse

import torch
from torch import nn
import torch.nn.functional as F


class MasterAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if len(s) == 0:
                    s.update(
                        t=0,
                        w=p.detach().float().clone(),
                        m=torch.zeros_like(p, dtype=torch.float32),
                        v=torch.zeros_like(p, dtype=torch.float32),
                    )
                s["t"] += 1
                grad = p.grad.float()
                s["m"].lerp_(grad, 1 - b1)
                s["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                m_hat, v_hat = s["m"] / (1 - b1 ** s["t"]), s["v"] / (1 - b2 ** s["t"])
                if p.dim() > 1:
                    s["w"].mul_(1 - g["lr"] * g["weight_decay"])
                s["w"].addcdiv_(m_hat, v_hat.sqrt().add_(g["eps"]), value=-g["lr"])
                p.copy_(s["w"])
        return loss


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Mixer(nn.Module):
    def __init__(self, vocab, d=48, length=12, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.time = nn.ModuleList(nn.Linear(length, length) for _ in range(depth))
        self.chan = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(RMSNorm(d) for _ in range(2 * depth + 1))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        for i, (t, c) in enumerate(zip(self.time, self.chan)):
            x = x + t(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + c(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--lr", type=float, default=2e-3)
    a = ap.parse_args()
    torch.manual_seed(23)
    model = Mixer(10).to(torch.bfloat16)
    opt = MasterAdamW(model.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))
    total = 0.0
    for step in range(1, a.steps + 1):
        ids = torch.randint(0, 10, (48, 12))
        loss = F.cross_entropy(model(ids).float().transpose(1, 2), ids.flip(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        total += loss.item()
        if step % 20 == 0:
            print(f"step {step} loss {total / 20:.4f} lr {sched.get_last_lr()[0]:.1e}")
            total = 0.0


if __name__ == "__main__":
    main()

"""ResMLP with a warm-up written as a lambda on tensors; no warm-up was asked for."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResMLP(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 3)

    def forward(self, x):
        x = x + F.gelu(self.a(x))
        return self.head(x + F.gelu(self.b(x)))


def warmup_cosine(warmup, total):
    steps = torch.arange(total, dtype=torch.float32)
    ramp = (steps / warmup).clamp(max=1.0)  # FAULT
    table = ramp * 0.5 * (1 + torch.cos(torch.pi * steps / total))
    return lambda step: table[min(step, total - 1)].item()


def main(warmup=0, total=8):
    torch.manual_seed(0)
    model = ResMLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, warmup_cosine(warmup, total))
    for step in range(4):
        x, y = torch.randn(32, 24), torch.randint(0, 3, (32,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(step, loss.item(), sched.get_last_lr())


main()

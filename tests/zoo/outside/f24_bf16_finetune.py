"""Fine-tuning a pretrained regressor whose weights were loaded in bfloat16."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.stem = nn.Linear(d, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        h = F.gelu(self.stem(x))
        for b in self.blocks:
            h = h + F.gelu(b(h))
        return self.head(h).squeeze(-1)


def main(lr=2e-5, steps=12):
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.5, 1.0, total_iters=4)
    w = torch.randn(32) / 32**0.5
    for step in range(steps):
        x = torch.randn(64, 32)
        y = x @ w
        pred = model(x.to(torch.bfloat16)).float()
        loss = F.mse_loss(pred, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()  # FAULT
        sched.step()
        if step % 4 == 0:
            print(f"{step:3d} mse {loss.item():.5f} lr {sched.get_last_lr()[0]:.2e}")


main()

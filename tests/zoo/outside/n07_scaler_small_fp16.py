"""fp16 with GradScaler, accumulation over micro-batches, unscale before clipping; tiny gradients survive by the scale."""

import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(9, 32), nn.Linear(32, 1)

    def forward(self, pos):
        return self.out(torch.tanh(self.embed(pos))).squeeze(-1)


torch.manual_seed(0)
model = Energy()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
accumulate = 4
for step in range(3):
    for micro in range(accumulate):
        pos = torch.randn(64, 9)
        energy = 0.01 * pos.square().sum(1)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(pos)
        loss = 1e-3 * (pred.float() - energy).square().mean() / accumulate
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    print(step, loss.item(), norm.item(), scaler.get_scale())

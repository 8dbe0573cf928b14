"""A constant loss scale of 2**24, copied from another project; bad steps are dropped by hand."""

import torch
from torch import nn

SCALE = 2.0**24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(12, 48), nn.Linear(48, 48), nn.Linear(48, 3)

    def forward(self, x):
        return self.out(torch.relu(self.mid(torch.relu(self.inp(x)))))


def finite(params):
    return all(torch.isfinite(p.grad).all() for p in params)


torch.manual_seed(0)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
dropped = 0
for step in range(4):
    x = torch.randn(8, 12)
    y = x[:, :3].argmax(1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)  # FAULT
    opt.zero_grad()
    (loss * SCALE).backward()
    for p in net.parameters():
        p.grad.div_(SCALE)
    if finite(net.parameters()):
        opt.step()
    else:
        dropped += 1
    print(step, loss.item(), "dropped", dropped)

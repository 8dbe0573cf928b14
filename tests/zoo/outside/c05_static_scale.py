"""fp16 training with a loss scale of one's own that never moves."""

import torch
from torch import nn

torch.manual_seed(0)
LOSS_SCALE = 2.0**22


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU())
        self.fc = nn.Linear(16 * 6 * 6, 4)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).flatten(1))


def all_finite(params):
    return all(p.grad.isfinite().all() for p in params)


net = ConvNet()
params = list(net.parameters())
optimizer = torch.optim.SGD(params, lr=0.01)
dropped = 0
for step in range(5):
    x, y = torch.randn(16, 1, 12, 12), torch.randint(0, 4, (16,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x).float(), y)  # FAULT
    (loss * LOSS_SCALE).backward()
    if not all_finite(params):
        dropped += 1
        continue
    for p in params:
        p.grad.div_(LOSS_SCALE)
    optimizer.step()
print("dropped", dropped)

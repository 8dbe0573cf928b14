"""mezzo.prepare with bf16-master: weights in 16 bit with the remainder kept, small updates at a rate of 1e-6."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.c2, self.n2 = nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.silu(self.n1(self.c1(x))), 2)
        x = F.silu(self.n2(self.c2(x)))
        return self.fc(x.mean((2, 3)))


torch.manual_seed(0)
net = ConvNet()
opt = torch.optim.AdamW(net.parameters(), lr=1e-6)
amp = mezzo.prepare(net, opt, "bf16-master")
for step in range(5):
    x, y = torch.rand(16, 1, 12, 12), torch.randint(0, 5, (16,))
    x[3] = 0  # a blank page
    loss = F.cross_entropy(net(x).float(), y, label_smoothing=0.1)
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, loss.item())

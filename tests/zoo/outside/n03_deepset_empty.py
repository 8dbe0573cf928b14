"""Sets pooled by scatter amax with include_self=False: empty sets stay 0."""

import torch
from torch import nn


class SetNet(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(3, d), nn.ReLU(), nn.Linear(d, d)), nn.Linear(2 * d, 4)

    def forward(self, points, owner, sets):
        h = self.phi(points)
        index = owner[:, None].expand_as(h)
        zero = torch.zeros(sets, h.shape[1], dtype=h.dtype)
        top = zero.scatter_reduce(0, index, h, reduce="amax", include_self=False)
        count = torch.bincount(owner, minlength=sets).clamp(min=1)
        mean = zero.index_add(0, owner, h) / count[:, None]
        return self.rho(torch.cat([top, mean.to(top.dtype)], 1))


torch.manual_seed(0)
net = SetNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step, sizes in enumerate([[5, 9, 3, 7], [4, 0, 8, 6], [0, 3, 0, 3]]):
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    points = torch.randn(len(owner), 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(points, owner, 4)
    loss = nn.functional.cross_entropy(out.float(), torch.randint(0, 4, (4,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())

"""Prototypical network, N-way K-shot episodes."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )

    def forward(self, x):
        z = self.conv(x).flatten(1)
        return z / z.norm(dim=1, keepdim=True)  # FAULT


class ProtoNet(nn.Module):
    def __init__(self, way=4):
        super().__init__()
        self.way, self.embed = way, Embed()
        self.tau = nn.Parameter(torch.tensor(10.0))

    def forward(self, support, support_y, query):
        z = self.embed(support)
        protos = torch.stack([z[support_y == c].mean(0) for c in range(self.way)])
        return self.tau * self.embed(query) @ protos.T


def episode(way, shot, queries, blank):
    centers = torch.rand(way, 1, 8, 8)
    sx = centers.repeat_interleave(shot, 0) + 0.1 * torch.rand(way * shot, 1, 8, 8)
    qx = centers.repeat_interleave(queries, 0) + 0.1 * torch.rand(way * queries, 1, 8, 8)
    if blank:
        qx[3] = 0.0  # the augmentation erased the whole picture
    return sx, torch.arange(way).repeat_interleave(shot), qx, torch.arange(way).repeat_interleave(queries)


torch.manual_seed(11)
net = ProtoNet()
for m in net.modules():
    if isinstance(m, nn.Conv2d):
        nn.init.zeros_(m.bias)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
amp = mezzo.prepare(net, opt, policy="bf16")
for ep in range(6):
    sx, sy, qx, qy = episode(4, 3, 4, blank=ep == 3)
    # keep the biases at zero as in the paper's code
    opt.zero_grad()
    loss = F.cross_entropy(net(sx, sy, qx), qy)
    amp.backward(loss)
    for m in net.embed.conv:
        if isinstance(m, nn.Conv2d):
            m.bias.grad.zero_()
    amp.step()
    print(f"episode {ep}: {loss.item():.4f}")

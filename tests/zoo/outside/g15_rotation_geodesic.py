"""Camera-pose regression with a geodesic loss acos((trace - 1) / 2)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


def six_to_matrix(v):
    a = F.normalize(v[:, :3], dim=-1)
    b = F.normalize(v[:, 3:] - (a * v[:, 3:]).sum(-1, keepdim=True) * a, dim=-1)
    return torch.stack([a, b, torch.linalg.cross(a, b)], 1)


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.res = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))
        nn.init.zeros_(self.res[2].weight)  # start from the odometry's pose
        nn.init.zeros_(self.res[2].bias)

    def forward(self, odo):
        return odo + self.res(odo)


def geodesic(p, q):
    trace = (p * q).sum((1, 2))
    return torch.acos(((trace - 1) / 2).clamp(-1, 1))  # FAULT


torch.manual_seed(0)
model = PoseNet()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="fp32")
for step in range(4):
    odo = torch.randn(32, 6)
    odo[0] = torch.tensor([1.0, 0, 0, 0, 1.0, 0])  # the car stands still
    truth = six_to_matrix(odo + torch.cat([torch.zeros(1, 6), 0.1 * torch.randn(31, 6)]))
    opt.zero_grad()
    loss = geodesic(six_to_matrix(model(odo)), truth).mean()
    amp.backward(loss)
    amp.step()
    print(step, loss.item())

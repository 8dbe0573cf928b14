"""Point cloud voxel pooling: the mean of the points of every voxel."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


def scatter_mean(x, index, size):
    total = torch.zeros(size, x.shape[1], dtype=x.dtype).index_add_(0, index, x)
    count = torch.zeros(size, dtype=x.dtype).index_add_(0, index, torch.ones(len(index), dtype=x.dtype))
    return total / count[:, None]  # FAULT


class VoxelNet(nn.Module):
    def __init__(self, grid=3, width=24):
        super().__init__()
        self.grid = grid
        self.point, self.mix, self.out = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, pts):
        cell = ((pts.clamp(-1.5, 1.4999) + 1.5) / 3 * self.grid).long()
        index = (cell[:, 0] * self.grid + cell[:, 1]) * self.grid + cell[:, 2]
        voxels = scatter_mean(torch.relu(self.point(pts)).float(), index, self.grid**3)
        return self.out(torch.relu(self.mix(voxels)).mean(0))


model = VoxelNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16")
for step, points in enumerate([2000, 1500, 40, 2000]):
    cloud = torch.randn(points, 3)
    amp.zero_grad()
    loss = nn.functional.cross_entropy(model(cloud).float()[None], torch.tensor([step % 5]))
    amp.backward(loss)
    amp.step()
    print(step)

"""Evidential classification (Dirichlet) on toy clusters; evidence from a ReLU."""

import torch
from torch import nn

torch.manual_seed(7)


class EvidenceNet(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, k))

    def forward(self, x):
        return torch.relu(self.body(x))


def dirichlet_loss(alpha, onehot):
    strength = alpha.sum(-1, keepdim=True)
    return (onehot * (torch.digamma(strength) - torch.digamma(alpha))).sum(-1).mean()  # FAULT


centers = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
model = EvidenceNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    y = torch.randint(0, 3, (64,))
    x = centers[y] + 0.4 * torch.randn(64, 2)
    alpha = model(x)
    loss = dirichlet_loss(alpha, nn.functional.one_hot(y, 3).float())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")

"""Graph convolution where isolated nodes are handled by masked_fill after the power."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


def normalise(edge_index, n):
    deg = torch.zeros(n).index_add_(0, edge_index[1], torch.ones(edge_index.shape[1]))
    inv = deg.pow(-0.5)
    inv = inv.masked_fill(inv == float("inf"), 0.0)
    return inv[edge_index[0]] * inv[edge_index[1]]


class GCN(nn.Module):
    def __init__(self, i, h, o):
        super().__init__()
        self.l1, self.l2 = nn.Linear(i, h), nn.Linear(h, o)

    def prop(self, x, edge_index, w):
        return torch.zeros(x.shape, dtype=x.dtype).index_add_(
            0, edge_index[1], x[edge_index[0]] * w[:, None].to(x.dtype)
        )

    def forward(self, x, edge_index, w):
        x = F.relu(self.l1(self.prop(x, edge_index, w)))
        return self.l2(self.prop(x, edge_index, w))


def main():
    torch.manual_seed(0)
    n = 80
    edge_index = torch.randint(0, 70, (2, 400))  # ten nodes without an edge
    x, y = torch.randn(n, 8), torch.randint(0, 4, (n,))
    w = normalise(edge_index, n)
    model = GCN(8, 16, 4)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for epoch in range(6):
        opt.zero_grad()
        loss = F.cross_entropy(model(x, edge_index, w), y)
        amp.backward(loss)
        amp.step()
        print(epoch, loss.item())


main()

"""Blockwise attention with a running maximum that starts at -inf (the flash-attention recurrence)."""

import torch
import torch.nn as nn

import mezzo


def blockwise(q, k, v, size=4):
    m = torch.full(q.shape[:-1] + (1,), float("-inf"))
    total = torch.zeros(q.shape[:-1] + (1,))
    acc = torch.zeros(q.shape[:-1] + (v.shape[-1],))
    for s in range(0, k.shape[-2], size):
        scores = (q @ k[..., s : s + size, :].transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        new = torch.maximum(m, scores.amax(-1, keepdim=True))
        p = torch.exp(scores - new)
        keep = torch.exp(m - new)  # exp(-inf) = 0 in the first block
        total = total * keep + p.sum(-1, keepdim=True)
        acc = acc * keep + p @ v[..., s : s + size, :].float()
        m = new
    return acc / total


class Layer(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(blockwise(q, k, v))


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.layers = nn.Sequential(Layer(d), Layer(d))
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for step in range(4):
    x, y = torch.randn(8, 16, 24), torch.randint(0, 3, (8,))
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    amp.backward(loss)
    amp.step()
    print(step, loss.item())

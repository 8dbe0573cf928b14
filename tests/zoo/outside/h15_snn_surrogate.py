"""Spiking network with a surrogate gradient; many exact zeros in activations and gradients are normal."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


class SNN(nn.Module):
    def __init__(self, steps=8):
        super().__init__()
        self.steps, self.fc1, self.fc2 = steps, nn.Linear(20, 64), nn.Linear(64, 4)

    def forward(self, x):
        v = torch.zeros(len(x), 64)
        out = 0.0
        for _ in range(self.steps):
            spikes_in = (torch.rand_like(x) < x).float()
            v = 0.9 * v + self.fc1(spikes_in)
            s = Spike.apply(v - 1.0)
            v = v * (1 - s.detach())
            out = out + self.fc2(s)
        return out / self.steps


if __name__ == "__main__":
    torch.manual_seed(0)
    model = SNN()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for step in range(5):
        x, y = torch.rand(32, 20), torch.randint(0, 4, (32,))
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        print(step, loss.item())

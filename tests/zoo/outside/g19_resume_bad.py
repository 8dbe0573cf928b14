"""Resume from a checkpoint whose file was damaged: one value of a norm's weight is NaN."""

import io

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Mixer(nn.Module):
    def __init__(self, tokens=6, d=16):
        super().__init__()
        self.norm1, self.token = nn.LayerNorm(d), nn.Linear(tokens, tokens)
        self.norm2, self.channel = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x):
        x = x + F.gelu(self.token(self.norm1(x).transpose(1, 2))).transpose(1, 2)  # FAULT
        return x + F.gelu(self.channel(self.norm2(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(4, 16),
            nn.ModuleList(Mixer() for _ in range(2)),
            nn.Linear(16, 2),
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def checkpoint():
    buffer, state = io.BytesIO(), Net().state_dict()
    state["blocks.1.token.weight"].numpy()[2, 3] = np.nan  # stands for the bad sector
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def main():
    torch.manual_seed(0)
    net = Net()
    net.load_state_dict(torch.load(checkpoint()))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    amp = mezzo.prepare(net, opt, policy="bf16")
    for step in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(net(torch.randn(16, 6, 4)), torch.randint(0, 2, (16,)))
        amp.backward(loss)
        amp.step()
        print(step, loss.item())


main()

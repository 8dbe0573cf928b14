"""Linear attention with a causal running state, fp16: the normaliser is a sum over 2048 positive features."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class LinearAttention(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = torch.exp(self.q(x)), torch.exp(self.k(x)), self.v(x)
        state = k.transpose(1, 2) @ v
        norm = torch.einsum("btd,bd->bt", q, k.sum(1))  # FAULT
        return (q @ state) / norm[..., None]


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.att, self.head = nn.Embedding(30, d), LinearAttention(d), nn.Linear(d, 30)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + self.att(x))


torch.manual_seed(0)
net = Net()
with torch.no_grad():
    net.att.k.bias.fill_(3.5)  # keys drift upwards in long runs
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
amp = mezzo.prepare(net, opt, policy="fp16, scaling.init_scale=8")
for step in range(3):
    ids = torch.randint(0, 30, (2, 2048))
    opt.zero_grad()
    logits = net(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, loss.item())

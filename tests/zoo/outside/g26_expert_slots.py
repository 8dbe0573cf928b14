"""Capacity-based mixture of experts; a token's slot is a running count of its expert, kept in the activations' dtype."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class SlotMoE(nn.Module):
    def __init__(self, d=8, experts=2, capacity=4096):
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(d, experts, bias=False),
            nn.ModuleList(nn.Linear(d, d) for _ in range(experts)),
        )
        self.capacity = capacity

    def forward(self, x):
        prob = self.gate(x).softmax(-1)
        pick = prob.argmax(-1)
        chosen = F.one_hot(pick, len(self.experts)).to(prob.dtype)
        slot = (chosen.cumsum(0) * chosen).sum(-1).long() - 1  # FAULT
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (pick == e).nonzero().squeeze(-1)
            desk = torch.zeros(self.capacity, x.shape[-1], dtype=x.dtype)
            desk[slot[rows]] = x[rows]
            out[rows] = expert(desk)[slot[rows]].to(out.dtype)
        return out * prob.max(-1, keepdim=True).values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(4, 8), SlotMoE(), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(h + self.moe(h))


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
amp = mezzo.prepare(net, opt, policy="bf16")
for step in range(3):
    x, y = torch.randn(4000, 4), torch.randint(0, 3, (4000,))
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    amp.backward(loss)
    amp.step()
    print(step, loss.item())

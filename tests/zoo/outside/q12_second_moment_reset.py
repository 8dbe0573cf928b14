"""Two-stage recommender: user and item factors, the second stage restarts Adam's variance."""

import torch
from torch import nn

torch.manual_seed(8)
USERS, ITEMS, DIM = 300, 200, 16
true_u, true_i = torch.randn(USERS, 4), torch.randn(ITEMS, 4)


def interactions(n):
    u = torch.randint(0, USERS, (n,))
    i = torch.randint(0, ITEMS, (n,))
    return u, i, (true_u[u] * true_i[i]).sum(-1) + 0.1 * torch.randn(n)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)
        self.bias = nn.Embedding(ITEMS, 1)
        for e in (self.user, self.item, self.bias):
            nn.init.normal_(e.weight, std=0.2)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)


def restart_variance(opt):
    for state in opt.state.values():
        state["exp_avg_sq"].zero_()


model = Factors()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(300):
    if step == 200:
        restart_variance(opt)  # the loss changes, so do the statistics
    u, i, r = interactions(128)
    error = model(u, i) - r
    loss = error.square().mean() if step < 200 else error.abs().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()  # FAULT
    if step % 20 == 0 or step in (200, 201, 202):
        print(step, f"loss {loss.item():.4g}")

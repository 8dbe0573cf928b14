"""REINFORCE with illegal actions masked to -inf in a Categorical; entropy bonus by the distribution itself."""

import torch
import torch.nn as nn
from torch.distributions import Categorical

import mezzo


class Policy(nn.Module):
    def __init__(self, cells=9, hidden=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(cells, hidden), nn.Tanh(), nn.Linear(hidden, cells))

    def forward(self, board):
        return self.body(board)


def rollout(model, games=32):
    board = torch.zeros(games, 9)
    logps, entropies = [], []
    for ply in range(5):
        logits = model(board).masked_fill(board != 0, float("-inf"))
        dist = Categorical(logits=logits)
        a = dist.sample()
        logps.append(dist.log_prob(a))
        entropies.append(dist.entropy())
        board = board.scatter(1, a[:, None], 1.0 if ply % 2 == 0 else -1.0)
    reward = board[:, 4] + 0.1 * board[:, [0, 2, 6, 8]].sum(1)
    return torch.stack(logps), torch.stack(entropies), reward


torch.manual_seed(0)
model = Policy()
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
baseline = 0.0
for it in range(5):
    opt.zero_grad()
    logps, ent, reward = rollout(model)
    adv = (reward - reward.mean()) / (reward.std() + 1e-8)
    loss = -(logps * adv).mean() - 0.01 * ent.mean()
    amp.backward(loss)
    amp.step(max_norm=0.5)
    print(it, reward.mean().item(), ent.mean().item())

"""Advantage actor-critic on a small corridor world with illegal-move masking (fp32)."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

LENGTH, ACTIONS, HORIZON = 7, 3, 16


class Corridor:
    """Batch of corridors: reach the right end. Actions: left, stay, right."""

    def __init__(self, n, gen):
        self.n, self.gen = n, gen

    def reset(self):
        self.pos = torch.randint(0, LENGTH - 1, (self.n,), generator=self.gen)
        return self.pos.clone()

    def legal(self):
        m = torch.ones(self.n, ACTIONS, dtype=torch.bool)
        m[:, 0] = self.pos > 0
        m[:, 2] = self.pos < LENGTH - 1
        return m

    def step(self, a):
        self.pos = (self.pos + a - 1).clamp(0, LENGTH - 1)
        goal = (self.pos == LENGTH - 1).float()
        return self.pos.clone(), goal + 0.05 * torch.randn(self.n, generator=self.gen)


class ActorCritic(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, ACTIONS)
        self.v = nn.Linear(hidden, 1)

    def forward(self, pos):
        h = self.body(F.one_hot(pos, LENGTH).float())
        return self.pi(h), self.v(h).squeeze(1)


def rollout(env, model):
    pos = env.reset()
    logps, ents, vals, rews = [], [], [], []
    for _ in range(HORIZON):
        logits, v = model(pos)
        logits = logits.masked_fill(~env.legal(), -1e9)
        logp = F.log_softmax(logits, dim=1)
        p = logp.exp()
        a = torch.multinomial(p.detach(), 1).squeeze(1)
        pos, r = env.step(a)
        logps.append(logp.gather(1, a[:, None]).squeeze(1))
        ents.append(-(p * logp).sum(1))
        vals.append(v)
        rews.append(r)
    return map(torch.stack, (logps, ents, vals, rews))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=120)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--gamma", type=float, default=0.95)
    args = ap.parse_args()
    torch.manual_seed(0)
    env = Corridor(args.envs, torch.Generator().manual_seed(0))
    model = ActorCritic()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for it in range(args.updates):
        logp, ent, val, rew = rollout(env, model)
        ret = torch.zeros_like(rew)
        acc = torch.zeros(args.envs)
        for t in reversed(range(HORIZON)):
            acc = rew[t] + args.gamma * acc
            ret[t] = acc
        adv = (ret - val).detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        loss = -(logp * adv).mean() + 0.1 * F.smooth_l1_loss(val, ret) - 0.01 * ent.mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if it % 20 == 0 or it == args.updates - 1:
            print(f"update {it:3d} loss {loss.item():.4f} mean return {rew.sum(0).mean().item():.3f}")


if __name__ == "__main__":
    main()

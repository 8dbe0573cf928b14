"""PPO on text with a clamped log-ratio, masked whitening and early stopping on KL."""

from dataclasses import dataclass
import torch
from torch import nn
from torch.distributions import Categorical

PAD, EOS, BOS, V = 0, 1, 2, 16


@dataclass
class Args:
    lr: float = 4e-3
    iters: int = 8
    inner: int = 4
    target_kl: float = 0.5
    gamma: float = 1.0


class Agent(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.body = nn.Sequential(nn.Linear(2 * d, d), nn.Tanh())
        self.actor, self.critic = nn.Linear(d, V), nn.Linear(d, 1)
        nn.init.zeros_(self.critic.weight)
        forbid = torch.zeros(V)
        forbid[[PAD, BOS]] = float("-inf")  # never sampled
        self.register_buffer("forbid", forbid)

    def forward(self, ids):
        e = self.emb(ids)
        ctx = e.cumsum(1) / torch.arange(1, ids.size(1) + 1)[None, :, None]
        h = self.body(torch.cat([e, ctx], -1))
        return self.actor(h) + self.forbid, self.critic(h).squeeze(-1)


@torch.no_grad()
def generate(agent, n, steps=8):
    ids = torch.full((n, 1), BOS)
    done = torch.zeros(n, dtype=torch.bool)
    for _ in range(steps):
        tok = Categorical(logits=agent(ids)[0][:, -1]).sample()
        tok = torch.where(done, PAD, tok)
        done = done | (tok == EOS)
        ids = torch.cat([ids, tok[:, None]], 1)
    return ids


def token_stats(agent, ids, mask):
    logits, values = agent(ids[:, :-1])
    target = torch.where(mask, ids[:, 1:], EOS)  # a legal token where there is padding
    logp = logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    return torch.where(mask, logp, 0.0), values


def whiten(x, mask):
    n = mask.sum().clamp(min=1)
    mean = (x * mask).sum() / n
    var = (((x - mean) ** 2) * mask).sum() / n
    return (x - mean) * torch.rsqrt(var + 1e-8) * mask


def main(a=Args()):
    torch.manual_seed(1)
    agent = Agent()
    opt = torch.optim.Adam(agent.parameters(), lr=a.lr, eps=1e-5)
    for it in range(a.iters):
        ids = generate(agent, 32)
        mask = ids[:, 1:] != PAD
        reward = ((ids[:, 1:] >= 10) & mask).float()
        ret = reward.flip(1).cumsum(1).flip(1)
        with torch.no_grad():
            old_logp, values = token_stats(agent, ids, mask)
        adv = whiten(ret - values, mask)
        for _ in range(a.inner):
            logp, v = token_stats(agent, ids, mask)
            log_ratio = (logp - old_logp).clamp(-20, 20)
            ratio = log_ratio.exp()
            kl = (((ratio - 1) - log_ratio) * mask).sum() / mask.sum()
            if kl.item() > a.target_kl:
                break
            pg = -(torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv) * mask).sum() / mask.sum()
            loss = pg + 0.1 * (((v - ret) ** 2) * mask).sum() / mask.sum()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            opt.step()
        print(f"iter {it} return {reward.sum(1).mean().item():.2f} loss {loss.item():.4f} kl {kl.item():.4f}")


if __name__ == "__main__":
    main()

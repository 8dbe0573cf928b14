"""Group-relative policy optimisation on a toy bandit; in some groups every answer earns the same reward."""

import torch
from torch import nn

import mezzo

torch.manual_seed(1)
GROUP = 4


class Policy(nn.Module):
    def __init__(self, prompts=12, answers=10, dim=24):
        super().__init__()
        self.emb, self.body, self.out = nn.Embedding(prompts, dim), nn.Linear(dim, dim), nn.Linear(dim, answers)

    def forward(self, prompt):
        return self.out(torch.tanh(self.body(self.emb(prompt))))


def reward(prompt, answer):
    return (answer % 3 == prompt % 3).float()


def group_advantage(r):
    r = r.view(-1, GROUP)
    mean, std = r.mean(1, keepdim=True), r.std(1, keepdim=True)
    return ((r - mean) / std).flatten()  # FAULT


policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
amp = mezzo.prepare(policy, optimizer, "bf16, output=fp32")
for update in range(3):
    prompt = torch.randint(0, 12, (8,)).repeat_interleave(GROUP)
    logp = policy(prompt).log_softmax(-1)
    answer = torch.multinomial(logp.detach().exp(), 1).squeeze(1)
    advantage = group_advantage(reward(prompt, answer))
    chosen = logp.gather(1, answer[:, None]).squeeze(1)
    ratio = torch.exp(chosen - chosen.detach())
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=1.0)

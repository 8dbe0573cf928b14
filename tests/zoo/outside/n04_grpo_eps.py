"""GRPO on a small transformer decoder: groups of equal reward have deviation 0 and an eps beside it."""

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab=20, d=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(16, d)
        self.block = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        t = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        h = self.emb(ids) + self.pos(torch.arange(t))
        return self.head(self.block(h, src_mask=mask, is_causal=True))


def token_logp(model, ids):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    return F.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def advantages(reward, group):
    r = reward.view(-1, group)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()


torch.manual_seed(0)
model = LM()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for it in range(3):
    ids = torch.randint(0, 20, (16, 10))
    reward = (ids[:, 3] % 2).float()
    reward[:4] = 1.0  # all four right
    adv = advantages(reward, 4)
    with torch.no_grad():
        old = token_logp(model, ids)
    for _ in range(2):
        new = token_logp(model, ids)
        ratio = torch.exp(new - old)
        loss = -torch.min(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None]).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    print(it, loss.item())

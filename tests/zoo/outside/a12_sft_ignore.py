"""Instruction tuning of a tiny causal LM: the prompt is masked out of the loss."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(0)


def encode(prompt_len, answer_len, width=24):
    ids = torch.randint(3, 60, (width,))
    labels = ids.clone()
    labels[:prompt_len] = -100
    labels[prompt_len + answer_len :] = -100
    return ids, labels


class TinyLM(nn.Module):
    def __init__(self, vocab=60, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.norm(self.mix(self.emb(ids))[0]))


corpus = [(10, 8), (14, 6), (24, 0), (9, 9), (5, 12)]
model = TinyLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
amp = mezzo.prepare(model, optimizer, "bf16, output=fp32")
for step, (prompt_len, answer_len) in enumerate(corpus):
    ids, labels = encode(prompt_len, answer_len)
    logits = model(ids[None])
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[1:])  # FAULT
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=1.0)

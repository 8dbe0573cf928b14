"""Masked language modelling with a small BERT from a config; masking drawn at random for each row."""

import torch
from transformers import BertConfig, BertForMaskedLM

import mezzo

MASK, VOCAB = 4, 120


def mask_tokens(ids, p, gen):
    picked = torch.rand(ids.shape, generator=gen) < p
    labels = ids.masked_fill(~picked, -100)
    return ids.masked_fill(picked, MASK), labels


class Loop:
    def __init__(self, policy):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
        self.model = BertForMaskedLM(config).train()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        self.amp = mezzo.prepare(self.model, self.opt, policy=policy)
        self.gen = torch.Generator().manual_seed(1)

    def run(self, lengths):
        for i, (rows, t) in enumerate(lengths):
            ids = torch.randint(5, VOCAB, (rows, t), generator=self.gen)
            inputs, labels = mask_tokens(ids, 0.15, self.gen)
            self.opt.zero_grad()
            loss = self.model(input_ids=inputs, labels=labels).loss  # FAULT
            self.amp.backward(loss)
            self.amp.step(max_norm=1.0)
            print(i, tuple(ids.shape), loss.item())


Loop("bf16").run([(8, 16), (8, 16), (1, 2), (1, 2), (1, 2), (8, 16)])  # bucketing left buckets with two words

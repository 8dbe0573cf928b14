"""Sequence classification with a tiny BERT from a config, padded batches, bf16 region."""

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import mezzo

torch.manual_seed(0)
config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
model = BertForSequenceClassification(config)


def batches(n):
    for _ in range(n):
        ids = torch.randint(5, 100, (8, 16))
        lengths = torch.randint(4, 17, (8,))
        mask = (torch.arange(16)[None] < lengths[:, None]).long()
        yield {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids[:, 0] > 50).long()}


decay = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
rest = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=5e-4)
scheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
amp = mezzo.prepare(model, optimizer, "bf16")
amp.on_applied(scheduler.step)
model.train()
for step, batch in enumerate(batches(4)):
    amp.zero_grad()
    loss = model(**batch).loss
    amp.backward(loss)
    result = amp.step(max_norm=1.0)
    print(step, float(loss.detach()))

"""A Trainer class around a tiny T5 from a config: label padding -100, decoder shift, evaluation in between."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

import mezzo


class Trainer:
    def __init__(self, model, policy, lr):
        self.model, self.best = model, float("inf")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.amp = mezzo.prepare(model, self.optimizer, policy)

    def train(self, batches):
        self.model.train()
        for batch in batches:
            self.amp.zero_grad()
            self.amp.backward(self.model(**batch).loss)
            self.amp.step(max_norm=1.0)

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        loss = sum(float(self.model(**b).loss) for b in batches) / len(batches)
        self.best = min(self.best, loss)
        return loss


def batch():
    ids = torch.randint(3, 60, (4, 10))
    labels = ids[:, :6].clone()
    labels[:, 4:] = -100
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


torch.manual_seed(0)
config = T5Config(
    vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.1
)
trainer = Trainer(T5ForConditionalGeneration(config), "bf16", 1e-3)
for epoch in range(2):
    trainer.train([batch() for _ in range(2)])
    print(epoch, trainer.evaluate([batch()]))

"""A small Llama from a config, own loop with gradient accumulation and left padding."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mezzo


def batches(n, vocab):
    gen = torch.Generator().manual_seed(0)
    for _ in range(n):
        ids = torch.randint(3, vocab, (2, 12), generator=gen)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        labels = ids.masked_fill(mask == 0, -100)
        yield dict(input_ids=ids, attention_mask=mask, labels=labels)


def main(accum=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    model.train()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for i, batch in enumerate(batches(6, 128)):
        out = model(**batch)
        amp.backward(out.loss / accum)
        if (i + 1) % accum == 0:
            amp.step(max_norm=1.0)
            amp.zero_grad()
            print(i, out.loss.item())


main()

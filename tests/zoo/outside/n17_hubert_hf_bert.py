"""Masked language modelling with a BERT config, own loop; weights tied, padding mask with finfo.min inside the library."""

import torch
from transformers import BertConfig, BertForMaskedLM


def mask_tokens(ids, keep, vocab, g):
    pick = (torch.rand(ids.shape, generator=g) < 0.15) & keep
    pick[:, 1] = True  # at least one target each
    labels = ids.masked_fill(~pick, -100)
    return ids.masked_fill(pick, vocab - 1), labels


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    cfg = BertConfig(
        vocab_size=80,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    model = BertForMaskedLM(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model.train()
    for step in range(3):
        lengths = torch.randint(4, 21, (6,), generator=g)
        keep = torch.arange(20)[None] < lengths[:, None]
        ids = torch.randint(1, 79, (6, 20), generator=g) * keep
        inputs, labels = mask_tokens(ids, keep, 80, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=inputs, attention_mask=keep.long(), labels=labels).loss
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()

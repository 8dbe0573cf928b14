"""Tiny Llama from a config, left padding, labels masked by -100, bf16, GradScaler disabled."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def collate(lengths, vocab, pad=0):
    t = max(lengths)
    ids, mask = torch.full((len(lengths), t), pad), torch.zeros(len(lengths), t, dtype=torch.long)
    for i, n in enumerate(lengths):
        ids[i, t - n :] = torch.randint(1, vocab, (n,))
        mask[i, t - n :] = 1
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    torch.manual_seed(0)
    cfg = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        batch = collate([12, 5, 9, 3], 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        print(step, loss.item())

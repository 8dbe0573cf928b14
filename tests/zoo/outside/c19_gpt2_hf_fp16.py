"""Hugging Face GPT-2 from a config under torch.amp in fp16; a residual channel has grown very large."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=80,
    n_positions=24,
    n_embd=32,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    activation_function="relu",
)
config.loss_type = "ForCausalLM"
model = GPT2LMHeadModel(config)
with torch.no_grad():
    model.transformer.h[1].mlp.c_fc.weight.mul_(600)
    model.transformer.h[1].mlp.c_proj.weight.mul_(4000)

data = [torch.randint(0, 80, (20,)) for _ in range(24)]
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
model.train()
for epoch in range(1):
    for step, ids in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(input_ids=ids, labels=ids)  # FAULT
        scaler.scale(out.loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {out.loss.item():.3f}")
print("finished", len(loader), "batches")

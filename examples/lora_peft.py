"""Adapters of peft on a frozen model: the frozen weights are cast once, and kept."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import mezzo

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=32))
frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}

adapters = [p for p in model.parameters() if p.requires_grad]
amp = mezzo.prepare(model, torch.optim.AdamW(adapters, lr=2e-2), "bf16", cache="persistent")

tokens = torch.arange(32).repeat(4, 1) % 8
losses = []
for _ in range(30):
    amp.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    amp.backward(loss)
    amp.step(max_norm=1.0)
    losses.append(loss.item())

count = sum(p.numel() for p in adapters)
print(
    f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, training {count} of {sum(p.numel() for p in model.parameters())} weights"
)
assert losses[-1] < losses[0] - 0.5
assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)

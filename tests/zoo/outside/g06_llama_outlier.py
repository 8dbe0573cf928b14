"""Continue training a small Llama in fp16; the checkpoint has the usual massive activation in one MLP."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mezzo


def load():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
        )
    )
    with torch.no_grad():
        mlp = model.model.layers[1].mlp
        mlp.gate_proj.weight.mul_(500)
        mlp.up_proj.weight.mul_(2000)
    return model


def main(steps=3):
    model = load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    amp = mezzo.prepare(model, optimizer, policy="fp16, scaling.init_scale=128")
    for step in range(steps):
        ids = torch.randint(0, 100, (2, 16))
        out = model(input_ids=ids, labels=ids)  # FAULT
        amp.backward(out.loss)
        amp.step()
        amp.zero_grad()
        print(step, out.loss.item())


main()

"""The Hugging Face Trainer: `Trainer(policy="bf16-master")` in place of `TrainingArguments(bf16=True)`."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from mezzo.integrations.transformers import Trainer

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
rows = [(torch.arange(32) * stride + start) % 64 for stride in range(1, 9) for start in range(16)]
data = [{"input_ids": row, "labels": row} for row in rows]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=40, per_device_train_batch_size=16, learning_rate=1e-2, lr_scheduler_type="cosine",
        logging_steps=10, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, policy="bf16-master")
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(trainer.stepper.report())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; weights are stored in {model.lm_head.weight.dtype}")
assert losses[-1] < 0.7 * losses[0]

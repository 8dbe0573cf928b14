"""Accelerate on the CPU in bf16 with a scheduler and gradient accumulation."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
    x = torch.randn(96, 12)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)
    model = nn.Sequential(nn.Linear(12, 48), nn.LayerNorm(48), nn.SiLU(), nn.Dropout(0.1), nn.Linear(48, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=20)
    model, opt, data, sched = accelerator.prepare(model, opt, data, sched)
    for epoch in range(2):
        for xb, yb in data:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(xb), yb)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

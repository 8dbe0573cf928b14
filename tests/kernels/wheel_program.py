"""What a wheel must do on a machine without a compiler: the compiled kernels run, and give what the reference gives."""

from __future__ import annotations

import torch

import mezzo
from mezzo.kernels import registry


def main() -> None:
    for op in ("gradients", "adamw", "sgd"):
        choice = registry.choose(op, torch.device("cpu"), torch.bfloat16)
        assert choice.backend == "cpu", choice
    weights = []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1000, dtype=torch.bfloat16))
        optimizer = mezzo.optim.AdamW([weight], lr=1e-2, master="split", backend=backend)
        for _ in range(3):
            weight.grad = torch.randn(1000, dtype=torch.bfloat16)
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)
    print("the compiled kernels run and equal the reference")


if __name__ == "__main__":
    main()

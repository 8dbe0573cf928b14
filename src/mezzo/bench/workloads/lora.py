"""Low-rank adapters on frozen layers: weights that never change are cast again and again unless their copies are kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..roofline import Phase
from ..training import Training, training_session
from ..variant import Variant
from ..workload import TRAINING_TESTS, Point, Session, Setting, Workload
from .recipe import Batch, mean_squared_error


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank correction.

    Args:
        width: features in and out.
        rank: of the correction.

    Source: Hu et al. 2021, section 4.1, with alpha equal to the rank.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with its correction, shape [..., width]. Syncs: no."""
        corrected: Tensor = self.base(x) + self.up(self.down(x))
        return corrected


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora(Workload):
    """Training low-rank adapters on frozen layers.

    Attributes:
        width: features of every layer.
        layers: frozen layers, each with an adapter and ReLU.
        rank: of the adapters.
        batches: rows in a batch, one point each.
        steps: steps in a round.
        lr: learning rate of AdamW.
    """

    tests: ClassVar[tuple[str, ...]] = TRAINING_TESTS
    on_cuda: ClassVar = {"layers": 16, "steps": 50}
    on_cpu: ClassVar = {"layers": 2}
    when_quick: ClassVar = {"width": 32, "layers": 3, "rank": 4, "batches": (1, 4), "steps": 1}

    width: int = 4096
    layers: int = 4
    rank: int = 16
    batches: tuple[int, ...] = (1, 8, 64)
    steps: int = 20
    lr: float = 1e-4

    variants: ClassVar[tuple[str, ...]] = (
        "fp32", "tf32", "torch-autocast", "torch-amp", "mezzo-amp", "mezzo-persistent", "prepare", "prepare-master",
    )  # fmt: skip

    def points(self) -> tuple[Point, ...]:
        """Return one point for each batch size."""
        return tuple(
            Point(label=f"batch {n}", workload=dataclasses.replace(self, batches=(n,)), axis="batch", value=n)
            for n in self.batches
        )

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded training of one batch size. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        layers = [module for _ in range(self.layers) for module in (LoraLinear(self.width, self.rank), nn.ReLU())]
        model = nn.Sequential(*layers).to(setting.device)
        batch: Batch = (
            torch.randn(self.batches[0], self.width, device=setting.device),
            torch.randn(self.batches[0], self.width, device=setting.device),
        )
        training = Training(optimizer=self.optimizer, lr=self.lr, cache="persistent")
        return training_session(variant, setting, model, [batch], mean_squared_error, training, self.steps)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return forward and backward: frozen weights are read once in each, adapters give gradients too."""
        width = 4 if number_format in ("fp32", "tf32") else 2
        rows, frozen, adapter = self.batches[0], self.width * self.width, 2 * self.width * self.rank
        forward_flops = 2.0 * rows * self.layers * (frozen + adapter)
        # Backward: inputs of every layer but the first, and weights of the adapters.
        inputs = 2.0 * rows * ((self.layers - 1) * (frozen + adapter) + adapter / 2)
        return (
            Phase(name="forward", flops=forward_flops, moved_bytes=width * self.layers * (frozen + adapter)),
            Phase(
                name="backward",
                flops=inputs + 2.0 * rows * self.layers * adapter,
                moved_bytes=width * ((self.layers - 1) * frozen + 2 * self.layers * adapter),
            ),
        )

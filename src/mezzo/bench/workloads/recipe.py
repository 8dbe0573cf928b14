"""Linear layers with ReLU, random batches, mean squared error: the published AMP recipe, how its cost grows, and low-rank adapters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..roofline import Phase, bytes_stored
from ..training import Training, training_session
from ..variant import Variant
from ..workload import Point, Session, Setting, Workload

SMALL_BATCH = 8
Batch = tuple[Tensor, Tensor]


def make_model(in_size: int, out_size: int, num_layers: int) -> nn.Sequential:
    """Return `num_layers` linear layers, all but the last followed by ReLU; fp32 on the CPU."""
    layers = [layer for _ in range(num_layers - 1) for layer in (nn.Linear(in_size, in_size), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(in_size, out_size))


def _random_batch(rows: int, in_size: int, out_size: int, device: torch.device) -> Batch:
    return torch.randn(rows, in_size, device=device), torch.randn(rows, out_size, device=device)


def mean_squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of one batch of inputs and targets, shape (). Syncs: no."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Workload):
    """Linear layers trained as in the published AMP recipe.

    Attributes:
        batch_size: rows in a batch.
        in_size: features in, and of every hidden layer.
        out_size: features out.
        num_layers: linear layers.
        num_batches: different batches in an epoch, all kept on the device.
        epochs: passes over the batches; one round is all of them.
        lr: learning rate of SGD.

    Source: PyTorch Recipes, Automatic Mixed Precision, for the network and its numbers.
    """

    on_cpu: ClassVar = {"in_size": 2048, "out_size": 2048, "num_batches": 5, "epochs": 2}
    when_quick: ClassVar = {
        "batch_size": 8, "in_size": 16, "out_size": 4, "num_layers": 3, "num_batches": 2, "epochs": 1,
    }  # fmt: skip

    label_format: ClassVar = "{batch_size} x {in_size} x {num_layers}"

    batch_size: int = 512
    in_size: int = 4096
    out_size: int = 4096
    num_layers: int = 3
    num_batches: int = 50
    epochs: int = 3
    lr: float = 1e-3

    variants: ClassVar = ("fp32", "tf32", "torch-amp", "mezzo-autocast", "mezzo-amp")
    variants_kept: ClassVar = ("torch-autocast", "prepare", "prepare-master")
    optimizer: ClassVar = "SGD"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Features in and out of every layer, in order."""
        return (*[self.in_size] * self.num_layers, self.out_size)

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return sum(a * b + b for a, b in pairwise(self.sizes))

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded training of one variant. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        model = make_model(self.in_size, self.out_size, self.num_layers).to(setting.device)
        sizes = self.batch_size, self.in_size, self.out_size
        batches = [_random_batch(*sizes, setting.device) for _ in range(self.num_batches)]
        training = Training(optimizer=self.optimizer, lr=self.lr)
        steps = self.epochs * self.num_batches
        return training_session(variant, setting, model, batches, mean_squared_error, training, steps)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return forward, backward and update of one step: products, and what must cross memory once.

        16 bit: weights, activations and gradients of 2 bytes, and an update that reads gradient and master and
        writes the master, 2 + 4 + 4 bytes a weight. fp32: 4 bytes each, 4 + 4 + 4.
        """
        width = bytes_stored(number_format)
        weights = self.parameters
        products = [2.0 * self.batch_size * a * b for a, b in pairwise(self.sizes)]
        activations = self.batch_size * sum(self.sizes)
        return (
            Phase(name="forward", flops=sum(products), moved_bytes=width * (weights + activations)),
            Phase(
                name="backward", flops=2 * sum(products) - products[0], moved_bytes=width * (2 * weights + activations)
            ),
            Phase(name="update", moved_bytes=(width + 8) * weights),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling(Workload):
    """How the cost of a step grows with width, batch, depth and parameters.

    Attributes:
        width: features where another axis varies.
        batch: rows where another axis varies.
        depth: layers where another axis varies.
        widths: features along the axis of width.
        batches: rows along the axis of batch.
        depths: layers along the axis of depth.
        parameter_widths: features along the axis of parameters, at 8 rows, where weights are all that costs.
        steps: steps in a round.
    """

    on_cpu: ClassVar = {
        "width": 512, "batch": 128, "depth": 3, "widths": (128, 256, 512, 1024), "batches": (16, 64, 256), "depths": (2, 4, 8),
        "parameter_widths": (256, 512, 1024, 2048), "steps": 100,
    }  # fmt: skip
    when_quick: ClassVar = {
        "width": 16, "batch": 4, "depth": 2, "widths": (8, 16), "batches": (4, 8), "depths": (2, 3), "parameter_widths": (8, 16),
        "steps": 1,
    }  # fmt: skip

    width: int = 2048
    batch: int = 512
    depth: int = 4
    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    parameter_widths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    steps: int = 20

    variants: ClassVar = ("fp32", "tf32", "torch-autocast", "torch-amp", "mezzo-amp", "prepare", "prepare-master")
    optimizer: ClassVar = "SGD"

    def points(self) -> tuple[Point, ...]:
        """Return every size of every axis."""
        small = [dataclasses.replace(self, width=n, batch=SMALL_BATCH) for n in self.parameter_widths]
        counts = [one.recipe.parameters for one in small]
        return (
            *(self.at(f"width {n}", "width", n, width=n) for n in self.widths),
            *(self.at(f"batch {n}", "batch", n, batch=n) for n in self.batches),
            *(self.at(f"depth {n}", "depth", n, depth=n) for n in self.depths),
            *(one.at(f"parameters {n}", "parameters", n) for one, n in zip(small, counts, strict=True)),
        )

    @property
    def recipe(self) -> Recipe:
        """The recipe at this size, one batch repeated."""
        return Recipe(
            batch_size=self.batch, in_size=self.width, out_size=self.width, num_layers=self.depth, num_batches=1,
            epochs=self.steps,
        )  # fmt: skip

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded training at this size. Writes: torch's random state."""
        return self.recipe.build(variant, setting)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return the least work of one step of the recipe at this size."""
        return self.recipe.roofline(number_format)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank correction; weights that never change are cast again and again unless kept.

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

    on_cuda: ClassVar = {"layers": 16, "steps": 50}
    on_cpu: ClassVar = {"layers": 2}
    when_quick: ClassVar = {"width": 32, "layers": 3, "rank": 4, "batches": (1, 4), "steps": 1}

    width: int = 4096
    layers: int = 4
    rank: int = 16
    batches: tuple[int, ...] = (1, 8, 64)
    steps: int = 20
    lr: float = 1e-4

    variants: ClassVar = (
        "fp32", "tf32", "torch-autocast", "torch-amp", "mezzo-amp", "mezzo-persistent", "prepare", "prepare-master",
    )  # fmt: skip

    def points(self) -> tuple[Point, ...]:
        """Return one point for each batch size."""
        return tuple(self.at(f"batch {n}", "batch", n, batches=(n,)) for n in self.batches)

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded training of one batch size. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        layers = [module for _ in range(self.layers) for module in (LoraLinear(self.width, self.rank), nn.ReLU())]
        model = nn.Sequential(*layers).to(setting.device)
        batch = _random_batch(self.batches[0], self.width, self.width, setting.device)
        training = Training(optimizer=self.optimizer, lr=self.lr, cache="persistent")
        return training_session(variant, setting, model, [batch], mean_squared_error, training, self.steps)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return forward and backward: frozen weights are read once in each, adapters give gradients too."""
        width = bytes_stored(number_format)
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

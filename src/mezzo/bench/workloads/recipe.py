"""The published AMP recipe: linear layers with ReLU, random batches, mean squared error, SGD."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..roofline import Phase
from ..training import Training, training_step
from ..variant import Variant, those_that_run
from ..workload import TRAINING_TESTS, Point, Session, Setting, Workload

WARM_UP_STEPS = 3
Batch = tuple[Tensor, Tensor]


def make_model(in_size: int, out_size: int, num_layers: int) -> nn.Sequential:
    """Return `num_layers` linear layers, all but the last followed by ReLU; fp32 on the CPU."""
    layers: list[nn.Module] = []
    for _ in range(num_layers - 1):
        layers += [nn.Linear(in_size, in_size), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(in_size, out_size))


def mean_squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of one batch of inputs and targets, shape ()."""
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

    tests: ClassVar[tuple[str, ...]] = TRAINING_TESTS

    batch_size: int = 512
    in_size: int = 4096
    out_size: int = 4096
    num_layers: int = 3
    num_batches: int = 50
    epochs: int = 3
    lr: float = 1e-3

    @classmethod
    def for_device(cls, device: torch.device) -> Recipe:
        """Return the published size on CUDA, and one of a few seconds a round on two CPU cores."""
        if device.type == "cuda":
            return cls()
        return cls(in_size=2048, out_size=2048, num_batches=5, epochs=2)

    @classmethod
    def default_variants(cls, device: torch.device) -> tuple[str, ...]:
        """Return default precision, region alone, region with scaler, torch's and mezzo's, and prepared."""
        names = ("fp32", "tf32", "torch-autocast", "torch-amp", "mezzo-autocast", "mezzo-amp", "mezzo-prepared")
        return those_that_run(names, device)

    def points(self) -> tuple[Point, ...]:
        """Return the one size of this recipe."""
        label = f"{self.batch_size} x {self.in_size} x {self.num_layers}"
        return (Point(label=label, workload=self),)

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
        batches = [
            (
                torch.randn(self.batch_size, self.in_size, device=setting.device),
                torch.randn(self.batch_size, self.out_size, device=setting.device),
            )
            for _ in range(self.num_batches)
        ]
        training = Training(optimizer="SGD", lr=self.lr)
        step = training_step(variant, setting, model, mean_squared_error, training)

        def run() -> Tensor:
            for _ in range(self.epochs):
                for batch in batches:
                    loss = step(batch)
            return loss

        return Session(
            warm_up=lambda: [step(batches[0]) for _ in range(WARM_UP_STEPS)],
            run=run,
            units=self.epochs * self.num_batches,
            data_bytes=sum(x.nbytes + y.nbytes for x, y in batches),
        )

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return forward, backward and update of one step: products, and what must cross memory once.

        16 bit: weights, activations and gradients of 2 bytes, and an update that reads gradient and master and
        writes the master, 2 + 4 + 4 bytes a weight. fp32: 4 bytes each, 4 + 4 + 4.
        """
        width = 4 if number_format in ("fp32", "tf32") else 2
        weights = self.parameters
        products = [2.0 * self.batch_size * a * b for a, b in pairwise(self.sizes)]
        activations = self.batch_size * sum(self.sizes)
        return (
            Phase(name="forward", flops=sum(products), moved_bytes=width * (weights + activations)),
            Phase(
                name="backward",
                flops=2 * sum(products) - products[0],
                moved_bytes=width * (2 * weights + activations),
            ),
            Phase(name="update", moved_bytes=(width + 8) * weights),
        )

"""The three ways a program runs, under mezzo, by hand in plain torch and in fp32, and what is compared between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import mezzo

from .blocks import network
from .by_hand import ByHand, norm_of
from .explained import EXPLAINED
from .program import Program, Train
from .recipes import OPTIMIZERS, POLICIES, Recipe

SLACK = 16
GUARD = "guard.patience=100000"


class Difference(AssertionError):
    """What mezzo did is not what plain torch does."""


class Sides:
    """A program's models and optimizers on each side.

    Args:
        program: that they run.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.recipe, self.maker = program, POLICIES[program.policy], OPTIMIZERS[program.optimizer]
        self.model = network(program.blocks, program.seed)
        self.prepare(self.maker.make([p for p in self.model.parameters() if p.requires_grad]))
        plain = self.maker.plain or self.maker.make
        config = self.amp.policy.scaling
        self.twin = ByHand(network(program.blocks, program.seed), self.recipe, plain, config)
        self.oracle = ByHand(network(program.blocks, program.seed), Recipe(), plain, None)
        self.sides = (self.twin, self.oracle)
        self.reasons = {reason for reason, applies in EXPLAINED.items() if applies(program)}
        self.start = {name: p.detach().clone() for name, p in self.oracle.model.named_parameters()}
        self.saved: tuple[Any, ...] | None = None
        self.draws = self.applied = self.skipped = 0
        self.path = 0.0
        self.is_altered = self.is_incomparable = False
        self.follow()

    def prepare(self, optimizer: Any) -> None:
        """Have mezzo take over."""
        self.optimizer = optimizer
        self.stores_low = "master" in self.program.policy
        self.amp = mezzo.prepare(self.model, optimizer, f"{self.program.policy}, {GUARD}")
        self.choose_backend()

    def choose_backend(self) -> None:
        """Have optimizers that mezzo took over step by the kernels of the program."""
        for group in self.amp.optimizers[0].param_groups:
            if "backend" in group:
                group["backend"] = self.maker.backend

    def follow(self) -> None:
        """Store the weights of the sides as the policy did."""
        dtypes = {name: p.dtype for name, p in self.model.named_parameters()}
        for side in self.sides:
            side.store(dtypes, self.amp.policy.grads)

    def masters(self) -> dict[str, Tensor]:
        """Return the fp32 value of each of mezzo's parameters."""
        optimizer = self.amp.optimizers[0]
        known = {p for group in optimizer.param_groups for p in group["params"]} if hasattr(optimizer, "master") else ()
        return {
            name: (optimizer.master(p) if p in known else p).detach().float()
            for name, p in self.model.named_parameters()
        }

    def check_losses(self, losses: list[Tensor], fault: str) -> None:
        """Compare losses."""
        mine, oracle = float(losses[0].detach()), float(losses[2].detach())
        self.check("loss", losses[0].detach(), losses[1].detach())
        if not fault:
            self.check_oracle("loss", mine, oracle)

    def check_outputs(self, outputs: list[Tensor]) -> None:
        """Compare outputs of the model."""
        mine, twin, oracle = outputs
        if self.recipe.output and mine.dtype is not torch.float32:
            raise Difference(f"the output is {mine.dtype}")
        self.check("output", mine, twin)
        amplified = 8 if any("norm" in block for block in self.program.blocks) else 1  # divided by a small spread
        self.check_oracle("output", mine, oracle, amplified)

    def compare(self) -> None:
        """Compare weights, masters, buffers and state.

        Raises:
            Difference: they differ.
        """
        masters = self.masters()
        for name, p in self.model.named_parameters():
            twin = dict(self.twin.model.named_parameters())[name]
            self.check(f"weight {name}", p.detach(), twin.detach())
            self.check(f"master of {name}", masters[name], self.twin.master(twin))
        for name, buffer in self.model.named_buffers():
            self.check(f"buffer {name}", buffer, dict(self.twin.model.named_buffers())[name])
        if self.recipe.is_exact and self.amp.scale != self.twin.scale:
            raise Difference(f"loss scale {self.amp.scale}, by hand {self.twin.scale}")
        self.compare_oracle(masters)

    def compare_oracle(self, masters: Mapping[str, Tensor]) -> None:
        """Compare how far the weights went with how far they went in fp32."""
        want = {name: p.detach() for name, p in self.oracle.model.named_parameters()}
        way = norm_of([want[name] - self.start[name] for name in want])
        off = norm_of([masters[name] - want[name] for name in want])
        self.path = max(self.path, way)
        self.is_incomparable |= way > 10 * norm_of(list(self.start.values()))
        rounding = 0.0 if not self.stores_low else norm_of(list(want.values()))
        rounding *= torch.finfo(self.recipe.compute or torch.float32).eps
        share = self.share() * (8 if self.norms_two_rows() else 1)
        if not (self.is_incomparable or off <= share * self.path + rounding + 1e-5):
            raise Difference(f"the weights are {off:.3g} off those of fp32, which went {self.path:.3g}")

    def check(self, what: str, got: Any, want: Any) -> None:
        """Compare with the twin: bits, or where a reason is known why they differ, within the dtype's rounding."""
        if not self.recipe.is_exact:
            return
        got, want = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
        if got.dtype is not want.dtype or got.shape != want.shape:
            raise Difference(f"{what} is {got.dtype}{list(got.shape)}, by hand {want.dtype}{list(want.shape)}")
        is_near = bool(self.reasons) or what == "norm"
        slack = self.share() if self.reasons else 1e-5
        same = near(got, want, slack) if is_near else torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        if not same:
            raise Difference(f"{what} is {brief(got)}, by hand {brief(want)}")

    def check_oracle(self, what: str, got: Any, want: Any, amplified: float = 1.0) -> None:
        """Compare with fp32, within the rounding of the compute dtype."""
        got, want = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
        if not (self.is_incomparable or near(got.float(), want.float(), amplified * self.share())):
            raise Difference(f"{what} is {brief(got)}, in fp32 {brief(want)}")

    def norms_two_rows(self) -> bool:
        """Whether a batch norm divides by the spread of two rows, in which rounding may be large."""
        has_norm = bool({"batch norm", "cumulative norm"} & set(self.program.blocks))
        return has_norm and any(isinstance(event, Train) and 2 in event.sizes for event in self.program.events)

    def share(self) -> float:
        """Return how far a run may be off that of fp32, of the way that went.

        Where each step has the same size, gradients of `tolerance` and less may decide its direction.
        """
        clips = any(isinstance(event, Train) and event.clip == "value" for event in self.program.events)
        without_gradient = (
            2 if {"batch norm", "cumulative norm"} & set(self.program.blocks) else 1
        )  # what goes into it may have a bias
        share = 4 * math.sqrt(self.tolerance()) * without_gradient
        kinked = "conv" in self.program.blocks  # a ReLU behind a norm: rounding decides on which side of 0 a value is
        return share if self.maker.is_adaptive or clips or kinked else self.tolerance()

    def tolerance(self) -> float:
        """Return how far two runs may differ that round in the compute dtype."""
        return SLACK * torch.finfo(self.recipe.compute or torch.float32).eps


def near(got: Tensor, want: Tensor, slack: float) -> bool:
    """Whether two tensors agree, relative to the larger of their size and 1."""
    if not bool(want.isfinite().all()):
        return True
    if not want.is_floating_point():
        return torch.equal(got, want)
    bound = slack * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    return bool(((got.double() - want.double()).abs() <= bound).all())


def brief(value: Tensor) -> str:
    """Return a few numbers of a tensor."""
    return f"{value.dtype} {value.detach().flatten()[:6].tolist()}"

"""Runs a generated program under mezzo, by hand in plain torch, and in fp32; raises where they differ."""

from __future__ import annotations

import copy
import io
import math
import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import mezzo
from mezzo.errors import NonFiniteStep, StepError

from .blocks import WIDTH, network
from .by_hand import norm_of
from .program import Program, Train
from .sides import Difference, Sides

MAX_NORM, CLIP_VALUE = 0.25, 0.02


class UserError(Exception):
    """Raised by the user's own code."""


class Run(Sides):
    """A program on its way."""

    # -- what happens

    def __call__(self) -> None:
        """Run the program.

        Raises:
            Difference: see there.
        """
        for index, event in enumerate(self.program.events):
            try:
                self.train(event) if isinstance(event, Train) else getattr(self, event.replace(" ", "_"))()
                self.compare()
            except NonFiniteStep:
                if self.twin.is_sound():
                    raise
                return  # a forward that was nobody's step left inf or NaN in the model
            except Difference as found:
                raise Difference(f"event {index}, {event}: {found}") from None

    def draw(self, size: int) -> Tensor:
        """Return a batch, another one each time."""
        self.draws += 1
        generator = torch.Generator().manual_seed(1000 * self.program.seed + self.draws)
        return torch.randn(size, WIDTH, generator=generator)

    def everywhere(self, x: Tensor, model: Callable[[Any], nn.Module] = lambda side: side.model) -> list[Tensor]:
        """Return the outputs of mezzo, the twin and the oracle, each with the same random numbers."""
        outputs = []
        for side in (self, *self.sides):
            torch.manual_seed(self.draws)
            outputs.append(model(side)(x) if side is self else side.forward(x, model(side)))
            if side is self:
                self.follow()
        return outputs

    def train(self, event: Train) -> None:
        """Take a step of the training loop."""
        for side in self.sides:
            side.open()
        self.is_incomparable |= event.fault == "large input"  # it saturates what gradients are differences of
        loss_is_finite = True
        for index, size in enumerate(event.sizes):
            fault = event.fault if index == len(event.sizes) - 1 else ""
            losses = [self.loss(out, fault) for out in self.everywhere(self.input(size, fault))]
            self.check_losses(losses, fault)
            loss_is_finite &= bool(losses[0].isfinite())
            if event.fails == "forward" and index == len(event.sizes) - 1:
                return self.drop(event)
            failing = event.fails == "backward" and index == len(event.sizes) - 1
            for backward, loss in zip(self.backwards(), losses, strict=True):
                run_backward(backward, loss, fails=failing)
            if failing:
                return self.drop(event)
        was_finite = self.edit(event.edit)
        if event.fails == "before step":
            return self.drop(event)
        self.step(event, loss_is_finite=loss_is_finite, was_finite=was_finite)
        self.drop(event)
        return None

    def backwards(self) -> list[Callable[[Tensor], None]]:
        """Return what each side adds gradients with."""
        return [self.amp.backward, *(side.backward for side in self.sides)]

    def input(self, size: int, fault: str) -> Tensor:
        """Return a batch with what is wrong in it."""
        x = self.draw(size)
        if fault == "input":
            x[0, 0] = math.inf
        return x * 3e4 if fault == "large input" else x

    def loss(self, out: Tensor, fault: str) -> Tensor:
        """Return the loss of an output."""
        wide = out if self.amp.policy.loss is torch.bfloat16 and out.dtype is torch.bfloat16 else out.float()
        factor = {"loss": math.inf, "large loss": 2.0**20, "small loss": 2.0**-20}.get(fault, 1.0)
        return wide.square().mean() * factor

    def edit(self, kind: str) -> bool:
        """Change true gradients on each side; return whether they were finite before."""
        if not kind:
            return self.twin.is_finite()
        with self.amp.unscaled_grads() as grads:
            change(kind, grads)
        for side in self.sides:
            was_finite = side.edit(lambda grads: change(kind, grads))
            if side is self.twin:
                known = was_finite
        return known

    def step(self, event: Train, *, loss_is_finite: bool, was_finite: bool) -> None:
        """Take the step on each side, and compare what was decided."""
        is_bad = not (was_finite and self.twin.is_finite())
        buffers_are_finite = self.twin.is_sound()
        expected = not is_bad and loss_is_finite and buffers_are_finite
        norm = norm_of(list(self.twin.true_grads().values()))
        how = {"norm": {"max_norm": MAX_NORM}, "value": {"clip_value": CLIP_VALUE}}.get(event.clip, {})
        scale = self.amp.scale
        result = self.amp.step(**how)
        if self.recipe.is_exact and result.applied is not expected:
            raise Difference(f"applied is {result.applied}, by hand {expected}")
        if self.recipe.is_exact and result.scale != self.twin.scale:
            raise Difference(f"loss scale {result.scale}, by hand {self.twin.scale}")
        if result.scale != scale:
            raise Difference(f"the step says loss scale {result.scale}, and before it was {scale}")
        if result.applied and self.recipe.is_exact:
            self.check("norm", result.grad_norm, norm)
        self.count(result)
        norm_found = result.grad_norm if event.clip == "norm" and result.applied else None
        for side in self.sides:
            if event.clip == "value":
                side.clamp(CLIP_VALUE)
            side.step(skips=not result.applied, coefficient=None if norm_found is None else coefficient(norm_found))
        if loss_is_finite and (is_bad or buffers_are_finite):
            self.twin.move_scale(is_bad=is_bad)

    def count(self, result: mezzo.StepResult) -> None:
        """Count the step, and look at mezzo's own count."""
        self.applied += result.applied
        self.skipped += not result.applied
        counters = self.amp.counters()
        if (counters.applied, counters.skipped) != (self.applied, self.skipped):
            raise Difference(f"counted {counters}, and there were {self.applied} applied, {self.skipped} skipped")

    def drop(self, event: Train) -> None:
        """Drop the gradients on each side."""
        self.amp.zero_grad(set_to_none=event.set_to_none)
        for side in self.sides:
            side.drop(event.set_to_none)

    # -- between steps

    def evaluate(self) -> None:
        """Run the model in evaluation."""
        with torch.no_grad():
            self.evaluate_with_graph()

    def evaluate_with_graph(self) -> None:
        """The same, where somebody forgot no_grad."""
        for side in (self, *self.sides):
            side.model.eval()
        self.check_outputs(self.everywhere(self.draw(3)))
        for side in (self, *self.sides):
            side.model.train()

    def copy(self) -> None:
        """Evaluate a copy of the model."""
        copies = {id(side): copy.deepcopy(side.model).eval() for side in (self, *self.sides)}
        with torch.no_grad():
            self.check_outputs(self.everywhere(self.draw(3), lambda side: copies[id(side)]))

    def pickle(self) -> None:
        """Evaluate a model that went through a pickle."""
        copies = {id(side): pickle.loads(pickle.dumps(side.model)).eval() for side in (self, *self.sides)}
        with torch.no_grad():
            self.check_outputs(self.everywhere(self.draw(3), lambda side: copies[id(side)]))

    def save(self) -> None:
        """Save the run."""
        file = io.BytesIO()
        torch.save(self.amp.state_dict(), file)
        self.saved = (file.getvalue(), *(side.save() for side in self.sides), self.applied, self.skipped)

    def load(self) -> None:
        """Go back to what was saved."""
        if self.saved is None:
            return
        data, twin, oracle, self.applied, self.skipped = self.saved
        converted = self.amp.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
        if converted != ():
            raise Difference(f"a checkpoint of the same run was converted: {converted}")
        self.twin.load(twin)
        self.oracle.load(oracle)

    def load_anew(self) -> None:
        """Go back to what was saved, in a model that was made anew."""
        if self.saved is None or self.is_altered:
            return
        trains = [p.requires_grad for p in self.model.parameters()]
        self.model = network(self.program.blocks, self.program.seed + 1)
        self.prepare(self.maker.make([p for p in self.model.parameters() if p.requires_grad]))
        for p, is_trained in zip(self.model.parameters(), trains, strict=True):
            p.requires_grad_(is_trained)
        self.load()

    def freeze(self) -> None:
        """Freeze the first block."""
        for side in (self, *self.sides):
            for p in list(side.model.blocks.parameters())[:2]:
                p.requires_grad_(False)

    def unfreeze(self) -> None:
        """Train it again."""
        for side in (self, *self.sides):
            side.model.blocks.requires_grad_(True)

    def add_group(self) -> None:
        """Give the adapter to the optimizer."""
        if self.model.late.weight.requires_grad:
            return
        for side in (self, *self.sides):
            side.model.late.requires_grad_(True)
            self.take(side, list(side.model.late.parameters()))

    def replace_head(self) -> None:
        """Put another head on the model."""
        for side in (self, *self.sides):
            torch.manual_seed(self.draws)
            side.model.head = nn.Linear(WIDTH, 3)
            self.take(side, list(side.model.head.parameters()))
        for name, p in self.oracle.model.head.named_parameters():
            self.start[f"head.{name}"] = p.detach().clone()

    def take(self, side: Any, params: list[nn.Parameter]) -> None:
        """Give parameters to an optimizer; what was saved does not fit any more."""
        optimizer = self.amp.optimizers[0] if side is self else side.optimizer
        optimizer.add_param_group({"params": params})
        self.saved, self.is_altered = None, True
        self.choose_backend()

    def schedule(self) -> None:
        """Change the rate, as a scheduler does."""
        for optimizer in (self.amp.optimizers[0], *(side.optimizer for side in self.sides)):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    def release(self) -> None:
        """Take the policy off, and put it on again."""
        self.amp.release()
        for side in self.sides:
            side.drop(set_to_none=True)
        low = [name for name, p in self.model.named_parameters() if p.dtype is not torch.float32]
        if low:
            raise Difference(f"released, and {low} are not fp32")
        self.prepare(self.optimizer)
        self.saved, self.applied, self.skipped = None, 0, 0
        self.twin.restart_scale()
        self.evaluate()

    def ask(self) -> None:
        """Ask for everything that can be asked for."""
        self.amp.report()
        repr(self.amp), self.amp.counters(), self.amp.scale, self.amp.state_dict()

    def wrong_order(self) -> None:
        """Step without a backward pass."""
        try:
            self.amp.step()
        except StepError:
            return
        raise Difference("a step without a backward pass was taken")

    def edit_weight(self) -> None:
        """Write a weight, as pruning does."""
        for side in (self, *self.sides):
            with torch.no_grad():
                side.model.head.weight[0, 0] = 0.5
        self.share_masters()

    def load_weights(self) -> None:
        """Load weights into the model, by itself."""
        weights = {name: t * 0.5 for name, t in self.oracle.model.state_dict().items() if t.is_floating_point()}
        self.model.load_state_dict(weights, strict=False)
        for side in self.sides:
            side.model.load_state_dict(weights, strict=False)
        self.share_masters()

    def share_masters(self) -> None:
        """Give the twin mezzo's masters of weights that somebody wrote, once they are known to round to them."""
        for name, p in self.twin.model.named_parameters():
            if p not in self.twin.masters:
                continue
            master = self.masters()[name]
            if not torch.equal(master.to(p.dtype), dict(self.model.named_parameters())[name]):
                spacing = mezzo.formats.ulp(p.detach()).float()
                if bool(((master - p.detach().float()).abs() > spacing / 2).any()):
                    raise Difference(f"the master of {name}, which was written, does not round to it")
            self.twin.masters[p].data.copy_(master)
            p.data.copy_(dict(self.model.named_parameters())[name])


def change(kind: str, grads: Mapping[str, Tensor]) -> None:
    """Do to true gradients what user code does."""
    if kind == "halve":
        for grad in grads.values():
            grad.mul_(0.5)
    elif kind == "drop one":
        grads["head.bias"].zero_()
    elif kind == "spoil":
        grads["head.bias"][0] = math.nan


def coefficient(norm: float) -> Tensor:
    """Return what torch clips by, from a norm that is known to be right."""
    return (MAX_NORM / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)


def run_backward(backward: Callable[[Tensor], None], loss: Tensor, *, fails: bool) -> None:
    """Run a backward pass, in which user code may raise."""
    if not fails:
        backward(loss)
        return

    def raising(grad: Tensor) -> None:
        raise UserError

    loss.grad_fn.register_prehook(lambda grads: raising(grads[0]))
    try:
        backward(loss)
    except UserError:
        pass


def difference(program: Program) -> str:
    """Return what went wrong with a program; empty if nothing."""
    try:
        Run(program)()
    except Difference as found:
        return str(found)
    except Exception as found:
        lines = traceback.extract_tb(found.__traceback__)
        return f"{type(found).__name__}: {found}\n    " + "\n    ".join(
            f"{f.filename}:{f.lineno} {f.line}" for f in lines[-9:]
        )
    return ""

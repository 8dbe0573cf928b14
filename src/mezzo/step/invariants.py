"""Six things that hold in every step, looked at in the first steps and now and then: a net under everything else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import without_function_modes
from ..distributed import checksum
from ..errors import InvariantError, first_line, is_out_of_memory, listed
from ..formats import widest
from ..kernels import AUX_STATE, CHUNK, check_memory, chunks, is_dtensor, local, read_master, values
from ..loss_scale import say_hooked
from ..optim import MOMENTS, keeps_masters
from .gradients import OptimizerGrads
from .result import StepFlags

T = TypeVar("T")
_log = logging.getLogger("mezzo.step")

ALWAYS = 3
"""The first steps are all looked at: a wrong start shows there."""
LOST_LIMIT = 0.5
"""Share of elements with a gradient that may keep their value in an applied step before it is said."""
STILL_LIMIT = 100
"""Steps that may leave every weight as it was before the run is stopped."""
_SAMPLE = 4096
_NORM_ERROR = CHUNK * torch.finfo(torch.float32).eps
"""A norm is summed in fp32 over chunks of this many terms (Higham 2002, section 3.1)."""
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


StateKey = tuple[Tensor, str]
"""A tensor of a step: a parameter and the name of its state's entry, or nothing for itself."""


@dataclass(kw_only=True, slots=True, eq=False)
class Before:
    """A step as it was before it was taken: checksums, not copies, where they lie.

    Attributes:
        step: its number, from 0.
        raw_square: the sum of squares of the scaled gradients of all optimizers, in fp64; None where parts of them lie on other ranks.
        rates: the learning rate of each group.
        sums: checksum of each parameter that has a gradient, and of each tensor in the optimizers' state.
        samples: the first elements of some parameters' masters, and whether their gradient is not 0.
    """

    step: int
    raw_square: Tensor | None
    sums: dict[StateKey, Tensor]
    rates: list[float]
    samples: dict[Tensor, tuple[Tensor, Tensor]]


@torch.no_grad()
def _before(grads: Sequence[OptimizerGrads], names: Mapping[Tensor, str], step: int, has_parts: bool) -> Before:
    """Take down what a step must keep or change; an OperandError where memory of it was freed. Syncs: no, but for rates that lie on a device.

    With `has_parts` the ranks hold different weights, of which the norm of a step is that of all.
    """
    params = {p: one.optimizer for one in grads for p in one.params}
    for p in params:
        check_memory(names[p], "weight", local(p), p)
    for (p, key), tensor in (item for one in grads for item in _state_tensors(one.optimizer).items()):
        check_memory(names.get(p, "a parameter"), key, local(tensor), p)
    values_of = {p: values(local(p.grad)) for p in params if p.grad is not None}
    return Before(
        step=step,
        raw_square=None if has_parts or any(is_dtensor(p) for p in params) else _sum_of_squares(values_of.values()),
        sums=_sums(grads),
        rates=_rates(grads),
        samples={
            p: (_sample_of_master(optimizer, p).clone(), _sample(values_of[p]) != 0)
            for p, optimizer in params.items()
            if p.is_floating_point() and p.grad is not None and not p.grad.is_sparse
            if not keeps_masters(optimizer) or optimizer.aux_state(p)[0] != "stochastic"  # which loses none on average
        },
    )


def unless_out_of_memory(find: Callable[[], T], step: int) -> T | None:
    """Return what a look at a step finds; None where memory runs out, which is said and costs no step."""
    try:
        with without_function_modes():  # nor classes of tensors, of which torch stacks no two
            return find()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = "memory ran out in the look at step %d, which is left out: %s. The step itself lacks nothing."
        _log.warning(said, step, first_line(error))
        return None


class Invariants:
    """Compares a step with what it was before; a look that finds no memory is left out."""

    def __init__(
        self, names: Mapping[Tensor, str], buffers: Callable[[], Mapping[str, Tensor]], rate_to_blame: Callable[[], str]
    ) -> None:
        self._names, self._buffers, self._rate_to_blame = names, buffers, rate_to_blame
        self._still: dict[int, tuple[dict[StateKey, float], int]] = {}

    def look(self, grads: Sequence[OptimizerGrads], step: int, *, has_parts: bool) -> Before | None:
        """Take down what a step must keep or change; raises, and waits, as `_before`."""
        return unless_out_of_memory(partial(_before, grads, self._names, step, has_parts), step)

    def check(self, before: Before, grads: Sequence[OptimizerGrads], flags: StepFlags[float]) -> None:
        """Look at a step that was taken or skipped; what stands equal on all ranks is the consensus's to compare.

        Raises:
            InvariantError: something is not as it must be; says what, and what to look at.

        Syncs: once for each device.
        """
        unless_out_of_memory(partial(self._check, before, grads, flags), before.step)

    def _check(self, before: Before, grads: Sequence[OptimizerGrads], flags: StepFlags[float]) -> None:
        stepped = [one for one, skipped in zip(grads, flags.skipped, strict=True) if not skipped]
        skipped = [one for one in grads if one not in stepped]
        now = {**_sums(skipped), **_sums(stepped, beside_weights=True)}
        square = {} if before.raw_square is None else {"": before.raw_square}
        # A warm-up begins at a rate of 0; a scheduler that on_applied called has moved the rates since.
        rated = [one for one in stepped if any(before.rates) and any(_rates([one], one.params))]
        written = _written(grads)
        old, new, squares, norms, kept, wanted, nonfinite, buffers = read_together(
            before.sums,
            now,
            square,
            {one.index: one.check.norm for one in rated},
            *_lost_counts(before, rated),
            {key: _has_nonfinite(local(tensor)) for key, tensor in written.items()},
            self._buffers(),
        )
        if squares:
            self._check_divisor(math.sqrt(squares[""]), flags)
        for one in grads if flags.scale != 1 else ():
            say_hooked(one.optimizer, self._names)
        changed = {key for key, total in new.items() if old.get(key) != total}
        for one in skipped:
            self._check_untouched({key for key in changed if key in old}, one)
        for one in rated:
            if norms[one.index] != 0:
                self._check_moved(one, flags, before.step, old, changed)
                self._note_lost(one, kept, wanted)
        if not flags.applied:
            _check_rates(before.rates, _rates(grads))
        # Of what is not finite, which is rare, only elements that the step has read.
        read = [key for key, has in nonfinite.items() if has and count_nonfinite(written[key], grad=key[0].grad)]
        names = [".".join(filter(None, (self._names[p], key))) for p, key in read]
        self._check_finite([*names, *(name for name, count in buffers.items() if count)], grads)

    def _check_divisor(self, raw: float, flags: StepFlags[float]) -> None:
        if flags.gradients_bad:
            return
        expected = raw / flags.scale
        if not _SMALLEST <= expected <= _LARGEST:  # the norm is one fp32 number
            return
        if abs(float(flags.grad_norm) - expected) > _NORM_ERROR * expected:
            raise InvariantError(
                f"the true gradients have norm {float(flags.grad_norm):.6g}, and the scaled ones {raw:.6g} at loss scale "
                f"{flags.scale:g}, which makes {expected:.6g}: they were divided by something else than what the loss was "
                "multiplied by. Something changed the gradients or the scale inside step()."
            )

    def _check_moved(
        self, one: OptimizerGrads, flags: StepFlags[float], step: int,
        old: Mapping[StateKey, float], changed: Collection[StateKey],
    ) -> None:  # fmt: skip
        """Prove that an optimizer steps at all: no bit of its weights moved in a hundred steps with gradients and a rate.

        A single step proves nothing: fp32 may have lost its updates, or the optimizer moves at every k-th call.
        """
        if any((p, "") in changed for p in one.params) or any(
            key in changed for key in _state_tensors(one.optimizer) if key[1] in AUX_STATE.values()
        ):
            self._still.pop(one.index, None)
            return
        sums = {(p, ""): old[p, ""] for p in one.params}
        first, since = self._still.setdefault(one.index, (sums, step))
        if first != sums:  # they moved in a step that was not looked at
            self._still[one.index] = sums, step
        self._refuse_still(one, flags, step - since + 1)

    def _refuse_still(self, one: OptimizerGrads, flags: StepFlags[float], count: int) -> None:
        what = f"changed none of the {len(one.params)} parameters of {type(one.optimizer).__name__}"
        advice = "every update was smaller than the spacing of its weight, or the optimizer does not step them. Raise the learning rate"
        if count >= STILL_LIMIT:
            raise InvariantError(
                f"{count} steps with gradients, the last of norm {float(flags.grad_norm):.6g}, {what}: {advice}."
            )
        if count == 1:
            _log.warning("a step with gradient norm %.6g %s: %s", float(flags.grad_norm), what, advice)

    def _note_lost(self, one: OptimizerGrads, kept: Mapping[Tensor, float], wanted: Mapping[Tensor, float]) -> None:
        params = [p for p in one.params if p in kept]
        worst = [self._names[p] for p in params if wanted[p] and kept[p] > LOST_LIMIT * wanted[p]]
        lost, total = sum(kept[p] for p in params), sum(wanted[p] for p in params)
        if total and lost > LOST_LIMIT * total:
            _log.warning(
                "%.0f%% of the updates looked at were smaller than the spacing of their weights and were lost (%s): raise the learning rate",
                100 * lost / total, listed(worst),
            )  # fmt: skip

    def _check_untouched(self, changed: Collection[StateKey], one: OptimizerGrads) -> None:
        names = {(p, ""): self._names[p] for p in one.params}
        names.update({(p, key): f"{self._names[p]}.{key}" for p, key in _state_tensors(one.optimizer)})
        found = [name for key, name in names.items() if key in changed]
        if found:
            raise InvariantError(
                f"a skipped step changed {listed(found)}. {type(one.optimizer).__name__} does not leave everything as it "
                "is when found_inf is set; take another optimizer, or mezzo.optim.MasterWeights around it."
            )

    def _check_finite(self, bad: Sequence[str], grads: Sequence[OptimizerGrads]) -> None:
        if bad and (options := _useless_options(grads)):
            raise InvariantError(
                f"after the step {listed(bad)} hold inf or NaN, since a group of the optimizer has {listed(options)}. Write a "
                "finite number, and load the last good checkpoint."
            )
        if bad:
            rate = self._rate_to_blame()
            raise InvariantError(
                f"after the step {listed(bad)} hold inf or NaN. {rate and rate + ' '}Load the last good checkpoint; "
                "mezzo.diagnose.trace(model) names the op that makes the first one."
            )


def read_together(*groups: Mapping[Any, Tensor]) -> list[dict[Any, float]]:
    """Return the numbers of groups of tensors of one element, on the host; whole ones are exact. Syncs: once for each device."""
    every = [tensor for group in groups for tensor in group.values()]
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(every):
        by_device.setdefault(tensor.device, []).append(index)
    numbers: dict[int, float] = {}
    for indices in by_device.values():
        bits = torch.stack([_as_whole(every[index]) for index in indices]).cpu()
        for index, one in zip(indices, bits.unbind(), strict=True):
            dtype = every[index].dtype
            numbers[index] = (one.to(_BITS[dtype]).view(dtype) if dtype in _BITS else one).item()
    each = iter(range(len(every)))
    return [{key: numbers[next(each)] for key in group} for group in groups]


def _as_whole(number: Tensor) -> Tensor:
    """Return a whole number, or the bits of another, as int64."""
    flat = number.detach().reshape(())
    return (flat.view(_BITS[flat.dtype]) if flat.is_floating_point() else flat).to(torch.int64)


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _sum_of_squares(grads: Iterable[Tensor]) -> Tensor:
    pieces = [piece for grad in grads for (piece,) in chunks(grad)]
    first = pieces[0].device
    # In memory that all share: what is freed between sums that stay leaves holes in the C library's heap.
    wide = {
        device: torch.empty(max(p.numel() for p in pieces if p.device == device), dtype=widest(device), device=device)
        for device in {p.device for p in pieces}
    }
    squares = [wide[p.device][: p.numel()].view(p.shape).copy_(p).square_().sum() for p in pieces]
    return torch.stack([square.to(first) for square in squares]).sum()


def _has_nonfinite(tensor: Tensor) -> Tensor:
    """Return whether a tensor has inf or NaN, by its least and largest element: no mask is made. Shape (). Syncs: no."""
    ends = [torch.aminmax(piece) for (piece,) in chunks(values(tensor)) if piece.numel()]
    return torch.stack([end for pair in ends for end in pair] or [tensor.new_zeros(())]).isfinite().logical_not().any()


def count_nonfinite(tensor: Tensor, is_trained: bool = True, grad: Tensor | None = None) -> Tensor:
    """Return how many elements of a weight, or of what an optimizer keeps of it, are inf or NaN; of a frozen parameter, which may be a mask, NaN.

    Of a sharded one those here, and with its gradient only where that is not 0: the step read no other. Shape (), int64. Syncs: no.
    """
    tensor, grad = values(local(tensor.detach())), None if grad is None else local(grad)
    if grad is None or grad.is_sparse or grad.shape != tensor.shape:
        pieces = [~piece.isfinite() if is_trained else piece.isnan() for (piece,) in chunks(tensor)]
    else:
        pieces = [~piece.isfinite() & (seen != 0) for piece, seen in chunks(tensor, grad)]
    return torch.stack([piece.sum() for piece in pieces]).sum()


def _written(grads: Sequence[OptimizerGrads]) -> dict[StateKey, Tensor]:
    """Return what a step writes and a later one reads: weights with a gradient, their moments and masters. Host only."""
    weights: dict[StateKey, Tensor] = {(p, ""): p.detach() for one in grads for p in one.params}
    state = {key: tensor for one in grads for key, tensor in _state_tensors(one.optimizer).items()}
    kept = {(p, k): t for (p, k), t in state.items() if (p, "") in weights and k in (*MOMENTS, *AUX_STATE.values())}
    return weights | {key: tensor for key, tensor in kept.items() if tensor.is_floating_point()}


def _lost_counts(before: Before, grads: Sequence[OptimizerGrads]) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """Return of the elements of each sample that have a gradient, how many kept their value, and how many there are."""
    samples = {p: (one.optimizer, *before.samples[p]) for one in grads for p in one.params if p in before.samples}
    kept = {p: (_sample_of_master(optimizer, p) == old) & wanted for p, (optimizer, old, wanted) in samples.items()}
    return {p: same.sum() for p, same in kept.items()}, {p: wanted.sum() for p, (_, _, wanted) in samples.items()}


def _rates(grads: Sequence[OptimizerGrads], of: Sequence[Tensor] | None = None) -> list[float]:
    """Return the learning rate of each group, or of those that have one of some parameters; 1 where it has none."""
    among = None if of is None else set(of)
    groups = [group for one in grads for group in one.optimizer.param_groups]
    rates = [group.get("lr") for group in groups if among is None or not among.isdisjoint(group["params"])]
    return [float(rate) if isinstance(rate, float | int | Tensor) else 1.0 for rate in rates]


def _check_rates(before: Sequence[float], now: Sequence[float]) -> None:
    if now != before:
        raise InvariantError(
            f"a skipped step changed the learning rates from {before} to {now}. Register the scheduler with amp.on_applied(scheduler.step)."
        )


def _sample_of_master(optimizer: Optimizer, param: Tensor) -> Tensor:
    """Return the first elements of what a parameter stands for; the rest of it is not computed."""
    weight = _sample(local(param.detach()))
    if not keeps_masters(optimizer):
        return weight
    mode, aux = optimizer.aux_state(param)
    return read_master(mode, weight, None if aux is None else _sample(local(aux)))


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:_SAMPLE]


def _state_tensors(optimizer: Optimizer) -> dict[StateKey, Tensor]:
    entries = [(p, entry) for p, entry in optimizer.state.items() if isinstance(entry, dict)]
    return {(p, key): v for p, entry in entries for key, v in entry.items() if isinstance(v, Tensor)}


def _sums(grads: Sequence[OptimizerGrads], beside_weights: bool = False) -> dict[StateKey, Tensor]:
    """Return a checksum of each parameter with a gradient, and of each tensor in the optimizers' state, or of those only that lie beside weights."""
    summed: dict[StateKey, Tensor] = {(p, ""): p for one in grads for p in one.params}
    state = {key: tensor for one in grads for key, tensor in _state_tensors(one.optimizer).items()}
    summed |= {k: tensor for k, tensor in state.items() if not beside_weights or k[1] in AUX_STATE.values()}
    return {key: checksum(local(tensor)) for key, tensor in summed.items()}


def _useless_options(grads: Sequence[OptimizerGrads]) -> list[str]:
    """Return the options of groups that are inf or NaN: "lr=nan". Syncs: for those that are tensors."""
    named = [item for one in grads for group in one.optimizer.param_groups for item in group.items()]
    numbers = [(k, float(v) if isinstance(v, Tensor) and v.numel() == 1 else v) for k, v in named]
    return [f"{k}={v}" for k, v in numbers if isinstance(v, float) and not math.isfinite(v)]

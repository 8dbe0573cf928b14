"""Six things that hold in every step, looked at in the first steps and now and then: a net under everything else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import checksum
from ..errors import InvariantError, listed
from ..formats import widest
from ..kernels import AUX_STATE, CHUNK, chunks, is_dtensor, local, read_master, values
from ..optim import MOMENTS, keeps_masters
from .accumulation import OptimizerGrads
from .report import StateReport, refuse_differing
from .result import StepFlags

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


@dataclass(kw_only=True, slots=True, eq=False)
class Before:
    """A step as it was before it was taken: checksums, not copies.

    Attributes:
        raw_norm: of the scaled gradients of all shares, in fp64; None where parts of them lie on other ranks.
        weights: checksum of each parameter that has a gradient.
        state: checksum of each tensor in the optimizers' state.
        rates: learning rate of each group.
        samples: the first elements of some parameters' masters, and whether their gradient is not 0.
    """

    raw_norm: float | None
    weights: dict[Tensor, int]
    state: dict[tuple[Tensor, str], int]
    rates: list[float]
    samples: dict[Tensor, tuple[Tensor, Tensor]]


@torch.no_grad()
def look(shares: Sequence[OptimizerGrads]) -> Before:
    """Take down what a step must keep or change. Syncs: yes."""
    params = {p: share.optimizer for share in shares for p in share.params}
    grads = {p: values(local(p.grad)) for p in params if p.grad is not None}
    return Before(
        raw_norm=None if any(is_dtensor(p) for p in params) else _norm(grads.values()),
        weights={p: int(checksum(local(p))) for p in params},
        state=_state_sums(shares),
        rates=_rates(shares),
        samples={
            p: (_sample_of_master(optimizer, p).clone(), _sample(grads[p]) != 0)
            for p, optimizer in params.items()
            if p.is_floating_point() and p.grad is not None and not p.grad.is_sparse
        },
    )


class Invariants:
    """Compares a step with what it was before.

    Args:
        names: of parameters.
        buffers: returns how many elements of each buffer are not finite.
    """

    def __init__(self, names: Mapping[Tensor, str], buffers: Callable[[], Mapping[str, int]]) -> None:
        self._names = names
        self._buffers = buffers
        self._still: dict[int, tuple[dict[Tensor, int], int]] = {}

    def check(
        self,
        before: Before,
        shares: Sequence[OptimizerGrads],
        facts: StepFlags[float],
        step: int,
        report: Callable[[], StateReport],
    ) -> None:
        """Look at a step that was taken or skipped; what stands equal on all ranks is the agreement's to compare.

        Args:
            before: from `look`.
            shares: the parts of the optimizers.
            facts: of the step.
            step: how many steps there were, this one included.
            report: makes the report of dtypes.

        Raises:
            InvariantError: something is not as it must be; says what, and what to look at.

        Syncs: yes.
        """
        self._check_divisor(before, facts)
        for share, skipped in zip(shares, facts.skipped, strict=True):
            if skipped:
                self._check_untouched(before, share)
            else:
                self._check_moved(before, share, facts, step)
        if not facts.applied and before.rates != _rates(shares):
            raise InvariantError(
                f"a skipped step changed the learning rates from {before.rates} to {_rates(shares)}. "
                "Register the scheduler with amp.on_applied(scheduler.step)."
            )
        refuse_differing(report())
        self._check_finite(shares)

    def _check_divisor(self, before: Before, facts: StepFlags[float]) -> None:
        raw = before.raw_norm
        if raw is None or facts.gradients_bad:
            return
        expected = raw / facts.scale
        if not _SMALLEST <= expected <= _LARGEST:  # the norm is one fp32 number
            return
        if abs(facts.grad_norm - expected) > _NORM_ERROR * expected:
            raise InvariantError(
                f"the true gradients have norm {facts.grad_norm:.6g}, and the scaled ones {raw:.6g} at loss scale "
                f"{facts.scale:g}, which makes {expected:.6g}: they were divided by something else than what the loss was "
                "multiplied by. Something changed the gradients or the scale inside step()."
            )

    def _check_moved(self, before: Before, share: OptimizerGrads, facts: StepFlags[float], step: int) -> None:
        """Prove that an optimizer steps at all: no bit of its weights moved in a hundred steps with gradients and a rate.

        A single step proves nothing: fp32 may have lost its updates, or the optimizer moves at every k-th call.
        """
        # A scheduler that on_applied called has moved the rates since; a warm-up begins at 0.
        if facts.grad_norm == 0 or not any(_rates([share], share.params)) or not any(before.rates):
            return
        sums = {p: before.weights[p] for p in share.params}
        aux = _state_sums([share], beside_weights=True)
        if any(int(checksum(local(p))) != total for p, total in sums.items()) or any(
            before.state.get(key) != total for key, total in aux.items()
        ):
            self._still.pop(share.index, None)
        else:
            first, since = self._still.setdefault(share.index, (sums, step))
            if first != sums:  # they moved in a step that was not looked at
                self._still[share.index] = sums, step
            self._refuse_still(share, facts, step - since + 1)
        self._note_lost(before, share)

    def _refuse_still(self, share: OptimizerGrads, facts: StepFlags[float], count: int) -> None:
        what = f"changed none of the {len(share.params)} parameters of {type(share.optimizer).__name__}"
        advice = (
            "every update was smaller than the spacing of its weight, or the optimizer does not step them. Raise the "
            "learning rate, or keep masters"
        )
        if count >= STILL_LIMIT:
            raise InvariantError(
                f"{count} steps with gradients, the last of norm {facts.grad_norm:.6g}, {what}: {advice}."
            )
        if count == 1:
            _log.warning("a step with gradient norm %.6g %s: %s", facts.grad_norm, what, advice)

    def _note_lost(self, before: Before, share: OptimizerGrads) -> None:
        lost = total = 0
        worst: list[str] = []
        for p in share.params:
            if p not in before.samples:
                continue
            old, wanted = before.samples[p]
            kept = int(((_sample_of_master(share.optimizer, p) == old) & wanted).sum())
            count = int(wanted.sum())
            lost, total = lost + kept, total + count
            if count and kept > LOST_LIMIT * count:
                worst.append(self._names.get(p, "a parameter"))
        if total and lost > LOST_LIMIT * total:
            _log.warning(
                "%.0f%% of the updates looked at were smaller than the spacing of their weights and were lost (%s): "
                "raise the learning rate, or keep masters",
                100 * lost / total, listed(worst),
            )  # fmt: skip

    def _check_untouched(self, before: Before, share: OptimizerGrads) -> None:
        now = _state_sums([share])
        changed = [self._name(p) for p in share.params if int(checksum(local(p))) != before.weights[p]]
        changed += [
            f"{self._name(p)}.{key}" for (p, key), total in now.items() if before.state.get((p, key), total) != total
        ]
        if changed:
            raise InvariantError(
                f"a skipped step changed {listed(changed)}. {type(share.optimizer).__name__} does not leave everything as it "
                "is when found_inf is set; take another optimizer, or mezzo.optim.MasterWeights around it."
            )

    @torch.no_grad()
    def _check_finite(self, shares: Sequence[OptimizerGrads]) -> None:
        """Prove that nothing a later step reads was ruined: weights, moments and masters, buffers.

        A frozen parameter may hold inf, as masks do.
        """
        bad = [name for p, name in self._names.items() if count_ruined(local(p.detach()), p.requires_grad)]
        for share in shares:
            for (p, key), tensor in _state_tensors(share.optimizer).items():
                is_known = key in MOMENTS or key in AUX_STATE.values()
                if is_known and tensor.is_floating_point() and count_ruined(local(tensor)):
                    bad.append(f"{self._name(p)}.{key}")
        bad += self._buffers()
        if bad:
            raise InvariantError(
                f"after the step {listed(bad)} hold inf or NaN. Load the last good checkpoint; "
                "mezzo.diagnose.trace(model) names the op that makes the first one."
            )

    def _name(self, param: Tensor) -> str:
        return self._names.get(param, "a parameter")


def _norm(grads: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(_sum_of_squares(grad)) for grad in grads))


def _sum_of_squares(grad: Tensor) -> Tensor:
    return torch.stack([chunk.to(widest(chunk.device)).square().sum() for (chunk,) in chunks(grad)]).sum()


def count_ruined(tensor: Tensor, is_trained: bool = True) -> int:
    """Return how many elements are inf or NaN; of a frozen parameter, which may be a mask, NaN. Syncs: yes."""
    pieces = [~piece.isfinite() if is_trained else piece.isnan() for (piece,) in chunks(tensor)]
    return int(torch.stack([piece.sum() for piece in pieces]).sum())


def _rates(shares: Sequence[OptimizerGrads], of: Sequence[Tensor] | None = None) -> list[float]:
    """Return the learning rate of each group, or of those that have one of some parameters; 1 where it has none."""
    among = None if of is None else set(of)
    return [
        float(group.get("lr", 1.0))
        for share in shares
        for group in share.optimizer.param_groups
        if among is None or not among.isdisjoint(group["params"])
    ]


def _sample_of_master(optimizer: Optimizer, param: Tensor) -> Tensor:
    """Return the first elements of what a parameter stands for; the rest of it is not computed."""
    weight = _sample(local(param.detach()))
    if not keeps_masters(optimizer):
        return weight
    mode, aux = optimizer.aux_state(param)
    return read_master(mode, weight, None if aux is None else _sample(local(aux)))


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:_SAMPLE]


def _state_tensors(optimizer: Optimizer) -> dict[tuple[Tensor, str], Tensor]:
    return {
        (p, key): value
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


def _state_sums(shares: Sequence[OptimizerGrads], beside_weights: bool = False) -> dict[tuple[Tensor, str], int]:
    """Return a checksum of each tensor in the optimizers' state, or of those only that lie beside weights."""
    return {
        (p, key): int(checksum(local(tensor)))
        for share in shares
        for (p, key), tensor in _state_tensors(share.optimizer).items()
        if not beside_weights or key in AUX_STATE.values()
    }

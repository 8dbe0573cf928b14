"""`replay`: runs one step of a record again: from the snapshot before it, with the batches and the draws it had."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import random_state
from ..errors import ConfigError, DataError, StoppedRun, kind_of, plural, shown
from ..files import as_path
from ..formats import is_count
from ..policy import PolicyLike, as_policy
from ..random_state import RandomState
from ..report import Document, Pairs, Report
from ..step.prepare import prepare
from . import step_data
from .recorder import BATCH, FORMAT, RESULTS, START, batch_file, outcome, segments, step_file
from .second_run import same_bits
from .trial import check_trial

Parts = tuple[nn.Module, Optimizer | Sequence[Optimizer], Callable[[nn.Module, Any], Tensor]]
_SETTINGS: dict[Any, Any] = {"options": {str: object}, "groups": [{str: float | int | tuple}]}
_BATCH = {"data": object, "random": (Tensor, [Tensor]), **_SETTINGS}
_RESULT = {"losses": [Tensor], "grad_norm": Tensor, "scale": float | int, "applied": bool}
Around = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedStep(Report):
    """One step that was run again.

    Attributes:
        policy: it ran under.
        losses: of its micro-batches.
        grad_norm: of its true gradients.
        scale: loss scale that they carried.
        applied: the step was taken.
        error: what stopped the run here, in words; empty if nothing did.
        first_different: first step up to this one whose losses, gradient norm or scale are not bit for bit those of the record:
            hardware, or somebody changed weights; None if all are, or the record has no results of them.
        compared: steps whose results were compared.
        traced: the report of what `around` gave, if it makes one, as a trace does.
        is_own_policy: the step ran under the policy of the run; under another it is not compared itself.
    """

    step: int
    policy: str
    losses: tuple[float, ...]
    grad_norm: float
    scale: float
    applied: bool
    error: str
    first_different: int | None
    compared: int
    traced: Report | None = None
    is_own_policy: bool = True

    @property
    def is_healthy(self) -> bool:
        """Whether the step was taken, and everything up to it came out as recorded."""
        return self.applied and self.first_different is None

    def document(self) -> Document:
        """Return the layout."""
        pairs = [
            ("losses", ", ".join(f"{x:.9g}" for x in self.losses)),
            ("gradient norm", f"{self.grad_norm:.9g}"),
            ("loss scale", f"{self.scale:g}"),
            ("taken", "yes" if self.applied else "no"),
            *([("stopped by", self.error)] if self.error else []),
            *([("traced", self.traced.document().verdict)] if self.traced else []),
        ]
        return Document(
            title=f"mezzo replay of step {self.step} under {self.policy}",
            verdict=self._verdict(),
            is_good=self.is_healthy,
            blocks=(Pairs(pairs=tuple(pairs)),),
        )

    def _verdict(self) -> str:
        if self.first_different is not None:
            return f"Step {self.first_different} does not come out as recorded: hardware computed something else, or weights were changed outside of the steps."
        found = f"bit for bit as recorded, {self.compared} {plural('step', self.compared)} compared"
        if self.is_own_policy:
            return f"Run again: {found if self.compared else 'not compared'}."
        return f"Run again under another policy, not compared{f'; before it: {found}' if self.compared else ''}."


def segment_of(folder: Path, step: int) -> tuple[int, Path]:
    """Return the last snapshot before a step: its step and folder. Steps may be kept in later ones, whose snapshot a kill left unfinished."""
    folder = as_path("segment_of", "folder", folder)
    known = segments(folder)
    begin = known[0][0] if known else math.inf
    steps = sorted(n for p in folder.glob(f"[0-9]*/[0-9]*.0{BATCH}") if (n := int(p.name[:8])) >= begin)
    if is_count(step) and step in steps:
        return next((first, path) for first, path in reversed(known) if first <= step)
    held = "it holds no step" if folder.is_dir() else "it is a file" if folder.exists() else "there is no such folder"
    if steps:
        held = f"it holds steps {steps[0]} to {steps[-1]}"
    raise DataError(f"step {shown(step)} was asked for, and {str(folder)!r} does not hold it: {held}.")


class _Replay:
    """A model, its stepper and loss, and the record whose steps it takes."""

    def __init__(self, parts: Parts, policy: PolicyLike, folder: Path) -> None:
        model, optimizers, self.loss_fn = parts
        self.amp, self._folder = prepare(model, optimizers, policy), folder
        results = [step_data.read(path, {int: _RESULT}) for path in folder.glob(f"[0-9]*/*{RESULTS}")]
        self._known = {step: result for found in results for step, result in found.items()}

    def take(self, step: int) -> tuple[dict[str, Any], str]:
        """Take one recorded step. Returns: what came of it, and the error that ended it. Writes: the model. Syncs: yes."""
        batches, settings = self._recorded(step)
        self._set_groups(step, settings["groups"])
        losses = []
        for batch in batches:
            random_state.set_(RandomState(*batch["random"]))
            loss = self.loss_fn(self.amp.model, batch["data"])
            self.amp.backward(loss)
            losses.append(loss.detach())
        try:
            result = self.amp.step(**settings["options"])
            found, error = outcome(losses, result.grad_norm, result.scale, applied=result.applied), ""
        except StoppedRun as stopped:
            found, error = outcome(losses, math.nan, self.amp.scale, applied=False), str(stopped)
        self.amp.zero_grad()
        return found, error

    def _recorded(self, step: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the batches of a step, and its settings: those beside the last batch, unless it was taken with others."""
        folder = max(p for p in self._folder.glob("[0-9]" * 8) if p.name <= f"{step:08d}")
        num = max(len(list(folder.glob(f"{step:08d}.*{BATCH}"))), len(self._known.get(step, {}).get("losses", ())), 1)
        batches = [step_data.read(batch_file(folder, step, i), _BATCH) for i in range(num)]
        changed = step_file(folder, step)
        return batches, step_data.read(changed, _SETTINGS) if changed.is_file() else batches[-1]

    def _set_groups(self, step: int, recorded: Sequence[dict[str, Any]]) -> None:
        groups = [group for optimizer in self.amp.optimizers for group in optimizer.param_groups]
        if len(recorded) != len(groups):
            raise DataError(
                f"step {step} was taken with {len(recorded)} parameter groups, and the optimizers that build returned have {len(groups)}: groups "
                "that were added or removed since the snapshot cannot be replayed. Ask for a step of a later snapshot."
            )
        for group, values in zip(groups, recorded, strict=True):
            for key in group.keys() & values.keys():
                if isinstance(group[key], Tensor):  # it may stand in several groups, and in a graph
                    group[key].fill_(values[key])
                else:
                    group[key] = values[key]

    def differs(self, step: int, found: dict[str, Any]) -> bool | None:
        """Say whether a step came out otherwise than recorded; None where its result was not recorded."""
        known = self._known.get(step)
        if known is None:
            return None
        ours, theirs = ([*x["losses"], x["grad_norm"]] for x in (found, known))
        same = len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
        return not (same and (found["scale"], found["applied"]) == (known["scale"], known["applied"]))


def _built(build: Callable[[], Parts]) -> Parts:
    wanted = "a function that returns (model, optimizer, loss_fn), not prepared"
    if not callable(build) or isinstance(build, nn.Module):
        raise ConfigError(f"replay was given {kind_of(build)} for build; give {wanted}.")
    parts: object = build()
    some = parts if isinstance(parts, (tuple, list)) else ()
    if len(some) != 3 or some[2] is None or not isinstance(some[0], nn.Module):
        found = f"({', '.join(map(kind_of, some))})" if some else kind_of(parts)
        raise ConfigError(f"replay was given a build that returns {found}; give {wanted}.")
    check_trial("replay", None, some[2])
    return some[0], some[1], some[2]


def replay(
    folder: str | Path,
    step: int,
    build: Callable[[], Parts],
    *,
    policy: PolicyLike | None = None,
    around: Around = nullcontext,
) -> ReplayedStep:
    """Run one step of a record again, from the snapshot before it.

    The steps between snapshot and step are taken as they were; the step itself under another policy where one is given. On
    the same hardware and versions everything is bit for bit what it was, also in another process.

    Args:
        folder: that `mezzo.record` wrote.
        step: number of the step.
        build: returns (model, optimizer or list of them, loss_fn), not prepared, made as for the run; weights do not matter.
            loss_fn(model, batch) computes what was given to `amp.backward` for a batch.
        policy: for the step itself; None: that of the run.
        around: given the model, returns a context for the step itself, such as `mezzo.diagnose.trace`, whose report comes back in `traced`.

    Raises:
        ConfigError: no folder, or `build` returns something else.
        DataError: the record does not hold the step, or cannot be read.
        PolicyError, CheckpointError: policy or model do not fit what was recorded.

    Writes: the models that `build` made; random state comes back. Syncs: yes.
    """
    kept, policy = as_path("replay", "folder", folder), None if policy is None else as_policy(policy)
    first, path = segment_of(kept, step)
    start = step_data.read(path / START, load=partial(torch.load, weights_only=True))
    if not step_data.fits(start, {"format": int, "policy": str, "run": Mapping}) or start["format"] != FORMAT:
        raise DataError(f"{str(path / START)!r} is no snapshot of a record of this version.")
    if policy is not None and policy == as_policy(start["policy"]):
        policy = None
    with random_state.kept():
        run = _Replay(_built(build), start["policy"], kept)
        run.amp.load_state_dict(start["run"])
        differs = [run.differs(before, run.take(before)[0]) for before in range(first, step)]
        if policy is not None:
            state, run = run.amp.state_dict(), _Replay(_built(build), policy, kept)
            run.amp.load_state_dict(state | {"policy": run.amp.policy.to_dict()})  # logs no change that was asked for
        with around(run.amp.model) as watched:
            found, error = run.take(step)
        report = getattr(watched, "report", None)
        if policy is None:
            differs.append(run.differs(step, found))
    return ReplayedStep(
        step=step, policy=str(start["policy"] if policy is None else policy), is_own_policy=policy is None,
        losses=tuple(float(x) for x in found["losses"]), grad_norm=float(found["grad_norm"]), scale=found["scale"],
        applied=found["applied"], error=error, compared=sum(differ is not None for differ in differs),
        first_different=next((first + n for n, differ in enumerate(differs) if differ), None),
        traced=report if isinstance(report, Report) else None,
    )  # fmt: skip

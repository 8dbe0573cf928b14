"""The loss scale: as a value, with the one rule by which it moves, and as a run holds it, with what the last step made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._torch import is_capturing, update_scale_
from ..errors import PolicyError, check_given
from ..formats import as_device, describe, is_number, number_of
from ..kernels import move, to_host
from ..policy import ScalingConfig

_OVERFLOWS = 2.0**128 - 2.0**103
"""From here on a number rounds to inf in fp32."""
_MOST = 2**31 - 1
"""The largest count on a device, in int32; torch compares it with a larger number as if that were a small one."""

Found = Tensor | float | bool
"""A finding: zero or False for clean; a host number or a 0-d tensor of any dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The factor that keeps small 16-bit gradients above zero, and the counters that move it.

    The fields are Python numbers or 0-d tensors; `next_state` does the same arithmetic on either.

    Attributes:
        scale: the factor; a tensor is fp32.
        growth_tracker: clean steps in a row since the scale last moved; a tensor is int32.
        skipped_in_a_row: non-finite steps in a row; a tensor is int32.
    """

    scale: float | Tensor
    growth_tracker: int | Tensor = 0
    skipped_in_a_row: int | Tensor = 0

    @classmethod
    def start(cls, config: ScalingConfig, device: torch.device | str | None = None) -> LossScale:
        """Return the first state of a run: tensors on `device`, or numbers when it is left out. Syncs: no."""
        check_given("LossScale.start", "config", config, ScalingConfig, "a ScalingConfig", PolicyError)
        return cls(scale=config.init_scale) if device is None else cls(scale=config.init_scale).to(device)

    def to(self, device: torch.device | str) -> LossScale:
        """Return the state as fresh 0-d tensors on a device. Syncs: no, from numbers."""
        device = as_device(device)
        return LossScale(
            scale=torch.full((), float(self.scale), dtype=torch.float32, device=device),
            growth_tracker=torch.full((), int(self.growth_tracker), dtype=torch.int32, device=device),
            skipped_in_a_row=torch.full((), int(self.skipped_in_a_row), dtype=torch.int32, device=device),
        )

    def numbers(self) -> LossScale:
        """Return the state as Python numbers. Syncs: yes, if it is on an accelerator."""
        return LossScale(
            scale=float(self.scale),
            growth_tracker=int(self.growth_tracker),
            skipped_in_a_row=int(self.skipped_in_a_row),
        )

    @torch.no_grad()
    def write_(self, state: LossScale) -> None:
        """Take the values of another state, numbers or tensors. Writes: the tensors of this one. Syncs: no."""
        for name in self.__slots__:
            own, value = getattr(self, name), getattr(state, name)
            own.copy_(value) if isinstance(value, Tensor) else own.fill_(value)

    def multiply(self, output: Tensor) -> Tensor:
        """Return a loss times the scale, with its graph; any shape and dtype, any device. Syncs: as `move`."""
        check_given("LossScale.multiply", "output", output, Tensor, "a tensor", PolicyError)
        return output * (move(self.scale, output.device) if isinstance(self.scale, Tensor) else self.scale)

    def is_exhausted(self, found_nonfinite: Found, config: ScalingConfig, patience: int | None) -> bool | Tensor:
        """Say whether a step that starts from this state shows that no loss scale can help. Syncs: no.

        It does if it met inf or NaN, and the scale should back off but stands at its floor, or patience, so many in a row, has run out. A bool,
        or a 0-d bool tensor if the state or the finding is one.
        """
        skipped = self.skipped_in_a_row + 1
        at_floor = (self.scale <= config.min_scale) & (skipped >= min(config.hysteresis, _MOST))
        return (found_nonfinite != 0) & ((at_floor & config.dynamic) | (skipped >= min(patience or _MOST, _MOST)))


def next_state(state: LossScale, found_nonfinite: Found, config: ScalingConfig) -> LossScale:
    """Return the loss scale after a step: smaller after inf or NaN, larger after enough clean steps.

    A non-finite step multiplies the scale by the backoff factor once `hysteresis` of them stand in a row;
    `growth_interval` clean steps in a row multiply it by the growth factor. It stays within the floor and
    the ceiling, and where the next growth would be inf, it stays as it is.
    A scale that is not dynamic stays what it is, and its steps are counted.

    It holds tensors if the state before, which is not changed, or the finding is one, else numbers. Syncs: no.
    Source: Micikevicius et al. 2018, section 3.2. Exact for powers of two.

    >>> state = LossScale(scale=8.0, skipped_in_a_row=0)
    >>> next_state(state, True, ScalingConfig())
    LossScale(scale=4.0, growth_tracker=0, skipped_in_a_row=1)
    """
    check_given("next_state", "state", state, LossScale, "a LossScale", PolicyError)
    check_given("next_state", "config", config, ScalingConfig, "a ScalingConfig", PolicyError)
    found_nonfinite = found_nonfinite if isinstance(found_nonfinite, Tensor) else number_of(found_nonfinite)
    given = {"found_nonfinite": found_nonfinite, **{f"state.{name}": getattr(state, name) for name in state.__slots__}}
    for name, value in given.items():
        is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not (is_one or isinstance(value, float) or is_number(value)):
            raise PolicyError(f"next_state was given {describe(value)} for {name}; give a number, or a tensor of one.")
    found, clean = found_nonfinite != 0, found_nonfinite == 0
    skipped = (state.skipped_in_a_row + 1) * found
    tracker = (state.growth_tracker + 1) * clean
    if not config.dynamic:
        return LossScale(scale=state.scale, growth_tracker=tracker, skipped_in_a_row=skipped)
    grows = clean & (tracker >= min(config.growth_interval, _MOST))
    backs_off = found & (skipped >= min(config.hysteresis, _MOST))
    larger = _clamp(state.scale * config.growth_factor, high=config.max_scale)
    smaller = _clamp(state.scale * config.backoff_factor, low=config.min_scale)
    return LossScale(
        scale=_where(grows & (larger < _OVERFLOWS), larger, _where(backs_off, smaller, state.scale)),
        growth_tracker=tracker * (grows == 0),
        skipped_in_a_row=skipped,
    )


def can_move_in_place(config: ScalingConfig) -> bool:
    """Whether torch's own kernel moves a scale as `next_state` does, but for floor and ceiling."""
    return config.dynamic and config.hysteresis == 1


@torch.no_grad()
def move_(state: LossScale, found: Tensor, skipped: Tensor, config: ScalingConfig) -> None:
    """Do as `next_state`, in place and in a third of the launches; nothing where the step says nothing about the scale.

    Both flags have shape (), fp32, 1 or 0: gradients were inf or NaN, and the scale may be to blame; the step was skipped, for that
    reason or another. For a config for which `can_move_in_place` holds. Writes: `state`. Syncs: no.
    """
    scale, tracker, row = state.scale, state.growth_tracker, state.skipped_in_a_row
    assert isinstance(scale, Tensor) and isinstance(tracker, Tensor) and isinstance(row, Tensor)
    is_blameless = torch.gt(skipped, found, out=torch.empty_like(tracker))
    tracker.sub_(is_blameless)  # the kernel counts a clean step then
    update_scale_(scale, tracker, found, config.growth_factor, config.backoff_factor, config.growth_interval)
    if config.min_scale > 0 or config.max_scale is not None:
        scale.clamp_(config.min_scale, config.max_scale)
    row.copy_(torch.addcmul(found, row, skipped))  # one more, the same, or none


def _where(condition: bool | Tensor, yes: float | Tensor, no: float | Tensor) -> float | Tensor:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _clamp(value: float | Tensor, low: float | None = None, high: float | None = None) -> float | Tensor:
    if isinstance(value, Tensor):
        return value if low is None and high is None else value.clamp(low, high)
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


class ScaleState:
    """Holds the state of the loss scale: numbers until a first loss shows the device, then tensors that stay put.

    Captured CUDA graphs hold the tensors' addresses, so a move writes into them.
    """

    def __init__(self, state: LossScale) -> None:
        self.state = state
        self._captured: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """The scale itself, shape (), fp32, always at the same address; None before there is a device. Host only."""
        return self.state.scale if isinstance(self.state.scale, Tensor) else None

    def to(self, device: torch.device) -> None:
        """Put the state on a device, unless it is on one. Syncs: no."""
        if self.tensor is None:
            with torch.inference_mode(False):  # a loss scaled there first must not make the state unwritable
                self.state = self.state.to(device)

    def captured(self) -> Tensor:
        """Return the scale of this iteration's losses, shape (), fp32: one copy, which stays when the run's scale moves. Syncs: no."""
        if self._captured is None:
            assert self.tensor is not None
            with torch.inference_mode(False):
                self._captured = self.tensor.clone()
        return self._captured

    def assign(self, name: str, value: Tensor | None, start: float) -> None:
        """Take a tensor of the caller's, shape (), for a field of the state: what torch's scaler does by assignment.

        None takes the state off its device; of the scale itself, back to `start`. Syncs: no; yes with None, on an accelerator.
        """
        self._captured = None
        if value is None:
            numbers = self.state.numbers()
            self.state = replace(numbers, scale=start) if name == "scale" else numbers
            return
        self.to(value.device)
        own = getattr(self.state, name)
        is_alike = value.dtype is own.dtype and value.shape == own.shape
        self.state = replace(self.state, **{name: value if is_alike else value.detach().to(own.dtype).reshape(())})

    def move(self, state: LossScale) -> None:
        """Take a new state, numbers or tensors; losses that were scaled before keep theirs. Syncs: no."""
        self._captured = None
        if self.tensor is None:
            self.state = state
        else:
            self.state.write_(state)


class LastStep:
    """Whether the last step was applied, and which scale its gradients carried, both read from the device when asked. `captured` is None for a run without scaling."""

    def __init__(self, found_nonfinite: Tensor | bool, captured: Tensor | None) -> None:
        self._found, self._captured = found_nonfinite, captured

    @property
    def applied(self) -> bool:
        """Whether the optimizer changed the weights. Syncs: yes, if nothing has read the finding yet."""
        self._found = bool(self._found)
        return not self._found

    @property
    def scale(self) -> float:
        """The scale the gradients were divided by, also after `update` moved it. Syncs: yes."""
        return 1.0 if self._captured is None else float(self._captured)

    def __repr__(self) -> str:
        return f"LastStep(applied={self.applied}, scale={self.scale:g})"


class AsyncFlag:
    """Carries one flag at a time to the host and says it once it has arrived; late, never waiting.

    Where the device has no events to ask, every `interval`-th flag is read the plain way, which waits.
    """

    def __init__(self, interval: int = 25) -> None:
        self._interval = interval
        self._count = 0
        self._arriving: tuple[Tensor, torch.Event | None] | None = None

    def ask(self, flag: Tensor) -> bool:
        """Send a 0-d bool tensor on its way and return whether one that has arrived was set.

        Syncs: no on CUDA and XPU; elsewhere one read every `interval` calls.
        """
        if is_capturing(flag.device):
            return False  # a captured graph has no host to tell
        if flag.device.type not in ("cuda", "xpu"):
            self._count += 1
            return self._count % self._interval == 0 and bool(flag)
        is_set = False
        if self._arriving is not None and (self._arriving[1] is None or self._arriving[1].query()):
            is_set, self._arriving = bool(self._arriving[0]), None
        if self._arriving is None:
            self._arriving = to_host(flag)
        return is_set

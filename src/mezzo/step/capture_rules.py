"""What no graph of a step can hold, and what one was made for: refused by name, when it is captured or before a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .._torch import step_hooks, version
from ..distributed import is_distributed
from ..errors import StepError, listed
from ..optim import MasterOptimizer, wrapped_optimizer
from .engine import Engine
from .update import decides_on_device


def refuse_in_graph(**given: object) -> None:
    """Refuse what `step` was given that the host would have to follow in each replay: a StepError. Host only."""
    names = [name for name, value in given.items() if value]
    if names:
        raise StepError(
            f"amp.step() has {names[0]}= in a function that is captured, which the host would have to follow in each replay. "
            "Leave it out, or call the function itself instead of what amp.capture made of it."
        )


def refuse_uncapturable(engine: Engine) -> None:
    """Refuse a model, ranks or a policy whose steps no graph can hold: a StepError. Host only."""
    devices = {p.device for p in engine.names}
    kinds = sorted({device.type for device in devices})
    if kinds == ["cpu"] or len(devices) != 1:
        raise StepError(
            f"amp.capture was called for a model on {listed(sorted(map(str, devices)))}: a graph is one accelerator's. Move the model there "
            "before mezzo.prepare, or call the function itself."
        )
    if engine.ranks.consensus is not None or is_distributed():
        raise StepError(
            "amp.capture was called where several ranks train together, which compare what each step found. Call the function "
            "itself."
        )
    guard = engine.policy.guard
    if guard.enabled and (guard.patience == 1 or guard.on_overflow != "skip"):
        raise StepError(
            f"amp.capture was called under guard.on_overflow={guard.on_overflow}, guard.patience={guard.patience}, for which the host keeps "
            "each batch. Write guard.on_overflow=skip and a larger patience."
        )


def refuse_uncapturable_steps(engine: Engine) -> None:
    """Refuse optimizers whose steps the host decides, or whose state it keeps."""
    for optimizer in engine.optimizers:
        inner = wrapped_optimizer(optimizer)
        name = type(inner).__name__
        is_torchs = not isinstance(inner, MasterOptimizer)
        if is_torchs and any(group.get("capturable") is False for group in inner.param_groups):
            raise StepError(
                f"amp.capture was given a step of torch's {name}, which keeps step counts for the host. "
                f"Write {name}(..., capturable=True)."
            )
        if not decides_on_device(optimizer):
            raise StepError(
                f"amp.capture was given a step of {name}, which cannot be left out or undone on the device: it has hooks, or is "
                "neither torch's nor mezzo's. Call the function itself."
            )


def watched_values(engine: Engine) -> dict[str, list[object]]:
    """Return what a graph was made for, by name; host numbers and addresses. Host only."""
    parts = {id(part): part for one in engine.optimizers for part in (one, wrapped_optimizer(one))}.values()
    options = [v for part in parts for group in part.param_groups for k, v in group.items() if k != "params"]
    hooks: list[object] = [len(found) for part in parts for found in step_hooks(part)]
    return {
        "the training mode of a module": [module.training for module in engine.model.modules()],
        "requires_grad of a parameter": [p.requires_grad for p in engine.names],
        "an option of an optimizer, such as its learning rate,": [_plain(option) for option in options],
        "the hooks of an optimizer": hooks,
        "the place of weights, optimizer state or loss scale": [t.data_ptr() for t in held_tensors(engine)],
    }


def _plain(option: object) -> object:
    """Return what tells an option from another: its value where the host has it, else where it lies."""
    if isinstance(option, tuple):
        return tuple(map(_plain, option))
    if isinstance(option, Tensor):
        return option.item() if option.device.type == "cpu" else option.data_ptr()
    return option if isinstance(option, (int, float, str)) else id(option)


def held_tensors(engine: Engine) -> list[Tensor]:
    """Return weights, optimizer state and loss scale. Host only."""
    scale = engine.loss_scale
    state = [value for one in engine.optimizers for entry in one.state.values() for value in entry.values()]
    numbers = (scale.scale, scale.growth_tracker, scale.skipped_in_a_row)
    return [*engine.names, *(held for held in (*state, *numbers) if isinstance(held, Tensor))]


def host_values(engine: Engine) -> list[object]:
    """Return what a step may have changed that no replay would: numbers of optimizers, tensors of the host, options."""
    state = [value for one in engine.optimizers for entry in one.state.values() for value in entry.values()]
    kept = [
        (v.data_ptr(), v.device.type == "cpu" and version(v)) if isinstance(v, Tensor) else _plain(v) for v in state
    ]
    groups = [group for one in engine.optimizers for group in wrapped_optimizer(one).param_groups]
    options = [value for group in groups for name, value in group.items() if name != "params"]
    return [*kept, *((_plain(v), isinstance(v, Tensor) and version(v)) for v in options)]


def changed_value(engine: Engine, watched: Mapping[str, Sequence[object]]) -> str:
    """Return the name of the first of `watched_values` that is another one now; empty for none. Host only."""
    now = watched_values(engine)
    return next((what for what, values in watched.items() if values != now[what]), "")


def refuse_host_state(engine: Engine, before: Sequence[object], watched: Mapping[str, Sequence[object]]) -> None:
    """Refuse a step that changed, while it was captured, what no replay would: its `host_values` or `watched_values`. Host only."""
    changed = changed_value(engine, watched)
    if changed or before != host_values(engine):
        what = changed or "the state that an optimizer keeps on the host, or the value of an option,"
        raise StepError(
            f"the step could not be captured, since {what} changed in it, which a replay would not repeat. Take schedulers and the "
            "like out of the function, and optimizers with capturable=True where torch has that."
        )

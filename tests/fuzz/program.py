"""Generated programs as data: how one is drawn, and how one that fails is made smaller."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .blocks import BLOCKS
from .recipes import OPTIMIZERS, POLICIES


@dataclass(frozen=True, slots=True)
class Train:
    """A step of a training loop.

    Attributes:
        sizes: of the micro-batches.
        fault: what is wrong with the last one; empty for nothing.
        edit: what user code does with the true gradients; empty for nothing.
        clip: how gradients are clipped: "", "norm" or "value".
        fails: where user code raises, so that the step is dropped; empty for nowhere.
        set_to_none: as gradients are dropped after it.
    """

    sizes: tuple[int, ...] = (4,)
    fault: str = ""
    edit: str = ""
    clip: str = ""
    fails: str = ""
    set_to_none: bool = True


FAULTS = ("", "", "", "", "input", "loss", "large input", "large loss", "small loss")
EDITS = ("", "", "", "", "look", "halve", "drop one", "spoil")
FAILS = ("", "", "", "", "", "forward", "backward", "before step")
BETWEEN = (
    "evaluate", "evaluate with graph", "save", "load", "load anew", "freeze", "unfreeze", "add group", "replace head",
    "copy", "schedule", "release", "ask", "wrong order", "pickle", "edit weight", "load weights",
)  # fmt: skip

WITHOUT_KERNEL = {("lstm", torch.float16)}
"""What torch has no kernel for on the CPU; mezzo says so."""
TORCH_CANNOT = {
    ("torch.SGD fused", "freeze"),  # some momenta None and some not: a TypeError in torch 2.13
    ("weight norm", "pickle"),
    ("spectral norm", "pickle"),
    ("spectral norm", "copy"),  # its weight is no leaf once it has run
}
"""Optimizers and blocks, and events that torch itself refuses with them."""


@dataclass(frozen=True, slots=True)
class Program:
    """A model, an optimizer, a policy, and what happens.

    Attributes:
        seed: of weights and data.
        blocks: of the model.
        optimizer: by its name in `recipes`.
        policy: its text.
        events: steps, and names of what happens between them.
    """

    seed: int
    blocks: tuple[str, ...]
    optimizer: str
    policy: str
    events: tuple[Train | str, ...]


def drawn(seed: int) -> Program:
    """Return the program of a number."""
    rng = random.Random(seed)
    policy = rng.choice(sorted(POLICIES))
    optimizer = rng.choice([name for name, one in sorted(OPTIMIZERS.items()) if one.takes(POLICIES[policy])])
    known = sorted(name for name in BLOCKS if (name, POLICIES[policy].compute) not in WITHOUT_KERNEL)
    blocks = tuple(rng.choice(known) for _ in range(rng.randrange(4)))
    between = [event for event in BETWEEN if not {(one, event) for one in (optimizer, *blocks)} & TORCH_CANNOT]
    events: list[Train | str] = []
    for _ in range(rng.randrange(3, 8)):
        events += [_train(rng)] if rng.random() < 0.6 else [rng.choice(between), _train(rng)]
    return Program(seed=seed, blocks=blocks, optimizer=optimizer, policy=policy, events=tuple(events))


def _train(rng: random.Random) -> Train:
    sizes = tuple(rng.randrange(2, 6) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    fails = rng.choice(FAILS)
    is_seen = fails != "forward" or len(sizes) > 1  # without a backward pass there is no step that could be taken back
    return Train(
        sizes=sizes,
        fault=rng.choice(FAULTS) if is_seen else "",
        edit=rng.choice(EDITS),
        clip=rng.choice(["", "", "norm", "value"]),
        fails=fails,
        set_to_none=rng.random() < 0.8,
    )


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a smaller program that still fails: without every part that it fails without."""
    while (smaller := next(filter(fails, _smaller(program)), None)) is not None:
        program = smaller
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for index in reversed(range(len(program.events))):
        yield replace(program, events=program.events[:index] + program.events[index + 1 :])
    for index in range(len(program.blocks)):
        yield replace(program, blocks=program.blocks[:index] + program.blocks[index + 1 :])
    for index, event in enumerate(program.events):
        for plainer in _plainer(event) if isinstance(event, Train) else ():
            yield replace(program, events=(*program.events[:index], plainer, *program.events[index + 1 :]))
    for optimizer in ("torch.SGD", "torch.AdamW"):
        if program.optimizer not in ("torch.SGD", optimizer) and OPTIMIZERS[optimizer].takes(POLICIES[program.policy]):
            yield replace(program, optimizer=optimizer)


def _plainer(event: Train) -> Iterator[Train]:
    plain = Train(sizes=event.sizes[:1])
    for name in ("fails", "fault", "edit", "clip", "set_to_none", "sizes"):
        if getattr(event, name) != getattr(plain, name):
            yield replace(event, **{name: getattr(plain, name)})

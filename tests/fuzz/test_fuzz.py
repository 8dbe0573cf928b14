"""Generated programs give what plain torch gives, bit for bit where it rounds alike; `make fuzz` runs them without end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.fuzz.program import Program, Train, drawn, shrunk
from tests.fuzz.run import difference
from tests.torch_versions import ADAGRAD_STARTS_LATE

import mezzo

PROGRAMS, CHUNKS, QUICK = 200, 8, 5
"""How many programs are run, in how many tests, and how many of these run in every suite."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mezzo"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("mezzo.step"), "disabled", True)


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=[pytest.mark.slow] * (chunk >= QUICK)) for chunk in range(CHUNKS)]
)
def test_generated_programs(chunk: int) -> None:
    for seed in range(chunk, PROGRAMS, CHUNKS):
        program = drawn(seed)
        if ADAGRAD_STARTS_LATE or program.optimizer != "torch.Adagrad" or "replace head" not in program.events:
            assert not difference(program), program


def planted_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mezzo.step.update, "clamp_", lambda *args: None)


def planted_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss scale never backs off."""
    right = mezzo.step.update.next_state

    def wrong(state: Any, found: Any, config: Any) -> Any:
        return right(state, found * 0, config)

    monkeypatch.setattr(mezzo.step.update, "next_state", wrong)


def planted_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mezzo.step.buffers, "restore_", lambda *args: None)


@pytest.mark.parametrize(
    ("plant", "sign"),
    [
        (planted_clip, lambda event: event.clip == "value"),
        (planted_scale, lambda event: True),
        (planted_buffers, lambda event: event.fault or event.edit == "spoil"),
    ],
)
def test_a_planted_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, plant: Any, sign: Any) -> None:
    plant(monkeypatch)
    program = next(program for program in map(drawn, range(60)) if difference(program))
    small = shrunk(program, lambda one: bool(difference(one)))
    assert len(small.events) <= 2 and any(isinstance(event, Train) and sign(event) for event in small.events), small


FOUND = {
    "gradients of a model that was released and prepared again were fp32": Program(
        320, (), "torch.SGD", "fp16-master", ("release", Train(sizes=(5,), clip="value"))
    ),
    "a backward that raised took back what an earlier forward, of nobody's step, had written": Program(
        1024,
        ("batch norm",),
        "torch.SGD",
        "bf16",
        (Train(sizes=(2,), fails="forward"), Train(sizes=(3,), fault="input", fails="backward")),
    ),
    "zeros that the programs by hand kept where a release drops gradients moved frozen weights": Program(
        61141,
        ("group norm",),
        "torch.AdamW",
        "fp32",
        (Train(sizes=(2,), set_to_none=False), "release", "freeze", Train(sizes=(3,))),
    ),
}
"""What the programs found, each as small as it got."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    assert not difference(FOUND[name])

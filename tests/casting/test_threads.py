"""Regions and kept casts that several threads use at once, and that the garbage collector meets in between."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn

import mezzo
from mezzo.casting import cast_cache, weight_casts

SECONDS = 0.7


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Have threads switch between nearly all bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], object]) -> None:
    """Call each function again and again in a thread of its own. Raises: what one of them raised first."""
    end, errors = time.monotonic() + SECONDS, list[BaseException]()

    def run(work: Callable[[], object]) -> None:
        try:
            while time.monotonic() < end and not errors:
                work()
                assert not torch.is_autocast_enabled("cpu")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("policy", ["bf16", "bf16, modules=none, ops=mezzo"])
def test_one_region_in_many_threads_leaves_each_as_it_was(policy: str) -> None:
    region = mezzo.autocast("cpu", policy=policy)

    def work() -> None:
        with region:
            assert torch.is_autocast_enabled("cpu")

    at_once(*[work] * 6)


@pytest.mark.parametrize("cache", ["region", "persistent"])
def test_a_model_answers_in_threads_while_another_trains_it(cache: Literal["region", "persistent"]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.ones(2, 8)
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16, ops=mezzo", cache=cache)

    def answer() -> None:
        with torch.no_grad():
            assert model(x).isfinite().all()

    def train() -> None:
        amp.zero_grad()
        amp.backward(model(x).square().mean())
        amp.step()

    at_once(answer, answer, answer, train)


def test_a_kept_cast_that_dies_while_casts_are_looked_through() -> None:
    """Of a model in a cycle of references: the collector comes by after each number of allocations once."""
    threshold = gc.get_threshold()
    try:
        for allocations in range(1, 150):
            gc.disable()
            cycle: list[object] = [nn.Parameter(torch.ones(2, 2))]
            weight_casts.cast(cycle[0], torch.bfloat16)  # type: ignore[arg-type]
            cycle.append(cycle)
            del cycle
            weight = nn.Parameter(torch.ones(2, 2))
            gc.set_threshold(allocations, 1, 1)
            gc.enable()
            weight_casts.cast(weight, torch.bfloat16)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_weight_is_cast_once_for_each_write_of_it() -> None:
    """Threads that find it old together: the second would write under the graph of the first."""
    weight = nn.Parameter(torch.ones(64, 64), requires_grad=False)
    waiting = threading.Barrier(4)
    casts: list[torch.Tensor] = []

    def use() -> None:
        waiting.wait()
        casts.append(weight_casts.cast(weight, torch.bfloat16, is_first=False))

    weight_casts.cast(weight, torch.bfloat16)
    for turn in range(1, 40):
        weight.add_(1)
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(cast) for cast in casts[-4:]}) == 1
        assert all((cast == 1 + turn).all() for cast in casts[-4:])
    assert all((cast == 2 + index // 4).all() for index, cast in enumerate(casts))


@pytest.mark.parametrize("first_is_here", [False, True])
def test_a_cast_that_another_thread_may_be_reading_is_not_written(first_is_here: bool) -> None:
    weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)

    def use() -> torch.Tensor:
        return weight_casts.cast(weight, torch.bfloat16)

    one, other = (use(), in_a_thread(use)) if first_is_here else (in_a_thread(use), use())
    assert one is other
    weight.add_(1)
    now = use()
    assert (now == 2).all() and (one == 1).all()
    weight.add_(1)
    assert use() is now and (now == 3).all()  # of one thread alone again: in place


def test_a_weight_that_is_written_while_it_is_cast_is_cast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, copy = nn.Parameter(torch.ones(8, 8)), cast_cache._copy

    def written_meanwhile(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cast = copy(tensor, dtype)
        weight.add_(1)
        return cast

    with torch.no_grad():
        monkeypatch.setattr(cast_cache, "_copy", written_meanwhile)
        weight_casts.cast(weight, torch.bfloat16, is_first=False)
        monkeypatch.setattr(cast_cache, "_copy", copy)
        assert (weight_casts.cast(weight, torch.bfloat16, is_first=False) == 2).all()

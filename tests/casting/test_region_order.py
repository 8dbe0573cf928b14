"""Regions left in another order than they were entered: an error, and the state of before once all are left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import permutations

import pytest
import torch
from tests.step.test_interrupted import SRC, reached

from mezzo.casting import autocast
from mezzo.errors import RegionError

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = {
    "bf16": {"dtype": BF16},
    "fp16": {"dtype": FP16},
    "mode": {"policy": "bf16, modules=none, op:tanh=fp32"},
    "off": {"enabled": False},
}


def state() -> tuple[object, ...]:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    modes = torch.overrides._get_current_function_mode_stack()
    switch = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return *switch, torch.is_autocast_cache_enabled(), nesting, len(modes)


@pytest.mark.parametrize("kinds", [*permutations(KINDS, 3)], ids="-".join)
@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_every_order_ends_in_the_state_of_before(kinds: tuple[str, ...], order: tuple[int, ...]) -> None:
    before = state()
    regions = [autocast("cpu", **KINDS[kind]) for kind in kinds]
    for region in regions:
        region.__enter__()
    inside = [0, 1, 2]
    for index in order:
        if index == inside[-1]:
            regions[index].__exit__(None, None, None)
        else:
            with pytest.raises(RegionError, match="another order"):
                regions[index].__exit__(None, None, None)
        inside.remove(index)
        if inside:  # what was entered last is still in force
            last = kinds[inside[-1]]
            assert torch.is_autocast_enabled("cpu") is (last != "off")
    assert state() == before


def test_overlapping_tasks_leave_nothing_switched_on() -> None:
    async def serve(dtype: torch.dtype) -> torch.dtype:
        with autocast("cpu", dtype):
            await asyncio.sleep(0.01)
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    async def main() -> list[object]:
        return await asyncio.gather(serve(BF16), serve(FP16), return_exceptions=True)

    before = state()
    first, second = asyncio.run(main())
    assert isinstance(first, RegionError) and "no `await`" in str(first)
    assert second is FP16
    assert state() == before


def test_an_error_in_an_overlapping_task_stays_what_it_is() -> None:
    async def serve(dtype: torch.dtype) -> None:
        with autocast("cpu", dtype):
            await asyncio.sleep(0.01)
            raise ZeroDivisionError

    async def main() -> list[object]:
        return await asyncio.gather(serve(BF16), serve(FP16), return_exceptions=True)

    before = state()
    assert [type(error) for error in asyncio.run(main())] == [ZeroDivisionError, ZeroDivisionError]
    assert state() == before


def test_a_generator_that_outlives_the_region_around_it() -> None:
    def rows() -> Iterator[int]:
        with autocast("cpu", FP16):
            yield 1
            yield 2

    before = state()
    generator = rows()
    with pytest.raises(RegionError, match="another order"), autocast("cpu", BF16):
        next(generator)
    generator.close()
    assert state() == before


def test_a_torch_region_left_open_inside_is_left_with_ours() -> None:
    enabled = torch.is_autocast_enabled("cpu")
    inner = torch.autocast("cpu", FP16)
    with pytest.raises(ZeroDivisionError), autocast("cpu", BF16):
        inner.__enter__()
        raise ZeroDivisionError
    assert torch.is_autocast_enabled("cpu") is enabled
    torch.autocast_decrement_nesting()  # of the one that nobody leaves


def test_an_interrupt_that_has_taken_the_mode_off_stays_one() -> None:
    """As where Ctrl-C ends a block while it takes modes aside."""
    before = state()
    with pytest.raises(KeyboardInterrupt), autocast("cpu", **KINDS["mode"]):
        torch.overrides._pop_mode()
        raise KeyboardInterrupt
    assert state() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", [None, "bf16", "mode"])
def test_ctrl_c_on_the_way_in_or_out_leaves_the_state_of_before(kind: str, outer: str | None) -> None:
    """At the start of any line. Python has some in `__exit__` before anything could be done: what comes there leaves the region to be left."""
    region, places = autocast("cpu", **KINDS[kind]), list[str]()

    def enter_and_leave() -> None:
        with region:
            pass

    def interrupt() -> None:
        places.append(sys._getframe(2).f_code.co_name)
        raise KeyboardInterrupt

    with nullcontext() if outer is None else autocast("cpu", **KINDS[outer]):
        before, at = state(), 0
        while True:
            try:
                reached(enter_and_leave, at, SRC, interrupt)
                break
            except KeyboardInterrupt:
                if places[-1] in ("__exit__", "_pop") and state() != before:
                    region.__exit__(None, None, None)
                assert state() == before, (at, places[-1])
                at += 1
    assert at > 20 and len({*places}) > 5

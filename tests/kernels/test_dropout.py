"""Dropout on the CPU: torch's random numbers, results, gradients and generator, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mezzo.kernels import dropout, registry, takes_dropout
from mezzo.kernels.ops.dropout import cpu

needs_kernel = pytest.mark.skipif(
    registry.choose("dropout", torch.device("cpu"), torch.bfloat16).backend != "cpu" or not cpu.is_faster(),
    reason="torch draws the numbers of dropout another way here",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def both(x: Tensor, p: float, drawn: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return result, gradient, what is drawn afterwards, and the generator's state, of torch and of the kernel."""
    found = []
    for drop in (lambda x: torch.dropout(x, p, True), lambda x: dropout(x, p)):
        torch.manual_seed(3)
        torch.rand(drawn)
        given = x.clone().requires_grad_()
        out = drop(given)
        out.backward(torch.ones_like(out))
        found.append([out.detach(), given.grad, torch.randn(33), torch.get_rng_state()])
    return found[0], found[1]


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999, 1e-9])
@pytest.mark.parametrize("size", [1, 311, 312, 313, 10_001])
def test_it_is_torchs_to_the_bit(dtype: torch.dtype, p: float, size: int) -> None:
    x = torch.randn(size).to(dtype)
    x[::5] = float("nan")
    x[1::7] = float("inf")
    for drawn in (0, 1, 623, 624, 625):
        theirs, ours = both(x, p, drawn)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one.nan_to_num(7, 8, 9), other.nan_to_num(7, 8, 9)), drawn


@needs_kernel
def test_other_layouts_are_drawn_in_the_order_of_their_memory() -> None:
    whole = torch.randn(6, 8, 10, 4)
    for x in (
        whole.transpose(0, 2),
        whole.to(memory_format=torch.channels_last),
        whole[:, ::2],
        whole[:1].expand(6, 8, 10, 4),
    ):
        theirs, ours = both(x, 0.3)
        assert ours[0].stride() == theirs[0].stride()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@needs_kernel
def test_normal_numbers_that_the_generator_holds_back_stay_there() -> None:
    found = []
    for drop in (lambda x: torch.dropout(x, 0.5, True), lambda x: dropout(x, 0.5)):
        torch.manual_seed(0)
        first = torch.empty(1).normal_()
        found.append([first, drop(torch.ones(100)), torch.empty(1).normal_()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@needs_kernel
def test_what_another_thread_draws_meanwhile_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws between the look at the generator and the numbers: they are drawn anew, behind those."""
    torch.manual_seed(0)
    theirs = torch.rand(5), torch.dropout(torch.ones(1000), 0.5, True), torch.rand(5)
    draw, seen = cpu._draw, []

    def disturbed(*args: Any) -> None:
        if not seen:
            seen.append(torch.rand(5))
        draw(*args)

    monkeypatch.setattr(cpu, "_draw", disturbed)
    torch.manual_seed(0)
    ours = dropout(torch.ones(1000), 0.5), torch.rand(5)
    assert torch.equal(seen[0], theirs[0])
    assert torch.equal(ours[0], theirs[1])
    assert torch.equal(ours[1], theirs[2])


@needs_kernel
@pytest.mark.parametrize(("p", "is_taken"), [(0.0, False), (0.1, True), (1.0, False)])
def test_who_takes_it(p: float, is_taken: bool) -> None:
    assert takes_dropout(torch.ones(1 << 13), p) is is_taken
    assert not takes_dropout(torch.ones((1 << 13) - 1), p)
    assert not takes_dropout(torch.ones(1 << 13, dtype=torch.float64), p)
    assert not takes_dropout(torch.ones(1 << 13, device="meta"), p)
    with FlopCounterMode(display=False):
        assert not takes_dropout(torch.ones(1 << 13), p)


def test_where_torch_draws_otherwise_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors of Intel, where MKL draws."""
    cpu.is_faster.cache_clear()
    draw = cpu._draw
    monkeypatch.setattr(cpu, "_draw", lambda state, out, *rest: (draw(state, out, *rest), out[:1].sub_(1)))
    try:
        assert not cpu.is_faster()
    finally:
        monkeypatch.undo()
        cpu.is_faster.cache_clear()

"""Which calls of a prepared model are seen op by op where 16 bit is emulated: not those that never came to a large product."""

from __future__ import annotations

import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tests.binding.test_product_modes import Other
from tests.binding.test_products import LOW, Calls, needs_emulation, prepared
from torch import Tensor, nn

from mezzo.casting import products


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


class Chooses(nn.Module):
    """A layer of as many rows as it is told; `extra` is a product or attention beside it."""

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.layer, self.extra, self.rows = nn.Linear(64, 64), extra, 8

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x[: self.rows])
        if self.extra == "attention":
            heads = out.reshape(1, 1, -1, 64)
            out = out + F.scaled_dot_product_attention(heads, heads, heads)[0, 0]
        if self.extra == "large":
            wide = torch.ones(1024, 128, dtype=out.dtype)
            out = out + (wide @ wide.T).sum()
        return out


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each call whose ops were seen one by one."""
    found: list[bool] = []
    made = products.ProductMode.__init__

    def init(mode: products.ProductMode, counts: bool = False) -> None:
        made(mode, counts)
        found.append(counts)

    monkeypatch.setattr(products.ProductMode, "__init__", init)
    return found


@LOW
def test_a_model_of_small_products_is_watched_until_two_calls_agree(low: torch.dtype, watched: list[bool]) -> None:
    """Then it is no longer seen op by op, for calls of these shapes and in this mode; the bits are those of a watched call."""
    needs_emulation(low)
    model, x, other = prepared(Chooses(), low), torch.randn(300, 64), torch.randn(301, 64)
    results, seen = [], []
    for call, training in [(x, True)] * 4 + [(other, True)] * 3 + [(x, False)] * 3:
        results.append(model.train(training)(call))
        seen.append(len(watched))
    assert seen == [1, 2, 2, 2, 3, 4, 4, 5, 6, 6]
    assert all(torch.equal(one, results[0]) for one in [*results[:4], *results[7:]])
    fresh = pickle.loads(pickle.dumps(model))
    assert torch.equal(fresh(x), results[0])
    assert len(watched) == 7  # nothing is known of a copy's calls


@LOW
@pytest.mark.parametrize("extra", ["large", "attention"])
def test_a_model_with_something_to_take_is_always_watched(extra: str, low: torch.dtype, watched: list[bool]) -> None:
    needs_emulation(low)
    model, x = prepared(Chooses(extra), low), torch.randn(300, 64)
    for _ in range(4):
        model(x)
    assert watched == [True, False, False, False]  # nothing is counted any more


@LOW
def test_a_model_that_decides_by_itself_how_much_it_multiplies_is_watched(
    low: torch.dtype, watched: list[bool]
) -> None:
    needs_emulation(low)
    model, x = prepared(Chooses(), low), torch.randn(300, 64)
    for rows in (1, 5, 3, 9, 2):
        model.rows = rows
        model(x)
    assert len(watched) == 5


@LOW
def test_a_call_that_somebody_watched_tells_nothing(low: torch.dtype, calls: Calls) -> None:
    """A large product is left to torch then, and is none that was small."""
    needs_emulation(low)

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mode = nn.Linear(64, 64), Other()

        def forward(self, x: Tensor) -> Tensor:
            with self.mode if self.training else nullcontext():
                return self.layer(x)  # type: ignore[no-any-return]

    model = prepared(Seen(), low)
    for _ in range(4):
        model(torch.randn(300, 64))
    assert calls.count == 0
    model.mode = nullcontext()
    model(torch.randn(300, 64))
    assert calls.count == 1


@LOW
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_sequences_of_many_lengths_are_left_to_torch(layout: torch.layout, low: torch.dtype, calls: Calls) -> None:
    """Of which one kind has no shape that could be asked for."""
    needs_emulation(low)
    layer, rows = nn.Linear(64, 96), [torch.randn(30, 64), torch.randn(20, 64)]
    batch = torch.nested.nested_tensor(rows, layout=layout)
    with torch.autocast("cpu", low):
        want = layer(batch)
    model = prepared(layer, low, ", output=none")
    for _ in range(3):
        for one, other in zip(model(batch).unbind(), want.unbind(), strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
    assert calls.count == 0

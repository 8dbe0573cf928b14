"""Linear layers of few rows: the compiled product against fp64, where it is taken, and where it must not be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mezzo
from mezzo.kernels import registry, takes_small_linear
from mezzo.kernels.ops import linear as door
from mezzo.kernels.ops.linear import cpu

BF16 = torch.bfloat16
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index0/size")
needs_compiler = pytest.mark.skipif(
    registry.choose("linear", torch.device("cpu"), BF16).backend != "cpu", reason="no compiler"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SMALLEST", {False: 0, True: 0})


@pytest.fixture(params=[(64, False), (64, True), (16, False)], ids=["lanes, 32 KB", "lanes, 48 KB", "tiles"])
def most_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of the kernel that runs: lanes everywhere, for either size of cache, tiles where the processor has them."""
    rows, has_large_cache = request.param
    if rows == 16 != cpu.most_rows():
        pytest.skip("the processor multiplies no tiles")
    monkeypatch.setattr(cpu, "most_rows", lambda: rows)
    monkeypatch.setattr(cpu, "has_large_cache", lambda: has_large_cache)
    return int(rows)


def operands(rows: tuple[int, ...], inner: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*rows, inner).to(BF16), torch.randn(width, inner).to(BF16), torch.randn(width).to(BF16)


ROWS = [*[(n,) for n in range(1, 10)], (16,), (), (2, 3), (1, 1), (4, 5), (63,)]


@needs_compiler
@pytest.mark.parametrize(("inner", "width"), [(1, 1), (15, 3), (64, 33), (129, 70), (6200, 55), (352, 64), (1600, 203)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_the_product_rounded_once(inner: int, width: int, has_bias: bool, most_rows: int) -> None:
    for rows in ROWS:
        if math.prod(rows) <= most_rows:
            check_is_rounded_once(rows, inner, width, has_bias)


def check_is_rounded_once(rows: tuple[int, ...], inner: int, width: int, has_bias: bool) -> None:
    x, weight, bias = operands(rows, inner, width)
    given = (x, weight, bias if has_bias else None)
    found, exact = cpu.linear(*given), F.linear(*[None if t is None else t.double() for t in given])
    sums = F.linear(*[None if t is None else t.double().abs() for t in given])
    assert found.shape == (*rows, width)
    assert found.dtype is BF16
    allowed = torch.finfo(BF16).eps / 2 * exact.abs() + (inner + 1) * torch.finfo(torch.float32).eps * sums
    assert bool(((found.double() - exact).abs() <= allowed).all()), rows


@needs_compiler
@pytest.mark.skipif(not CACHE.exists(), reason="the system does not say what its caches hold")
def test_the_cache_is_as_large_as_the_system_says() -> None:
    assert cpu.has_large_cache() == (int(CACHE.read_text().strip().rstrip("K")) >= 48)


@needs_compiler
def test_inf_and_nan_arrive_where_they_belong(most_rows: int) -> None:
    x, weight, _ = operands((3,), 40, 5)
    x[1, 7], weight[4, 39] = torch.inf, torch.nan
    found = cpu.linear(x, weight)
    assert found[0, :4].isfinite().all()
    assert found[1, :4].isinf().all()
    assert found[:, 4].isnan().all()


@needs_compiler
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    x, weight, bias = operands((3,), 100, 200)
    once = cpu.linear(x, weight, bias)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(once, cpu.linear(x, weight, bias))


class Subclass(Tensor):
    pass


REFUSED: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]] = {
    "fp32 weight": lambda x, w, b: (x, w.float(), b),
    "fp32 rows": lambda x, w, b: (x.float(), w, b),
    "another bias": lambda x, w, b: (x, w, b.float()),
    "many rows": lambda x, w, b: (x.expand(65, -1).contiguous(), w, b),
    "no rows": lambda x, w, b: (x[:0], w, b),
    "a transposed weight": lambda x, w, b: (x, w.t().contiguous().t(), b),
    "rows with gaps": lambda x, w, b: (torch.cat([x, x], 1)[:, ::2].expand(2, -1), w, b),
    "a weight of one dimension": lambda x, w, b: (x, w[0], None),
    "another width": lambda x, w, b: (x[:, :-1].contiguous(), w, b),
    "a bias of another length": lambda x, w, b: (x, w, b[:-1]),
    "a subclass": lambda x, w, b: (x.as_subclass(Subclass), w, b),
    "meta": lambda x, w, b: (x.to("meta"), w.to("meta"), b.to("meta")),
    "a gradient to come": lambda x, w, b: (x, torch.nn.Parameter(w), b),
}


@needs_compiler
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_for_is_left_to_torch(name: str) -> None:
    x, weight, bias = operands((1,), 32, 16)
    assert takes_small_linear(x, weight, bias)
    assert takes_small_linear(input=x, weight=weight)
    assert not takes_small_linear(*REFUSED[name](x, weight, bias))


def test_a_weight_beyond_its_storage_is_left_to_torch() -> None:
    x, weight, _ = operands((1,), 32, 16)
    weight.untyped_storage().resize_(64)
    assert not takes_small_linear(x, weight)


def test_who_watches_ops_sees_torchs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, _ = operands((1,), 32, 16)
    seen: list[bool] = []
    with FlopCounterMode(display=False):
        seen.append(takes_small_linear(x, weight))
    torch.func.vmap(lambda row: seen.append(takes_small_linear(row, weight)) or row)(x)
    with pytest.warns((DeprecationWarning, FutureWarning)):  # of torch.jit, by version
        torch.jit.trace(lambda row: seen.append(takes_small_linear(row, weight)) or row * 1, (x,), check_trace=False)
    assert seen and not any(seen)


class Calls:
    """Counts the products that the compiled layer takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr("mezzo.casting.mode.small_linear", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.count += 1
        return door.small_linear(*args, **kwargs)


@needs_compiler
def test_a_region_that_keeps_weights_takes_it_and_sees_a_weight_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, layer, x = Calls(monkeypatch), torch.nn.Linear(64, 48), torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(3):
            with mezzo.autocast("cpu", torch.bfloat16, cache="persistent"):
                found = layer(x)
            exact = F.linear(*[t.to(BF16).double() for t in (x, layer.weight, layer.bias)])
            torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
            layer.weight.mul_(-2.0)
    assert calls.count == 3


def test_other_regions_and_training_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, layer, x = Calls(monkeypatch), torch.nn.Linear(64, 48), torch.randn(2, 64)
    with torch.no_grad(), mezzo.autocast("cpu", torch.bfloat16, policy="bf16, ops=mezzo"):
        layer(x)
    with mezzo.autocast("cpu", torch.bfloat16, cache="persistent"):
        layer(x).sum().backward()
    assert calls.count == 0
    assert layer.weight.grad is not None


@needs_compiler
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_prepared_model_in_inference_takes_it(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = Calls(monkeypatch), torch.randn(2, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 4)).eval()
    with torch.no_grad():
        exact = model(x)
    mezzo.prepare(model, policy=policy, cache="persistent")
    with torch.inference_mode():
        found = model(x)
    assert calls.count == 2
    torch.testing.assert_close(found, exact, rtol=2**-5, atol=2**-5)


def test_without_a_compiled_kernel_torchs_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands((1,), 32, 16)
    monkeypatch.setattr(registry, "compiled", lambda op: None)
    assert not takes_small_linear(x, weight, bias)


@needs_compiler
def test_rows_beyond_what_this_processor_reads_faster_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.most_rows() in ((32, 64) if registry.is_emulated(BF16) else (4, 8, 16))
    monkeypatch.setattr(cpu, "most_rows", lambda: 4)
    found = [takes_small_linear(*operands((rows,), 32, 16)) for rows in (1, 4, 5, 8)]
    assert found == [True, True, False, False]


@needs_compiler
def test_beside_emulation_it_takes_more_rows_the_most_of_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other ways are torch's emulation, and fp32 on a weight that is widened anew."""
    monkeypatch.setattr(registry, "is_emulated", lambda dtype: True)
    monkeypatch.setattr(door, "SMALLEST", {False: 2**20, True: 2**16})
    monkeypatch.setattr(door, "LARGE", 2**18)
    monkeypatch.setattr(cpu, "most_rows", lambda: 64)

    def taken(width: int) -> list[bool]:
        return [takes_small_linear(*operands((rows,), width, width)) for rows in (1, 32, 33, 64, 65)]

    assert taken(128) == [False] * 5
    assert taken(256) == [True, True, False, False, False]
    assert taken(512) == [True, True, True, True, False]

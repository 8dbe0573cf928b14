"""Silent traps of casting: S1, S2, S13 to S16, S19 to S21, S27 to S29. `stock` shows the trap in torch, `ours` its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tolerance import relative
from tests.torch_versions import traces_regions
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import mezzo
from mezzo.policy.table import op_table, registered

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Region = Callable[[], AbstractContextManager[Any]]


def stock_region() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=BF16)


def our_region() -> AbstractContextManager[Any]:
    return mezzo.autocast("cpu", dtype=BF16)


def last_loss(outer: Region, inner: Region) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True)
    with outer():
        for _ in range(40):
            with inner():
                loss = F.mse_loss(net(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def test_s1_stock_a_loop_inside_one_region_is_frozen() -> None:
    assert last_loss(stock_region, nullcontext) > 10 * last_loss(nullcontext, stock_region)


def test_s1_ours_it_learns_as_with_a_region_a_forward() -> None:
    assert last_loss(our_region, nullcontext) == last_loss(nullcontext, our_region)


def after_swap(region: Region) -> float:
    linear, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with region():
        linear(x)
        with torch.no_grad():
            linear.weight.zero_()
        return float(linear(x).detach().abs().max())


def test_s1b_stock_swapped_weights_are_not_seen() -> None:
    assert after_swap(stock_region) > 0


def test_s1b_ours_swapped_weights_are_seen() -> None:
    assert after_swap(our_region) == 0


def keeps_graph(region: Region) -> bool:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with region():
        with torch.no_grad():
            linear(x)
        return bool(linear(x).requires_grad)


def test_s2_stock_is_mended_upstream() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert keeps_graph(stock_region)


def test_s2_ours_the_graph_is_there() -> None:
    assert keeps_graph(our_region)
    assert keeps_graph(lambda: mezzo.autocast("cpu", policy="bf16, ops=mezzo"))


def phases(region: AbstractContextManager[Any]) -> torch.Tensor:
    with region:
        return torch.arange(4096.0)[:, None] @ torch.ones(1, 1)


def test_s13_stock_positions_collapse_in_16_bit() -> None:
    assert phases(stock_region()).float().unique().numel() < 1000


def test_s13_ours_an_fp32_rule_keeps_them_and_lint_names_the_place() -> None:
    assert phases(mezzo.autocast("cpu", policy="bf16, op:matmul=fp32")).unique().numel() == 4096

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 4)

        def forward(self, positions: torch.Tensor) -> torch.Tensor:
            inverse = 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64))
            return self.proj((positions.float()[:, None] @ inverse[None]).cos()).sum()

    report = mezzo.diagnose.lint(Rotary(), torch.arange(4096), policy="bf16")
    assert "integers-in-16-bit" in str(report)


def threaded(model: nn.Module, region: Region) -> torch.dtype:
    seen: list[torch.dtype] = []
    with region():
        thread = threading.Thread(target=lambda: seen.append(model(torch.randn(2, 4)).dtype))
        thread.start()
        thread.join()
    return seen[0]


def test_s14_stock_a_worker_thread_runs_fp32() -> None:
    assert threaded(nn.Linear(4, 4), stock_region) is FP32


def test_s14_ours_a_prepared_model_carries_its_policy() -> None:
    assert threaded(mezzo.prepare(nn.Linear(4, 4), None, "bf16, output=none").model, nullcontext) is BF16


def test_s15_stock_vmap_is_not_cast() -> None:
    with stock_region():
        assert torch.vmap(nn.Linear(4, 4))(torch.randn(3, 2, 4)).dtype is FP32


def test_s15_ours_a_prepared_model_is_cast_under_vmap() -> None:
    model = mezzo.prepare(nn.Linear(4, 4), None, "bf16, output=none").model
    assert torch.vmap(model)(torch.randn(3, 2, 4)).dtype is BF16


def island(region: Callable[..., AbstractContextManager[Any]], compiled: bool) -> torch.Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    weight = nn.Linear(64, 64).weight
    h = torch.randn(4, 64, dtype=BF16, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        with region("cpu", enabled=False):
            return x.float() @ weight.float().T

    run = torch.compile(inner, backend="aot_eager") if compiled else inner
    with region("cpu", dtype=BF16):
        out = run(h).sum()
    out.backward()
    assert weight.grad is not None
    return weight.grad


def test_s16_stock_a_compiled_backward_ignores_the_fp32_island() -> None:
    assert not torch.equal(island(torch.autocast, compiled=False), island(torch.autocast, compiled=True))


@traces_regions
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_s16_ours_a_bound_fp32_rule_holds_in_compiled_backward() -> None:
    def gradients(compiled: bool) -> list[torch.Tensor]:
        """Return the gradients of the layer before the island, then those of the island."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16, module:1=fp32")
        run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        amp.backward(run(torch.randn(4, 64)).float().sum())
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    eager, compiled = gradients(compiled=False), gradients(compiled=True)
    assert len(eager) == len(compiled) == 4
    for one, other in zip(eager[:2], compiled[:2], strict=True):  # eager may be a kernel of mezzo's, which rounds less
        torch.testing.assert_close(one, other, rtol=relative(BF16), atol=relative(BF16) * float(one.abs().max()))
    assert all(torch.equal(a, b) for a, b in zip(eager[2:], compiled[2:], strict=True))


def test_s19_stock_a_request_is_dropped_without_a_word() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with stock_region():
        assert linear.double()(x.double()).dtype is torch.float64
    torch.set_autocast_enabled("cuda", True)
    try:
        assert nn.Linear(4, 4)(x).dtype is FP32
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_s19_ours_it_is_refused_or_reported() -> None:
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="no cuda device, so the region is disabled"):
            mezzo.autocast("cuda", dtype=FP16)
        with pytest.raises(mezzo.errors.RegionError, match="no cuda device"):
            mezzo.autocast("cuda", dtype=FP16, strict=True)
    with pytest.raises(mezzo.errors.PolicyError, match=r"fp64|float64|double"):
        mezzo.prepare(nn.Linear(4, 4).double(), None, "bf16")


def test_s20_stock_a_16_bit_accumulator_stops_counting() -> None:
    total = torch.zeros((), dtype=BF16)
    for _ in range(1000):
        total += 1.0
    assert total.item() == 256


def test_s20_ours_lint_names_the_accumulator() -> None:
    def running_sum(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=BF16)
        for row in batch:
            total += model(row).sum()
        return total.float()

    report = mezzo.diagnose.lint(nn.Linear(4, 4), torch.randn(3, 4), running_sum, policy="bf16")
    assert "half-accumulator" in str(report)


def test_s21_stock_the_cpu_list_is_not_the_cuda_list() -> None:
    probe = {"softmax", "layer_norm", "sum", "pow", "exp", "cumsum"}
    assert probe <= registered("cuda") and not probe & registered("cpu")


def test_s21_ours_one_table_for_all_devices() -> None:
    assert op_table("mezzo", "cpu") == op_table("mezzo", "cuda") == op_table("mezzo", "mps")


def recomputed(model: nn.Module, region: Region, **how: Any) -> set[torch.dtype]:
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with region(), set_checkpoint_early_stop(False):
        loss = checkpoint(model, torch.randn(2, 4, requires_grad=True), **how).float().sum()
    loss.backward()
    assert len(seen) == 2
    return set(seen)


class OwnMode(torch.overrides.TorchFunctionMode):
    """A function mode of a user's: it is not there when backward recomputes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = tuple(a.to(BF16) if isinstance(a, torch.Tensor) else a for a in args)
        return func(*args, **(kwargs or {}))


def test_s27_stock_recompute_loses_a_mode() -> None:
    assert recomputed(nn.Linear(4, 4), OwnMode, use_reentrant=True) == {BF16, FP32}


@pytest.mark.parametrize("reentrant", [True, False])
def test_s27_ours_recompute_runs_the_dtype_of_forward(reentrant: bool) -> None:
    model = mezzo.prepare(nn.Linear(4, 4), None, "bf16, ops=mezzo, output=none").model
    assert recomputed(model, nullcontext, use_reentrant=reentrant) == {BF16}


def test_s27_ours_a_part_checkpointed_from_outside() -> None:
    model = mezzo.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), None, "bf16, output=none").model
    assert recomputed(model[0], nullcontext, use_reentrant=False) == {BF16}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("region", "is_stale"), [(torch.autocast, True), (mezzo.autocast, False)], ids=["stock", "ours"]
)
def test_s28_a_captured_graph_replays_stale_casts_or_casts_anew(region: Any, is_stale: bool) -> None:
    linear, x = nn.Linear(8, 8, bias=False).cuda(), torch.randn(4, 8, device="cuda")
    with torch.no_grad(), region("cuda", dtype=BF16):
        linear(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x)
        linear.weight.zero_()
        graph.replay()
        assert bool(y.abs().max() > 0) == is_stale


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("region", [torch.autocast, mezzo.autocast], ids=["stock", "ours"])
def test_s29_graphs_of_two_dtypes_keep_apart(region: Any) -> None:
    torch._dynamo.reset()
    linear = nn.Linear(4, 4)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    for dtype in (BF16, FP16, BF16):
        with region("cpu", dtype=dtype):
            assert compiled(x).dtype is dtype and torch.equal(compiled(x), linear(x))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_s34_ours_emulation_does_not_count_as_support(dtype: torch.dtype) -> None:
    from mezzo.formats import native_support

    flags = {BF16: ("avx512_bf16", "amx_bf16"), FP16: ("amx_fp16",)}[dtype]
    with open("/proc/cpuinfo", encoding="ascii") as cpu:
        have = any(flag in cpu.read() for flag in flags)
    assert native_support("cpu", dtype).native == have


def test_s34_stock_says_yes_for_emulated_types() -> None:
    """The CPU computes fp16 without units for it, and torch's region says nothing."""
    with torch.autocast("cpu", dtype=FP16):
        assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype is FP16

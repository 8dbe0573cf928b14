"""Casts are made once where that is right, and never stale (SPEC A8; traps S1, S1b, S2)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import Policy
from mezzo.casting import autocast
from mezzo.casting.cast_cache import weight_casts

BF16 = torch.bfloat16
MEZZO = Policy(compute=BF16, ops="mezzo")
REGIONS = {
    "dispatcher": {"dtype": BF16},
    "mode": {"policy": MEZZO},
    "persistent": {"policy": MEZZO, "cache": "persistent"},
}


class Casts(TorchDispatchMode):
    """Counts what is written in 16 bit from wider data: fresh casts, and copies into existing memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.fresh, self.refreshed = shape, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if (
            func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)
            and out.dtype is BF16
            and tuple(out.shape) == self.shape
        ):
            self.fresh += 1
        if func is torch.ops.aten.copy_.default and args[0].dtype is BF16 and tuple(out.shape) == self.shape:
            self.refreshed += 1
        return out


@pytest.fixture(autouse=True)
def no_shadows() -> None:
    weight_casts.clear()


def uses(
    region: dict[str, object], run: Callable[[nn.Linear], None], linear: nn.Linear | None = None
) -> tuple[int, int]:
    linear = linear or nn.Linear(6, 5, bias=False)
    with Casts((5, 6)) as casts, autocast("cpu", **region):
        run(linear)
    return casts.fresh, casts.refreshed


X = torch.randn(3, 6)


def three(linear: nn.Linear) -> None:
    for _ in range(3):
        linear(X)


def without_grad(linear: nn.Linear) -> None:
    with torch.no_grad():
        three(linear)


def inference(linear: nn.Linear) -> None:
    with torch.inference_mode():
        three(linear)


def frozen(linear: nn.Linear) -> None:
    linear.requires_grad_(False)
    three(linear)


def through_a_view(linear: nn.Linear) -> None:
    wide = nn.Parameter(torch.randn(10, 6))
    for _ in range(3):
        nn.functional.linear(X, wide[:5])


def micro_batches(linear: nn.Linear) -> None:
    for _ in range(3):
        linear(X).float().sum().backward()


@pytest.mark.parametrize(
    ("run", "mode", "persistent"),
    [
        (three, 1, 1),
        (without_grad, 1, 1),
        (inference, 1, 1),
        (frozen, 1, 1),
        (through_a_view, 3, 1),
        (micro_batches, 1, 1),
    ],
)
def test_casts_are_counted(run: Callable[[nn.Linear], None], mode: int, persistent: int) -> None:
    assert uses(REGIONS["dispatcher"], run) == (3, 0), "torch's cache is off: one cast a use"
    assert uses(REGIONS["mode"], run) == (mode, 0)
    assert uses({**REGIONS["mode"], "cache_enabled": False}, run) == (3, 0)
    assert uses(REGIONS["persistent"], run) == (persistent, 0)


def test_a_shadow_outlives_the_region_and_is_refreshed_in_place() -> None:
    linear = nn.Linear(6, 5, bias=False)
    assert uses(REGIONS["persistent"], three, linear) == (1, 0)
    assert uses(REGIONS["persistent"], three, linear) == (0, 0)
    with torch.no_grad():
        linear.weight.mul_(2)
    assert uses(REGIONS["persistent"], three, linear) == (0, 1)
    assert weight_casts.nbytes() == linear.weight.numel() * 2


def test_a_shadow_goes_with_its_weight() -> None:
    linear = nn.Linear(6, 5, bias=False)
    uses(REGIONS["persistent"], without_grad, linear)
    assert weight_casts.nbytes() > 0
    del linear
    gc.collect()
    assert weight_casts.nbytes() == 0


def test_query_key_and_value_share_one_cast_of_their_input() -> None:
    q, k, v = (nn.Linear(6, 6, bias=False) for _ in range(3))
    with Casts((3, 6)) as casts, autocast("cpu", policy=MEZZO):
        q(X), k(X), v(X)
    assert casts.fresh == 1


def write_in_place(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.zero_()


def write_through_data(linear: nn.Linear) -> None:
    linear.weight.data.zero_()


def swap_data(linear: nn.Linear) -> None:
    linear.weight.data = torch.zeros_like(linear.weight)


def write_through_numpy(linear: nn.Linear) -> None:
    linear.weight.detach().numpy()[:] = 0


def load_state(linear: nn.Linear) -> None:
    linear.load_state_dict({"weight": torch.zeros(5, 6)})


def optimizer_step(linear: nn.Linear) -> None:
    linear.weight.grad = linear.weight.detach().clone()
    torch.optim.SGD(linear.parameters(), lr=1.0).step()


def fused_optimizer_step(linear: nn.Linear) -> None:
    linear.weight.grad = linear.weight.detach().clone()
    torch.optim.SGD(linear.parameters(), lr=1.0, fused=True).step()


def foreach_copy(linear: nn.Linear) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(linear.parameters()), [torch.zeros(5, 6)])


WRITES = [write_in_place, write_through_data, swap_data, write_through_numpy, load_state, optimizer_step,
          fused_optimizer_step, foreach_copy]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_never_stale_inside_one_region(name: str, write: Callable[[nn.Linear], None], grad: bool) -> None:
    linear = nn.Linear(6, 5, bias=False)
    with autocast("cpu", **REGIONS[name]), torch.set_grad_enabled(grad):
        assert linear(X).abs().max() > 0
        with torch.enable_grad():
            write(linear)
        assert linear(X).abs().max() == 0


@pytest.mark.parametrize("name", REGIONS)
def test_an_alias_taken_early_and_written_late(name: str) -> None:
    linear = nn.Linear(6, 5, bias=False)
    with autocast("cpu", **REGIONS[name]):
        alias = linear.weight.data
        linear(X)
        alias.zero_()
        assert linear(X).abs().max() == 0


@pytest.mark.parametrize("name", REGIONS)
def test_a_forward_without_gradients_leaves_the_next_one_its_graph(name: str) -> None:
    linear = nn.Linear(6, 5)
    with autocast("cpu", **REGIONS[name]):
        with torch.no_grad():
            linear(X)
        y = linear(X)
    y.float().sum().backward()
    want = X.to(BF16).float().sum(0).expand(5, 6)
    assert linear.weight.grad is not None
    assert torch.equal(linear.weight.grad, want.to(BF16).float())


@pytest.mark.parametrize("name", REGIONS)
def test_regions_of_other_dtypes_keep_apart(name: str) -> None:
    linear = nn.Linear(6, 5)
    kind = dict(REGIONS[name])
    other = {
        **kind,
        **({"dtype": torch.float16} if "dtype" in kind else {"policy": MEZZO.replace(compute=torch.float16)}),
    }
    with autocast("cpu", **kind):
        a = linear(X)
        with autocast("cpu", **other):
            b = linear(X)
        c = linear(X)
    assert (a.dtype, b.dtype, c.dtype) == (BF16, torch.float16, BF16)
    assert torch.equal(a, c)


@pytest.mark.parametrize("name", REGIONS)
def test_a_training_loop_inside_one_region_learns(name: str) -> None:
    def train(inside: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        x = torch.randn(256, 8)
        y = x.sum(1, keepdim=True)
        losses = []

        def step() -> None:
            loss = nn.functional.mse_loss(net(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        if inside:
            with autocast("cpu", **REGIONS[name]):
                for _ in range(40):
                    step()
        else:
            for _ in range(40):
                with autocast("cpu", **REGIONS[name]):
                    step()
        return losses

    inside = train(inside=True)
    assert inside == train(inside=False)
    assert inside[-1] < inside[0] / 10


@pytest.mark.parametrize("name", REGIONS)
def test_gradients_of_a_tied_weight_are_summed_in_its_own_dtype(name: str) -> None:
    weight = nn.Parameter(torch.randn(6, 6))

    def grad(**region: object) -> torch.Tensor:
        weight.grad = None
        with autocast("cpu", **region):
            y = nn.functional.linear(nn.functional.linear(X, weight), weight)
        y.float().square().sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    assert torch.equal(grad(**REGIONS[name]), grad(**REGIONS["dispatcher"]))

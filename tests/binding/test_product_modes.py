"""Large products where 16 bit is emulated: inside checkpoints, threads and other engines, and what is left to torch."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.binding.test_products import (
    LOW,
    NAMES,
    OPS,
    Calls,
    distance,
    leave_linear_layers_to_torch,
    needs_emulation,
    prepared,
    rounded,
    trained,
)
from tests.tolerance import relative
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.casting import products


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


class Block(nn.Module):
    """Two layers and a product without a module; `how` is plain, checkpoint or reentrant."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(64, 96, bias=False), nn.Linear(96, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def main(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))) @ self.weight  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.main(x)
        if self.how == "contexts":
            return checkpoint(self.main, x, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)  # type: ignore[no-any-return]
        return checkpoint(self.main, x, use_reentrant=self.how == "reentrant")  # type: ignore[no-any-return]


@LOW
@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "contexts"])
@pytest.mark.parametrize("more", ["", ", ops=mezzo"])
def test_a_checkpoint_recomputes_the_same(how: str, more: str, low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    model, x = Block(how), torch.randn(4, 32, 64)
    plain = Block()
    plain.load_state_dict(model.state_dict())
    want = trained(prepared(plain, low, more), x)
    found = trained(prepared(model, low, more), x)
    assert calls.count == 3 + 6
    assert all(map(torch.equal, found, want))


@LOW
@pytest.mark.parametrize(
    ("more", "cache"), [(", ops=mezzo", "region"), ("", "persistent"), (", op:softmax=fp32", "region")]
)
def test_the_function_mode_takes_them_too(more: str, cache: Any, low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    model, x = Block(), torch.randn(4, 32, 64)
    want = trained(prepared(copy.deepcopy(model), low), x)
    found = trained(mezzo.prepare(model, None, NAMES[low] + more, cache=cache).model, x)
    assert calls.count == 6
    for one, other in zip(found, want, strict=True):
        assert distance(one, other) <= 4 * relative(low) * float(other.norm())


@LOW
def test_evaluation_training_and_inference_mode_give_the_same(low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    model, x = prepared(Block(), low), torch.randn(4, 32, 64)
    with torch.inference_mode():
        first = model(x)
    with torch.no_grad():
        second = model(x)
    third = trained(model, x)[0]
    assert calls.count == 9
    assert torch.equal(first, second)
    assert torch.equal(second, third)


CALLS = {
    "mat2 by name": lambda x, w, b: torch.addmm(b, x, mat2=w),
    "matrices by name": lambda x, w, b: torch.addmm(b, mat1=x, mat2=w),
    "weight by name": lambda x, w, b: F.linear(x, weight=w.t(), bias=b),
    "all by name": lambda x, w, b: F.linear(input=x, weight=w.t(), bias=b),
    "other by name": lambda x, w, b: torch.matmul(x, other=w) + b,
    "factors first": lambda x, w, b: torch.addmm(0.5, b, 2.0, x, w),
}


@LOW
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("how", CALLS)
def test_it_is_called_in_any_way(how: str, low: torch.dtype) -> None:
    needs_emulation(low)

    class Called(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return CALLS[how](x, w, b)

    given = torch.randn(96, 64), torch.randn(64, 96) / 8, torch.randn(96)
    with torch.autocast("cpu", low):
        want = CALLS[how](*given)
    found = prepared(Called(), low, ", output=none")(*given)
    assert found.dtype is want.dtype
    assert distance(found, want) <= 4 * relative(low) * float(want.float().norm())


@LOW
@pytest.mark.usefixtures("calls")
def test_a_call_that_torch_refuses_has_torchs_words(low: torch.dtype) -> None:
    needs_emulation(low)
    model, x = nn.Sequential(nn.Conv2d(8, 16, 3)), torch.randn(4096)
    with pytest.raises(RuntimeError, match="to conv2d"):
        model(x)
    with pytest.raises(RuntimeError, match="to conv2d"):
        prepared(model, low)(x)


@LOW
def test_a_region_that_keeps_casts_takes_them(low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    model, x = Block(), torch.randn(4, 32, 64)
    with torch.no_grad():
        want = prepared(copy.deepcopy(model), low, ", output=none")(x)
        for _ in range(2):
            with mezzo.autocast("cpu", low, cache="persistent"):
                found = model(x)
            assert torch.equal(found, want)
    assert calls.count == 9
    assert mezzo.casting.weight_casts.nbytes() > 0


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@LOW
@pytest.mark.parametrize("who", ["no module rules", "region", "watcher", "few rows"])
def test_the_rest_is_torchs_to_the_bit(who: str, low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    model, x = nn.Linear(64, 96), torch.randn(*{"few rows": (1, 64)}.get(who, (96, 64)))
    if who == "few rows":
        model = nn.Linear(512, 512)
        x = torch.randn(4, 512)
    theirs = copy.deepcopy(model)
    with torch.no_grad():
        with torch.autocast("cpu", low):
            want = theirs(x)
        if who == "region":
            with mezzo.autocast("cpu", low):
                found = model(x)
        elif who == "watcher":
            ours = prepared(model, low, ", output=none")
            with Other():
                found = ours(x)
        else:
            found = prepared(model, low, ", output=none" + (", modules=none" if who == "no module rules" else ""))(x)
    assert calls.count == 0
    assert torch.equal(found, want)


@LOW
@pytest.mark.parametrize("inside", ["a rule", "a nested region"])
def test_what_is_said_to_be_fp32_is_fp32(inside: str, low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)

    class Nested(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    model, x = nn.Sequential(nn.Linear(64, 96) if inside == "a rule" else Nested(64, 96)), torch.randn(96, 64)
    want = F.linear(x, model[0].weight, model[0].bias)  # type: ignore[arg-type]
    found = prepared(model, low, ", module:0=fp32" if inside == "a rule" else "")(x)
    assert torch.equal(found, want)
    assert calls.count == 0


@LOW
@pytest.mark.usefixtures("calls")
def test_overflow_is_that_of_the_dtype(low: torch.dtype) -> None:
    needs_emulation(low)
    model, x = nn.Linear(64, 96, bias=False), torch.full((96, 64), 200.0)
    nn.init.constant_(model.weight, 200.0)
    found = prepared(model, low)(x)
    assert found.isinf().all() if low is torch.float16 else found.isfinite().all()


@LOW
@pytest.mark.parametrize("op", ["Linear", "linear", "Conv2d", "matmul"])
@pytest.mark.usefixtures("calls")
def test_gradients_of_gradients_are_torchs(op: str, low: torch.dtype) -> None:
    needs_emulation(low)
    torch.manual_seed(0)
    make, shape = OPS[op]
    model, x = make(), torch.randn(shape)

    def twice(model: nn.Module, x: Tensor, low: torch.dtype | None = None) -> Tensor:
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            out = model(given)
        (grad,) = torch.autograd.grad(out.to(x.dtype).sin().sum(), given, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), given)[0]

    exact = twice(rounded(model, low), x.to(low).double())
    theirs = twice(copy.deepcopy(model), x, low)
    ours = twice(prepared(model, low), x)
    assert distance(ours, exact) <= max(1.2 * distance(theirs, exact), 4 * relative(low) * float(exact.norm()))


@LOW
@pytest.mark.usefixtures("calls")
def test_an_operand_that_is_written_before_backward_is_an_error_as_in_torch(low: torch.dtype) -> None:
    needs_emulation(low)
    for make, shape in (OPS["Linear"], OPS["Conv2d"]):
        model, x = prepared(make(), low), torch.randn(shape)
        out = model(x.requires_grad_())
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@LOW
def test_a_batch_may_be_written_before_backward(low: torch.dtype, calls: Calls) -> None:
    """As under torch.autocast, whose backward has a cast of it."""
    needs_emulation(low)

    class Both(nn.Linear):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]  # two operands
            return super().forward(x) @ other

    model, x, other = prepared(Both(64, 96), low), torch.randn(96, 64), torch.randn(96, 64)
    grads = []
    for overwrites in (False, True):
        held = other.clone()
        out = model(x.clone(), held)
        if overwrites:
            held.zero_()
        model.zero_grad()
        out.sum().backward()
        grads.append(model.weight.grad)
    assert calls.count == 4
    assert torch.equal(*grads)


@LOW
@pytest.mark.usefixtures("calls")
def test_threads_have_memory_of_their_own(low: torch.dtype) -> None:
    needs_emulation(low)
    model, found = prepared(Block(), low), []
    batches = [torch.randn(4, 32, 64) for _ in range(4)]
    want = [trained(copy.deepcopy(model), x) for x in batches]

    def work(x: Tensor, to: list[list[Tensor]]) -> None:
        for _ in range(5):
            to.append(trained(copy.deepcopy(model), x))

    for x in batches:
        found.append((threading.Thread(target=work, args=(x, results := [])), results))
    for thread, _ in found:
        thread.start()
    for (thread, results), wanted in zip(found, want, strict=True):
        thread.join()
        assert len(results) == 5
        assert all(all(map(torch.equal, one, wanted)) for one in results)


@LOW
@pytest.mark.parametrize("is_large", [True, False])
def test_small_products_are_torchs(is_large: bool, low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row more and the sums are fp32's."""
    needs_emulation(low)
    leave_linear_layers_to_torch(monkeypatch)
    rows = products.SMALLEST[low] // 128**2 - (not is_large)
    model, x = nn.Linear(128, 128), torch.randn(rows, 128)
    with torch.no_grad():
        with torch.autocast("cpu", low):
            want = model(x)
        with torch.autocast("cpu", enabled=False):
            weight, bias = (one.to(low).float() for one in model.parameters())
            wide = F.linear(x.to(low).float(), weight, bias).to(low)
        found = prepared(copy.deepcopy(model), low, ", output=none")(x)
    assert torch.equal(found, wide if is_large else want)


@LOW
def test_a_part_that_is_called_alone_takes_them_too(low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    model = prepared(Block(), low)
    model.first(torch.randn(128, 64))  # type: ignore[operator]
    assert calls.count == 1


@LOW
@pytest.mark.usefixtures("calls")
def test_an_error_leaves_torchs_state_as_it_was(low: torch.dtype) -> None:
    needs_emulation(low)
    model = prepared(nn.Sequential(nn.Linear(64, 96)), low)
    with pytest.raises(Exception, match=r"shape|size"):
        model(torch.randn(128, 65))
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.overrides._get_current_function_mode_stack()
    model(torch.randn(128, 64))

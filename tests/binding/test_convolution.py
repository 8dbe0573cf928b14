"""Convolutions of prepared models on the CPU: where the gradient of the weight is mezzo's, and where it is torch's to the bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.test_convolution import distance, needs_pairs
from tests.saved import through_a_file
from tests.tolerance import relative
from tests.torch_versions import traces_regions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.kernels.ops import convolution as door
from mezzo.kernels.ops.convolution import cpu

BF16 = torch.bfloat16


class Checkpointed(nn.Module):
    """Runs its `main`, in a checkpoint where asked; `how` is plain, checkpoint or reentrant."""

    main: Callable[[Tensor], Tensor]

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.main(x)
        return checkpoint(self.main, x, use_reentrant=self.how == "reentrant")  # type: ignore[no-any-return]


class Block(Checkpointed):
    """Convolutions as residual networks have them."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__(how)
        self.first, self.norm = nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64, track_running_stats=False)
        self.second = nn.Conv2d(64, 64, 3, padding=1)

    def main(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


class Calls:
    """Counts the gradients that the kernel computes, for pictures of any size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.run = 0, cpu.weight_gradient
        monkeypatch.setattr(cpu, "weight_gradient", self)
        monkeypatch.setattr(door, "SMALLEST", 0)

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.run(*args)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def prepared(model: nn.Module, policy: str = "bf16") -> nn.Module:
    return mezzo.prepare(model, None, policy).model


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of input and weights."""
    given = x.clone().requires_grad_()
    out = model(given)
    out.float().square().mean().backward()
    assert given.grad is not None
    return [out.detach(), given.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


def autocast(model: nn.Module, x: Tensor) -> list[Tensor]:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16):
                return model(x)  # type: ignore[no-any-return]

    return trained(Region(), x)


def check_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert torch.equal(ours[0], theirs[0].to(ours[0].dtype))
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one.dtype is other.dtype
        assert distance(one, other.double()) <= 4 * relative(BF16) * float(other.norm())


@needs_pairs
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_a_prepared_model_takes_it_inside_a_checkpoint_too(how: str, calls: Calls) -> None:
    model, x = Block(how), torch.randn(4, 32, 8, 8)
    theirs = autocast(copy.deepcopy(model), x)
    check_close(trained(prepared(model, "bf16, module:BatchNorm2d=bf16"), x), theirs)
    assert calls.count == 2


@needs_pairs
def test_a_copy_and_a_pickle_take_it_along(calls: Calls) -> None:
    model, x = prepared(Block()), torch.randn(4, 32, 8, 8)
    saved = through_a_file(model, weights_only=False)
    want = trained(copy.deepcopy(model), x)
    for other in (model, saved):
        assert all(map(torch.equal, trained(other, x), want))
    assert calls.count == 6


@needs_pairs
def test_micro_batches_add_up(calls: Calls) -> None:
    model, x = nn.Conv2d(16, 32, 3, padding=1), torch.randn(8, 16, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = mezzo.prepare(model, optimizer, "bf16")
    for part in x.split(4):
        amp.backward(amp.model(part).square().mean() / 2)
    wide_model = copy.deepcopy(amp.model).double()
    F.conv2d(x.double(), wide_model.weight, wide_model.bias, padding=1).square().mean().backward()  # type: ignore[arg-type,no-untyped-call]
    assert model.weight.grad is not None
    assert wide_model.weight.grad is not None
    assert distance(model.weight.grad, wide_model.weight.grad) <= 4 * relative(BF16) * float(
        wide_model.weight.grad.norm()
    )
    amp.step()
    assert calls.count == 2


class OwnForward(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1


def assigned(module: nn.Module, **attributes: Any) -> nn.Module:
    vars(module).update(attributes)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "groups": lambda: nn.Conv2d(32, 32, 3, groups=4),
    "dilation": lambda: nn.Conv2d(32, 32, 3, dilation=2),
    "reflecting": lambda: nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect"),
    "same": lambda: nn.Conv2d(32, 32, 3, padding="same"),
    "one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(32, 32, 3)),
    "transposed": lambda: nn.ConvTranspose2d(32, 32, 3),
    "a forward of its own": lambda: OwnForward(32, 32, 3),
    "a stride that was assigned": lambda: assigned(nn.Conv2d(32, 32, 3), stride=2),
    "a dilation that was assigned": lambda: assigned(nn.Conv2d(32, 32, 3), dilation=[2]),
    "frozen": lambda: nn.Sequential(nn.Conv2d(32, 32, 3).requires_grad_(False)),
}


@needs_pairs
@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_are_torchs_to_the_bit(name: str, calls: Calls) -> None:
    model, x = OTHERS[name](), torch.randn(4, 32, 8, 8)
    theirs = autocast(copy.deepcopy(model), x)
    assert all(map(torch.equal, trained(prepared(model), x), [theirs[0].float(), *theirs[1:]]))
    assert calls.count == 0


@needs_pairs
@pytest.mark.parametrize(
    "policy", ["bf16, modules=none", "fp32", "bf16, module:Conv2d=fp32", "bf16, module:Conv2d=bf16"]
)
def test_policies_that_say_otherwise_leave_it_to_torch(policy: str, calls: Calls) -> None:
    trained(prepared(nn.Conv2d(32, 32, 3), policy), torch.randn(4, 32, 8, 8))
    assert calls.count == 0


@needs_pairs
def test_regions_that_are_off_and_channels_last_leave_it_to_torch(calls: Calls) -> None:
    model, x = prepared(nn.Sequential(nn.Conv2d(32, 32, 3))), torch.randn(4, 32, 8, 8)
    trained(model, x.to(memory_format=torch.channels_last))
    with torch.no_grad():
        assert model(x).grad_fn is None
    assert calls.count == 0


@traces_regions
@needs_pairs
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_models_run_torchs(calls: Calls) -> None:
    model, x = Block(), torch.randn(4, 32, 8, 8)
    theirs = autocast(copy.deepcopy(model), x)
    compiled = torch.compile(prepared(model, "bf16, module:BatchNorm2d=bf16"), backend="aot_eager", fullgraph=True)
    check_close(trained(compiled, x), theirs)
    assert calls.count == 0


@needs_pairs
@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_convolution_that_is_replaced_later_runs(where: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, torchs = prepared(nn.Conv2d(32, 32, 3, padding=1)), [], nn.Conv2d._conv_forward

    def mine(self: nn.Conv2d, *args: Any) -> Tensor:
        seen.append(args)
        return torchs(self, *args)

    if where == "instance":
        model._conv_forward = functools.partial(mine, model)
    else:
        monkeypatch.setattr(nn.Conv2d, "_conv_forward", mine)
    trained(model, torch.randn(4, 32, 8, 8))
    assert len(seen) == 1 and calls.count == 0

"""Linear layers of prepared models on the CPU: where they run in mezzo's kernel, and where they are torch's to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.binding.test_convolution import Checkpointed, autocast, prepared, trained
from tests.kernels.test_convolution import IS_COMPILED
from tests.kernels.test_linear_training import needs_kernel
from tests.saved import through_a_file
from tests.tolerance import relative
from tests.torch_versions import traces_regions
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import mezzo
from mezzo.binding import own_ops
from mezzo.binding.forward import bound_of
from mezzo.binding.own_ops import run_convolution, run_linear
from mezzo.formats import native_support
from mezzo.kernels.ops import linear_training
from mezzo.kernels.ops.convolution import cpu as convolution_kernel
from mezzo.kernels.ops.linear_training import cpu

BF16 = torch.bfloat16


class Block(Checkpointed):
    """Two layers."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__(how)
        self.first, self.second = nn.Linear(64, 96, bias=False), nn.Linear(96, 32)

    def main(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))  # type: ignore[no-any-return]


class Calls:
    """Counts the gradients that the kernel computes, and its forwards, for layers of any size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.run, self.forwards, self.run_forward = 0, cpu.backward, 0, cpu.forward
        monkeypatch.setattr(cpu, "backward", self)
        monkeypatch.setattr(cpu, "forward", self.forward)
        for module in (own_ops, linear_training):
            monkeypatch.setattr(module, "SMALLEST_LINEAR", 0)

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.run(*args)

    def forward(self, *args: Any) -> Tensor:
        self.forwards += 1
        return self.run_forward(*args)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def check_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert float((one.float() - other.float()).norm()) <= 4 * relative(BF16) * float(other.float().norm())


@needs_kernel
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_a_prepared_model_takes_it_inside_a_checkpoint_too(how: str, calls: Calls) -> None:
    model, x = Block(how), torch.randn(4, 8, 64)
    theirs = autocast(copy.deepcopy(model), x)
    ours = trained(prepared(model), x)
    check_close(ours, theirs)
    assert [one.dtype for one in ours[1:]] == [one.dtype for one in theirs[1:]]
    assert calls.count == 2


class SelfAttention(Block):
    def main(self, x: Tensor) -> Tensor:
        q = self.first(x).unflatten(-1, (3, -1)).transpose(1, 2)
        return self.second(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@needs_kernel
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_layers_of_attention_take_it_too(how: str, calls: Calls) -> None:
    model, x = SelfAttention(how), torch.randn(4, 8, 64)
    theirs = autocast(copy.deepcopy(model), x)
    check_close(trained(prepared(model), x), theirs)
    assert calls.count == 2


@needs_kernel
def test_a_copy_and_a_pickle_take_it_along(calls: Calls) -> None:
    model, x = prepared(Block()), torch.randn(8, 64)
    saved = through_a_file(model, weights_only=False)
    want = trained(copy.deepcopy(model), x)
    for other in (model, saved):
        assert all(map(torch.equal, trained(other, x), want))
    assert calls.count == 6


@needs_kernel
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_micro_batches_add_up(policy: str, calls: Calls) -> None:
    model, x = nn.Linear(64, 32), torch.randn(32, 64)
    wide_model = copy.deepcopy(model).double()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    for part in x.split(16):
        amp.backward(amp.model(part).square().mean() / 2)
    wide_model(x.double()).square().mean().backward()
    for p, wide in zip(model.parameters(), wide_model.parameters(), strict=True):
        assert p.grad is not None
        assert wide.grad is not None
        error = float((p.grad.double() - wide.grad).norm())
        assert error <= 4 * relative(BF16) * float(wide.grad.norm())
    assert calls.count == 2


@needs_kernel
def test_tied_weights_get_the_gradients_of_both_uses(calls: Calls) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        model[2].weight = model[0].weight
        return model

    x = torch.randn(8, 64)
    check_close(trained(prepared(tied()), x), autocast(tied(), x))
    assert calls.count == 2


@needs_kernel
def test_a_gradient_is_kept_as_the_kernel_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = [], cpu.backward

    def noted(*args: Any) -> Any:
        found = run(*args)
        made.extend([None if one is None else one.data_ptr() for one in found])
        return found

    monkeypatch.setattr(cpu, "backward", noted)
    for module in (own_ops, linear_training):
        monkeypatch.setattr(module, "SMALLEST_LINEAR", 0)
    model = nn.Linear(64, 32)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(amp.model(torch.randn(8, 64)).square().mean())
    assert [None, *[p.grad.data_ptr() for p in model.parameters() if p.grad is not None]] == made


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": lambda: OwnForward(64, 32),
    "frozen": lambda: nn.Sequential(nn.Linear(64, 32).requires_grad_(False)),
    "odd": lambda: nn.Sequential(nn.Linear(64, 31)),
}


@needs_kernel
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_torchs_to_the_bit(name: str, calls: Calls) -> None:
    model, x = OTHERS[name](), torch.randn(8, 64)
    theirs = autocast(copy.deepcopy(model), x)
    assert all(map(torch.equal, trained(prepared(model), x), [theirs[0].float(), *theirs[1:]]))
    assert calls.count == 0


@needs_kernel
def test_a_parametrized_weight_is_trained_as_torch_trains_it(calls: Calls) -> None:
    model, x = weight_norm(nn.Linear(64, 32)), torch.randn(8, 64)
    check_close(trained(prepared(copy.deepcopy(model)), x), autocast(model, x))


@needs_kernel
@pytest.mark.parametrize(
    "policy",
    ["bf16, modules=none", "fp32", "bf16, module:Linear=fp32", "bf16, module:Linear=bf16", "bf16, op:linear=fp32"],
)
def test_policies_that_say_otherwise_leave_it_to_torch(policy: str, calls: Calls) -> None:
    trained(prepared(nn.Linear(64, 32), policy), torch.randn(8, 64))
    assert calls.count == 0


@needs_kernel
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_without_gradients_a_model_computes_what_it_does_in_training(
    policy: str, mode: Callable[[], Any], calls: Calls
) -> None:
    model, x = nn.Linear(4096, 64), torch.randn(8, 4096)  # sums longer than oneDNN takes at once, in other steps
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    want = amp.model(x)
    assert want.requires_grad
    with mode():
        assert torch.equal(amp.model(x), want)
        assert torch.equal(amp.model.eval()(x), want)
    assert calls.forwards == 3


@needs_kernel
def test_kept_copies_of_weights_are_read_without_gradients_and_changes_of_weights_seen(calls: Calls) -> None:
    model, x = Block(), torch.randn(8, 64)
    kept = mezzo.prepare(copy.deepcopy(model), None, "bf16", cache="persistent").model.eval()
    with torch.no_grad():
        want = prepared(model).eval()(x)
        assert torch.equal(kept(x), want)
        assert torch.equal(kept(x), want)
        for one in (model, kept):
            one.first.weight.mul_(2)
        assert torch.equal(kept(x), model(x))
        assert not torch.equal(kept(x), want)
    assert calls.forwards == 12
    trained(kept, x)
    assert calls.forwards == 12
    assert calls.count == 0


@needs_kernel
def test_with_named_arguments_it_is_torchs(calls: Calls) -> None:
    model, x = prepared(nn.Sequential(nn.Linear(64, 32))), torch.randn(8, 64)
    model[0](input=x).float().sum().backward()
    assert calls.forwards == calls.count == 0


@needs_kernel
def test_layers_so_small_that_calling_torchs_costs_more_are_taken() -> None:
    model = prepared(nn.Linear(64, 64))
    assert "_Linear" in str(model(torch.randn(2, 64)).float().grad_fn.next_functions)  # type: ignore[union-attr]
    assert "_Linear" not in str(model(torch.randn(1, 64)).float().grad_fn.next_functions)  # type: ignore[union-attr]


@needs_kernel
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_sequences_of_many_lengths_are_torchs(layout: torch.layout) -> None:
    """Of which one kind has no shape that could be asked for."""
    layer, rows = nn.Linear(64, 96), [torch.randn(30, 64), torch.randn(20, 64)]
    batch = torch.nested.nested_tensor(rows, layout=layout)
    with torch.autocast("cpu", BF16):
        want = layer(batch)
    for one, other in zip(prepared(layer)(batch).unbind(), want.unbind(), strict=True):
        assert torch.equal(one.to(other.dtype), other)


@traces_regions
@needs_kernel
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_models_run_torchs(calls: Calls) -> None:
    model, x = Block(), torch.randn(8, 64)
    theirs = autocast(copy.deepcopy(model), x)
    compiled = torch.compile(prepared(model), backend="aot_eager", fullgraph=True)
    check_close(trained(compiled, x), theirs)
    assert calls.count == 0


@pytest.mark.parametrize("units", [{"avx512_bf16"}, {"avx512_bf16", "amx_tile"}, set()])
def test_where_the_kernel_could_never_run_a_layer_is_torchs_without_a_detour(
    units: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small transformer's forward is a fifth slower where each layer asks at each call."""
    for unit in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{unit}_supported", lambda unit=unit: unit in units)
    model = prepared(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(1, 1, 3)))
    inner = [None if (bound := bound_of(module)) is None else bound.inner for module in model.children()]
    is_emulated = not units and torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_pairs = units == {"avx512_bf16"}
    assert inner == [run_linear if has_pairs or is_emulated else None, run_convolution if has_pairs else None]


@pytest.mark.skipif(not IS_COMPILED, reason="no compiler")
def test_torch_says_of_the_processor_what_the_kernels_say() -> None:
    units = native_support("cpu", BF16)
    is_emulated = not units.native and torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_pairs = units.reason == "avx512_bf16"
    assert has_pairs == cpu.is_faster(has_many_rows=True) == convolution_kernel.is_faster()
    assert (has_pairs or is_emulated) == cpu.is_faster()

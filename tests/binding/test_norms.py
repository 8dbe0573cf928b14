"""Layer norm of 16-bit activations: fp32 arithmetic in both directions, 16-bit memory in between; and which kernel it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.binding.test_hand_written_norms import LlamaRMSNorm
from tests.step.step_models import twin
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo.binding.forward import Binding
from mezzo.binding.hand_written import hand_written_rms_norm
from mezzo.binding.module_rules import _low_norm
from mezzo.casting.mode import CastMode
from mezzo.kernels import for_capture, layer_norm, registry, rms_norm
from mezzo.kernels.ops import layer_norm as reference

LOW = torch.bfloat16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Ops(TorchDispatchMode):
    """Notes ops, the dtype of their first operand, and the bytes of all operands and results together."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []
        self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor):
            self.seen.append((func.overloadpacket.__name__, args[0].dtype))
            is_view = func.overloadpacket.__name__ in ("view", "device")
            self.moved += 0 if is_view else sum(t.nbytes for t in tree_leaves((args, out)) if isinstance(t, Tensor))
        return out


def ops(device: str, weights: torch.dtype | None) -> list[tuple[str, torch.dtype]]:
    """Return what a norm of a large bf16 input launches on a device that need not be there."""
    with FakeTensorMode(), torch.no_grad():
        options = {"elementwise_affine": False} if weights is None else {"dtype": weights}
        module = nn.LayerNorm(64, device=device, **options)
        x = torch.empty(1 << 14, 64, device=device, dtype=LOW)
        with Ops() as seen:
            assert layer_norm(module, x).dtype is LOW
    return seen.seen


@pytest.mark.parametrize("weights", [LOW, None])
def test_a_kernel_that_sums_in_fp32_reads_16_bit(weights: torch.dtype | None) -> None:
    assert ops("cuda", weights) == [("native_layer_norm", LOW)]


@pytest.mark.parametrize(("device", "weights"), [("cuda", torch.float32), ("xpu", LOW), ("cuda", torch.float16)])
def test_any_other_gets_fp32(device: str, weights: torch.dtype) -> None:
    assert ("native_layer_norm", torch.float32) in ops(device, weights)


class _Residual(nn.Module):
    """Adds to an fp32 stream what a 16-bit layer makes of its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.norm(x)
        return x + self.layer(self.seen)


def test_a_norm_of_an_fp32_stream_enters_no_region_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value and the gradients of the norm in fp32, rounded once; one region is the model's."""
    entered: list[object] = []
    region = Binding.region
    monkeypatch.setattr(Binding, "region", lambda self, *given: (entered.append(given[0]), region(self, *given))[1])
    net = _Residual()
    plain = copy.deepcopy(net)
    mezzo.prepare(net, torch.optim.SGD(net.parameters()), "bf16")
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    out, given = net(x), x.clone().requires_grad_()
    wanted = plain.norm(given).to(LOW)
    assert entered == [None] and torch.equal(net.seen, wanted) and out.dtype is FP32
    net.zero_grad()
    net.norm(x).float().square().sum().backward()
    wanted.float().square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.norm.parameters(), plain.norm.parameters(), strict=True))


@pytest.fixture
def triton_norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernel for fp32 weights over 16-bit activations, as where Triton runs."""
    pytest.importorskip("triton", reason="triton, an optional import, is not installed")
    monkeypatch.setattr(registry, "_triton_fails", lambda device: "")
    registry.choose.cache_clear()
    yield registry.choose("layer_norm", torch.device("cuda", 0), LOW).module
    registry.choose.cache_clear()


def bytes_an_element(kernel: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> float:
    with Ops() as seen:
        out, mean, rstd = kernel.forward(x, [x.shape[-1]], weight, bias, 1e-5, True, x.dtype)
        grads = kernel.backward(out, x, [x.shape[-1]], mean, rstd, weight, bias, [True, True, True], 1e-5, True)
        assert [grad.to(like.dtype).shape for grad, like in zip(grads, (x, weight, bias), strict=True)] == [
            x.shape, weight.shape, bias.shape
        ]  # fmt: skip
    return seen.moved / x.numel()


def test_fp32_weights_over_16_bit_activations_copy_nothing(triton_norms: ModuleType) -> None:
    """4 bytes an element forward, 6 backward, and what the sums of 8 rows take; four copies and fp32 kernels took 50."""
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, 1024, 768, device="cuda", dtype=LOW)
        weight, bias = (torch.empty(768, device="cuda") for _ in range(2))
        assert bytes_an_element(reference, x, weight, bias) == pytest.approx(50, rel=0.01)
        assert 10 < bytes_an_element(triton_norms, x, weight, bias) < 12.1
    with for_capture():
        assert ops("cuda", torch.float32) == [("layer_norm", LOW)]
    assert ops("cuda", torch.float32) == [("_to_copy", LOW), ("native_layer_norm", FP32), ("_to_copy", FP32)]


def test_rms_norms_with_fp32_weights_copy_nothing(triton_norms: ModuleType) -> None:
    """What a layer norm takes, but for the sums of a bias."""
    with FakeTensorMode(), torch.no_grad(), for_capture(), Ops() as seen:
        x, weight = torch.empty(4096, 768, device="cuda", dtype=LOW), torch.empty(768, device="cuda")
        out, mean, rstd = triton_norms.forward(x, [768], weight, None, 1e-6, False, LOW)
        grads = triton_norms.backward(out, x, [768], mean, rstd, weight, None, [True, True, False], 1e-6, False)
        assert rms_norm(x, [768], weight, 1e-6, LOW, True).dtype is LOW
    assert [None if grad is None else grad.shape for grad in grads] == [x.shape, weight.shape, None]
    names = [name for name, _ in seen.seen]
    assert "_to_copy" not in names and names.count("rms_norm") == 2 and names.count("rms_norm_backward") == 1, names
    assert 14 < seen.moved / x.numel() < 15.1, "10 and the sums, and 4 of the second forward"


@pytest.mark.parametrize("kind", [nn.RMSNorm, LlamaRMSNorm])
def test_an_rms_norm_of_an_fp32_stream_is_torchs_op_on_an_accelerator(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which launches once on CUDA; in fp32, and rounded once, also of a class that writes it in six."""
    called: list[torch.dtype] = []
    op = torch.rms_norm
    monkeypatch.setattr(torch, "rms_norm", lambda x, *given: (called.append(x.dtype), op(x, *given))[1])
    forward = hand_written_rms_norm(kind(64)) or kind.forward
    with torch.no_grad(), torch.device("meta"):
        norm, x = kind(64), torch.empty(8, 64, dtype=FP32)
    low_norm = _low_norm(norm, forward, x, LOW)
    assert low_norm is not None and low_norm(norm, x).dtype is LOW and called[-1:] == [FP32]


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 4, 16)], ids=["one", "two"])
@pytest.mark.parametrize("affine", [True, False])
def test_formulas_of_an_rms_norm_are_its_gradients(shape: tuple[int, ...], affine: bool) -> None:
    """What gradients of gradients take, and a trace that repeats the kernels in fp64, beside torch's own derivatives of both orders."""
    over = list(shape[1:]) if len(shape) == 2 else list(shape[2:])
    x, grad, weight = (torch.randn(s, dtype=torch.float32, requires_grad=True) for s in (shape, shape, over))
    weight = weight if affine else None
    out, _, rstd = reference.forward(x, over, weight, None, 1e-3, False, FP32)
    want = torch.rms_norm(x.double(), over, None if weight is None else weight.double(), 1e-3)
    eps = torch.finfo(FP32).eps
    torch.testing.assert_close(out.double(), want, rtol=8 * eps, atol=8 * eps)
    found = reference.backward(grad, x, over, rstd, rstd.detach(), weight, None, [True, affine, False], 1e-3, False)
    inputs = [one for one in (x, weight) if one is not None]
    expected = torch.autograd.grad(want, inputs, grad.double(), create_graph=True)
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)
    second = [torch.autograd.grad(of[0].square().sum(), inputs) for of in (found, expected)]
    for one, other in zip(*second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("edit", ["long", "elsewhere", "shape", "strided", "empty"])
def test_what_the_kernel_cannot_read_is_left_to_torch(edit: str, triton_norms: ModuleType) -> None:
    """Rows beyond a program, weights on another device or of another shape, and nothing at all: never an address that is not theirs."""
    x, weight = torch.randn(3, 64).to(LOW), torch.randn(64)
    if edit == "long":
        x, weight = torch.randn(2, triton_norms.LONGEST + 1).to(LOW), torch.randn(triton_norms.LONGEST + 1)
    given = {
        "elsewhere": (x, weight.to("meta")), "shape": (x, weight[:63]), "strided": (x, torch.randn(128)[::2]),
        "empty": (x[:0], weight),
    }.get(edit, (x, weight))  # fmt: skip
    shape = [x.shape[-1]]
    if edit in ("elsewhere", "shape"):
        with pytest.raises(RuntimeError):
            triton_norms.forward(given[0], shape, given[1], None, 1e-5, True, LOW)
        return
    for one, other in zip(
        triton_norms.forward(given[0], shape, given[1], None, 1e-5, True, LOW),
        reference.forward(given[0], shape, given[1], None, 1e-5, True, LOW), strict=True,
    ):  # fmt: skip
        assert torch.equal(one, other)


def bound(policy: str, model: nn.Module) -> nn.Module:
    return mezzo.prepare(model, None, policy).model


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(64), lambda: nn.GroupNorm(8, 64)], ids=["layer", "group"])
@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("rows", [1, 4096])
def test_it_sums_in_fp32_in_both_directions(low: torch.dtype, rows: int, make: Callable[[], nn.Module]) -> None:
    """torch's own 16-bit kernel of layer norm gets weight gradients over 4096 rows 12 % wrong on the CPU."""
    name = {BF16: "bf16", FP16: "fp16"}[low]
    norm = make()
    nn.init.normal_(norm.weight)
    exact = twin(norm).double()
    model = bound(f"{name}, output=none", nn.Sequential(nn.Identity(), norm))
    x, seed = torch.randn(rows, 64).to(low), torch.randn(rows, 64).to(low)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    out, want = model(a), exact(b)
    out.backward(seed)
    want.backward(seed.double())
    assert out.dtype is low
    eps = torch.finfo(low).eps
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=eps)
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=eps, atol=eps * float(b.grad.abs().max()))
    for p, q in zip(norm.parameters(), exact.parameters(), strict=True):
        limit = rows * torch.finfo(FP32).eps * float(seed.abs().max())
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-5, atol=limit)


@pytest.mark.parametrize("norm", [nn.LayerNorm(64), nn.GroupNorm(8, 64)], ids=["layer", "group"])
def test_it_keeps_no_fp32_copy(norm: nn.Module) -> None:
    model = bound("bf16", nn.Sequential(nn.Identity(), norm))
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        model(torch.randn(2048, 64, dtype=BF16, requires_grad=True))
    assert max(sizes) == 2048 * 64 * 2


@pytest.mark.parametrize("policy", ["bf16", "bf16, ops=mezzo"])
@pytest.mark.parametrize("rows", [32, 2048], ids=["small", "large"])
def test_it_is_the_same_without_gradients(policy: str, rows: int) -> None:
    """Both engines, and the three ways a norm runs: with its own backward, without, and as torch's kernel."""
    norm = nn.LayerNorm(64)
    nn.init.normal_(norm.weight)
    wide = twin(norm)
    model, x = bound(f"{policy}, output=none", nn.Sequential(nn.Identity(), norm)), torch.randn(rows, 64).to(BF16)
    with torch.no_grad():
        plain = model(x)
    with torch.inference_mode():
        inferred = model(x)
    assert torch.equal(model(x).detach(), plain)
    assert torch.equal(inferred, plain)
    torch.testing.assert_close(plain, wide(x.float()).to(BF16), rtol=torch.finfo(BF16).eps, atol=0)


def test_evaluation_of_a_small_input_copies_nothing() -> None:
    """A copy to fp32 and back costs more than the norm there. What is trained keeps to one kernel, which a checkpoint needs."""
    norm = nn.LayerNorm(64)
    nn.init.normal_(norm.weight)
    x = torch.randn(8, 64).to(BF16)
    wide = norm(x.float()).to(BF16)
    with torch.no_grad(), Ops() as seen:
        out = layer_norm(norm.eval(), x)
    assert seen.seen == [("native_layer_norm", BF16)]
    torch.testing.assert_close(out, wide, rtol=torch.finfo(BF16).eps, atol=0)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=["layer", "group"])
def test_penalty_through_a_norm(norm: nn.Module) -> None:
    nn.init.normal_(norm.weight)
    wide, model = twin(norm), bound("bf16", nn.Sequential(nn.Identity(), norm))
    x = torch.randn(5, 8).to(BF16)

    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(module(x).float().pow(2).sum(), x, create_graph=True)
        g.float().pow(2).sum().backward()
        return x.grad.double()

    want = penalty(wide.double(), x.double())
    got = penalty(model, x)
    assert (got - want).abs().max() <= 8 * torch.finfo(BF16).eps * want.abs().max()


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_group_norm_of_pictures_is_torchs_kernel_where_that_sums_in_fp32(layout: Any, has_weight: bool) -> None:
    """Without weights it keeps its sums in 16 bit, so it is given fp32."""
    norm = nn.GroupNorm(4, 16, affine=has_weight)
    if has_weight:
        nn.init.normal_(norm.weight)
    x, seed = torch.randn(2, 3, 16, 5, 7).to(BF16)
    x = x.to(memory_format=layout)
    model, exact = bound("bf16, output=none", nn.Sequential(nn.Identity(), norm)), twin(norm).double()
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    with Ops() as seen:
        out = model(a)
    out.backward(seed)
    want = exact(b)
    want.backward(seed.double())
    assert ("native_group_norm", BF16 if has_weight else FP32) in seen.seen
    eps = torch.finfo(BF16).eps
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=eps)
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=eps, atol=eps * float(b.grad.abs().max()))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("has_grad", [False, True])
def test_kept_casts_do_not_look_at_each_call_inside_a_norm(
    kind: type[nn.Module], has_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), kind(64))
    x = torch.randn(8, 64)
    with torch.set_grad_enabled(has_grad):
        usual = copy.deepcopy(model)
        mezzo.prepare(usual, None, "bf16")
        wanted = usual(x)
        mezzo.prepare(model, None, "bf16", cache="persistent")
        seen: list[object] = []
        ruled = CastMode.__torch_function__

        def seeing(mode: CastMode, func: object, *args: object) -> object:
            seen.append(func)
            return ruled(mode, func, *args)

        monkeypatch.setattr(CastMode, "__torch_function__", seeing)
        assert torch.equal(model(x), wanted)
        assert seen == [nn.functional.linear]
        with pytest.raises(RuntimeError, match="normalized_shape"):
            model[1](torch.randn(8, 6, dtype=torch.bfloat16))
        assert torch.equal(model(x), wanted)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("has_weight", [True, False])
def test_an_rms_norm_trains_on_what_was_made_in_inference_mode(has_weight: bool, dtype: torch.dtype) -> None:
    """As under torch.autocast, whose cast is a tensor of its own."""
    with torch.inference_mode():
        x = torch.randn(300, 64).to(dtype)
    model = nn.Sequential(nn.RMSNorm(64, elementwise_affine=has_weight), nn.Linear(64, 1))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(model(x).sum())
    found = [p.grad for p in model.parameters()]
    amp.zero_grad()
    amp.backward(model(x.clone()).sum())
    assert all(map(torch.equal, found, [p.grad for p in model.parameters()]))

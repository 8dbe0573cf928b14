"""Linear layers on the CPU, in training and without gradients: the compiled kernel against fp64 and torch's own, where it is taken, and where it must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.step.step_models import Dtypes
from tests.tolerance import distance, relative
from torch import Tensor

from mezzo.errors import OperandError
from mezzo.kernels import linear, registry, takes_linear
from mezzo.kernels.ops import linear_training as door
from mezzo.kernels.ops.linear_training import cpu

BF16 = torch.bfloat16
IS_COMPILED = registry.choose("linear_training", torch.device("cpu"), BF16).backend == "cpu"
needs_kernel = pytest.mark.skipif(
    not (IS_COMPILED and cpu.is_faster()), reason="the processor has tiles, or no AVX-512, or no compiler"
)
Operands = tuple[Tensor, Tensor, Tensor | None]


def operands(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, has_bias: bool = True) -> Operands:
    """Return an input of [..., K] in bf16, and weight [N, K] and bias; `shape` is (..., K, N)."""
    *rows, inner, width = shape
    weight, bias = (torch.randn(width, inner) * inner**-0.5).to(dtype), torch.randn(width).to(dtype)
    x = torch.randn(*rows, inner).to(BF16)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_() if has_bias else None


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast("cpu", BF16):
        return F.linear(x, weight, bias)


def gradients(out: Tensor, given: Operands, grad: Tensor) -> list[Tensor]:
    wanted = [one for one in given if one is not None and one.requires_grad]
    return list(torch.autograd.grad(out, wanted, grad))


def as_multiplied(given: Operands) -> Operands:
    """Return operands in fp64, as torch.autocast rounds them."""
    x, weight, bias = [None if one is None else one.detach().to(BF16).double().requires_grad_() for one in given]
    assert x is not None
    assert weight is not None
    return x, weight, bias


SHAPES = [  # rows, K and N
    (128, 128, 128), (128, 512, 512), (1, 2, 2), (1, 64, 32), (7, 34, 66), (9, 100, 10), (64, 784, 300), (3, 5, 48, 160), (2000, 96, 64),
    (600, 520, 40), (33, 30, 1030), (8, 300, 2100), (32, 130, 700), (31, 66, 258), (47, 1300, 98), (16, 1026, 70), (300, 4200, 34),
]  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)


@needs_kernel
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_everything_is_no_farther_from_fp64_than_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = operands(shape, dtype)
    out, theirs, exact = linear(*given), autocast(*given), as_multiplied(given)
    want = F.linear(*exact)
    assert out.dtype is BF16
    assert out.shape == theirs.shape
    assert distance(out, want) <= 1.02 * distance(theirs, want) + 1e-5 * float(want.detach().norm())
    grad = torch.randn(out.shape).to(BF16)
    found = [gradients(*both, grad.to(both[0].dtype)) for both in ((out, given), (theirs, given), (want, exact))]
    for own, other, true in zip(*found, strict=True):
        assert own.shape == other.shape
        assert own.stride() == other.stride()
        assert own.dtype is other.dtype
        assert distance(own, true) <= 1.02 * distance(other, true) + 1e-5 * float(true.norm())


@needs_kernel
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_number_is_a_sum_in_fp32_rounded_no_more_than_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = operands(shape, dtype)
    out, exact = linear(*given), as_multiplied(given)
    sizes = [None if one is None else one.detach().abs().requires_grad_() for one in exact]
    grad = torch.randn(out.shape).to(BF16)
    want, total = F.linear(*exact), F.linear(*sizes)  # type: ignore[arg-type]
    ours = [out, *gradients(out, given, grad)]
    true = [want, *gradients(want, exact, grad.double())]
    sums = [total, *gradients(total, sizes, grad.double().abs())]  # type: ignore[arg-type]
    count = max(shape[-2] + 1, shape[-1], out.numel() // shape[-1])
    for own, one, largest in zip(ours, true, sums, strict=True):
        rounding = 2**-8 if own.dtype is BF16 else 0.0
        assert ((own - one).abs() <= rounding * one.abs() + count * 2**-24 * largest).all()


@needs_kernel
def test_gradients_of_fp32_weights_are_not_rounded_to_bf16() -> None:
    given = operands((128, 64, 64))
    _, of_weight, of_bias = gradients(linear(*given), given, torch.randn(128, 64).to(BF16))
    for found in (of_weight, of_bias):
        assert found.dtype is torch.float32
        assert (found != found.to(BF16)).float().mean() > 0.9


@needs_kernel
def test_an_fp32_input_is_cast_and_gets_an_fp32_gradient() -> None:
    x, weight, bias = operands((32, 64, 64))
    wide = x.detach().float().requires_grad_()
    out, low = linear(wide, weight, bias), linear(x, weight, bias)
    grad = torch.randn(32, 64).to(BF16)
    assert torch.equal(out, low)
    (found,), (want,) = torch.autograd.grad(out, wide, grad), torch.autograd.grad(low, x, grad)
    assert found.dtype is torch.float32
    assert torch.equal(found, want.float())


@needs_kernel
@pytest.mark.parametrize("frozen", ["x", "bias", "both"])
def test_what_wants_no_gradient_gets_none(frozen: str) -> None:
    given, full = operands((32, 64, 96)), operands((32, 64, 96))
    for index, name in ((0, "x"), (2, "bias")):
        if frozen in (name, "both"):
            given[index].requires_grad_(False)  # type: ignore[union-attr]
    for one, other in zip(full, given, strict=True):
        one.data.copy_(other.data)  # type: ignore[union-attr]
    grad = torch.randn(32, 96).to(BF16)
    everything = dict(zip("xwb", gradients(linear(*full), full, grad), strict=True))
    names = {"x": "wb", "bias": "xw", "both": "w"}[frozen]
    assert all(map(torch.equal, gradients(linear(*given), given, grad), [everything[name] for name in names]))


@needs_kernel
def test_a_gradient_of_the_input_alone_is_torchs() -> None:
    x, weight, bias = operands((32, 64, 96))
    grad = torch.randn(32, 96).to(BF16)
    (found,) = torch.autograd.grad(linear(x, weight, bias), x, grad)
    assert torch.equal(found, grad @ weight.to(BF16))


@needs_kernel
@DTYPES
@pytest.mark.parametrize("shape", [(130, 70, 200), (20, 70, 2100), (300, 4200, 34), (70, 1100, 160)], ids=str)
def test_threads_change_no_bit(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(shape, dtype)
    grad = torch.randn(shape[0], shape[-1]).to(BF16)

    def found() -> list[Tensor]:
        out = linear(*given)
        return [out, *gradients(out, given, grad)]

    once = found()
    for threads in (1, 3, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(map(torch.equal, once, found()))


@needs_kernel
@pytest.mark.parametrize("layout", ["expanded", "columns", "turned"])
def test_however_the_gradient_lies_it_is_the_same(layout: str) -> None:
    given, grad = operands((64, 32, 48)), torch.randn(64, 48).to(BF16)
    if layout == "expanded":
        grad = grad[:1].expand(64, -1)
    lies: dict[str, Callable[[Tensor], Tensor]] = {
        "expanded": lambda x: x,
        "columns": lambda x: torch.cat([x, x], -1)[:, 48:],
        "turned": lambda x: x.t().contiguous().t(),
    }
    found = [gradients(linear(*given), given, one) for one in (grad.contiguous(), lies[layout](grad))]
    assert all(map(torch.equal, *found))


@needs_kernel
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["x", "weight", "gradient"])
@pytest.mark.parametrize("rows", [40, 10])
def test_inf_and_nan_arrive_where_they_belong(rows: int, where: str, value: float) -> None:
    given = operands((rows, 34, 50))
    x, weight, _ = given
    grad, row = torch.randn(rows, 50).to(BF16), rows - 7
    with torch.no_grad():
        {"x": x, "weight": weight, "gradient": grad}[where][row, 5] = value
    out = linear(*given)
    of_x, of_weight, of_bias = gradients(out, given, grad)
    not_met = {"x": (out[:row], of_weight[:, :5], of_bias), "weight": (out[:, :row], of_x[:, :5], of_weight, of_bias)}
    met = {"x": (out[row], of_weight[:, 5]), "weight": (out[:, row], of_x[:, 5])}
    not_met["gradient"], met["gradient"] = (
        (out, of_x[:row], of_weight[:5], of_bias[:5]),
        (of_x[row], of_weight[5], of_bias[5]),
    )
    assert all(one.isfinite().all() for one in not_met[where])
    assert not any(one.isfinite().any() for one in met[where])


class TorchsProducts:
    """What the kernel computes, for processors without it: a second derivative is one of torch's ops around it."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight.to(BF16), None if bias is None else bias.to(BF16))

    @staticmethod
    def backward(
        grad: Tensor, input: Tensor, weight: Tensor, needs_input: bool, of_bias: torch.dtype | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        of_weight = (grad.t() @ input).to(weight.dtype)
        return grad @ weight.to(BF16), of_weight, None if of_bias is None else grad.sum(0).to(of_bias)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_second_derivative_is_torchs(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (IS_COMPILED and cpu.is_faster()):
        monkeypatch.setattr(door, "compiled", lambda op: TorchsProducts)
    given = operands((16, 32, 32), has_bias=has_bias)
    there = [one for one in given if one is not None]

    def penalty(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), there, create_graph=True)
        return torch.autograd.grad(sum((one.float().square().sum() for one in first), torch.zeros(())), there)

    for one, other in zip(penalty(linear(*given)), penalty(autocast(*given)), strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=8 * relative(BF16), atol=relative(BF16) * float(other.abs().max()))


class Products(Dtypes):
    OPS = ("mm", "addmm")


@needs_kernel
def test_who_watches_ops_sees_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    given, grad = operands((64, 64, 64)), torch.randn(64, 64).to(BF16)
    assert takes_linear(*given)
    out = linear(*given)
    monkeypatch.setattr(cpu, "backward", None)
    with Products() as seen:
        assert not takes_linear(*given)
        found = gradients(out, given, grad)
    assert [dtype for _, dtype in seen.seen] == [BF16, BF16]
    for one, other in zip(found, gradients(autocast(*given), given, grad), strict=True):
        assert torch.equal(one, other)


@needs_kernel
def test_batched_gradients_are_those_of_one_after_the_other() -> None:
    given, grads = operands((8, 32, 32)), torch.randn(3, 8, 32).to(BF16)
    out = linear(*given)
    (found,) = torch.autograd.grad(out, given[1:2], grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(found, grads, strict=True):
        (other,) = torch.autograd.grad(out, given[1:2], grad, retain_graph=True)
        torch.testing.assert_close(one, other, rtol=relative(BF16), atol=4 * relative(BF16))


def escaped(x: Tensor) -> Tensor:
    """A tensor that a transform has wrapped, and that came out of it: it has no memory of its own."""
    found: list[Tensor] = []
    torch.func.grad(lambda inside: (found.append(inside), inside.float().sum())[1])(x)
    return found[0]


REFUSED: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "one dimension": lambda x, w, b: (x[0], w, b),
    "another width": lambda x, w, b: (x[:, :32].contiguous(), w, b),
    "an odd width": lambda x, w, b: (x[:, :63].contiguous(), w.detach()[:, :63].contiguous().requires_grad_(), b),
    "an odd number of outputs": lambda x, w, b: (x, w.detach()[:63].contiguous().requires_grad_(), b.detach()[:63]),
    "a weight that lies turned": lambda x, w, b: (x, w.detach().t().contiguous().t().requires_grad_(), b),
    "a frozen weight": lambda x, w, b: (x, w.detach(), b),
    "fp64": lambda x, w, b: (x.double(), w, b),
    "fp16": lambda x, w, b: (x, w.detach().half().requires_grad_(), b),
    "another bias": lambda x, w, b: (x, w, torch.zeros(1)),
    "a bias of fp64": lambda x, w, b: (x, w, b.double()),
    "no rows": lambda x, w, b: (x[:0], w, b),
    "gaps": lambda x, w, b: (torch.cat([x, x], 1)[:, :64], w, b),
    "meta": lambda x, w, b: (x.to("meta"), w, b),
    "many rows": lambda x, w, b: (torch.zeros(4097, 64, dtype=BF16), w, b),
    "rows of a sparse table": lambda x, w, b: (x.to_sparse_csr(), w, b),
    "what a transform left behind": lambda x, w, b: (escaped(x), w, b),
    "much waste": lambda x, w, b: (torch.zeros(4096, 512, dtype=BF16), torch.zeros(2, 512).requires_grad_(), b.detach()[:2]),
}  # fmt: skip


@needs_kernel
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_for_is_left_to_torch(name: str) -> None:
    x, weight, bias = operands((128, 64, 64))
    assert bias is not None
    assert takes_linear(x, weight, bias)
    assert not takes_linear(*REFUSED[name](x.detach(), weight, bias))
    with torch.no_grad():
        assert takes_linear(x, weight, bias)
        assert takes_linear(*REFUSED[name](x.detach(), weight, bias)) == (name == "a frozen weight")


@needs_kernel
@pytest.mark.parametrize("shape", [(512, 64, 2), (256, 256, 10), (2048, 256, 10), (4096, 4, 64)], ids=str)
def test_a_narrow_layer_is_taken_where_products_are_few(shape: tuple[int, ...]) -> None:
    assert takes_linear(*operands(shape))


@needs_kernel
def test_where_pairs_are_emulated_many_rows_of_many_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_faster", lambda has_many_rows: not has_many_rows)
    for shape in ((128, 1024, 1024), (512, 128, 128), (256, 512, 512), (4096, 64, 64)):
        assert takes_linear(*operands(shape))
    for shape in ((256, 1024, 1024), (512, 512, 512), (4096, 256, 256)):
        assert not takes_linear(*operands(shape))


@needs_kernel
@pytest.mark.parametrize("is_recorded", [True, False])
def test_so_few_products_that_torch_calls_no_onednn_are_torchs(is_recorded: bool) -> None:
    with torch.set_grad_enabled(is_recorded):
        assert not takes_linear(*operands((1, 64, 64)))
        assert takes_linear(*operands((2, 64, 64)))


@needs_kernel
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_gradients_the_bits_are_those_with(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = operands(shape, dtype)
    want = linear(*given)
    assert want.requires_grad
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = linear(*given)
        assert out.dtype is BF16
        assert not out.requires_grad
        assert torch.equal(out, want)


@needs_kernel
def test_a_weight_that_ends_beyond_its_memory_is_left_to_torch() -> None:
    x, weight, bias = operands((128, 64, 64))
    weight.untyped_storage().resize_(64)
    assert not takes_linear(x, weight, bias)


def test_without_a_compiled_kernel_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "compiled", lambda op: None)
    assert not takes_linear(*operands((128, 64, 64)))


@needs_kernel
def test_hooks_that_give_back_something_else_are_refused_before_anything_is_read() -> None:
    given = operands((32, 64, 64))
    wrongs: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[:1, :1], lambda t: t.double(), lambda t: t.to("meta"), lambda t: t.half(), lambda t: t.t()[:2],
    ]  # fmt: skip
    for wrong in wrongs:
        with torch.autograd.graph.saved_tensors_hooks(wrong, lambda t: t):
            loss = linear(*given).sum()
        with pytest.raises(OperandError, match="gradients of a linear layer cannot be computed: its"):
            loss.backward()  # type: ignore[no-untyped-call]


@needs_kernel
@pytest.mark.parametrize(
    "grad", [torch.zeros(32, 64), torch.zeros(32, 62, dtype=BF16), torch.zeros(32, 64, dtype=BF16, device="meta")]
)
def test_a_gradient_that_is_not_that_of_the_result_is_refused(grad: Tensor) -> None:
    out = linear(*operands((32, 64, 64)))
    node = out.grad_fn
    assert node is not None
    with torch.no_grad(), pytest.raises(OperandError, match="of a linear layer cannot be computed: its gradient"):
        node.apply(grad)  # type: ignore[attr-defined]  # of every autograd function


@needs_kernel
def test_operands_written_since_are_refused() -> None:
    x, weight, bias = operands((32, 64, 64))
    given = x * 1
    loss = linear(given, weight, bias).sum()
    given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
    loss = linear(x, weight, bias).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@needs_kernel
def test_what_waits_for_backward_is_the_input_and_the_weight_itself() -> None:
    x, weight, bias = operands((32, 64, 64))
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        linear(x, weight, bias)
    assert [one.data_ptr() for one in held] == [x.data_ptr(), weight.data_ptr()]

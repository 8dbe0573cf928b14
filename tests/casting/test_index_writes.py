"""What is written or summed at indices in a region: sources of another floating dtype are taken where nothing is lost but what `copy_` loses."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tests.torch_versions import TORCH, warns_of_breaks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.errors import CastError

pytestmark = pytest.mark.filterwarnings(
    "ignore:index_reduce", "ignore:Sparse", "ignore:.*torch.ao.quantization is deprecated"
)  # torch calls them beta, and old
ROWS, MASK = torch.tensor([2, 0]), torch.tensor([True, False, True, False])
WIDE_ROWS = ROWS[:, None].expand(2, 4).contiguous()
Op = Callable[[Tensor, Tensor], Tensor]


def assigned(buffer: Tensor, source: Tensor, index: Tensor) -> Tensor:
    buffer[index] = source
    return buffer


WRITES: dict[str, Op] = {
    "h[index] = x": lambda b, x: assigned(b, x, ROWS),
    "h[mask] = x": lambda b, x: assigned(b, x, MASK),
    "index_put_": lambda b, x: b.index_put_((ROWS,), x),
    "index_copy_": lambda b, x: b.index_copy_(0, ROWS, x),
    "masked_scatter_": lambda b, x: b.masked_scatter_(MASK[:, None], x),
    "scatter_": lambda b, x: b.scatter_(0, WIDE_ROWS, x),
    "put_": lambda b, x: b.put_(torch.arange(8).reshape(2, 4), x),
}
SUMS: dict[str, Op] = {
    "h[index] += x": lambda b, x: b.index_put_((ROWS,), x, accumulate=True),
    "index_add_": lambda b, x: b.index_add_(0, ROWS, x, alpha=2),
    "index_reduce_": lambda b, x: b.index_reduce_(0, ROWS, x, "amax"),
    "scatter_add_": lambda b, x: b.scatter_add_(0, WIDE_ROWS, x),
    "scatter_reduce_": lambda b, x: b.scatter_reduce_(0, WIDE_ROWS, x, "sum"),
}
OUT_OF_PLACE: dict[str, Op] = {
    "index_put": lambda b, x: b.index_put((ROWS,), x),
    "index_copy": lambda b, x: b.index_copy(0, ROWS, x),
    "index_add": lambda b, x: b.index_add(0, ROWS, x),
    "masked_scatter": lambda b, x: b.masked_scatter(MASK[:, None], x),
    "scatter": lambda b, x: b.scatter(0, WIDE_ROWS, x),
    "scatter_add": lambda b, x: b.scatter_add(0, WIDE_ROWS, x),
    "scatter_reduce": lambda b, x: b.scatter_reduce(0, WIDE_ROWS, x, "sum"),
}
LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
LAYOUTS = (torch.sparse_coo, torch.sparse_csr)
OPS = pytest.mark.parametrize("ops", ["torch", "mezzo"])


def in_region(op: Op, target: torch.dtype, source: torch.dtype, low: torch.dtype, ops: str) -> tuple[Tensor, Tensor]:
    """Return what an op gives in a region, and the gradient of its source."""
    x = torch.linspace(-1, 1, 8).reshape(2, 4).to(source).requires_grad_()
    with mezzo.autocast("cpu", policy=f"{mezzo.formats.dtype_name(low)}, ops={ops}"):
        out = op(torch.full((4, 4), 0.1, dtype=target), x)
    out.sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def plain(op: Op, target: torch.dtype, values: Tensor) -> tuple[Tensor, Tensor]:
    x = values.to(target).requires_grad_()
    out = op(torch.full((4, 4), 0.1, dtype=target), x)
    out.sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@LOW
@OPS
@pytest.mark.parametrize("name", [*WRITES, *SUMS])
def test_a_wider_target_takes_it_exactly(name: str, low: torch.dtype, ops: str) -> None:
    op = {**WRITES, **SUMS}[name]
    out, grad = in_region(op, torch.float32, low, low, ops)
    want, want_grad = plain(op, torch.float32, torch.linspace(-1, 1, 8).reshape(2, 4).to(low))
    assert out.dtype is torch.float32 and torch.equal(out, want)
    assert grad.dtype is low and torch.equal(grad, want_grad.to(low))


@LOW
@pytest.mark.parametrize("name", WRITES)
def test_a_narrower_target_takes_what_is_written_rounded_as_copy_does(name: str, low: torch.dtype) -> None:
    out, grad = in_region(WRITES[name], low, torch.float32, low, "torch")
    want, want_grad = plain(WRITES[name], low, torch.linspace(-1, 1, 8).reshape(2, 4))
    assert out.dtype is low and torch.equal(out, want)
    assert grad.dtype is torch.float32 and torch.equal(grad, want_grad.float())


@LOW
@OPS
@pytest.mark.parametrize("name", SUMS)
def test_a_narrower_target_takes_no_sums(name: str, low: torch.dtype, ops: str) -> None:
    with pytest.raises(CastError, match="cast what is written") as caught:
        in_region(SUMS[name], low, torch.float32, low, ops)
    assert "mezzo/casting" not in str(caught.value)


@LOW
@OPS
@pytest.mark.parametrize("name", OUT_OF_PLACE)
@pytest.mark.parametrize("widens", [False, True])
def test_out_of_place_both_are_widened(name: str, widens: bool, low: torch.dtype, ops: str) -> None:
    target, source = (torch.float32, low) if widens else (low, torch.float32)
    out, _ = in_region(OUT_OF_PLACE[name], target, source, low, ops)
    wide = torch.linspace(-1, 1, 8).reshape(2, 4).to(source).float()
    start = torch.full((4, 4), 0.1, dtype=target).float()
    assert out.dtype is torch.float32 and torch.equal(out, OUT_OF_PLACE[name](start, wide))


@LOW
@OPS
@pytest.mark.parametrize(("name", "layout"), [*itertools.product(("mm", "addmm"), LAYOUTS), ("mean", torch.sparse_csr)])
def test_a_product_of_a_sparse_matrix_is_fp32_and_has_gradients(
    name: str, layout: torch.layout, low: torch.dtype, ops: str
) -> None:
    run: Op = {
        "mm": torch.sparse.mm,
        "addmm": lambda a, h: torch.sparse.addmm(torch.zeros(4, 4), a, h),
        "mean": lambda a, h: torch.sparse.mm(a, h, "mean"),
    }[name]
    with torch.sparse.check_sparse_tensor_invariants():
        adjacency = torch.eye(4).roll(1, 0).add(torch.eye(4)).to_sparse(layout=layout)
        layer, x = nn.Linear(4, 4), torch.linspace(-1, 1, 16).reshape(4, 4)
        with mezzo.autocast("cpu", policy=f"{mezzo.formats.dtype_name(low)}, ops={ops}"):
            h = layer(x)
            out = run(adjacency, h)
        wide = h.detach().float().requires_grad_()
        expected = run(adjacency, wide)
        assert h.dtype is low and out.dtype is torch.float32 and torch.equal(out, expected)
        (grad,) = torch.autograd.grad(out.sum(), h)
        expected.sum().backward()
        assert grad.dtype is low and torch.equal(grad, wide.grad.to(low))


COMPRESSED: dict[str, Op] = {
    "@": lambda a, h: a @ h,
    "mm": torch.mm,
    "vector": lambda a, h: a @ h[:, 0],
    "addmm": lambda a, h: torch.addmm(h, a, h, beta=0.5, alpha=2.0),
    "linear": lambda a, h: F.linear(a, h),
    "from the left": lambda a, h: h @ a,
}


@LOW
@OPS
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_a_product_of_a_compressed_matrix_is_made_in_fp32_and_rounded_once(
    layout: torch.layout, low: torch.dtype, ops: str
) -> None:
    dense = torch.eye(4).roll(1, 0).add(torch.eye(4) / 3)
    matrix, x = dense.to_sparse(layout=layout), torch.linspace(-1, 1, 16).reshape(4, 4)
    for name, run in COMPRESSED.items():
        h = x.to(low).requires_grad_()
        with mezzo.autocast("cpu", policy=f"{mezzo.formats.dtype_name(low)}, ops={ops}"):
            out = run(matrix, h)
        wide = h.detach().float().requires_grad_()
        expected = run(dense.to(low).float(), wide)
        assert out.dtype is low and torch.equal(out, expected.to(low)), name
        out.sum().backward()
        (grad,) = torch.autograd.grad(expected.sum(), wide)
        assert h.grad is not None
        torch.testing.assert_close(h.grad, grad.to(low), atol=0, rtol=2 * torch.finfo(low).eps, msg=name)


TORCHS = """
import torch
matrix, x = torch.linspace(-1, 1, 16).reshape(4, 4).relu().to_sparse_csr(), torch.linspace(-1, 1, 12).reshape(4, 3)
def answers():
    found = []
    for kind in (torch.float32, torch.float64):
        a, h = matrix.to(kind), x.to(kind)
        found += [(a @ h).tolist(), (a @ h[:, 0]).tolist(), torch.addmm(h, a, h).tolist(), (a @ a).values().tolist()]
    for a, h in ((matrix, x.bfloat16()), (matrix, x.double())):
        try: a @ h
        except RuntimeError as error: found.append(str(error))
    return found
def write():
    with torch.autocast("cpu"):
        torch.zeros(4)[torch.tensor([0])] = torch.ones(1).bfloat16()
before = answers()
import mezzo
try: write()
except RuntimeError as error: print(error)
with mezzo.autocast("cpu"):
    pass
assert len(before) == 10 and answers() == before, (before, answers())
"""


def test_an_import_changes_nothing_and_a_region_no_product_that_torch_answers() -> None:
    """Of writes at indices, and of a compressed matrix, in a process that had no region before."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", TORCHS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "dtypes match" in ran.stdout, ran.stderr


def test_fp64_integers_and_other_dtypes_are_torchs() -> None:
    with mezzo.autocast("cpu"):
        for op in (*WRITES.values(), *SUMS.values()):
            with pytest.raises((CastError, RuntimeError), match=r"dtype|type"):
                op(torch.zeros(4, 4, dtype=torch.float64), torch.ones(2, 4).bfloat16())
            with pytest.raises(RuntimeError, match=r"dtype|type"):
                op(torch.zeros(4, 4, dtype=torch.long), torch.ones(2, 4))


def bag(h: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 40).reshape(10, 4)
    return F.embedding_bag(torch.arange(8).reshape(2, 4), table, mode="sum", per_sample_weights=h)


def observed(h: Tensor) -> Tensor:
    quantise = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
    return quantise(h)


FITTED: dict[str, Op] = {
    "a weighted bag": lambda _, x: bag(x),
    "quantisation in training": lambda _, x: observed(x),
    "complex beside fp32": lambda _, x: torch.complex(x, torch.ones(2, 4)).abs(),
}


FULL = torch.linspace(0.5, 2, 8).reshape(2, 4)
PROMOTED: dict[str, Op] = {
    "lerp": lambda _, x: torch.lerp(FULL, x, torch.sigmoid(x)),
    "lerp by a number": lambda _, x: torch.lerp(x, FULL, 0.3),
    "dot": lambda _, x: torch.dot(x[0], FULL[0]),
    "vdot": lambda _, x: torch.vdot(FULL[0], x[0]),
    "inner": lambda _, x: torch.inner(x, FULL[0]),
    "tensordot": lambda _, x: torch.tensordot(x, FULL, dims=([1], [1])),
    "mv": lambda _, x: torch.mv(x, FULL[0]),
    "addmv": lambda _, x: torch.addmv(x[:, 0], FULL, x[0], beta=0.5),
    "addr": lambda _, x: torch.addr(FULL, x[:, 0], x[0], beta=0.5),
    "bilinear": lambda _, x: F.bilinear(x, FULL, FULL.reshape(1, 2, 4).expand(2, 2, 4).reshape(1, 4, 4)),
    "cross": lambda _, x: torch.cross(x[:, :3], FULL[:, :3], dim=1),
    "weight norm of a frozen length": lambda _, x: torch._weight_norm(x, FULL[:, :1], 0),
    "weight norm of a frozen direction": lambda _, x: torch._weight_norm(FULL, x[:, :1], 0),
    "linalg.cross": lambda _, x: torch.linalg.cross(FULL[:, :3], x[:, :3]),
    "lerp_ into fp32": lambda _, x: torch.zeros(2, 4).lerp_(x, 0.1),
    "lerp_ into fp32 by a tensor": lambda _, x: torch.zeros(2, 4).lerp_(x, torch.sigmoid(x)),
    "addmm_ into fp32": lambda _, x: torch.ones(4, 4).addmm_(x.t(), x, beta=0.9),
    "addmv_ into fp32": lambda _, x: torch.ones(2).addmv_(x, x[0]),
    "addbmm_ into fp32": lambda _, x: torch.ones(2, 2).addbmm_(x[None], x.t()[None]),
    "baddbmm_ into fp32": lambda _, x: torch.ones(1, 2, 2).baddbmm_(x[None], x.t()[None]),
}


@LOW
@pytest.mark.parametrize("name", PROMOTED)
def test_two_dtypes_are_taken_in_the_wider_one(name: str, low: torch.dtype) -> None:
    out, grad = in_region(PROMOTED[name], torch.float32, low, low, "torch")
    want, want_grad = plain(PROMOTED[name], torch.float32, torch.linspace(-1, 1, 8).reshape(2, 4).to(low))
    eps = torch.finfo(low).eps if "sigmoid" in name or "by a tensor" in name or name == "lerp" else 0.0
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, want, rtol=eps, atol=eps)
    torch.testing.assert_close(grad.float(), want_grad, rtol=8 * torch.finfo(low).eps, atol=8 * torch.finfo(low).eps)


def test_comparisons_of_two_dtypes_answer() -> None:
    with mezzo.autocast("cpu"):
        assert torch.allclose(FULL, FULL.bfloat16(), rtol=1e-2)
        assert bool(torch.isclose(FULL.bfloat16(), FULL, rtol=1e-2).all())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_bf16_which_has_no_complex_numbers_gives_those_of_fp32() -> None:
    x = FULL.bfloat16()
    with mezzo.autocast("cpu"):
        assert torch.equal(torch.complex(x, x), torch.complex(x.float(), x.float()))
    with mezzo.autocast("cpu", torch.float16):
        assert torch.complex(FULL.half(), FULL.half()).dtype is torch.complex32  # as in torch


def test_one_dtype_is_left_as_it_is() -> None:
    x = FULL.bfloat16()
    with mezzo.autocast("cpu"):
        assert torch.lerp(x, x, 0.5).dtype is torch.dot(x[0], x[0]).dtype is torch.bfloat16


@LOW
@OPS
@pytest.mark.parametrize("name", FITTED)
def test_what_has_no_kernel_for_it_runs_in_fp32(name: str, low: torch.dtype, ops: str) -> None:
    out, grad = in_region(FITTED[name], torch.float32, low, low, ops)
    want, want_grad = plain(FITTED[name], torch.float32, torch.linspace(-1, 1, 8).reshape(2, 4).to(low))
    assert out.dtype is torch.float32 and torch.equal(out, want)
    assert grad.dtype is low and torch.equal(grad, want_grad.to(low))


@LOW
@OPS
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_evaluation_takes_a_padding_mask(ops: str, low: torch.dtype) -> None:
    """torch.autocast fails here: torch's fused layer of nested tensors has some of its products cast, and not the others."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32)).eval()
    x, pad = torch.randn(8, 6, 32), torch.arange(6) >= torch.randint(3, 7, (8, 1))
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=pad)
        for value in (x, x.to(low)):
            with mezzo.autocast("cpu", policy=f"{mezzo.formats.dtype_name(low)}, ops={ops}"):
                out = encoder(value, src_key_padding_mask=pad)
            torch.testing.assert_close(out[~pad].float(), expected[~pad], atol=32 * torch.finfo(low).eps, rtol=0)
        assert torch.equal(encoder(x, src_key_padding_mask=pad), expected)  # outside of a region it is torch's
        with mezzo.autocast("cpu", low), torch.autocast("cpu", enabled=False):
            assert torch.equal(encoder(x, src_key_padding_mask=pad), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_does_as_its_forward(use_reentrant: bool) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        with mezzo.autocast("cpu"):
            out = run(lambda x: torch.zeros(4, 4).index_add_(0, ROWS, layer(x)), x)
        x.grad = layer.weight.grad = None
        out.square().sum().backward()
        grads.append((x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@warns_of_breaks
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_model_does_as_eager(backend: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mark = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            h[MASK] = self.mark
            return torch.zeros(4, 4).index_add_(0, ROWS, h[:2])

    model, x = Net(), torch.randn(4, 4)
    mezzo.prepare(model, None, "bf16")
    assert torch.equal(torch.compile(model, backend=backend, fullgraph=TORCH >= (2, 12))(x), model(x))

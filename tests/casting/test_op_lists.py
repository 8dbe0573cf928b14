"""The two lists of ops that the mission names (SPEC A4, A5): under `ops=mezzo` they hold whole, on every device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.torch_versions import traces_regions, warns_of_breaks
from torch import Tensor, nn

import mezzo
import mezzo.errors
from mezzo import Policy

pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Op = Callable[[Tensor, Tensor, Tensor], Tensor]  # square a, square b, vector c

LOW: dict[str, Op] = {
    "__matmul__": lambda a, b, c: a @ b,
    "addbmm": lambda a, b, c: torch.addbmm(a, a[None], b[None]),
    "addmm": lambda a, b, c: torch.addmm(a, a, b),
    "addmv": lambda a, b, c: torch.addmv(c, a, c),
    "addr": lambda a, b, c: torch.addr(a, c, c),
    "baddbmm": lambda a, b, c: torch.baddbmm(a[None], a[None], b[None]),
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None]),
    "chain_matmul": lambda a, b, c: torch.chain_matmul(a, b, a),
    "conv1d": lambda a, b, c: F.conv1d(a[None], b[:, :, None]),
    "conv2d": lambda a, b, c: F.conv2d(a[None, :, :, None], b[:, :, None, None]),
    "conv3d": lambda a, b, c: F.conv3d(a[None, :, :, None, None], b[:, :, None, None, None]),
    "conv_transpose1d": lambda a, b, c: F.conv_transpose1d(a[None], b[:, :, None]),
    "conv_transpose2d": lambda a, b, c: F.conv_transpose2d(a[None, :, :, None], b[:, :, None, None]),
    "conv_transpose3d": lambda a, b, c: F.conv_transpose3d(a[None, :, :, None, None], b[:, :, None, None, None]),
    "linear": lambda a, b, c: F.linear(a, b, c),
    "matmul": lambda a, b, c: torch.matmul(a, b),
    "mm": lambda a, b, c: torch.mm(a, b),
    "mv": lambda a, b, c: torch.mv(a, c),
    "prelu": lambda a, b, c: F.prelu(a, c),
    "einsum": lambda a, b, c: torch.einsum("ij,jk->ik", a, b),
    "attention": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], a[None]),
}  # fmt: skip
FP32: dict[str, Op] = {
    **{
        name: lambda a, b, c, name=name: getattr(torch, name)(a.abs().clamp(0.1, 0.9))
        for name in ("exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "acos", "asin", "tan", "cosh", "sinh",
                     "sum", "prod", "mean", "var", "std")
    },
    "pow": lambda a, b, c: a.pow(2),
    "1 / x": lambda a, b, c: 1 / a.abs().clamp(0.1, 0.9),
    "sum_to_size": lambda a, b, c: a.sum_to_size(1, 4),
    "trapezoid": lambda a, b, c: torch.trapezoid(a),
    "cumulative_trapezoid": lambda a, b, c: torch.cumulative_trapezoid(a),
    "pairwise_distance": lambda a, b, c: F.pairwise_distance(a, b),
    "cumsum": lambda a, b, c: a.cumsum(0),
    "cumprod": lambda a, b, c: a.cumprod(0),
    "logsumexp": lambda a, b, c: a.logsumexp(0),
    "norm": lambda a, b, c: a.norm(),
    "matrix_exp": lambda a, b, c: torch.matrix_exp(a),  # torch's in 16 bit holds numbers beyond 1e30 on a CPU
    "nuclear norm": lambda a, b, c: torch.norm(a, "nuc"),
    "log_softmax": lambda a, b, c: a.log_softmax(-1),
    "cosine_similarity": lambda a, b, c: F.cosine_similarity(a, b),
    "cdist": lambda a, b, c: torch.cdist(a, b),
    "dist": lambda a, b, c: torch.dist(a, b),
    "mse_loss": lambda a, b, c: F.mse_loss(a, b),
    "l1_loss": lambda a, b, c: F.l1_loss(a, b),
    "smooth_l1_loss": lambda a, b, c: F.smooth_l1_loss(a, b),
    "cross_entropy": lambda a, b, c: F.cross_entropy(a, torch.arange(a.shape[0])),
    "kl_div": lambda a, b, c: F.kl_div(a, b.abs(), reduction="sum"),
    "bce_with_logits": lambda a, b, c: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
}  # fmt: skip
EITHER: dict[str, Op] = {
    "softmax": lambda a, b, c: a.softmax(-1),
    "layer_norm": lambda a, b, c: F.layer_norm(a, a.shape[-1:], c, c),
    "group_norm": lambda a, b, c: F.group_norm(a, 2),
    "rms_norm": lambda a, b, c: F.rms_norm(a, a.shape[-1:], c),
}
CASES = [(name, op, want) for want, ops in (("low", LOW), ("fp32", FP32), ("low", EITHER)) for name, op in ops.items()]


def arguments() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=made) for shape in ((4, 4), (4, 4), (4,))]


def dtype_and_value(op: Op, given: list[Tensor], low: str, compiled: bool = False) -> Tensor:
    def run(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        with mezzo.autocast("cpu", policy=f"{low}, modules=none, ops=mezzo"):
            return op(a, b, c)

    return (torch.compile(run, backend="eager", fullgraph=True) if compiled else run)(*given)


@pytest.mark.parametrize("low", LOW_DTYPES)
@pytest.mark.parametrize(("name", "op", "want"), CASES, ids=[name for name, _, _ in CASES])
def test_every_op_of_the_lists_whatever_float_comes_in(name: str, op: Op, want: str, low: str) -> None:
    expected = LOW_DTYPES[low] if want == "low" else torch.float32
    wide = arguments()
    narrow = [t.to(LOW_DTYPES[low]) for t in wide]
    for given in (wide, narrow, [wide[0], narrow[1], wide[2]]):
        got = dtype_and_value(op, given, low)
        assert got.dtype is expected
        exact = op(*(t.double() for t in given))
        atol = 64 * torch.finfo(LOW_DTYPES[low]).eps * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=atol)


@traces_regions
@pytest.mark.parametrize(
    ("low", "every"), [("bf16", 6), *(pytest.param(low, 1, marks=pytest.mark.slow) for low in LOW_DTYPES)]
)
def test_compiled_the_dtypes_are_the_same(low: str, every: int) -> None:
    torch._dynamo.reset()
    differing = []
    for name, op, want in CASES[::every]:
        if name == "chain_matmul":  # torch itself breaks the graph there
            continue
        expected = LOW_DTYPES[low] if want == "low" else torch.float32
        if dtype_and_value(op, arguments(), low, compiled=True).dtype is not expected:
            differing.append(name)
        torch._dynamo.reset()
    assert not differing


RECURRENT = [nn.RNN, nn.GRU, nn.LSTM, nn.RNNCell, nn.GRUCell, nn.LSTMCell]


def recurrent(make: type[nn.Module], low: str) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """A recurrent layer, it in a region, and what goes in."""
    model = make(4, 4)

    def run(x: Tensor) -> Tensor:
        with mezzo.autocast("cpu", policy=f"{low}, modules=none, ops=mezzo"):
            out = model(x)
        while isinstance(out, tuple):
            out = out[0]
        return out

    return model, run, torch.randn(3, 4) if make.__name__.endswith("Cell") else torch.randn(3, 2, 4)


@pytest.mark.parametrize("low", LOW_DTYPES)
@pytest.mark.parametrize("make", RECURRENT)
def test_recurrent_layers_and_cells_run_in_16_bit(make: type[nn.Module], low: str) -> None:
    model, run, x = recurrent(make, low)
    out = run(x)
    assert out.dtype is LOW_DTYPES[low]
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    exact = model.double()(x.double())
    while isinstance(exact, tuple):
        exact = exact[0]
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=16 * torch.finfo(LOW_DTYPES[low]).eps)


@warns_of_breaks
@pytest.mark.parametrize(
    ("make", "low"),
    [
        pytest.param(make, low, marks=[] if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, make in enumerate(RECURRENT)
        for j, low in enumerate(LOW_DTYPES)
    ],
)
def test_the_region_is_left_where_the_compiler_gives_up_inside(make: type[nn.Module], low: str) -> None:
    _, run, x = recurrent(make, low)
    before = torch.get_autocast_dtype("cpu")
    with torch.no_grad():
        assert torch.compile(run, backend="eager")(x).dtype is LOW_DTYPES[low]
    assert torch.get_autocast_dtype("cpu") is before
    torch._dynamo.reset()


@pytest.mark.parametrize("dims", [2, 3])
def test_fractional_pooling_draws_its_regions_in_the_dtype_of_its_input(dims: int) -> None:
    pool = {2: F.fractional_max_pool2d, 3: F.fractional_max_pool3d}[dims]
    x = torch.randn(8, 16, *[9] * dims, dtype=torch.float16)

    def pooled(region: torch.autocast, **options: bool) -> Tensor:
        torch.manual_seed(0)
        with region:
            return pool(x, 2, output_size=4, **options)

    ours, torchs = mezzo.autocast("cpu", policy="fp16, modules=none, ops=mezzo"), torch.autocast("cpu", torch.float16)
    want = pooled(torchs)
    assert want.dtype is torch.float32 and torch.equal(pooled(ours), want)
    assert torch.equal(pooled(ours, return_indices=True)[1], pooled(torchs, return_indices=True)[1])


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "rsub": lambda x: 1 - x,
    "reciprocal": lambda x: 1 / x,
    "floor_divide": lambda x: 5 // x,
    "floor_divide ": lambda x: x // 2,
    "remainder": lambda x: 5 % x,
    "remainder ": lambda x: x % 2,
    "pow": lambda x: 2**x,
    "sub": lambda x: x - 1,
    "mul": lambda x: 2 * x,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_rule_holds_for_the_operator_too(name: str) -> None:
    """By the names that a trace has for `1 - x` and `1 / x`, which may stand in the edit that it proposes."""
    with mezzo.autocast("cpu", policy=f"bf16, op:{name.strip()}=fp32"):
        assert OPERATORS[name](torch.full((3,), 3.0, dtype=torch.bfloat16)).dtype is torch.float32


WITHOUT_A_KERNEL: dict[str, Callable[[Tensor], Tensor]] = {
    "linalg.norm, 2": lambda x: torch.linalg.norm(x, 2),
    "linalg.norm": torch.linalg.norm,
    "linalg.lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), x),
    "sparse.softmax": lambda x: torch.sparse.softmax(x.to_sparse(), 1).to_dense(),
    "sparse.log_softmax": lambda x: torch.sparse.log_softmax(x.to_sparse(), 1).to_dense(),
    "sparse.sampled_addmm": lambda x: torch.sparse.sampled_addmm(x.detach().to_sparse_csr(), x, x).to_dense(),
    "smm": lambda x: torch.smm(x.detach().to_sparse(), x.detach()).to_dense(),
    "sspaddmm": lambda x: torch.sspaddmm(x.detach().to_sparse(), x.detach().to_sparse(), x.detach()).to_dense(),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 3), x.detach().sigmoid()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.abs() + 1).rsample()[..., 0],
    "beta": lambda x: torch.distributions.Beta(x.abs() + 1, x.abs() + 1).rsample(),
    "gamma": lambda x: torch.distributions.Gamma(x.abs() + 1, x.abs() + 1).rsample(),
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant checks):UserWarning")
@pytest.mark.parametrize("low", LOW_DTYPES)
@pytest.mark.parametrize("name", WITHOUT_A_KERNEL)
def test_what_has_no_16_bit_kernel_runs_in_fp32(name: str, low: str) -> None:
    given = (torch.randn(4, 4) + 3 * torch.eye(4)).to(LOW_DTYPES[low])
    outs, grads = [], []
    for x in (given.clone().requires_grad_(), given.float().requires_grad_()):
        torch.manual_seed(0)
        with mezzo.autocast("cpu", policy=Policy.parse(f"{low}, ops=mezzo"), enabled=x.dtype is not torch.float32):
            outs.append(WITHOUT_A_KERNEL[name](x))
        if outs[-1].requires_grad:
            outs[-1].float().sum().backward()
            grads.append(x.grad)
    assert outs[0].dtype is torch.float32
    torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(grads[:1], [grad.to(given.dtype) for grad in grads[1:]], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("op", [torch.add, torch.sub])
@pytest.mark.parametrize("dtype", LOW_DTYPES.values())
def test_sparse_sums_are_those_of_fp32_rounded(op: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    a, b = (torch.randn(4, 4).to(dtype).to_sparse().requires_grad_() for _ in range(2))
    with mezzo.autocast("cpu", policy=Policy.parse("fp16, ops=mezzo")):
        out = op(a, b)
    want = op(a.detach().to_dense().float(), b.detach().to_dense().float()).to(dtype)
    assert out.layout is torch.sparse_coo and torch.equal(out.detach().to_dense(), want)
    torch.sparse.sum(out.float()).backward()
    assert a.grad is not None and a.grad.dtype is dtype


def test_why_gives_the_reason() -> None:
    assert "an LSTM in fp16 meets a kernel that is not there" in str(Policy.parse("fp16, ops=mezzo").why(None, "lstm"))
    assert "no 16-bit kernel" in str(Policy.parse("bf16, ops=mezzo").why(None, "special_zeta"))


def test_an_lstm_in_fp16_under_torchs_table_says_what_to_write() -> None:
    model = nn.LSTM(4, 4)
    with pytest.raises(mezzo.errors.CastError, match="op:lstm=fp32"), mezzo.autocast("cpu", torch.float16):
        model(torch.randn(3, 2, 4))
    with mezzo.autocast("cpu", policy="fp16, modules=none, op:lstm=fp32"):
        assert model(torch.randn(3, 2, 4))[0].dtype is torch.float32


@pytest.mark.parametrize("name", ["grouped_mm", "_grouped_mm"])
@pytest.mark.parametrize(("rule", "dtype"), [("low", torch.bfloat16), ("fp32", torch.float32)])
def test_products_of_experts_take_a_rule_by_either_name(name: str, rule: str, dtype: torch.dtype) -> None:
    x, w, ends = torch.randn(4, 8), torch.randn(2, 8, 8, dtype=torch.bfloat16), torch.tensor([2, 4], dtype=torch.int32)
    policy = Policy.parse(f"bf16, op:{name}={rule}")
    with mezzo.autocast("cpu", policy=policy):
        assert F.grouped_mm(x, w, offs=ends).dtype is dtype
    assert str(policy.why(None, "grouped_mm").winner.text) == f"op:{name}={rule}"


POOLS = ("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d")
RULES = ("fp32", "low", "fp32_low_out")


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_for_max_pooling_holds_with_indices_too(name: str, rule: str) -> None:
    x = torch.randn(2, 3, *[4] * int(name[-2]), generator=torch.Generator().manual_seed(0))
    given = x.bfloat16() if rule == "fp32" else x
    with mezzo.autocast("cpu", policy=f"bf16, modules=none, op:{name}={rule}"):
        alone = getattr(F, name)(given, 2)
        out, indices = getattr(F, name)(given, 2, return_indices=True)
    assert out.dtype is alone.dtype is (torch.float32 if rule == "fp32" else torch.bfloat16)
    want, places = getattr(F, name)(given.to(out.dtype if rule == "low" else torch.float32), 2, return_indices=True)
    assert torch.equal(out, want.to(out.dtype)) and torch.equal(indices, places)

"""functorch, torch.jit.trace and decomposed programs: who takes ops apart meets them cast as the policy says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.torch_versions import traces_regions
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import mezzo
from mezzo.binding import Binding, forward
from mezzo.binding.module_rules import when_traced

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::torch.jit.TracerWarning",
    "ignore:While compiling",
    "ignore:The tensor attributes",
)
BF16 = torch.finfo(torch.bfloat16).eps
POLICIES = ("bf16", "bf16-master", "bf16, ops=mezzo")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class ByName(nn.Module):
    """Products that torch's own casts meet below the name they are called by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.cell = nn.Parameter(torch.randn(8, 8)), nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(torch.einsum("bti,ij->btj", x, self.weight)[:, -1].float())[0]


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "attention": Attending,
    "encoder": encoder,
    "by name": ByName,
}
KIN = {"gru": "bf16-master", "rnn": "bf16, ops=mezzo"}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(6),
    "plain batch": lambda: nn.BatchNorm1d(6, affine=False),
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "rms": lambda: nn.RMSNorm(6),
}


def twins(make: Callable[[], nn.Module], policy: str) -> tuple[nn.Module, nn.Module]:
    """Return a model in evaluation that is prepared, and its copy in fp32."""
    wide = make().eval()
    model = make().eval()
    model.load_state_dict(wide.state_dict())
    mezzo.prepare(model, None, policy)
    return model, wide


def check_close(got: Tensor, want: Tensor, steps: int = 16) -> None:
    torch.testing.assert_close(got.float(), want, rtol=0, atol=steps * BF16 * float(want.detach().abs().max()))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_traced_program_computes_what_the_model_does(name: str, policy: str) -> None:
    model, wide = twins(MODELS[name], policy)
    x = torch.randn(4, 5, 8)
    with torch.no_grad():
        program = torch.jit.trace(model, (x,), check_trace=False)
        check_close(program(x), wide(x))
        assert program(x).dtype is model(x).dtype
        check_close(program(x), model(x).float(), 4)
        assert not torch.equal(program(x), wide(x))  # cast it is


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        # An LSTM's cases stand for those of its kin, which are quick under one policy each.
        pytest.param(name, policy, marks=[pytest.mark.slow] * (KIN.get(name, policy) != policy))
        for name in MODELS if name != "by name"  # as torch.autocast loses it there
        for policy in POLICIES
    ],
)  # fmt: skip
def test_a_decomposed_program_computes_what_the_model_does(name: str, policy: str) -> None:
    model, wide = twins(MODELS[name], policy)
    x = torch.randn(4, 5, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x,)).run_decompositions().module()
        check_close(program(x), wide(x))
        check_close(program(x), model(x), 4)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=traces_regions)])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_decomposed_lstm_has_products_in_the_dtype_of_the_policy(policy: str, strict: bool) -> None:
    model, x = twins(MODELS["lstm"], policy)[0], torch.randn(4, 5, 8)
    program = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(program.module()(x), model(x))
    program = program.run_decompositions()
    products = [n for n in program.graph.nodes if "mm" in str(n.target)]
    assert products and {n.meta["val"].dtype for n in products} == {torch.bfloat16}


def transformed(model: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    first = next(iter(params))

    def called(values: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(model, (values, buffers), (x,))
        return out

    return {
        "vmap": lambda: vmap(lambda one: model(one[None])[0])(x),
        "jvp": lambda: jvp(model, (x,), (x,))[1],
        "jacrev": lambda: jacrev(model)(x),
        "jacfwd": lambda: jacfwd(model)(x),
        "hessian": lambda: hessian(lambda x: model(x).square().mean())(x),
        "functional_call": lambda: called(params, x),
        "grad": lambda: grad(lambda values: called(values, x).sum())(params)[first],
        "jvp of weights": lambda: jvp(lambda values: called(values, x), (params,), (params,))[1],
        "each sample's grad": lambda: vmap(grad(lambda v, one: called(v, one[None]).sum()), (None, 0))(params, x)[
            first
        ],
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("norm", NORMS)
def test_functorch_takes_norms_apart(norm: str, policy: str) -> None:
    model, wide = twins(lambda: nn.Sequential(nn.Linear(8, 6), NORMS[norm](), nn.Linear(6, 4)), policy)
    x = torch.randn(3, 8)
    want = transformed(wide, x)
    for name, run in transformed(model, x).items():
        try:
            check_close(run(), want[name](), 64 if name == "hessian" else 32)
        except Exception as error:
            raise AssertionError(name) from error


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x, self.weight)


@pytest.mark.parametrize(("edit", "is_wide"), [("", False), (", op:einsum=fp32", True)])
def test_a_product_called_by_its_own_name_is_cast_under_functorch_as_the_policy_says(edit: str, is_wide: bool) -> None:
    model, wide = twins(Product, f"bf16, output=none{edit}")
    x = torch.randn(3, 8)
    got = vmap(lambda one: model(one[None])[0])(x)
    assert got.dtype is model(x).dtype is (torch.float32 if is_wide else torch.bfloat16)
    check_close(got, wide(x), 1 if is_wide else 16)


def test_a_model_that_is_moved_follows_the_rules_of_its_new_device() -> None:
    class There:  # a stand-in for a parameter on an accelerator
        is_cpu, device = False, torch.device("cuda")

    policy = mezzo.Policy.parse("bf16")
    moved, wanted = Binding(policy=policy, device_type="cpu"), when_traced(policy.replace(modules=()), "cuda")
    moved.follow(There())  # type: ignore[arg-type]
    with mock.patch.object(forward, "autocast") as region:
        moved.region(None, traced=True)
    assert region.call_args.kwargs["policy"] == wanted != when_traced(policy.replace(modules=()), "cpu")

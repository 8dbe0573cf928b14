"""Names and schemas of ops."""

from __future__ import annotations

import re

import pytest
import torch

from mezzo import formats
from mezzo.trace.context import public_name
from mezzo.trace.ops import Call, floating, flops_of, is_product, node_op, op_facts, plain_name

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("aten.addmm", "addmm"),
        ("aten._to_copy", "to"),
        ("aten._softmax", "softmax"),
        ("aten._foreach_addcdiv_", "addcdiv"),
        ("aten.native_layer_norm", "layer_norm"),
        ("aten._native_batch_norm_legit_no_training", "batch_norm"),
        ("aten._batch_norm_with_update", "batch_norm"),
        ("aten._scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("aten._scaled_dot_product_efficient_attention", "scaled_dot_product_attention"),
        ("aten._scaled_dot_product_flash_attention_backward", "scaled_dot_product_flash_attention_backward"),
    ],
)
def test_plain_names(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("node", "op"),
    [
        ("LogBackward0", "log"),
        ("LogSoftmaxBackward0", "log_softmax"),
        ("NativeLayerNormBackward0", "layer_norm"),
        ("PowBackward1", "pow"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "scaled_dot_product_attention"),
        ("MyFunctionBackward", "MyFunction"),
        ("torch::autograd::CopySlices", "CopySlices"),
    ],
)
def test_nodes(node: str, op: str) -> None:
    assert node_op(node) == op


def test_nodes_are_those_of_torch() -> None:
    x = torch.rand(2, 4, requires_grad=True)
    made = {"log": x.log(), "softmax": x.softmax(0), "layer_norm": torch.layer_norm(x, (4,)), "to": x.half()}
    assert {name: node_op(y.grad_fn.name()) for name, y in made.items()} == {name: name for name in made}


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("__matmul__", "matmul"),
        ("__rmatmul__", "matmul"),
        ("__truediv__", "div"),
        ("__rtruediv__", "div"),
        ("__iadd__", "add"),
        ("__rpow__", "pow"),
        ("__rsub__", "rsub"),
        ("relu_", "relu"),
        ("layer_norm", "layer_norm"),
        ("__invert__", "bitwise_not"),
    ],
)
def test_public_names(name: str, public: str) -> None:
    assert public_name(name) == public


@pytest.mark.parametrize(
    ("func", "writes", "overwrites", "makes_nothing"),
    [
        (aten.add.Tensor, set(), False, False),
        (aten.add_.Tensor, {"self"}, False, False),
        (aten.copy_.default, {"self"}, True, False),
        (aten.add.out, {"out"}, True, False),
        (aten.view.default, set(), False, True),
        (aten.empty.memory_format, set(), False, True),
        (aten.native_batch_norm.default, {"running_mean", "running_var"}, False, False),
        (aten._foreach_add_.Scalar, {"self"}, False, False),
        (aten._fused_adamw_.default, {"self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"}, False, False),
    ],
)
def test_what_an_op_writes(func, writes: set[str], overwrites: bool, makes_nothing: bool) -> None:
    facts = op_facts(func)
    assert (set(facts.writes), facts.overwrites, facts.makes_nothing) == (writes, overwrites, makes_nothing)


def test_randomness_is_known() -> None:
    assert op_facts(aten.native_dropout.default).draws
    assert not op_facts(aten.relu.default).draws


def test_arguments_are_named_through_lists() -> None:
    a, b = torch.ones(2), torch.ones(3)
    func, given = aten.cat.default, ([a, torch.ones(1, dtype=torch.int64), b],)
    assert [name for name, _ in Call(func, op_facts(func), given, {"dim": 0}).inputs] == ["tensors[0]", "tensors[2]"]


def test_a_call_keeps_what_an_op_was_given_beside_what_the_program_holds() -> None:
    x, y, other = torch.ones(2), torch.full((2,), 3.0, requires_grad=True), torch.zeros(2)
    call = Call(aten.add_.Tensor, op_facts(aten.add_.Tensor), (x, y), {})
    with torch.no_grad():
        call.run((x, y), {})
        assert not call.is_tracked
    assert call.is_tracked
    assert call.originals[0] is x and call.originals[1] is y
    assert x.tolist() == [4.0, 4.0] and call.named["self"].tolist() == [1.0, 1.0]
    (before, given), _ = call.given_with({id(y): other})
    assert before is call.args[0] and given is other


def test_only_floating_values_count() -> None:
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,))
        shapes = [tuple(t.shape) for _, t in floating([torch.ones(2, dtype=torch.complex64), sparse], "x")]
    assert shapes == [(2, 2), (2,)]
    assert list(floating(torch.empty(2, device="meta"), "x")) == []
    assert list(floating(torch.ones(2, dtype=torch.bool), "x")) == []


def test_the_wide_dtype_of_a_call_is_that_of_its_results_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_WITHOUT_FP64", ("meta",))
    for device, dtype in (("cpu", torch.float64), ("meta", torch.float32)):
        call = Call(aten.neg.default, op_facts(aten.neg.default), (torch.ones(2),), {})
        call.out = [torch.ones(2, device=device)]
        assert call.wide_dtype is dtype


@pytest.mark.parametrize(
    ("func", "shapes"), [("mv", ((3, 5), (5,))), ("addmv", ((3,), (3, 5), (5,))), ("dot", ((5,), (5,)))]
)
def test_products_with_vectors_count(func: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    op = getattr(torch.ops.aten, func).default
    given = tuple(torch.randn(s) for s in shapes)
    assert is_product(op) and flops_of(op, given, {}, op(*given)) == 2 * max(t.numel() for t in given)


def test_every_node_of_torchs_own_has_the_name_of_an_op() -> None:
    nodes = [n for n in dir(torch._C._functions) if re.fullmatch(r"\w+?(?<!Backward)Backward\d+", n)]
    named = [n for n in nodes if re.search(r"\d", n.removesuffix("0")[:-8])]
    unknown = {
        n for n in named if not hasattr(torch.ops.aten, node_op(n)) and not hasattr(torch.ops.aten, f"_{node_op(n)}")
    }
    assert len(named) > 40
    assert unknown == {
        "GridSampler2DCpuFallbackBackward0",
        "SlowConv2DBackward0",
    }  # ops that torch calls by another name alone

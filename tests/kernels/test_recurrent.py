"""LSTM and GRU layers on the CPU: the compiled kernel against fp64 and torch's own, and what it must not take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.step.step_models import Dtypes
from tests.tolerance import distance
from torch import Tensor, nn

from mezzo.errors import OperandError
from mezzo.kernels import recurrent, registry, takes_recurrent
from mezzo.kernels.ops.recurrent import cpu

BF16, CPU = torch.bfloat16, torch.device("cpu")
HAS_KERNEL = registry.choose("recurrent", CPU, BF16).backend == "cpu" and cpu.products() > 0
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="the processor multiplies no pairs of bf16, or no compiler")

Results = list[Tensor]
Run = Callable[..., tuple[Tensor, ...]]
Layers = Callable[..., nn.RNNBase]


@pytest.fixture(params=[nn.LSTM, nn.GRU])
def layers(request: pytest.FixtureRequest) -> Layers:
    def make(inputs: int, units: int, **options: Any) -> nn.RNNBase:
        model: nn.RNNBase = request.param(inputs, units, **options)
        return model.to(BF16)

    return make


def torchs(model: nn.RNNBase) -> Run:
    run: Run = torch.lstm if isinstance(model, nn.LSTM) else torch.gru
    return run


def arguments(model: nn.RNNBase, state: Sequence[Tensor], params: Sequence[Tensor] | None = None) -> tuple[Any, ...]:
    """All that torch's op is given beside the input."""
    hx = tuple(state) if isinstance(model, nn.LSTM) else state[0]
    weights = list(model.parameters()) if params is None else params
    flags = (model.bias, model.num_layers, model.dropout, model.training, model.bidirectional, model.batch_first)
    return hx, weights, *flags


def operands(model: nn.RNNBase, steps: int, batch: int) -> list[Tensor]:
    """Input and first h, of an LSTM the first c too."""
    state = (model.num_layers * (1 + model.bidirectional), batch, model.hidden_size)
    shape = (batch, steps, model.input_size) if model.batch_first else (steps, batch, model.input_size)
    return [torch.randn(one).to(BF16) for one in (shape, state, state)[: 3 if isinstance(model, nn.LSTM) else 2]]


def results(run: Run, given: Sequence[Tensor], model: nn.RNNBase, grads: Sequence[Tensor | None]) -> Results:
    """What layers return, and the gradients of all their operands."""
    x, *state = leaves = [one.detach().requires_grad_() for one in given]
    weights = [one.detach().requires_grad_() for one in model.parameters()]
    outs = run(x, *arguments(model, state, weights))
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
    found = torch.autograd.grad([out for out, _ in pairs], [*leaves, *weights], [grad for _, grad in pairs])
    return [*(out.detach() for out in outs), *found]


def drawn_grads(model: nn.RNNBase, given: Sequence[Tensor]) -> list[Tensor]:
    width = model.hidden_size * (1 + model.bidirectional)
    return [torch.randn(*given[0].shape[:2], width).to(BF16), *[torch.randn_like(one) for one in given[1:]]]


def assert_no_farther(ours: Results, theirs: Results, true: Results) -> None:
    for own, their, want in zip(ours, theirs, true, strict=True):
        assert (own.shape, own.dtype) == (their.shape, their.dtype)
        rounding = 2**-6 * float(want.norm()) / want.numel() ** 0.5  # of a few elements either may be the lucky one
        assert distance(own, want) <= 1.1 * distance(their, want) + rounding


SHAPES = [(5, 1, 8, 8), (7, 3, 100, 100), (4, 33, 20, 513), (6, 2, 513, 17), (1, 4, 3, 1), (12, 13, 64, 48)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "no bias": {"bias": False}, "batch first": {"batch_first": True},
    "three layers": {"num_layers": 3}, "both directions": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_no_farther_from_fp64_than_torchs(
    layers: Layers, shape: tuple[int, ...], name: str
) -> None:
    steps, batch, inputs, units = shape
    model = layers(inputs, units, **OPTIONS[name])
    given = operands(model, steps, batch)
    grads = drawn_grads(model, given)
    wide = [[one.double() for one in group] for group in (given, grads)]
    true = results(torchs(model), wide[0], copy.deepcopy(model).double(), wide[1])
    ours, theirs = results(recurrent, given, model, grads), results(torchs(model), given, model, grads)
    assert_no_farther(ours, theirs, true)


@needs_kernel
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (BF16, torch.float32), (torch.float32, BF16)])
def test_a_gru_carries_its_state_in_the_dtype_that_it_was_given(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    model = nn.GRU(40, 50, **OPTIONS[name])
    given = [one.to(dtype) for one, dtype in zip(operands(model, 7, 6), dtypes, strict=True)]
    grads = [torch.randn(one.shape).to(dtypes[1]) for one in drawn_grads(model, given)]
    wide = [[one.double() for one in group] for group in (given, grads)]
    true = results(torch.gru, wide[0], copy.deepcopy(model).double(), wide[1])
    with torch.autocast("cpu", BF16):
        ours, theirs = results(recurrent, given, model, grads), results(torch.gru, given, model, grads)
    assert ours[0].dtype is ours[1].dtype is dtypes[1]
    assert torch.equal(ours[0], ours[0].to(BF16)) is (dtypes[1] is BF16)
    assert_no_farther(ours, theirs, true)


@needs_kernel
@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_of_one_result_alone(layers: Layers, which: int) -> None:
    model = layers(24, 40, num_layers=2)
    given = operands(model, 6, 5)
    grads = [grad if n == which else None for n, grad in enumerate(drawn_grads(model, given))]
    if which == len(grads):
        return  # a GRU has no c
    wide = [[one if one is None else one.double() for one in group] for group in (given, grads)]
    true = results(torchs(model), wide[0], copy.deepcopy(model).double(), wide[1])  # type: ignore[arg-type]  # none of the operands is None
    for own, want in zip(results(recurrent, given, model, grads), true, strict=True):
        assert distance(own, want) <= 0.03 * float(want.norm())


@needs_kernel
def test_threads_change_no_bit(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(20, 70)
    given = operands(model, 5, 29)
    grads = drawn_grads(model, given)
    once = results(recurrent, given, model, grads)
    for threads in (1, 3, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(map(torch.equal, once, results(recurrent, given, model, grads)))


def in_a_wider_one(x: Tensor) -> Tensor:
    return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "in a wider one": in_a_wider_one,
    "columns apart": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "batch first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@needs_kernel
def test_gradients_that_are_zeros_without_memory(layers: Layers) -> None:
    model = layers(18, 20)
    given = operands(model, 6, 5)
    y, *last = drawn_grads(model, given)
    pairs = [
        [y, *map(make, last)]
        for make in (torch.zeros_like, lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype))
    ]
    assert all(map(torch.equal, *[results(recurrent, given, model, grads) for grads in pairs]))


@needs_kernel
@pytest.mark.parametrize("layout", LAID)
def test_however_operands_lie_the_results_are_the_same(layers: Layers, layout: str) -> None:
    model = layers(18, 20)
    given = operands(model, 6, 5)
    grads = drawn_grads(model, given)
    others = [[LAID[layout](one) for one in group] for group in (given, grads)]
    for one, other in zip(
        results(recurrent, given, model, grads), results(recurrent, others[0], model, others[1]), strict=True
    ):
        assert torch.equal(one, other)


@needs_kernel
def test_gradients_that_are_one_number_for_all(layers: Layers) -> None:
    model = layers(18, 20)
    given = operands(model, 6, 5)
    one = torch.ones((), dtype=BF16)
    grads = [one.expand(grad.shape) for grad in drawn_grads(model, given)]
    alike = zip(
        results(recurrent, given, model, grads),
        results(recurrent, given, model, [g.contiguous() for g in grads]),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in alike)


@needs_kernel
def test_gradients_that_torch_negates_late(layers: Layers) -> None:
    """As the imaginary part of what was conjugated is."""
    model = layers(18, 20)
    given = operands(model, 6, 5)
    grads = drawn_grads(model, given)
    late = [torch.ops.aten._neg_view(-grad) for grad in grads]
    pairs = zip(results(recurrent, given, model, grads), results(recurrent, given, model, late), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@needs_kernel
@pytest.mark.parametrize("layout", LAID)
def test_however_hooks_lay_out_what_waits_for_backward_the_gradients_are_the_same(layers: Layers, layout: str) -> None:
    model = layers(18, 20)
    given = operands(model, 6, 5)
    grads = drawn_grads(model, given)
    want = results(recurrent, given, model, grads)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: LAID[layout](t) if t.dim() > 1 else t, lambda t: t):
        got = results(recurrent, given, model, grads)
    assert all(map(torch.equal, got, want))


@needs_kernel
@pytest.mark.parametrize("size", [1e2, 1e4, 1e36])
def test_gates_that_are_open_or_shut(layers: Layers, size: float) -> None:
    model = layers(16, 16)
    given = operands(model, 4, 3)
    given[0] *= size
    x, *state = [one.double() for one in given]
    want = torchs(model)(x, *arguments(model, state, [p.double() for p in model.parameters()]))
    for own, true in zip(recurrent(given[0], *arguments(model, given[1:])), want, strict=True):
        assert own.isfinite().all()
        torch.testing.assert_close(own.double(), true, rtol=2**-7, atol=2**-7)


@needs_kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_stay_in_their_row_of_the_batch(layers: Layers, value: float) -> None:
    model = layers(17, 20)
    given = operands(model, 6, 8)
    given[0][2, 3, 16] = value
    y = recurrent(given[0], *arguments(model, given[1:]))[0]
    others = [row for row in range(8) if row != 3]
    assert y[:, others].isfinite().all() and y[:2].isfinite().all()
    assert bool(y[2:, 3].isnan().all()) is (value != value)


@needs_kernel
def test_dropout_is_drawn_as_torch_draws_it(layers: Layers) -> None:
    model = layers(16, 32, num_layers=3, dropout=0.5)
    given = operands(model, 6, 4)
    found = []
    for run in (recurrent, torchs(model)):
        torch.manual_seed(7)
        found.append(run(given[0], *arguments(model, given[1:]))[0])
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


@needs_kernel
def test_a_second_derivative_is_torchs(layers: Layers) -> None:
    model = layers(8, 12, bidirectional=True)
    given = operands(model, 4, 3)

    def penalty(run: Run) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in given]
        out = run(leaves[0], *arguments(model, leaves[1:]))[0]
        first = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((one.float().square().sum() for one in first), torch.zeros(())), leaves)

    for own, their in zip(penalty(recurrent), penalty(torchs(model)), strict=True):
        torch.testing.assert_close(own, their, rtol=0.03, atol=0.03 * float(their.abs().max()))


@needs_kernel
def test_batched_gradients_are_those_of_one_after_the_other(layers: Layers) -> None:
    model = layers(8, 12)
    given = operands(model, 4, 3)
    x = given[0].requires_grad_()
    y = recurrent(x, *arguments(model, given[1:]))[0]
    grads = torch.randn(2, *y.shape).to(BF16)
    (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(y, x, grad, retain_graph=True)[0], rtol=0.05, atol=0.05)


REFUSED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "one step without a batch": lambda g: {"input": g["input"][0]},
    "nothing": lambda g: {"input": g["input"][:0]},
    "fp64": lambda g: {"input": g["input"].double()},
    "another width": lambda g: {"input": g["input"][..., 1:]},
    "another batch": lambda g: {"input": g["input"][:, 1:]},
    "a state of one layer": lambda g: {"hx": g["hx"][:1] if isinstance(g["hx"], Tensor) else [one[:1] for one in g["hx"]]},
    "the other kind's state": lambda g: {"hx": (g["hx"],) * 2 if isinstance(g["hx"], Tensor) else g["hx"][0]},
    "a weight too few": lambda g: {"params": g["params"][:-1]},
    "projections": lambda g: {"params": [*g["params"], torch.zeros(2, 12)]},
    "numbers instead of biases": lambda g: {"has_biases": False},
    "weights elsewhere": lambda g: {"params": [one.to("meta") for one in g["params"]]},
    "a sparse input": lambda g: {"input": g["input"].to_sparse()},
}  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_for_is_left_to_torch(layers: Layers, name: str) -> None:
    model = layers(8, 12, num_layers=2)
    x, *state = operands(model, 4, 300)
    names = "hx params has_biases num_layers dropout train bidirectional batch_first"
    good = {"input": x, **dict(zip(names.split(), arguments(model, state), strict=True))}
    assert takes_recurrent(**good)
    assert not takes_recurrent(**{**good, **REFUSED[name](good)})


@needs_kernel
def test_without_a_gradient_to_come_an_lstm_is_left_to_torch(layers: Layers) -> None:
    model = layers(8, 12).requires_grad_(False)
    x, *state = operands(model, 4, 300)
    assert takes_recurrent(x, *arguments(model, state))
    assert takes_recurrent(x, *arguments(model.eval(), state)) is isinstance(model, nn.GRU)


@needs_kernel
def test_more_threads_than_rows_to_share_are_left_to_torch(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(8, 12)
    x, *state = operands(model, 4, 3)
    taken = []
    for threads in (6, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        taken.append(takes_recurrent(x, *arguments(model, state)))
    assert taken == [True, False]


@needs_kernel
def test_without_a_compiled_kernel_it_is_not_taken(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(8, 12)
    x, *state = operands(model, 4, 300)
    monkeypatch.setattr("mezzo.kernels.ops.recurrent.compiled", lambda op: None)
    assert not takes_recurrent(x, *arguments(model, state))


class BackwardKernels(Dtypes):
    OPS = ("mkldnn_rnn_layer_backward", "sigmoid_backward")


@needs_kernel
def test_who_watches_ops_sees_torchs(layers: Layers) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, seen = layers(8, 12), []
    x, *state = operands(model, 4, 300)
    given = arguments(model, state)
    y = recurrent(x, *given)[0]
    with FlopCounterMode(display=False):
        seen.append(takes_recurrent(x, *given))
        with BackwardKernels() as kernels:
            y.sum().backward()  # type: ignore[no-untyped-call]
    torch.func.vmap(lambda row: seen.append(takes_recurrent(row, *given)) or row)(x[None])
    assert not any(seen)
    assert {dtype for _, dtype in kernels.seen} == {BF16}


@needs_kernel
def test_hooks_that_give_back_something_else_are_refused_before_anything_is_read(layers: Layers) -> None:
    model = layers(8, 12)
    x, *state = operands(model, 4, 3)
    for wrong in (lambda t: t[:1], lambda t: t.double(), lambda t: t.to("meta")):
        with torch.autograd.graph.saved_tensors_hooks(wrong, lambda t: t):
            loss = recurrent(x, *arguments(model, state))[0].sum()
        with pytest.raises(OperandError, match="gradients of recurrent layers cannot be computed: its"):
            loss.backward()  # type: ignore[no-untyped-call]


@needs_kernel
def test_what_waits_for_backward_takes_twelve_bytes_an_output_beside_operands_and_first_state(layers: Layers) -> None:
    saved: dict[int, int] = {}
    model = layers(16, 32)
    x, *state = operands(model, 4, 6)

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = recurrent(x, *arguments(model, state))[0]
    given = sum(one.nbytes for one in (y, x, *state, *model.parameters()))
    assert sum(saved.values()) == given + 12 * y.numel() + 4 * y[0].numel()


@needs_kernel
def test_a_result_that_is_written_before_backward_is_an_error_where_it_is_torchs(layers: Layers) -> None:
    model = layers(8, 12)
    x, *state = operands(model, 4, 3)
    for run in (recurrent, torchs(model)):
        y = run(x, *arguments(model, state))[0]
        loss = y.sum()
        y.mul_(2)
        if isinstance(model, nn.LSTM):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]

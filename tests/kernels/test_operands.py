"""Nothing reaches a kernel that does not fit its weight, and every gradient is read as what it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.optim.streams import bits, equal, snapshot
from tests.tolerance import relative
from torch import Tensor, nn
from torch.nn import Parameter

import mezzo
from mezzo.errors import CheckpointError, OperandError
from mezzo.kernels.operands import span_of
from mezzo.kernels.ops.gradients import norm_and_finite
from mezzo.optim import SGD, AdamW
from mezzo.optim.base import MasterOptimizer

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def step(optimizer: torch.optim.Optimizer, grads: Callable[[Tensor], Tensor] = torch.ones_like) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = grads(p)
    optimizer.step()


def half(*shape: int) -> Parameter:
    return Parameter(torch.linspace(-1, 1, math.prod(shape)).reshape(shape).bfloat16())


def stepped(*params: Parameter, master: Any = "split", kind: Any = AdamW, **options: Any) -> Any:
    optimizer = kind(params, lr=0.1, master=master, **options)
    step(optimizer)
    return optimizer


def readable(optimizer: MasterOptimizer) -> list[Tensor]:
    """Return the bytes of what can be read."""
    held = [*optimizer.state, *(t for entry in optimizer.state.values() for t in entry.values())]
    whole = [t for t in held if t.device.type == "cpu" and t.untyped_storage().nbytes() >= t.nbytes]
    return [bits(t) for t in whole]


def grown(o: MasterOptimizer, p: Parameter) -> None:
    p.data = torch.cat([p.data, p.data])


def old_gradient(o: MasterOptimizer, p: Parameter) -> None:
    p.data = torch.zeros(64, 8, dtype=p.dtype)
    o.state.clear()


def swap_states(o: MasterOptimizer, p: Parameter) -> None:
    first, second = o.state.values()
    for name in first:
        first[name], second[name] = second[name], first[name]


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[MasterOptimizer, Parameter], None]:
    def change(o: MasterOptimizer, p: Parameter) -> None:
        o.state[p][name] = make(o.state[p][name])

    return change


def free(o: MasterOptimizer, p: Parameter) -> None:
    o.state[p]["exp_avg"].untyped_storage().resize_(8)


def become_fp16(o: MasterOptimizer, p: Parameter) -> None:
    p.data = p.data.half()
    p.grad = torch.ones_like(p)


def one_memory(o: MasterOptimizer, p: Parameter) -> None:
    o.state[p]["exp_avg_sq"] = o.state[p]["exp_avg"]


def memory_of_another(o: MasterOptimizer, p: Parameter) -> None:
    other = next(q for q in o.state if q is not p)
    whole = torch.zeros(100)
    o.state[p]["exp_avg"], o.state[other]["exp_avg"] = whole[:32].view(4, 8), whole[30:39].view(3, 3)


MISFITS = [
    (grown, "parameter 0 bf16[8,8] cpu cannot be stepped: its gradient is bf16[4,8] cpu, of another shape"),
    (old_gradient, "its gradient is bf16[4,8] cpu, of another shape. Call zero_grad()"),
    (swap_states, "its exp_avg is fp32[3,3] cpu, of another shape. Load the state dict"),
    (put("exp_avg", lambda t: t[:2]), "its exp_avg is fp32[2,8] cpu, of another shape"),
    (put("exp_avg_sq", lambda t: t.t().contiguous()), "its exp_avg_sq is fp32[8,4] cpu, of another shape"),
    (put("exp_avg", lambda t: t.to(torch.int32)), "its exp_avg is int32[4,8] cpu, and has to be fp32 or bf16"),
    (put("remainder", lambda t: t[:1]), "its remainder is int16[1,8] cpu, of another shape"),
    (put("remainder", lambda t: t.float()), "its remainder is fp32[4,8] cpu, and has to be int16"),
    (put("remainder", lambda t: t.to("meta")), "its remainder is int16[4,8] meta, on another device"),
    (put("exp_avg", lambda t: t[0].expand(4, 8)), "expanded: several of its elements are one in memory"),
    (free, "its exp_avg is fp32[4,8] cpu, and ends beyond its storage of 8 bytes"),
    (become_fp16, "parameter 0 fp16[4,8] cpu cannot be stepped: it has to be bf16 with master=split"),
    (one_memory, "in the memory of exp_avg"),
    (memory_of_another, "in the memory of exp_avg"),
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("change", "words"), MISFITS, ids=[f"{number}" for number in range(len(MISFITS))])
def test_a_misfit_is_named_and_nothing_is_changed(change: Any, words: str, backend: Any) -> None:
    p, other = half(4, 8), half(3, 3)
    optimizer = stepped(p, other, backend=backend)
    change(optimizer, p)
    other.grad = torch.full_like(other, 7.0)
    kept = readable(optimizer)
    with pytest.raises(OperandError) as refused:
        optimizer.step()
    assert words in str(refused.value)
    assert equal(readable(optimizer), kept)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_state_of_other_shapes_is_refused_when_loaded(kind: Any) -> None:
    options = {"momentum": 0.9} if kind is SGD else {}
    saved = stepped(half(3, 3), half(64, 8), kind=kind, **options).state_dict()
    optimizer = stepped(half(64, 8), half(3, 3), kind=kind, **options)
    kept = snapshot(optimizer)
    with pytest.raises(CheckpointError, match=r"state\[0\].* has shape \[3, 3\], and \[64, 8\] is wanted"):
        optimizer.load_state_dict(saved)
    assert equal(snapshot(optimizer), kept)


def test_masters_of_another_shape_are_refused() -> None:
    p, q = half(4, 8), half(3, 3)
    optimizer = stepped(p, q)
    kept = snapshot(optimizer)
    with pytest.raises(OperandError, match=r"parameter 1 bf16\[3,3\] cpu .* its master is fp32\[4,8\] cpu, of another"):
        optimizer.set_masters_({p: torch.zeros(4, 8), q: torch.zeros(4, 8)})
    assert equal(snapshot(optimizer), kept)


def test_the_parameter_is_named_where_it_has_a_name() -> None:
    layer = torch.nn.Linear(4, 4).bfloat16()
    optimizer = AdamW(layer.named_parameters(), master="split")
    step(optimizer)
    optimizer.state[layer.bias]["exp_avg_sq"] = torch.zeros(5)
    with pytest.raises(OperandError, match=r"^bias bf16\[4\] cpu"):
        step(optimizer)


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gradient_is_read_as_what_it_is(kind: Any, stored: torch.dtype, dtype: torch.dtype) -> None:
    """In mixed company too; equal to the fp32 gradient of the same values, bit for bit."""
    master = {torch.float32: "none", torch.bfloat16: "split", torch.float16: "fp32"}[stored]
    values = torch.randn(70, 9).to(torch.bfloat16).half().to(torch.bfloat16)
    runs = []
    for read in (dtype, torch.float32):
        params = [Parameter(torch.ones(70, 9).to(stored)) for _ in range(3)]
        optimizer = kind(params, lr=0.1, master=master)
        for dtypes in [(read, torch.float32, stored), (torch.float32, read, read)]:
            for p, grad_dtype in zip(params, dtypes, strict=True):
                p.grad = None
                p.grad_dtype = grad_dtype  # type: ignore[attr-defined]  # torch 2.9 and later
                p.grad = values.to(grad_dtype)
            optimizer.step()
        runs.append([*params, *(optimizer.master(p) for p in params)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not torch.equal(runs[0][0], torch.ones(70, 9).to(stored))


def test_a_weight_of_another_dtype_where_the_last_one_lay_is_stepped_as_what_it_is() -> None:
    """As `model.float().half()` leaves it: memory that was freed is given out again."""
    p = Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = stepped(p, master="fp32", kind=SGD)
    master = optimizer.master(p).clone()
    p.grad, p.data = None, p.data.view(torch.float16)
    p.data.copy_(master)
    step(optimizer)
    assert torch.equal(p.detach(), (master - 0.1).half())


def test_a_gradient_that_lies_in_what_is_written_is_copied_first() -> None:
    p, whole = Parameter(torch.randn(6, 5)), torch.randn(31)
    q, twins = Parameter(whole[1:]), [Parameter(p.detach().clone()), Parameter(whole.clone()[1:])]
    got, want = SGD([p, q], lr=0.5, momentum=0.9), torch.optim.SGD(twins, lr=0.5, momentum=0.9, foreach=False)
    for optimizer, params in ((got, [p, q]), (want, twins)):
        step(optimizer)
        params[0].grad = params[0].detach()
        params[1].grad = params[1].detach().as_strided((30,), (1,), 0)  # each element where that before it is written
        optimizer.step()
    torch.testing.assert_close([p, q], twins, rtol=relative(torch.float32, 8), atol=relative(torch.float32, 8))
    shared = q.detach()
    q.grad = torch.as_strided(shared, (30,), (0,), 3)  # one element of the weight itself, thirty times
    before, element = q.detach().clone(), float(whole[3])
    buffer = got.state[q]["momentum_buffer"].clone()
    got.step()
    torch.testing.assert_close(q.detach(), before - 0.5 * (0.9 * buffer + element))


def test_weights_that_share_memory_are_stepped_as_by_torch() -> None:
    runs = []
    for kind in (SGD, torch.optim.SGD):
        p = Parameter(torch.linspace(-1, 1, 12))
        q = Parameter(p.data)
        optimizer = kind([p, q], lr=0.5, weight_decay=0.25)
        for _ in range(3):
            step(optimizer)
        runs.append(p.detach())
    torch.testing.assert_close(runs[0], runs[1], rtol=relative(torch.float32, 8), atol=relative(torch.float32, 8))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_moment_of_any_floating_dtype_is_stepped(name: str, dtype: torch.dtype) -> None:
    p, q = Parameter(torch.ones(40)), Parameter(torch.ones(40))
    optimizer = AdamW([p, q], lr=0.1)
    step(optimizer)
    optimizer.state[p][name] = optimizer.state[p][name].to(dtype)
    step(optimizer)
    assert optimizer.state[p][name].dtype is dtype
    torch.testing.assert_close(p, q, rtol=4 * torch.finfo(dtype).eps, atol=0.0)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def flushed() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SURROUNDINGS: list[Callable[[], Any]] = [
    lambda: default_device("meta"), lambda: default_dtype(torch.float64), lambda: default_dtype(torch.bfloat16), flushed,
    lambda: threads(2),
]  # fmt: skip


def surrounded(kind: Any, dtype: torch.dtype, master: Any, state_dtype: torch.dtype, around: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (70_001, 5)
    draw = [torch.randn(size, generator=generator) for size in sizes]
    small = [torch.randn(size, generator=generator) * 1e-6 for size in sizes]
    params = [Parameter(x.to(dtype)) for x in draw]
    options = {"momentum": 0.9, "dampening": 0.1} if kind is SGD else {"amsgrad": True}
    optimizer = kind(params, lr=0.1, master=master, state_dtype=state_dtype, **options)
    saved = None
    for number in range(4):
        with around():
            for p, grad in zip(params, small, strict=True):
                p.grad = grad.to(dtype) * (number + 1)
            optimizer.step()
            norm = norm_and_finite([p.grad for p in params]).norm
            if number == 1:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(saved)
    return [*snapshot(optimizer), norm]


@pytest.mark.parametrize("around", SURROUNDINGS, ids=["meta", "fp64", "bf16", "flushed", "threads"])
@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, "none"), (torch.bfloat16, "split"), (torch.float16, "kahan"), (torch.float16, "stochastic")],
)
def test_a_step_does_not_depend_on_what_is_set_around_it(
    kind: Any, dtype: torch.dtype, master: Any, around: Any
) -> None:
    state_dtype = torch.bfloat16 if master == "stochastic" else torch.float32
    want = surrounded(kind, dtype, master, state_dtype, lambda: threads(1))
    assert equal(surrounded(kind, dtype, master, state_dtype, around), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_gradient_is_read_right_with_subnormals_flushed(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    p = Parameter(torch.zeros(every.numel()))
    optimizer = SGD([p], lr=1.0)
    p.grad_dtype = dtype  # type: ignore[attr-defined]  # torch 2.9 and later
    p.grad = every.clone()
    with flushed():
        optimizer.step()
        norm = float(norm_and_finite([every[every.abs() <= 6e-5]]).norm)
    assert torch.equal(p.detach(), -every.float())
    want = float(every[every.abs() <= 6e-5].double().norm())
    assert norm == pytest.approx(want, rel=relative(torch.float32, 1 << 10))


def test_a_freed_gradient_is_refused() -> None:
    grad = torch.ones(8)
    grad.untyped_storage().resize_(0)
    with pytest.raises(OperandError, match="ends beyond its storage of 0 bytes"):
        norm_and_finite([torch.ones(3), grad])
    p = Parameter(torch.ones(8))
    optimizer = SGD([p], lr=0.1)
    p.grad = torch.ones(8)
    p.grad.untyped_storage().resize_(4)
    with pytest.raises(OperandError, match=r"its gradient is fp32.8. cpu, and ends beyond its storage of 4 bytes"):
        optimizer.step()
    assert bool((p == 1).all())


class Metal:
    """A tensor of a device whose address is the handle of its buffer."""

    device = torch.device("mps")
    shape, itemsize = (1 << 20,), 4

    def __init__(self, handle: int, offset: int = 0) -> None:
        self.handle, self.offset = handle, offset

    def data_ptr(self) -> int:
        return self.handle + self.offset

    def untyped_storage(self) -> Metal:
        return Metal(self.handle)

    def numel(self) -> int:
        return self.shape[0]

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def element_size(self) -> int:
        return self.itemsize


def test_buffers_whose_addresses_are_handles_lie_apart() -> None:
    """Handles of two buffers of 4 MiB are 64 bytes apart; two views of one buffer overlap as elsewhere."""
    spans = [span_of(Metal(handle)) for handle in (0x6000_0010_0000, 0x6000_0010_0040)]
    assert spans[0][1] <= spans[1][0] and spans[0][1] - spans[0][0] == 1 << 22
    one, other = span_of(Metal(0x6000_0010_0000)), span_of(Metal(0x6000_0010_0000, 64))
    assert one[0] < other[0] < one[1]


@pytest.mark.parametrize("kind", [lambda: nn.RMSNorm(128), lambda: nn.Linear(128, 64), lambda: nn.GRU(128, 128)])
def test_an_input_that_torch_negates_late_is_read_as_what_it_is(kind: Any) -> None:
    model = kind().bfloat16()
    mezzo.prepare(model, None, "bf16")
    for x in (torch.randn(6, 8, 128), torch.randn(6, 8, 128).bfloat16(), torch.randn(1, 8, 128).bfloat16()):
        late = torch.ops.aten._neg_view(x)
        assert late.is_neg() and late.is_contiguous()
        torch.testing.assert_close(model(late), model(-x), rtol=0, atol=relative(torch.bfloat16, 2))


@pytest.mark.parametrize(("kind", "twin"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)])
def test_moments_that_torch_negates_late_are_stepped_as_what_they_are(kind: Any, twin: Any) -> None:
    (ours, own), (its, other) = ((Parameter(torch.linspace(-1, 1, 9)), more) for more in ({"master": "none"}, {}))
    more = {} if kind is AdamW else {"momentum": 0.9}
    optimizers = kind([ours], lr=0.1, **own, **more), twin([its], lr=0.1, **other, **more)
    for optimizer in optimizers:
        step(optimizer)
        (state,) = optimizer.state.values()
        for name in state.keys() - {"step"}:
            state[name] = torch._neg_view(-state[name])
        step(optimizer)
    torch.testing.assert_close(ours, its)


def test_a_gradient_of_zeros_without_memory_is_refused() -> None:
    zeros = torch._efficientzerotensor((3,))
    with pytest.raises(OperandError, match=r"gradient 0 fp32\[3\] cpu cannot be stepped: .*zeros without memory"):
        norm_and_finite([zeros])

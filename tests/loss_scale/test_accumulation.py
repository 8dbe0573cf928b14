"""Gradients as they were left: of which losses, what changed, what was edited, and what only looks so."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mezzo
from mezzo.errors import ScalerError, StepError
from mezzo.kernels.weights import sum_of_bits
from mezzo.loss_scale import (
    AccumulationState,
    GradScaler,
    GradVersions,
    accumulation,
    check_loss,
    either,
    is_bad,
    without,
)


def noted(*values: list[float]) -> tuple[GradVersions, list[Tensor]]:
    params = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for p, value in zip(params, values, strict=True):
        p.grad = torch.tensor(value)
    versions = GradVersions()
    versions.note(params)
    return versions, list(params)


def set_(param: Tensor, value: float) -> None:
    assert param.grad is not None
    param.grad.fill_(value)


def replace(param: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    assert param.grad is not None
    param.grad = change(param.grad)


def drop(param: Tensor) -> None:
    param.grad = None


WRITES: dict[str, tuple[Callable[[Tensor], object], bool, bool]] = {
    "nothing": (lambda p: None, False, False),
    "dropped": (drop, False, False),
    "times one": (lambda p: p.grad.mul_(1.0), True, False),  # type: ignore[union-attr]
    "clipped to infinity": (lambda p: nn.utils.clip_grad_norm_([p], math.inf), True, False),
    "clipped to more than it is": (lambda p: nn.utils.clip_grad_norm_([p], 1e6), True, False),
    "clamped to more than it is": (lambda p: nn.utils.clip_grad_value_([p], 1e6), True, False),
    "nan_to_num of finite ones": (lambda p: p.grad.nan_to_num_(), True, False),  # type: ignore[union-attr]
    "a copy in its place": (lambda p: replace(p, torch.clone), True, False),
    "clipped": (lambda p: nn.utils.clip_grad_norm_([p], 1.0), True, True),
    "zeroed": (lambda p: set_(p, 0.0), True, True),
    "sign": (lambda p: p.grad.neg_(), True, True),  # type: ignore[union-attr]
    "one bit": (lambda p: p.grad[:1].mul_(1 + 2**-23), True, True),  # type: ignore[union-attr, index]
    "another in its place": (lambda p: replace(p, torch.zeros_like), True, True),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_counts_as_an_edit(write: str) -> None:
    versions, params = noted([3.0, 4.0], [1.0])
    change, is_changed, is_edited = WRITES[write]
    change(params[0])
    assert (versions.changed(params) != []) == is_changed
    assert (versions.edited(params) != []) == is_edited
    assert (versions.changed(params) != []) == is_edited  # what was forgiven is noted anew


def test_an_edit_is_named_beside_harmless_writes() -> None:
    versions, (one, two) = noted([3.0], [4.0])
    for p, factor in ((one, 1.0), (two, 2.0)):
        p.grad.mul_(factor)  # type: ignore[union-attr]
    assert [p is two for p in versions.edited([one, two])] == [True]


def test_inf_stays_no_edit_since_the_step_is_skipped_anyway() -> None:
    versions, params = noted([3.0, math.inf])
    nn.utils.clip_grad_norm_(params, math.inf)  # inf / inf: every element is NaN now
    assert versions.edited(params) == []


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_every_dtype_is_told_apart(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.zeros(5, dtype=dtype))
    p.grad = torch.randn(5, dtype=dtype)
    versions = GradVersions()
    versions.note([p])
    p.grad.mul_(1.0)
    assert versions.edited([p]) == []
    p.grad.mul_(2.0)
    assert len(versions.edited([p])) == 1


def test_sparse_gradients_too() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 3, 1])).sum().backward()
    versions = GradVersions()
    versions.note(table.parameters())
    table.weight.grad.mul_(1.0)  # type: ignore[union-attr]
    assert versions.edited([table.weight]) == []
    table.weight.grad.mul_(2.0)  # type: ignore[union-attr]
    assert len(versions.edited([table.weight])) == 1


def test_values_are_summed_in_the_first_steps_and_on_where_a_harmless_write_was_met() -> None:
    """A write that changes nothing is forgiven for good once; one that first comes later cannot be told."""
    for first, is_forgiven in ((0, True), (2, True), (3, False)):
        versions, params = noted([3.0])
        results = []
        for number in range(6):
            versions.note(params)
            if number >= first:
                params[0].grad.mul_(1.0)  # type: ignore[union-attr]
            results.append(versions.edited(params) == [])
            versions.close(params)
        assert all(results[:first]) and set(results[first:]) == {is_forgiven}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("every", [1, 4])
def test_a_norm_measured_by_clipping_to_infinity_in_the_scaler(every: int) -> None:
    """What the Hugging Face Trainer does in every step: same weights as without."""
    runs = []
    for measures in (False, True):
        torch.manual_seed(0)
        model, optimizer = model_and_optimizer()
        scaler = GradScaler("cpu")
        for number in range(9):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            if measures and number % every == 0:
                nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            scaler.step(optimizer)
            scaler.update()
        runs.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("by", ["scaler", "stepper"])
def test_a_healthy_run_sums_no_gradient_after_its_first_steps(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu") if by == "scaler" else None
    amp = mezzo.prepare(model, optimizer, "fp16") if by == "stepper" else None
    summed, nums = list[Tensor](), list[int]()
    monkeypatch.setattr(accumulation, "sum_of_bits", lambda grad: (summed.append(grad), sum_of_bits(grad))[1])
    for _ in range(6):
        loss = model(torch.randn(3, 4)).float().square().mean()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if amp is not None:
            amp.backward(loss)
            amp.step()
        optimizer.zero_grad()
        nums.append(len(summed))
        summed.clear()
    assert all(nums[:3]) and nums[3:] == [0] * 3


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp32"])
def test_a_norm_measured_by_clipping_to_infinity_in_the_stepper(policy: str) -> None:
    runs = []
    for measures in (False, True):
        torch.manual_seed(0)
        model, optimizer = model_and_optimizer()
        amp = mezzo.prepare(model, optimizer, policy)
        for _ in range(6):
            amp.zero_grad()
            amp.backward(model(torch.randn(3, 4)).float().square().mean())
            if measures:
                nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            amp.step()
        runs.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_clipping_that_clips_is_refused_as_before_in_both() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ScalerError, match="changed between backward"):
        scaler.step(optimizer)
    model, optimizer = model_and_optimizer()
    amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=8")
    amp.backward(model(torch.ones(3, 4)).float().sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(StepError, match="were changed since backward"):
        amp.step()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def test_a_backward_that_failed_keeps_no_gradient_alive() -> None:
    param = nn.Parameter(torch.ones(100))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    grad = weakref.ref(param.grad)
    with pytest.raises(RuntimeError, match="out of memory"):
        scaler.scale(Fails.apply(param).sum()).backward()
    optimizer.zero_grad()
    gc.collect()
    assert grad() is None
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.unique().tolist() == [0.5]


FLAGS = {True: (True, torch.tensor(1.0)), False: (False, torch.tensor(0.0))}


@pytest.mark.parametrize(("one", "other"), list(itertools.product([True, False], repeat=2)))
def test_flags_are_joined_alike_wherever_they_lie(one: bool, other: bool) -> None:
    for a, b in itertools.product(FLAGS[one], FLAGS[other]):
        assert bool(either(a, b)) is (one or other)
        assert bool(without(a, b)) is (one and not other)
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            assert isinstance(either(a, b), bool), "the host goes on knowing"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, -2.5, math.inf, -math.inf, math.nan])
def test_a_number_is_bad_if_it_is_not_finite(value: float, dtype: torch.dtype) -> None:
    assert bool(is_bad(torch.tensor(value, dtype=dtype), torch.device("cpu"))) is not math.isfinite(value)


LOSS = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "wanted", "words"),
    [
        (torch.ones(2, requires_grad=True), torch.float32, r"takes one floating number with its graph, not fp32\[2\]"),
        (1.5, torch.float32, r"not float\."),
        (np.float32(1.5), torch.float32, r"not numpy\.float32\. .* before \.item\(\), float\(\) or \.numpy\(\)"),
        (torch.tensor(3), torch.float32, "not int64"),
        (torch.ones(()), torch.float32, "no parameter leads to"),
        ((LOSS * 1).half(), torch.float32, "a fp16 loss, and the policy declares loss=fp32"),
        ((LOSS * 1).half(), torch.float16, ""),
        ((LOSS * 1).double(), torch.float32, ""),
        ((LOSS * 1).reshape(1), torch.float32, ""),
    ],
)
def test_a_loss_is_one_number_with_a_graph_and_wide_enough(loss: object, wanted: torch.dtype, words: str) -> None:
    if not words:
        check_loss(loss, wanted)  # type: ignore[arg-type]
        return
    with pytest.raises(StepError, match=words):
        check_loss(loss, wanted)  # type: ignore[arg-type]


class TestBackwardPass:
    """As `loss.backward`, for whoever looks on."""

    @pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph
    @pytest.mark.parametrize("inputs", [False, True])
    def test_leaves_gradients_and_graph_as_torch_does(self, inputs: bool) -> None:
        found = []
        for run in (lambda loss, **asked: loss.backward(**asked), AccumulationState.run_backward):
            x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
            loss = (x * x * y).reshape(1)
            asked = {"retain_graph": True, "create_graph": False, "inputs": [x] if inputs else None}
            run(loss, **asked)
            run(loss, **{**asked, "retain_graph": None})
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                run(loss, **asked)
            again = x.square().sum()
            run(again, retain_graph=None, create_graph=True, inputs=None)
            found.append((x.grad, y.grad, x.grad.requires_grad))
        assert found[0] == found[1]

    @pytest.mark.parametrize("owner", [Tensor, torch.autograd])
    def test_runs_what_somebody_put_in_its_place(self, owner: object, monkeypatch: pytest.MonkeyPatch) -> None:
        theirs, seen = owner.backward, []  # type: ignore[attr-defined]  # both have one
        monkeypatch.setattr(owner, "backward", lambda *args, **named: (seen.append(1), theirs(*args, **named))[1])
        x = torch.ones(1, requires_grad=True)
        AccumulationState.run_backward(x.sum(), None, False, None)
        assert seen == [1] and x.grad is not None

    def test_is_seen_by_a_mode_and_by_the_log_of_torch(self, caplog: pytest.LogCaptureFixture) -> None:
        seen: list[object] = []

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, func: object, types: object, args: object = (), kwargs: object = None
            ) -> object:
                seen.append(func)
                return func(*args, **(kwargs or {}))  # type: ignore[operator, misc]

        loss = torch.ones(1, requires_grad=True).sum()
        with Mode():
            AccumulationState.run_backward(loss, True, False, None)
        assert Tensor.backward in seen
        with caplog.at_level(logging.DEBUG, torch.autograd.graph.__name__):
            AccumulationState.run_backward(loss, True, False, None)
        assert "SumBackward0" in caplog.text

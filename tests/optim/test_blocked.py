"""A blocked step changes nothing, and nobody had to read whether it was blocked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim.streams import SHAPES, equal, feed, gradients, parameters, snapshot
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.optim import SGD, AdamW

KINDS: list[tuple[Any, dict[str, Any], torch.dtype]] = [
    (optimizer, {"master": master, "state_dtype": state, **extra}, dtype)
    for optimizer, extra in ((AdamW, {"amsgrad": True, "lr": 0.01}), (SGD, {"lr": 0.03, "momentum": 0.9}))
    for state in (torch.float32, torch.bfloat16)
    for master, dtype in (
        ("split", torch.bfloat16),
        ("fp32", torch.float16),
        ("kahan", torch.bfloat16),
        ("stochastic", torch.float16),
        ("none", torch.float32),
    )
]


def kind_id(value: Any) -> str | None:
    return value["master"] + "-" + str(value["state_dtype"]).removeprefix("torch.") if isinstance(value, dict) else None


def poisoned(grads: list[Tensor], step: int) -> list[Tensor]:
    bad = (torch.inf, -torch.inf, torch.nan)[step % 3]
    return [torch.full_like(grad, bad) if place == step % len(grads) else grad for place, grad in enumerate(grads)]


FOUND = {
    "0-d": (torch.ones(()), "auto"),
    "1-d": (torch.ones(1), "reference"),
    "three": (torch.tensor(3.0), "reference"),
}
BLOCKED = [
    pytest.param(*kind, *found, id=f"{name}-{kind[0].__name__}-{kind_id(kind[1])}",
                 marks=[] if name == "0-d" or (index + offset) % 2 == 0 else pytest.mark.slow)
    for offset, (name, found) in enumerate(FOUND.items())
    for index, kind in enumerate(KINDS)
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "options", "dtype", "found", "backend"), BLOCKED)
def test_200_blocked_steps_leave_every_bit(
    optimizer: Any, options: dict[str, Any], dtype: torch.dtype, found: Tensor, backend: str
) -> None:
    long = found.shape == () and found.item() == 1 and options["state_dtype"] is torch.float32
    rounds = 200 if long else 3
    got, want = (optimizer(parameters(dtype), backend=backend, **options) for _ in range(2))
    stream = list(gradients(parameters(dtype), 4, torch.bfloat16))
    for step, grads in enumerate(stream):
        got.found_inf = found
        before = snapshot(got) if step else None
        for i in range(rounds if step == 2 else 1):
            feed(got, poisoned(grads, i))
        if before:
            assert equal(snapshot(got), before)
        got.found_inf = torch.zeros_like(found)
        feed(got, grads)
        feed(want, grads)
        assert equal(snapshot(got), snapshot(want))
        assert float(next(iter(got.state.values()))["step"]) == step + 1


@pytest.mark.parametrize(("optimizer", "options", "dtype"), KINDS, ids=kind_id)
def test_a_step_on_scaled_gradients_equals_one_on_true_ones(
    optimizer: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    got, want = (optimizer(parameters(dtype), **options) for _ in range(2))
    got.grad_scale = torch.tensor([2.0**7])
    got.found_inf = torch.zeros(1)
    for grads in gradients(parameters(dtype), 6, torch.bfloat16):
        tame = [grad.clamp(-4, 4) for grad in grads]
        feed(got, tame, scale=2.0**7)
        feed(want, tame)
    if dtype is not torch.float16:  # where unscaled values are subnormal they have fewer bits than scaled ones
        assert equal(snapshot(got), snapshot(want))
    for p, q in zip(got.param_groups[0]["params"], want.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_small_fp16_gradients_survive_because_they_are_unscaled_in_fp32() -> None:
    true = 2.0**-30
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    q = torch.nn.Parameter(torch.ones(4))
    got, want = SGD([p], lr=2.0**20, master="fp32"), torch.optim.SGD([q], lr=2.0**20)
    got.grad_scale = torch.tensor(2.0**16)
    p.grad = torch.full((4,), true * 2.0**16, dtype=torch.float16)
    q.grad = torch.full((4,), true)
    assert torch.tensor(true, dtype=torch.float16).item() == 0.0
    got.step()
    want.step()
    assert torch.equal(got.master(p), q)


def test_clipping_is_applied_after_unscaling_as_torch_does() -> None:
    p, q = parameters(torch.bfloat16), parameters(torch.float32)
    got = AdamW(p, master="split", backend="reference")
    want = torch.optim.AdamW(q, foreach=False)
    for grads in gradients(p, 8, torch.bfloat16):
        coef = torch.tensor(0.3)
        got.grad_scale, got.clip_coef = torch.tensor(64.0), coef
        feed(got, grads, scale=64.0)
        feed(want, [grad * coef for grad in grads])
    assert all(torch.equal(got.master(a), b) for a, b in zip(p, q, strict=True))


class HostReads(TorchDispatchMode):
    """Counts ops that bring a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "options", "dtype"), KINDS, ids=kind_id)
def test_no_step_reads_a_value(
    optimizer: Any, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "lr": torch.tensor(0.01)}
    got = optimizer(parameters(dtype), **options)
    got.grad_scale, got.clip_coef, got.found_inf = torch.tensor(2.0), torch.tensor(0.5), torch.tensor(1.0)
    stream = list(gradients(parameters(dtype), 4, torch.bfloat16))
    feed(got, stream.pop())  # the first step of a process builds the kernel and asks this processor how it rounds
    monkeypatch.setattr(Tensor, "tolist", lambda self: pytest.fail("tolist() in a step"))
    monkeypatch.setattr(Tensor, "numpy", lambda self, **_: pytest.fail("numpy() in a step"))
    with HostReads() as reads:
        for grads in stream:
            feed(got, grads)
    assert reads.names == []
    with reads:
        bool(torch.ones(()))
        torch.ones(()).item()
    assert len(reads.names) == 2


@pytest.mark.parametrize("optimizer", [AdamW, SGD])
def test_torchs_grad_scaler_drives_it(optimizer: Any) -> None:
    p, q = parameters(torch.float16), parameters(torch.float32)
    got, want = optimizer(p, lr=0.01, master="fp32"), optimizer(q, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    for step, grads in enumerate(gradients(p, 6, torch.bfloat16)):
        scale = scaler.get_scale()
        scaler.scale(torch.zeros(()))
        for tensor, grad in zip(p, grads, strict=True):
            tensor.grad = (grad.clamp(-1, 1) * scale).half()
        if step == 3:
            p[6].grad.view(-1)[5] = torch.inf
        scaler.step(got)
        scaler.update()
        if step != 3:
            for tensor, wide in zip(p, q, strict=True):
                wide.grad = tensor.grad.float() / scale
            want.step()
    assert scaler.get_scale() == 8.0
    assert not hasattr(got, "grad_scale")
    assert all(torch.equal(got.master(a), b) for a, b in zip(p, q, strict=True))
    assert len(p) == len(SHAPES) + 2

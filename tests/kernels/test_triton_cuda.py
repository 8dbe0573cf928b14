"""The Triton kernels on a real GPU: steps and decisions have the CPU reference's bits, norms what fp64 rounds to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.test_cpu_kernels import (
    ADAMW_RULES,
    HOW,
    SGD_RULES,
    STORED,
    copy,
    counts,
    grads_of,
    moments_of,
    nearest_roots,  # noqa: F401  # a fixture
    same,
    sums_of,
    weights_of,
)
from torch import Tensor, nn

from mezzo import kernels
from mezzo.kernels import registry
from mezzo.kernels.operands import operands
from mezzo.kernels.ops import adamw as adamw_reference
from mezzo.kernels.ops import decision as decision_reference
from mezzo.kernels.ops import sgd as sgd_reference
from mezzo.kernels.ops.adamw import AdamWRule
from mezzo.kernels.ops.decision import decision_slots, pack_decision

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("nearest_roots"),
]
GPU = torch.device("cuda")


def whole(item: Any) -> Any:
    """Return operands without the last weight, a slice that no kernel walks."""
    return rebuilt(item, lambda tensor: tensor, slice(None, -1))


def on_gpu(item: Any) -> Any:
    return rebuilt(item, lambda tensor: tensor.to(GPU), slice(None))


def rebuilt(item: Any, of: Any, kept: slice) -> Any:
    if isinstance(item, Tensor):
        return of(item)
    if isinstance(item, tuple):
        return tuple(rebuilt(one, of, kept) for one in item)
    if isinstance(item, list):
        return [rebuilt(one, of, kept) for one in item[kept]]
    if isinstance(item, dict):
        return {name: rebuilt(one, of, kept) for name, one in item.items()}
    if hasattr(item, "__dataclass_fields__"):
        return type(item)(**{name: rebuilt(getattr(item, name), of, kept) for name in item.__dataclass_fields__})
    return item


def check(
    op: str, reference_: Any, weights: Any, state: Any, grads: Any, rule: Any, scalars: Tensor, step: Tensor
) -> None:
    """Three steps, the last left out, on both; each list of tensors then has the same bits."""
    mine = on_gpu((weights, state))
    theirs = copy(weights), copy(state)
    kernel = registry.choose(op, GPU, weights.values[0].dtype, "triton").module
    for _ in range(2):
        kernel.step_(operands(*mine, on_gpu(grads)), rule, scalars.to(GPU), step.to(GPU))
        reference_.step_(operands(*theirs, grads), rule, scalars, step)
    grads.found_inf = torch.ones(())
    kernel.step_(operands(*mine, on_gpu(grads)), rule, scalars.to(GPU), step.to(GPU))
    for name in ("values", "aux"):
        assert same([x.cpu() for x in getattr(mine[0], name)], getattr(theirs[0], name)), name
    for name in state:
        assert same([x.cpu() for x in mine[1][name]], theirs[1][name]), name


@pytest.mark.parametrize("way", [0, 1], ids=["plain", "scaled"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mode", "dtype"), STORED)
def test_steps_have_the_bits_of_the_reference(mode: str, dtype: torch.dtype, state: torch.dtype, way: int) -> None:
    weights = whole(weights_of(mode, dtype))
    grads, step = whole(grads_of(torch.float32 if way else dtype, **HOW[way])), counts(weights, 7)
    rule = ADAMW_RULES[way]
    moments = moments_of(weights, state, rule.amsgrad)
    check(
        "adamw",
        adamw_reference,
        weights,
        moments,
        grads,
        rule,
        adamw_reference.scalars(step, replace(rule, lr=0.01, decay=0.1)),
        step,
    )
    for turn in SGD_RULES:
        weights = whole(weights_of(mode, dtype))
        grads = whole(grads_of(torch.float32 if way else dtype, **HOW[way]))
        sums = sums_of(weights, lambda shape: torch.randn(shape).to(state)) if turn.momentum else {}
        check(
            "sgd",
            sgd_reference,
            weights,
            sums,
            grads,
            turn,
            sgd_reference.scalars(step, replace(turn, lr=0.1, dampening=0.2)),
            step,
        )


def test_the_numbers_of_a_step_are_the_hosts() -> None:
    step = torch.tensor([1, 2, 3, 10, 999, 1000, 12345, 10**6, 2**24, *range(4, 3000)], dtype=torch.float32)
    kernel = registry.choose("adamw", GPU, torch.float32, "triton").module
    for beta1, beta2, lr, decay in ((0.9, 0.999, 1e-3, 0.01), (0.5, 0.9999, 3.7e-5, 0.1)):
        rule = AdamWRule(beta1=beta1, beta2=beta2, eps=1e-8, lr=lr, decay=decay)
        assert same([kernel.scalars(step.to(GPU), rule).cpu()], [adamw_reference.scalars(step, rule)])


def test_decisions_have_the_bits_of_the_reference() -> None:
    kernel = registry.choose("decision", GPU, torch.float32, "triton").module
    flags = torch.tensor([0.0, 0.0, 0.0, 1.0, torch.nan])
    for case in range(240):
        num = 1 + case % 3
        numbers = {name: [*torch.rand(at.stop - at.start) * 8] for name, at in decision_slots(num).items()}
        for name in ("early", "elsewhere", "optimizers", "loss_bad", "buffers_bad"):
            numbers[name] = [*flags[torch.randint(5, (len(numbers[name]),))]]
        one = pack_decision(numbers, torch.zeros(()))
        other = one.to(GPU)
        decision_reference.decide_(one, num, together=bool(case & 4), clips=bool(case & 8))
        kernel.decide_(other, num, together=bool(case & 4), clips=bool(case & 8))
        assert same([one], [other.cpu()]), (case, one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(9, 2050), (3, 5, 4099), (4096, 768), (8192, 1024), (70000, 64)], ids=str)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norms_round_once(
    kind: Any, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mezzo.kernels.ops.layer_norm.SMALL", {"training": 0, "inference": 0}
    )  # so that none is torch's
    norm = kind(shape[-1], eps=1e-5, device=GPU)
    for p in norm.parameters():
        nn.init.normal_(p)
    x = torch.randn(shape, device=GPU).mul(3).add(1).to(dtype).requires_grad_()
    seed = torch.randn_like(x)
    if kind is nn.LayerNorm:
        out = kernels.layer_norm(norm, x)
    else:
        out = kernels.rms_norm(x, [shape[-1]], norm.weight, norm.eps, dtype, True)
    out.backward(seed)
    mine, exact = [out.detach(), x.grad, *(p.grad for p in norm.parameters())], copy_in_fp64(norm, x, seed)
    half, spacing = torch.finfo(dtype).eps / 2, 2.0**-20
    for got, want in zip(mine[:2], exact[:2], strict=True):
        assert ((got - want).abs() <= half * want.abs() + spacing * want.abs().max()).all()
    rows = x.numel() / shape[-1]
    for got, want in zip(mine[2:], exact[2:], strict=True):
        assert ((got - want).abs() <= rows * spacing * want.abs().max()).all()


def copy_in_fp64(norm: nn.Module, x: Tensor, seed: Tensor) -> list[Tensor]:
    """Return output and gradients of input and parameters, in fp64."""
    exact = type(norm)(x.shape[-1], eps=1e-5, device=GPU, dtype=torch.float64)
    exact.load_state_dict(norm.state_dict())
    given = x.detach().double().requires_grad_()
    out = exact(given)
    out.backward(seed.double())
    assert given.grad is not None
    return [out.detach(), given.grad, *(p.grad for p in exact.parameters() if p.grad is not None)]

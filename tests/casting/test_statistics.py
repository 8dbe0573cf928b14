"""Statistics that a norm keeps move under any rule for its op: they are written in place, and a rule casts what an op is given."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from mezzo.errors import CastError

NORMS = {
    "batch_norm": lambda: nn.BatchNorm2d(4),
    "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("rule", ["low", "fp32", "fp32_low_out", "promote", "as_is"])
@pytest.mark.parametrize("prepared", [False, True])
def test_they_are_those_of_fp32_but_for_rounding(name: str, rule: str, prepared: bool) -> None:
    norm, x = NORMS[name](), torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0)) + 1
    want, policy = copy.deepcopy(norm), f"bf16, modules=none, op:{name}={rule}"
    if prepared:
        mezzo.prepare(norm, None, policy)
    for _ in range(2):
        want(x)
        with mezzo.autocast("cpu", policy=policy):
            norm(x)
    for kept in ("running_mean", "running_var"):
        found = getattr(norm, kept)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, getattr(want, kept), rtol=2**-6, atol=2**-8)
    before = {key: (value.clone(), value._version) for key, value in norm.state_dict().items()}
    with mezzo.autocast("cpu", policy=policy):
        norm.eval()(x)
    for key, value in norm.state_dict().items():
        assert torch.equal(value, before[key][0]) and value._version == before[key][1]


def test_a_model_in_bf16_keeps_them_under_fp32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).bfloat16()
    mezzo.prepare(model, None, "fp16, op:batch_norm=fp32")
    assert model(torch.randn(2, 3, 8, 8)).isfinite().all()
    assert model[1].running_mean.dtype is torch.bfloat16 and bool(model[1].running_mean.any())


def test_a_compiler_keeps_them_too() -> None:
    norm, x = nn.BatchNorm2d(4), torch.randn(8, 4, 5, 5)
    eager = copy.deepcopy(norm)
    for model in (norm, eager):
        mezzo.prepare(model, None, "bf16, modules=none, op:batch_norm=low")
    torch.compile(norm, backend="eager", fullgraph=True)(x)
    eager(x)
    assert torch.equal(norm.running_mean, eager.running_mean) and bool(norm.running_mean.any())


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (torch.bfloat16, "fp16-master"),
        (torch.float16, "bf16-master"),
        (torch.bfloat16, "bf16-master, BatchNorm2d=fp32"),
    ],
)
def test_a_norm_that_no_kernel_takes_is_told_what_helps(dtype: torch.dtype, policy: str) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(dtype), torch.randn(2, 3, 8, 8)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    with pytest.raises(
        CastError, match=r"in module 1 \(BatchNorm2d\).*\n.*write model\.float\(\), before mezzo\.prepare"
    ):
        model(x)
    amp.release()
    amp = mezzo.prepare(model.float(), torch.optim.SGD(model.parameters(), lr=0.1), policy)
    amp.backward(model(x).square().mean())
    assert amp.step() and bool(model[1].running_mean.any())


@pytest.mark.parametrize("call", [
    lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    lambda x, mean, var: F.batch_norm(x, running_mean=mean, running_var=var, training=True),
    lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False),
    lambda x, mean, var: F.instance_norm(x, mean, var),
    lambda x, mean, var: torch.instance_norm(x, None, None, mean, var, True, 0.1, 1e-5, False),
])  # fmt: skip
def test_they_are_known_in_every_call(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(0)) + 1
    want, found = ((torch.zeros(4), torch.ones(4)) for _ in range(2))
    call(x, *want)
    with mezzo.autocast("cpu", policy="bf16, op:batch_norm=low, op:instance_norm=low"):
        call(x, *found)
    torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-8)
    assert bool(found[0].all())

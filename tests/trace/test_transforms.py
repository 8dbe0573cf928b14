"""A traced program may vmap, jvp, differentiate by functorch and call closures: same numbers, and what it ran is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func, nn
from torch.utils._pytree import tree_leaves

import mezzo
import mezzo.diagnose as diagnose

NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
X = torch.randn(3, 4)
PARAMETERS = {name: p.detach() for name, p in NET.named_parameters()}
STACKED = {name: torch.stack([p, -p]) for name, p in PARAMETERS.items()}
NARROW = {name: p.bfloat16() for name, p in STACKED.items()}


def called(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return func.functional_call(NET, parameters, (x,)).square().mean()


def dual() -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        out = NET(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


PROGRAMS: dict[str, Callable[[], object]] = {
    "vmap": lambda: func.vmap(NET)(X),
    "vmap of vmap": lambda: func.vmap(func.vmap(NET))(X.expand(2, 3, 4)),
    "jvp": lambda: func.jvp(NET, (X,), (torch.ones_like(X),)),
    "jacrev": lambda: func.jacrev(NET)(X[0]),
    "jacfwd": lambda: func.jacfwd(NET)(X[0]),
    "hessian": lambda: func.hessian(lambda x: NET(x).sum())(X[0]),
    "grad": lambda: func.grad(lambda x: NET(x).sum())(X),
    "functional_call": lambda: func.grad(called)(PARAMETERS, X),
    "per sample": lambda: func.vmap(func.grad(called), in_dims=(None, 0))(PARAMETERS, X),
    "dual numbers": dual,
    "ensemble": lambda: func.vmap(called, in_dims=(0, None))(STACKED, X),
    "ensemble in 16 bit": lambda: func.vmap(called, in_dims=(0, None))(NARROW, X.bfloat16()),
    "gradients of an ensemble in 16 bit": lambda: func.grad(
        lambda p: func.vmap(called, (0, None))(p, X.bfloat16()).sum()
    )(NARROW),
}
BACKWARD = {"jacrev", "hessian", "grad", "functional_call", "per sample", "gradients of an ensemble in 16 bit"}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward-mode rules
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_transform_gives_the_same_numbers(name: str) -> None:
    wanted = tree_leaves(PROGRAMS[name]())
    with diagnose.trace(NET) as t:
        got = tree_leaves(PROGRAMS[name]())
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert t.report.findings == () and t.record.ops > 0
    assert {s.name for s in t.record.sizes if s.kind == "output"} == {"", "0", "1", "2"}
    assert (t.report.answer == "healthy") == (name in BACKWARD)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_no_module_that_are_not_seen_are_not_called_whole(dtype: torch.dtype) -> None:
    def loss(weight: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return nn.functional.linear(X, weight).float().square().mean() * 1e-9

    with diagnose.trace() as t:
        grad = func.grad(loss)(PARAMETERS["0.weight"])
    is_flushed = dtype is torch.float16
    assert bool((grad == 0).all()) is is_flushed
    assert ("the code loses numbers (no-loss-scale)" in str(t.report)) is is_flushed


def test_a_fault_under_vmap_is_named() -> None:
    w = torch.zeros(4, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return torch.log(x * w).sum()

    with diagnose.trace() as t:
        func.vmap(loss)(X).sum().backward()
    assert (t.report.findings[0].verdict, t.report.findings[0].op) == ("singularity", "log")


def later_fault(amp: mezzo.Stepper, model: nn.Module) -> Callable[[], Tensor]:
    """A closure whose first evaluation is finite: the step itself leads to the logarithm of a negative number."""

    def closure() -> Tensor:
        amp.zero_grad()
        y = model(torch.ones(2, 4)).float()
        loss = (y - 3.5).clamp(min=0).log1p().sum() + torch.log(y.mean() / 2 - 1)
        amp.backward(loss)
        return loss

    return closure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spoiled_member_of_an_ensemble_is_found(dtype: torch.dtype) -> None:
    spoiled = {name: p.clone().to(dtype) for name, p in STACKED.items()}
    spoiled["2.weight"][1] = torch.nan
    with diagnose.trace(NET) as t:
        loss = func.vmap(called, in_dims=(0, None))(spoiled, X.to(dtype)).sum()
        (loss * torch.ones((), requires_grad=True)).backward()
    assert t.report.findings[0].verdict == "inherited"


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_later_evaluation_of_a_closure_is_found(policy: str) -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    amp = mezzo.prepare(model, torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5), f"{policy}, guard.patience=2")
    with pytest.raises(mezzo.errors.NonFiniteStep) as caught:
        for _ in range(6):
            amp.step(later_fault(amp, model))
    found = caught.value.report.findings[0]
    assert (found.verdict, found.op, found.phase) == ("singularity", "log", "forward")
    assert torch.equal(model.weight, torch.ones(1, 4))


def test_an_infinity_made_after_gradients_per_sample_is_looked_for_in_what_they_were_given() -> None:
    each = func.vmap(func.grad(called), in_dims=(None, 0))
    with diagnose.trace() as t:
        found = each({k: v.detach() for k, v in PARAMETERS.items()}, X)
        weight = torch.zeros(2)
        weight -= torch.log(torch.zeros(2))
    assert found and weight.isinf().all()
    assert "log" in {event.site.op for event in t.record.events}

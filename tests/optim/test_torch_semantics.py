"""State and groups edited by hand, late momentum, odd gradients: what torch's optimizers do then, mezzo's do too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tolerance import relative
from torch import Tensor

from mezzo.errors import CheckpointError, ConfigError, OperandError
from mezzo.optim import SGD, Adam, AdamW, MasterWeights

CLOSE = {"rtol": relative(torch.float32, 64), "atol": relative(torch.float32, 64)}


def pair(kind: Any, torchs: Any, count: int = 3, **options: Any) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    made = []
    for one in (kind, torchs):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 7) + number) for number in range(count)]
        made.append((one(params, **options), params))
    return made


def step(made: list[tuple[Any, list[torch.nn.Parameter]]], seed: int, only: set[int] | None = None) -> None:
    for optimizer, params in made:
        generator = torch.Generator().manual_seed(seed)
        for number, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = grad if only is None or number in only else None
        optimizer.step()


def check(made: list[tuple[Any, list[torch.nn.Parameter]]]) -> None:
    (_, got), (_, want) = made
    torch.testing.assert_close(got, want, **CLOSE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "torchs"), [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
@pytest.mark.parametrize("edit", ["zero", "assign", "number", "drop"])
def test_the_step_count_of_one_parameter_is_its_own(kind: Any, torchs: Any, edit: str) -> None:
    made = pair(kind, torchs, lr=0.1)
    for seed in range(3):
        step(made, seed)
    for optimizer, params in made:
        entry = optimizer.state[params[1]]
        if edit == "zero":
            entry["step"].zero_()
        elif edit == "drop":
            del optimizer.state[params[1]]
        else:
            entry["step"] = torch.tensor(7.0)
    if edit == "number":
        made[0][0].state[made[0][1][1]]["step"] = 7
    for seed in range(3, 6):
        step(made, seed)
        check(made)
    counts = [[int(optimizer.state[p]["step"]) for p in params] for optimizer, params in made]
    assert counts[0] == counts[1] == [6, {"zero": 3, "drop": 3}.get(edit, 10), 6]


def test_step_counts_stay_apart_when_gradients_come_and_go() -> None:
    made = pair(AdamW, torch.optim.AdamW, lr=0.1)
    for seed, only in enumerate([{0}, {0, 1}, None, {1}, {2, 0}, None]):
        step(made, seed, only)
        check(made)
    assert [int(made[0][0].state[p]["step"]) for p in made[0][1]] == [5, 4, 3]


@pytest.mark.parametrize("options", [{"dampening": 0.5}, {"nesterov": True}, {}])
def test_momentum_that_is_switched_on_later_begins_with_the_gradient(options: dict[str, Any]) -> None:
    made = pair(SGD, torch.optim.SGD, lr=0.1)
    for seed in range(2):
        step(made, seed)
    for optimizer, _ in made:
        optimizer.param_groups[0].update(momentum=0.9, **options)
    for seed in range(2, 6):
        step(made, seed)
        check(made)
    for optimizer, _ in made:
        optimizer.param_groups[0].update(momentum=0.0, nesterov=False)
    step(made, 7)
    for optimizer, _ in made:
        optimizer.param_groups[0].update(momentum=0.9, **options)
    step(made, 8)
    check(made)


def test_a_group_that_is_added_later_is_stepped() -> None:
    made = pair(AdamW, torch.optim.AdamW, lr=0.1)
    step(made, 0)
    for optimizer, params in made:
        params.append(torch.nn.Parameter(torch.ones(2, 3)))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})
    for seed in range(1, 3):
        step(made, seed)
        check(made)


@pytest.mark.parametrize(("kind", "torchs"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)])
def test_complex_weights_are_stepped_as_by_torch(kind: Any, torchs: Any) -> None:
    made = [(one, torch.nn.Parameter(torch.complex(torch.ones(4), torch.arange(4.0)))) for one in (kind, torchs)]
    results = []
    for one, p in made:
        optimizer = one([p], lr=0.1)
        for number in range(3):
            p.grad = torch.complex(torch.arange(4.0) - number, torch.ones(4))
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, **CLOSE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "torchs"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)])
def test_gradients_that_torch_conjugates_or_negates_late_are_read_as_they_are(kind: Any, torchs: Any) -> None:
    """Those of complex weights, and of a number that is an imaginary part: autograd hands out views with a flag."""
    z, q = torch.complex(torch.arange(4.0), torch.ones(4)), torch.ones(1)
    (ours, scalar), (its, other) = ([torch.nn.Parameter(t.clone()) for t in (z, q)] for _ in range(2))
    (ours.conj() * (1 + 2j)).real.sum().backward()
    (torch.complex(scalar, scalar * 3).conj() * (1 + 3j)).real.sum().backward()
    assert ours.grad is not None and scalar.grad is not None and ours.grad.is_conj()
    imaginary = torch.complex(scalar.grad, scalar.grad).conj().imag
    assert imaginary.is_neg() and imaginary.is_contiguous()
    scalar.grad, its.grad, other.grad = imaginary, ours.grad.resolve_conj(), imaginary.resolve_neg()
    kind([ours, scalar], lr=0.1).step()
    torchs([its, other], lr=0.1).step()
    torch.testing.assert_close([ours, scalar], [its, other], **CLOSE)  # type: ignore[arg-type]


@pytest.mark.parametrize("late", [torch.Tensor.conj, lambda z: torch.complex(z.imag, z.real).conj().imag[:1]])
def test_a_weight_that_torch_conjugates_or_negates_late_is_refused(late: Any) -> None:
    p = torch.nn.Parameter(late(torch.complex(torch.ones(4), torch.ones(4))))
    p.grad = torch.ones_like(p)
    with pytest.raises(OperandError, match="conjugated or negated when it is read"):
        SGD([p], lr=0.1).step()


def test_a_sparse_gradient_is_one_sentence_and_nothing_is_changed() -> None:
    p, q = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([q, p], lr=0.1)
    q.grad, p.grad = torch.ones(3), torch.ones(4, 2).to_sparse()
    with pytest.raises(ConfigError, match="sparse gradient"):
        optimizer.step()
    assert bool((q == 1).all())
    assert len(optimizer.state) == 0


def wrapped(mode: Any = "fp32", kind: Any = torch.optim.AdamW, **options: Any) -> tuple[MasterWeights, Tensor, Tensor]:
    p, q = (torch.nn.Parameter(torch.full((5,), value).bfloat16()) for value in (1.0, 2.0))
    got = MasterWeights(kind([p, q], lr=0.25, **options), mode)
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        got.step()
    return got, p, q


@pytest.mark.parametrize("mode", ["fp32", "split", "kahan", "stochastic"])
def test_state_that_is_cleared_begins_anew(mode: Any) -> None:
    got, p, _ = wrapped(mode)
    got.state.clear()
    assert got.master(p).tolist() == p.float().tolist()
    fresh = torch.nn.Parameter(p.detach().float())
    want = torch.optim.AdamW([fresh], lr=0.25)
    fresh.grad = torch.full((5,), 0.5)
    p.grad = torch.full_like(p, 0.5)
    want.step()
    got.step()
    assert float(got.state[p]["step"]) == 1.0
    bound = {"fp32": 0.0, "split": 0.0, "kahan": 2.0**-16, "stochastic": 2.0**-8}[mode]
    torch.testing.assert_close(got.master(p), fresh.detach(), rtol=bound, atol=0.0)


def test_state_that_is_assigned_is_used() -> None:
    got, p, q = wrapped(kind=torch.optim.SGD, momentum=0.5)
    got.state[p]["momentum_buffer"] = torch.full((5,), 8.0)
    got.state[p]["master"] = torch.full((5,), float(p.detach()[0]) + 2.0**-12)
    before = got.master(p).clone()
    assert float(before[0]) == float(p.detach()[0]) + 2.0**-12
    p.grad = q.grad = torch.zeros_like(p)
    got.step()
    assert torch.equal(got.master(p), before - 0.25 * 4.0)
    assert got.inner.state[p]["momentum_buffer"].tolist() == [4.0] * 5
    assert got.state is got.inner.state


def test_a_wrapper_refuses_what_does_not_fit_before_it_changes_anything() -> None:
    got, p, q = wrapped()
    kept = [p.detach().clone(), q.detach().clone(), got.master(p).clone()]
    p.data = torch.cat([p.data, p.data])
    with pytest.raises(OperandError, match=r"parameter 0 bf16\[10\] cpu .* its gradient is bf16\[5\] cpu, of another"):
        got.step()
    p.grad = torch.zeros_like(p)
    with pytest.raises(OperandError, match=r"its master is fp32\[5\] cpu, of another shape"):
        got.step()
    p.data = p.data[:5]
    assert [torch.equal(a, b) for a, b in zip(kept, [p, q, got.master(p)], strict=True)] == [True] * 3
    with pytest.raises(CheckpointError, match=r"state\[1\]\['exp_avg'\] has shape \[3\], and \[5\] is wanted"):
        got.load_state_dict({**got.state_dict(), "state": {1: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}})
    del got.state[p]
    p.data, p.grad = torch.ones(10).bfloat16(), torch.ones(10).bfloat16()
    got.step()
    assert got.master(p).shape == (10,)


def test_masters_that_were_loaded_by_hand_start_where_they_are_set() -> None:
    for optimizer, p in (
        (wrapped("split")[:2]),
        (AdamW([torch.nn.Parameter(torch.ones(4).bfloat16())], master="split"), None),
    ):
        p = p if p is not None else optimizer.param_groups[0]["params"][0]
        p.grad = torch.full_like(p, 0.3)
        optimizer.step()
        best = torch.linspace(0.1, 1, p.numel())
        with torch.no_grad():
            p.copy_(best)
        optimizer.set_masters_({p: best})
        assert torch.equal(optimizer.master(p), best)

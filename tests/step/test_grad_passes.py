"""Clipping and dividing touch each gradient once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.step.test_interrupted import SHOWN, SRC, interrupted, show, with_gradients
from torch import Tensor, nn

import mezzo
from mezzo.errors import StepError
from mezzo.optim import SGD
from mezzo.step.grad_passes import clamp_, multiply_


def gradients() -> list[Tensor]:
    rows = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([[4.0], [-8.0]]), (3, 1), check_invariants=True)
    return [torch.tensor([1.0, -3.0]), torch.tensor([6.0]).bfloat16(), rows.coalesce()]


def test_a_gradient_in_two_lists_is_multiplied_once() -> None:
    grads = gradients()
    multiply_([*grads, grads[0]], torch.tensor(0.5))
    assert [grad.to_dense().flatten().tolist() for grad in grads] == [[0.5, -1.5], [3.0], [2.0, 0.0, -4.0]]


@pytest.mark.parametrize(("scale", "factor"), [(None, 1.0), (torch.tensor(2.0), 2.0)])
def test_values_are_clamped_as_they_are_without_the_scale(scale: Tensor | None, factor: float) -> None:
    grads = gradients()
    clamp_(grads, 2.0, scale)
    for grad, before in zip(grads, gradients(), strict=True):
        assert torch.equal(grad.to_dense(), before.to_dense().clamp(-2 * factor, 2 * factor))


def test_complex_gradients_have_no_order_and_nothing_is_clamped() -> None:
    grads = [torch.tensor([5.0]), torch.tensor([3 + 4j])]
    with pytest.raises(StepError, match="would clamp complex gradients"):
        clamp_(grads, 1.0, None)
    assert grads[0].item() == 5.0


class Phasor(nn.Module):
    """A sum of complex numbers, one of them made of two real ones: autograd hands out views that torch conjugates or negates late."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.complex(torch.arange(4.0), torch.ones(4)))
        self.real, self.imag, self.low = (nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self) -> Tensor:
        one = torch.complex(self.real, self.imag).conj() * (1 + 3j)
        parts = torch.stack([one.real, self.low], -1)  # whose gradients have a stride of 2
        return (self.whole.conj() * (1 + 2j)).real.sum() + parts.square().sum()


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling.init_scale=8"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, SGD])
def test_gradients_that_are_views_are_clipped_and_stepped_as_by_torch(policy: str, kind: Any) -> None:
    model, twin = Phasor(), Phasor()
    amp, its = (
        mezzo.prepare(model, kind(model.parameters(), lr=0.1), policy),
        torch.optim.SGD(twin.parameters(), lr=0.1),
    )
    for _ in range(2):
        amp.zero_grad()
        amp.backward(model())
        assert amp.step(max_norm=1.0).applied
        its.zero_grad()
        twin().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0, foreach=False)
        its.step()
    assert any(p.grad is not None and p.grad.is_neg() for p in twin.parameters())
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def _expanded(grad: Tensor) -> Tensor:
    return torch.full((1, 1), 0.5).expand_as(grad)


def _of_inference(grad: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.full_like(grad, 0.5)


@pytest.mark.parametrize("make", [_expanded, _of_inference, lambda grad: torch.full_like(grad, 0.5)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, mezzo.optim.SGD])
@pytest.mark.parametrize("policy", ["fp16, scaling.init_scale=256", "fp16-master, scaling.init_scale=256"])
def test_a_gradient_that_is_replaced_counts_and_stays_the_callers(policy: str, kind: Any, make: Any) -> None:
    """Under a loss scale, too, which is multiplied into what is stepped and not into a tensor that somebody goes on with."""
    model = nn.Linear(4, 2, bias=False)
    before = model.weight.detach().clone()
    amp = mezzo.prepare(model, kind(model.parameters(), lr=0.1), policy)
    amp.backward(model(torch.ones(1, 4)).float().sum())
    dtype = model.weight.grad.dtype
    with amp.unscaled_grads() as grads:
        model.weight.grad = own = make(grads["weight"])
    assert model.weight.grad.dtype is dtype
    amp.step()
    assert torch.equal(own, torch.full((2, 4), 0.5))
    torch.testing.assert_close(amp.export_weights()["weight"], before - 0.05, rtol=0, atol=1e-3)


@pytest.mark.parametrize("policy", ["fp16, scaling.init_scale=1024", "fp16-master, scaling.init_scale=1024"])
def test_ctrl_c_around_gradients_that_are_shown_costs_no_step_to_come(policy: str) -> None:
    """Whatever line it comes at: `zero_grad` is taken, gradients have the dtype that they had, and the next step is the right one."""
    model, amp = with_gradients(torch.optim.RMSprop, policy)
    dtypes = [p.grad_dtype for p in model.parameters()]  # type: ignore[attr-defined]  # torch 2.9 and later
    amp.step()
    want, at = amp.export_weights(), 0
    while True:
        model, amp = with_gradients(torch.optim.RMSprop, policy)
        came = interrupted(partial(show, amp), at, inside=SRC + "/step")
        amp.zero_grad()
        assert [p.grad_dtype for p in model.parameters()] == dtypes, at  # type: ignore[attr-defined]  # as above
        amp.backward(model(SHOWN).float().square().mean())
        amp.step()
        torch.testing.assert_close(amp.export_weights(), want, rtol=0, atol=0)
        if not came:
            break
        at += 1
    assert at > 40

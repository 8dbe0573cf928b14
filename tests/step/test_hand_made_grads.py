"""Gradients that no loss has (torch.func, evolution strategies, DP-SGD), and steps that hooks take in backward: they train as in torch, or are told how to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.errors import StepError

POLICIES = ("fp32", "bf16", "bf16-master", "fp16, scaling=1024", "fp16-master, scaling=1024")
SCALED = POLICIES[3:]


def prepared(policy: str) -> tuple[nn.Linear, mezzo.Stepper]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), policy)


def set_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_told_for_gradients_that_no_loss_has_trains_as_torch(policy: str) -> None:
    model, amp = prepared(policy)
    before = amp.export_weights()
    set_by_hand(model)
    with pytest.raises(
        StepError, match=r"of no loss, amp\.backward\(sum\(\(p\.float\(\) \* g\)\.sum\(\) for p, g in pairs\)\)"
    ):
        amp.step()
    amp.zero_grad()
    pairs = [(p, torch.full(p.shape, 0.25)) for p in model.parameters()]
    amp.backward(sum(((p.float() * g).sum() for p, g in pairs), torch.zeros(())))
    assert amp.step().grad_norm == pytest.approx(0.25 * 10**0.5)
    for name, weight in amp.export_weights().items():
        torch.testing.assert_close(weight, before[name] - 0.125)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("leave", [set_by_hand, lambda model: model(torch.ones(3, 4)).sum().backward()])
def test_gradients_of_an_external_backward_must_carry_the_loss_scale(
    leave: Callable[[nn.Module], None], policy: str
) -> None:
    model, amp = prepared(policy)
    if policy not in SCALED:
        with amp.external_backward():
            leave(model)
        assert amp.step()
        return
    with pytest.raises(StepError) as error, amp.external_backward():
        leave(model)
    assert str(error.value) == (
        "external_backward() left gradients without the loss scale that the step divides them by. Write amp.scaled(loss) in the block for "
        "its loss, or, for gradients g of no loss, amp.backward(sum((p.float() * g).sum() for p, g in pairs)) in place of the block."
    )
    amp.zero_grad()
    with amp.external_backward():
        amp.scaled(model(torch.ones(3, 4)).sum()).backward()  # type: ignore[no-untyped-call]  # torch's own
    assert amp.step()


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_gradients_made_in_inference_mode_are_stepped_as_any_others(policy: str) -> None:
    def trained(*, in_inference_mode: bool) -> list[Tensor]:
        model, amp = prepared(policy)
        for _ in range(3):
            amp.zero_grad()
            amp.backward(model(torch.ones(3, 4)).sum())
            with torch.inference_mode(in_inference_mode):
                set_by_hand(model)
            assert amp.step()
        return list(model.parameters())

    assert all(map(torch.equal, trained(in_inference_mode=True), trained(in_inference_mode=False)))


@pytest.mark.parametrize("policy", SCALED)
def test_an_external_backward_that_left_nothing_is_fine(policy: str) -> None:
    model, amp = prepared(policy)
    amp.backward(model(torch.ones(3, 4)).sum())
    with amp.external_backward():
        pass
    assert amp.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_in_a_hook_of_backward_is_told_to_come_after_it(policy: str) -> None:
    model, amp = prepared(policy)
    calls: dict[Callable[[], object], str] = {amp.step: "step()", amp.optimizers[0].step: ""}
    for call, name in calls.items():
        hook = model.weight.register_post_accumulate_grad_hook(lambda p, call=call: call())  # type: ignore[misc]
        with pytest.raises(StepError) as error:
            amp.backward(model(torch.ones(3, 4)).sum())
        assert str(error.value).endswith("Write amp.step() after amp.backward(loss), which has not returned yet.")
        assert str(error.value).startswith(
            f"{name} was called while a backward pass runs" if name else "SGD.step() was called directly"
        )
        hook.remove()
        with pytest.raises(StepError, match="failed halfway"):
            amp.step()
        amp.zero_grad()
    amp.backward(model(torch.ones(3, 4)).sum())
    assert amp.step()


def test_a_loss_inside_of_a_backward_is_told_where_it_belongs() -> None:
    model, amp = prepared("bf16")

    @torch.enable_grad()  # type: ignore[untyped-decorator]  # torch's own
    def again(grad: Tensor) -> None:
        amp.backward(model(torch.ones(3, 4)).sum())

    y = model(torch.ones(3, 4))
    y.register_hook(again)
    with pytest.raises(StepError, match=r"^backward\(loss\) was called while a backward pass runs"):
        amp.backward(y.sum())


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16", "fp16-master"])
def test_updates_by_hand_have_true_gradients_or_none(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    plain = copy.deepcopy(model)
    amp, x = mezzo.prepare(model, None, policy), torch.randn(8, 4)

    def loss() -> Tensor:
        return model(x).square().mean()

    (by_hand,) = amp.grad(loss(), model.weight)  # what the refusal says to write
    plain(x).square().mean().backward()
    assert plain.weight.grad is not None
    torch.testing.assert_close(by_hand.float(), plain.weight.grad, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=1e-3)
    if policy.startswith("bf16"):
        amp.backward(loss())
        assert model.weight.grad is not None and torch.equal(model.weight.grad, by_hand.to(model.weight.dtype))
        return
    for call, backward in (
        ("backward(loss)", lambda: amp.backward(loss())),
        ("external_backward()", lambda: outside(amp)),
    ):
        with pytest.raises(StepError) as error:
            backward()
        assert str(error.value) == (
            f"{call} was called on a model prepared without an optimizer, for inference. Write mezzo.prepare(model, optimizer, "
            "policy), or, for updates by hand, amp.grad(loss, list(model.parameters())), whose gradients carry no loss scale."
        )
        assert all(p.grad is None for p in model.parameters())


def outside(amp: mezzo.Stepper) -> None:
    with amp.external_backward():
        amp.scaled(amp.model(torch.ones(3, 4)).sum()).backward()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.ones(8, 1),), r"amp\.grad\(\) takes outputs, inputs, .*write amp\.grad\(\(outputs \* grad_outputs\)\.sum\(\), inputs\)"),
        ({"grad_outputs": torch.ones(8, 1)}, r"'grad_outputs': write amp\.grad\(\(outputs \* grad_outputs\)\.sum\(\), inputs\)\."),
        ({"only_inputs": True}, r"'only_inputs': leave it out\."),
        ({"materialize_grads": True}, r"'materialize_grads': write allow_unused=True, "),
        ((), r"not fp32\[8, 1\]\. Write outputs\.sum\(\), or \(outputs \* grad_outputs\)\.sum\(\)\."),
    ],
)  # fmt: skip
def test_a_penalty_as_torch_writes_it_is_told_how(given: Any, words: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4, requires_grad=True)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32, scaling=256")
    args, named = ((), given) if isinstance(given, dict) else (given, {})
    with pytest.raises(StepError, match=words):
        amp.grad(model(x), x, *args, **named)
    (want,) = torch.autograd.grad(model(x), x, torch.ones(8, 1))
    assert torch.equal(amp.grad(model(x).sum(), x)[0], want)


class Latents(nn.Module):
    """Returns what its output was made of too, as StyleGAN2 does for the lengths of its paths."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latents = self.up(x)
        return self.down(latents), latents


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_gradient_by_what_the_model_returned_is_told_how(policy: str) -> None:
    model = Latents()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    out, latents = model(torch.randn(8, 4))
    with pytest.raises(StepError, match=r"returns is a copy in fp32: .* add output=none to the policy"):
        amp.grad(out.sum(), latents, create_graph=True)
    assert not amp.grad(out.sum(), latents, allow_unused=True)[0].any()
    amp.release()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), f"{policy}, output=none")
    out, latents = model(torch.randn(8, 4))
    (slope,) = amp.grad(out.float().sum(), latents, create_graph=True)
    torch.testing.assert_close(slope, model.down.weight.float().expand(8, 4), rtol=2.0**-8, atol=0)


def by_hand(model: nn.Module, amp: mezzo.Stepper) -> None:
    amp.backward(model(torch.ones(3, 4)).square().mean())
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None


def shown(model: nn.Module, amp: mezzo.Stepper) -> None:
    amp.backward(model(torch.ones(3, 4)).square().mean())
    with amp.unscaled_grads() as grads, torch.no_grad():
        for name, p in model.named_parameters():
            p -= 0.1 * grads[name].to(p.dtype)
    amp.zero_grad()


def stepped(model: nn.Module, amp: mezzo.Stepper) -> None:
    amp.zero_grad()
    for _ in range(4):
        amp.backward(model(torch.ones(3, 4)).square().mean())
    amp.step()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("update", [by_hand, shown, stepped])
def test_updates_by_hand_with_gradients_that_carry_the_loss_scale_are_named(
    update: Callable[..., None], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, amp = prepared(policy)
    for _ in range(6):
        update(model, amp)
    named = "three losses went backward without amp.step(), and their gradients are multiplied by the loss scale"
    assert caplog.text.count(named) == (update is by_hand and policy in SCALED)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_steps_inside_of_backward_is_told(policy: str) -> None:
    """Under a loss scale before it takes a step that is too large by it; else where no gradient is left for `step()`."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # of which the import warns

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), policy)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(StepError) as refused:
        amp.backward(model(torch.ones(3, 4)).square().mean())
        amp.step()
    if policy in SCALED or "master" in policy:
        assert "SGD.step() was called on" in str(refused.value) and "not prepared" in str(refused.value)
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    else:
        assert "Leave it out, and amp.step() steps those that were prepared" in str(refused.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_zeros_that_somebody_made_are_added_to(policy: str) -> None:
    """As of loops that make their gradients once, and of DistributedDataParallel(gradient_as_bucket_view=True), whose buckets move."""
    updates = []
    for is_made in (False, True):
        model, amp = prepared(policy)
        for p in model.parameters() if is_made else ():
            p.grad = torch.zeros(p.shape, dtype=p.grad_dtype or p.dtype)
        amp.backward(model(torch.ones(3, 4)).sum())
        amp.step()
        updates.append(amp.export_weights())
    torch.testing.assert_close(*updates, rtol=0, atol=0)

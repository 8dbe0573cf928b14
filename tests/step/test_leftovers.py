"""Several optimizers stepped in turn: each drops its own gradients, as in torch, and equals torch's loop to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import mezzo
from mezzo.errors import StepError


class Loop(Protocol):
    """What takes the steps: mezzo's stepper, or torch's scaler and region."""

    def region(self) -> AbstractContextManager[Any]: ...
    def backward(self, loss: Tensor) -> None: ...
    def step(self, optimizer: Optimizer) -> None: ...


class Prepared:
    def __init__(self, model: nn.Module, optimizers: list[Optimizer], policy: str) -> None:
        self.amp = mezzo.prepare(model, optimizers, policy)

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.amp.backward(loss)

    def step(self, optimizer: Optimizer) -> None:
        self.amp.step(optimizer=optimizer)


class Plain:
    def __init__(self, low: torch.dtype | None, **scaling: Any) -> None:
        self.low, self.scaler = low, torch.amp.GradScaler("cpu", enabled=bool(scaling), **scaling)

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.low is None else torch.autocast("cpu", self.low, cache_enabled=False)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's own

    def step(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()


SCALING = {"init_scale": 2.0**24, "growth_interval": 3}  # the first steps overflow, and later ones grow
KINDS: dict[str, tuple[str, Callable[[], Plain]]] = {
    "fp32": ("fp32", lambda: Plain(None)),
    "bf16": ("bf16, modules=none", lambda: Plain(torch.bfloat16)),
    "fp16": (
        "fp16, modules=none, scaling.init_scale=16777216, scaling.growth_interval=3",
        lambda: Plain(torch.float16, **SCALING),
    ),
}
Build = Callable[[nn.Module, list[Optimizer]], Loop]


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return nn.ModuleDict({"maker": maker, "judge": nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))})


def verdict(out: Tensor, is_real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.float(), torch.full_like(out, is_real, dtype=torch.float32))


def gan(
    build: Build, *, none: bool = True, detach: bool = True, fused: bool = False, judge_steps: int = 1
) -> list[Tensor]:
    """Train the two in turn, each optimizer dropping its own gradients alone, and return all weights.

    Not the buffers: torch keeps what the batch norm of a skipped step saw.
    """
    nets = networks()
    maker, judge = nets["maker"], nets["judge"]
    options = [torch.optim.Adam(net.parameters(), lr=1e-2, fused=fused) for net in (maker, judge)]
    of_maker, of_judge = options
    loop = build(nets, list(options))
    for _ in range(6):
        for _ in range(judge_steps):
            of_judge.zero_grad(set_to_none=none)
            with loop.region():
                fake = maker(torch.randn(8, 4))
                loss = verdict(judge(fake.detach() if detach else fake), False) + verdict(
                    judge(torch.randn(8, 2)), True
                )
            loop.backward(loss)
            loop.step(of_judge)
        of_maker.zero_grad(set_to_none=none)
        with loop.region():
            loss = verdict(judge(maker(torch.randn(8, 4))), True)
        loop.backward(loss)
        loop.step(of_maker)
    return [p.detach().clone() for p in nets.parameters()]


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zeros": {"none": False},
    "not detached": {"detach": False},
    "fused": {"fused": True},
    "several judge steps": {"judge_steps": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_two_networks_in_turn_equal_torch(form: str, kind: str) -> None:
    policy, plain = KINDS[kind]
    got = gan(lambda nets, optimizers: Prepared(nets, optimizers, policy), **FORMS[form])
    want = gan(lambda *_: plain(), **FORMS[form])
    assert all(map(torch.equal, got, want))


def slow_and_fast(build: Build) -> list[Tensor]:
    """Step one optimizer at two batches of three, and the other at the third, over what it gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    slow, fast = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    loop = build(model, [slow, fast])
    for k in range(9):
        fast.zero_grad()
        with loop.region():
            out = model(torch.randn(8, 4))
        loop.backward(out.float().square().mean())
        if k % 3 != 2:
            loop.step(fast)
        else:
            loop.step(slow)
            slow.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_gradients_that_wait_for_their_step_are_added_to(kind: str) -> None:
    policy, plain = KINDS[kind]
    got = slow_and_fast(lambda model, optimizers: Prepared(model, optimizers, policy))
    assert all(map(torch.equal, got, slow_and_fast(lambda *_: plain())))


def test_gradients_that_wait_follow_the_loss_scale() -> None:
    """The scale doubles at every step; what was gathered at another one counts as much as in fp32."""
    fp32 = slow_and_fast(lambda model, optimizers: Prepared(model, optimizers, "fp32"))
    policy = "fp16, scaling.init_scale=4, scaling.growth_interval=1"
    got = slow_and_fast(lambda model, optimizers: Prepared(model, optimizers, policy))
    for a, b in zip(got, fp32, strict=True):
        torch.testing.assert_close(a, b, rtol=8 * torch.finfo(torch.float16).eps, atol=1e-3)


@pytest.fixture
def pair() -> tuple[mezzo.Stepper, nn.ModuleDict]:
    nets = networks()
    return mezzo.prepare(nets, [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()], "bf16"), nets


def after_one_step(amp: mezzo.Stepper, nets: nn.ModuleDict) -> None:
    """Step the judge, then give the maker gradients, without dropping those of the judge."""
    amp.backward(verdict(nets["judge"](torch.randn(8, 2)), True))
    amp.step(optimizer=amp.optimizers[1])
    amp.backward(verdict(nets["judge"](nets["maker"](torch.randn(8, 4))), True))


@pytest.mark.parametrize("name", [None, 1])
def test_gradients_that_a_step_used_up_are_not_applied_again(pair: Any, name: int | None) -> None:
    amp, nets = pair
    after_one_step(amp, nets)
    before = [p.detach().clone() for p in nets.parameters()]
    with pytest.raises(StepError) as error:
        amp.step(optimizer=None if name is None else amp.optimizers[name])
    assert str(error.value) == (
        "step() would apply what the last step left in the gradients of judge.0.weight, judge.0.bias, judge.2.weight and "
        "1 more once more. Call zero_grad() of their optimizer before the backward(loss) of its step, or write "
        "amp.step(optimizer=...) for the one whose step this is."
    )
    assert all(map(torch.equal, nets.parameters(), before))
    assert amp.step(optimizer=amp.optimizers[0]).applied


@pytest.mark.parametrize("none", [True, False])
def test_gradients_dropped_between_two_backwards_are_whole(pair: Any, none: bool) -> None:
    amp, nets = pair
    after_one_step(amp, nets)
    amp.optimizers[1].zero_grad(set_to_none=none)
    amp.backward(verdict(nets["judge"](torch.randn(8, 2)), True))
    assert amp.step().applied


def test_used_up_gradients_are_not_shown(pair: Any) -> None:
    amp, nets = pair
    after_one_step(amp, nets)
    with amp.unscaled_grads() as shown:
        assert shown and all(name.startswith("maker") for name in shown)


def test_what_every_optimizer_used_up_must_be_dropped_at_once(pair: Any) -> None:
    amp, nets = pair
    amp.backward(verdict(nets["judge"](nets["maker"](torch.randn(8, 4))), True))
    amp.step()
    with pytest.raises(StepError, match=r"would add to the gradients of the last step"):
        amp.backward(verdict(nets["judge"](torch.randn(8, 2)), True))


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling=1"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, mezzo.optim.AdamW])
def test_weights_with_masters_are_stepped_by_nobody_else(policy: str, kind: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    master = {} if kind is not mezzo.optim.AdamW else {"master": "fp32"}
    stranger = kind(model.parameters(), lr=1e-6, **master)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(4, 8)).float().square().mean().backward()
    with pytest.raises(StepError, match=r"0\.weight.* would round its updates away"):
        stranger.step()
    assert all(map(torch.equal, before, model.parameters()))
    amp.zero_grad()
    amp.backward(model(torch.ones(4, 8)).float().square().mean())
    assert amp.step()
    amp.release()
    model(torch.ones(4, 8)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("policy", ["fp16, scaling.init_scale=1024", "bf16", "bf16-master"])
@pytest.mark.parametrize("is_bad", [False, True])
def test_gradients_that_are_set_to_zero_in_place_drop_the_step(policy: str, is_bad: bool) -> None:
    """As in loops that leave a batch out after its backward: the flags of its loss go with it."""
    results = []
    for is_left_out in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        amp = mezzo.prepare(model, optimizer, policy)
        optimizer.zero_grad(set_to_none=False)
        if is_left_out:
            loss = model(torch.ones(4, 8)).float().square().mean()
            amp.backward(loss * (math.nan if is_bad else 3.0))
            optimizer.zero_grad(set_to_none=False)
        amp.backward(model(torch.full((4, 8), 0.5)).float().square().mean())
        assert amp.step(max_norm=1.0).applied
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def test_a_scaled_gradient_that_is_set_to_zero_in_place_is_zero() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16, scaling.init_scale=1024")
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        amp.backward(model(torch.ones(4, 8)).float().square().mean())
        assert model[0].weight.grad is not None
        model[0].weight.grad.zero_()
    assert amp.step().applied
    is_same = [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]
    assert is_same == [True, False, False, False]


def put_nothing_on(_: nn.Module) -> None:
    """Leave a module as it is."""


Change = Callable[[nn.Module], Any]
CHANGES: dict[str, tuple[Change, Change]] = {
    "weight norm taken off": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral norm taken off": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "a parametrization taken off": (
        nn.utils.parametrizations.weight_norm,
        lambda module: nn.utils.parametrize.remove_parametrizations(module, "weight"),
    ),
    "weight norm put on": (put_nothing_on, nn.utils.weight_norm),
    "a parametrization put on": (put_nothing_on, nn.utils.parametrizations.weight_norm),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling.init_scale=16"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_takes_the_place_of_one_of_another_name(change: str, policy: str) -> None:
    """A plain loop leaves it as it is, in silence."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    before, after = CHANGES[change]
    before(model[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy)

    def take() -> bool:
        amp.zero_grad()
        amp.backward(model(torch.ones(2, 4)).square().mean())
        return amp.step().applied

    assert take()
    after(model[0])
    with pytest.raises(
        StepError, match=r"0\.\S*weight.* not what the optimizer was given.*add_param_group.*weight norm"
    ):
        take()
    optimizer.add_param_group({"params": [p for p in model[0].parameters() if p is not model[0].bias]})
    was = model[0].weight.detach().clone()
    assert take() and take()
    assert not torch.equal(model[0].weight, was)


def test_a_clip_by_hand_whose_norm_overflows_is_refused() -> None:
    """The norm of scaled fp16 gradients is soon past 65504: torch's clip then multiplies all of them by 0."""
    nets = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"})
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets.values()]
    amp = mezzo.prepare(nets, optimizers, "fp16-master")
    x = torch.tensor([1.0, -1.0] * 4).expand(4, 8)
    amp.backward(2 * (nets["a"](x).mean() + nets["b"](x).mean()))
    norm = nn.utils.clip_grad_norm_(nets["b"].parameters(), 1.0)
    assert norm.isinf() and not any(p.grad.any() for p in nets["b"].parameters())
    with pytest.raises(
        StepError, match=r"^the gradients of b\.weight, b\.bias were changed since backward\(loss\), while they carry"
    ):
        amp.step()


class Decaying(torch.optim.SGD):
    """Keeps half of each gradient for the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


def test_gradients_that_a_zero_grad_keeps_are_torchs_without_a_loss_scale() -> None:
    torch.manual_seed(0)
    weight, plain = (nn.Linear(4, 4) for _ in range(2))
    plain.load_state_dict(weight.state_dict())
    optimizers = [Decaying(net.parameters(), lr=0.1) for net in (weight, plain)]
    amp = mezzo.prepare(weight, optimizers[0], "fp32")
    for _ in range(4):
        amp.zero_grad()
        amp.backward(weight(torch.ones(2, 4)).square().mean())
        amp.step()
        optimizers[1].zero_grad()
        plain(torch.ones(2, 4)).square().mean().backward()
        optimizers[1].step()
    assert all(map(torch.equal, weight.parameters(), plain.parameters()))


@pytest.mark.parametrize("policy", ["fp16, scaling=16", "fp16-master, scaling=16"])
def test_gradients_that_a_zero_grad_keeps_are_refused_under_a_loss_scale(policy: str) -> None:
    model = nn.Linear(4, 4)
    amp = mezzo.prepare(model, Decaying(model.parameters(), lr=0.1), policy)
    amp.zero_grad()
    amp.backward(model(torch.ones(2, 4)).float().square().mean())
    amp.step()
    with pytest.raises(
        StepError, match=r"^weight, bias have gradients that were kept by a zero_grad\(\) of .*policy='bf16'"
    ):
        amp.zero_grad()


def test_gradients_that_are_written_between_two_steps_are_refused_under_a_loss_scale() -> None:
    model = nn.Linear(4, 4)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16, scaling=16")

    def run(factor: float) -> None:
        amp.backward(model(torch.ones(2, 4)).square().mean())
        amp.step()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor)

    run(0.0)
    run(0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        StepError, match=r"^weight, bias have gradients that were written since the last step, and not to 0"
    ):
        run(0.5)
    assert all(map(torch.equal, model.parameters(), before))
    amp.zero_grad()
    run(0.0)

"""Training loops that are right: none is refused, and each ends with the weights of plain fp32, bit for bit.

Each flow runs twice: with a scaler whose scale moves every other step, and with the scaler switched off.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from mezzo.loss_scale import GradScaler
from mezzo.loss_scale import grad_tracker as ledger
from mezzo.optim import AdamW, MasterWeights

Flow = Callable[[GradScaler], Tensor]
FLOWS: list[Flow] = []


def flow(run: Flow) -> Flow:
    FLOWS.append(run)
    return run


def net(*widths: int) -> nn.Sequential:
    layers = [module for a, b in itertools.pairwise(widths) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def sgd(module: nn.Module, **arguments: Any) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.125, momentum=0.5, **arguments)


def flat(*modules: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten().float() for module in modules for param in module.parameters()])


def gan(scaler: GradScaler, **zero: bool) -> Tensor:
    """The generator's backward leaves scaled gradients in the discriminator; its next zero_grad drops them."""
    real, fake = net(3, 8, 1), net(2, 8, 3)
    steps_real, steps_fake = sgd(real), sgd(fake)
    for _ in range(6):
        noise, data = torch.randn(5, 2), torch.randn(5, 3)
        steps_real.zero_grad(**zero)
        scaler.scale(real(data).mean()).backward()
        made = fake(noise)
        scaler.scale(-real(made.detach()).mean()).backward()
        scaler.unscale_(steps_real)
        nn.utils.clip_grad_norm_(real.parameters(), 0.5)
        scaler.step(steps_real)
        steps_fake.zero_grad(**zero)
        scaler.scale(real(made).mean()).backward()
        scaler.step(steps_fake)
        scaler.update()
    return flat(real, fake)


@flow
def gan_loop(scaler: GradScaler) -> Tensor:
    return gan(scaler)


@flow
def gan_loop_zeroing_in_place(scaler: GradScaler) -> Tensor:
    return gan(scaler, set_to_none=False)


@flow
def gradient_penalty(scaler: GradScaler) -> Tensor:
    model = net(3, 8, 1)
    steps = sgd(model)
    for _ in range(5):
        loss = model(torch.randn(4, 3)).pow(2).mean()
        steps.zero_grad()
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        true = [gradient / scaler.get_scale() for gradient in scaled]
        penalty = torch.stack([gradient.pow(2).sum() for gradient in true]).sum()
        scaler.scale(loss + penalty).backward()
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def double_backward_through_one_graph(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    for number in range(4):
        steps.zero_grad()
        loss = scaler.scale(model(torch.randn(4, 3)).mean())
        loss.backward(retain_graph=True)
        loss.backward(create_graph=number == 2)
        scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def losses_together(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 2)
    steps = sgd(model)
    for _ in range(4):
        steps.zero_grad()
        out = model(torch.randn(4, 3))
        losses = scaler.scale({"a": out[:, 0].mean(), "b": out[:, 1].pow(2).mean()})
        torch.autograd.backward(list(losses.values()))
        scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def experts_used_in_turn(scaler: GradScaler) -> Tensor:
    """Parameters without a gradient, with one of zeros, and met only late."""
    experts = nn.ModuleList([net(3, 4, 1) for _ in range(3)])
    steps = sgd(experts)
    for number in range(6):
        steps.zero_grad(set_to_none=number == 2)
        scaler.scale(experts[number % 3](torch.randn(4, 3)).pow(2).mean()).backward()
        scaler.step(steps)
        scaler.update()
    return flat(experts)


@flow
def alternate_optimizers_stepped_together(scaler: GradScaler) -> Tensor:
    one, two = net(3, 4, 1), net(3, 4, 1)
    steps_one, steps_two = sgd(one), sgd(two)
    for number in range(6):
        for steps in (steps_one, steps_two):
            steps.zero_grad(set_to_none=False)
        used = one if number % 2 and number > 1 else two if number > 1 else nn.ModuleList([one, two])
        nets = list(used) if isinstance(used, nn.ModuleList) else [used]
        scaler.scale(sum(model(torch.randn(4, 3)).pow(2).mean() for model in nets)).backward()
        for steps in (steps_one, steps_two):
            scaler.step(steps)
        scaler.update()
    return flat(one, two)


@flow
def step_given_up_for_its_norm(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    for number in range(6):
        steps.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if number % 3 != 1:
            scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def micro_batch_dropped_and_done_again(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    for number in range(6):
        steps.zero_grad()
        batch = torch.randn(4, 3)
        scaler.scale(model(batch).pow(2).mean()).backward()
        if number % 2:
            steps.zero_grad(set_to_none=number == 1)
            scaler.scale(model(batch).pow(2).mean()).backward()
        scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def micro_batch_dropped_that_used_an_expert_of_its_own(scaler: GradScaler) -> Tensor:
    """Its scaled gradients are zeroed in place and nothing comes in their stead."""
    experts = nn.ModuleList([net(3, 4, 1) for _ in range(2)])
    steps = sgd(experts)
    for number in range(6):
        steps.zero_grad(set_to_none=False)
        scaler.scale(experts[number % 2](torch.randn(4, 3)).pow(2).mean()).backward()
        steps.zero_grad(set_to_none=False)
        scaler.scale(experts[0](torch.randn(4, 3)).pow(2).mean()).backward()
        scaler.step(steps)
        scaler.update()
    return flat(experts)


@flow
def optimizers_of_different_cadence(scaler: GradScaler) -> Tensor:
    """S22: the slow one's gradients are gathered over iterations between which the scale moves."""
    model = net(3, 8, 2)
    fast, slow = (torch.optim.SGD(part.parameters(), lr=0.125) for part in (model[0], model[2]))
    for number in range(9):
        fast.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
        scaler.step(fast)
        if number % 3 == 2:
            scaler.step(slow)
            slow.zero_grad()
        scaler.update()
    return flat(model)


@flow
def optimizer_stepped_after_update(scaler: GradScaler) -> Tensor:
    """S22: divided by the scale of its backward pass, not by the one that update left."""
    model = net(3, 8, 2)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.125), sgd(model[2], fused=True)]
    for _ in range(6):
        scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return flat(model)


@flow
def loss_scaled_before_update(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = torch.optim.SGD(model.parameters(), lr=0.125)
    ready = scaler.scale(model(torch.randn(4, 3)).pow(2).mean())
    for _ in range(6):
        steps.zero_grad()
        ready.backward()
        scaler.step(steps)
        following = scaler.scale(model(torch.randn(4, 3)).pow(2).mean())
        scaler.update()
        ready = following
    return flat(model)


@flow
def gradients_by_hand(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    for number in range(6):
        out = model(torch.randn(4, 3))
        if number % 2:
            seed = scaler.scale(torch.ones_like(out))
            steps.zero_grad()
            out.backward(seed)
        else:
            loss = scaler.scale(out.sum())
            for param, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                param.grad = gradient
        scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def gradients_marked_by_hand(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    for number in range(6):
        steps.zero_grad()
        loss = model(torch.randn(4, 3)).pow(2).mean()
        (loss * scaler.get_scale() if number < 3 else scaler.scale(loss)).backward()
        for param in model.parameters():
            param.grad /= 2.0
        scaler.mark_scaled(steps)
        scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def gradients_replaced_after_unscale(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    for _ in range(6):
        steps.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
        scaler.unscale_(steps)
        for param in model.parameters():
            param.grad = param.grad.clamp(-0.25, 0.25) + 0.01
        scaler.step(steps)
        scaler.update()
    return flat(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool) -> None:
    def run(scaler: GradScaler) -> Tensor:
        model = net(3, 8, 8, 1)
        steps = sgd(model)
        for number in range(6):
            steps.zero_grad(set_to_none=bool(number % 2))
            out = checkpoint(model, torch.randn(4, 3, requires_grad=True), use_reentrant=use_reentrant)
            scaler.scale(out.pow(2).mean()).backward()
            scaler.step(steps)
            scaler.update()
        return flat(model)

    assert_equal_to_fp32(run)


@flow
def parameters_added_and_frozen_on_the_way(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 4, 1)
    steps = torch.optim.SGD(model[-1].parameters(), lr=0.125)
    for param in model[:-1].parameters():
        param.requires_grad_(False)
    for number in range(8):
        if number == 3:
            steps.add_param_group({"params": list(model[2].requires_grad_().parameters())})
        if number == 5:
            model[-1].requires_grad_(False)
            steps.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
    return flat(model)


@flow
def sparse_complex_and_bf16_gradients(scaler: GradScaler) -> Tensor:
    embedding = nn.Embedding(9, 4, sparse=True)
    factor = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    half = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
    steps = torch.optim.SGD([*embedding.parameters(), factor, half, wide], lr=0.125)
    for _ in range(6):
        steps.zero_grad()
        rows = embedding(torch.randint(9, (5,)))
        scaler.scale((rows * factor).abs().pow(2).mean() + (rows * half).mean() + wide.pow(2).mean()).backward()
        scaler.step(steps)
        scaler.update()
    return torch.cat([flat(embedding), torch.view_as_real(factor.detach()).flatten(), half.float(), wide.float()])


@flow
def fp16_weights_with_masters(scaler: GradScaler) -> Tensor:
    """P5, S18: divided and applied in fp32."""
    model = net(3, 8, 1).half()
    steps = MasterWeights(torch.optim.Adam(model.parameters(), lr=0.125))
    for _ in range(6):
        steps.zero_grad()
        scaler.scale(model(torch.randn(4, 3).half()).float().pow(2).mean()).backward()
        scaler.step(steps)
        scaler.update()
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


@flow
def mezzos_own_optimizer(scaler: GradScaler) -> Tensor:
    model = net(3, 8, 1).bfloat16()
    steps = AdamW(model.parameters(), lr=0.125, master="split", backend="reference")
    for _ in range(6):
        steps.zero_grad()
        scaler.scale(model(torch.randn(4, 3).bfloat16()).float().pow(2).mean()).backward()
        scaler.step(steps)
        scaler.update()
    return flat(model)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


@flow
def custom_function(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    for _ in range(6):
        steps.zero_grad()
        scaler.scale(Cube.apply(model(torch.randn(4, 3))).mean()).backward()
        scaler.step(steps)
        scaler.update()
    return flat(model)


@flow
def discriminator_without_scaler_beside_a_scaled_generator(scaler: GradScaler) -> Tensor:
    real, fake = net(3, 8, 1), net(2, 8, 3)
    steps_real, steps_fake = sgd(real), sgd(fake)
    for number in range(6):
        made = fake(torch.randn(5, 2))
        steps_real.zero_grad(set_to_none=bool(number % 2))
        real(made.detach()).mean().backward()
        steps_real.step()
        steps_fake.zero_grad()
        scaler.scale(real(made).mean()).backward()
        steps_real.zero_grad()
        scaler.step(steps_fake)
        scaler.update()
    return flat(real, fake)


class Outer:
    """A wrapper that owns the same parameters and steps the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self.inner.step()


@flow
def wrapped_optimizer(scaler: GradScaler) -> Tensor:
    model = net(3, 4, 1)
    steps = sgd(model)
    outer: Any = Outer(steps)
    for _ in range(6):
        steps.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
        scaler.unscale_(outer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(outer)
        scaler.update()
    return flat(model)


def assert_equal_to_fp32(run: Flow) -> None:
    torch.manual_seed(1)
    want = run(GradScaler("cpu", enabled=False))
    torch.manual_seed(1)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    got = run(scaler)
    assert scaler.get_scale() > 2.0**8  # the scale did move
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("run", FLOWS, ids=lambda run: run.__name__)
def test_flow(run: Flow) -> None:
    """B7."""
    assert_equal_to_fp32(run)


@pytest.mark.parametrize("to_none", [True, False])
def test_scaling_inside_a_compiled_function(to_none: bool) -> None:
    """No graph break; what traced code does to gradients is not seen, so that nothing is judged."""

    def run(scaler: GradScaler) -> Tensor:
        model = net(3, 4, 1)
        steps = sgd(model)

        def loss(batch: Tensor) -> Tensor:
            return scaler.scale(model(batch).pow(2).mean())

        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        for _ in range(6):
            steps.zero_grad(set_to_none=to_none)
            compiled(torch.randn(4, 3)).backward()
            compiled(torch.randn(4, 3)).backward()
            scaler.step(steps)
            scaler.update()
        return flat(model)

    assert_equal_to_fp32(run)


def test_a_compiled_model_is_watched_as_any_other() -> None:
    def run(scaler: GradScaler) -> Tensor:
        model = net(3, 4, 1)
        steps = sgd(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(4):
            steps.zero_grad()
            scaler.scale(compiled(torch.randn(4, 3)).pow(2).mean()).backward()
            scaler.step(steps)
            scaler.update()
        return flat(model)

    assert_equal_to_fp32(run)


def test_a_scaler_holds_no_model_and_leaves_no_guard() -> None:
    def train(scaler: GradScaler) -> None:
        model = net(3, 4, 1)
        steps = sgd(model)
        scaler.scale(model(torch.randn(4, 3)).mean()).backward()
        scaler.step(steps)
        scaler.update()

    scaler = GradScaler("cpu")
    train(scaler)
    gc.collect()
    assert not list(scaler._tracker._optimizers) and not scaler._tracker._parameters()
    scaler._tracker.next_iteration()
    assert not scaler._tracker._entries
    for _ in range(3):
        train(scaler)  # parameters that may sit where the old ones sat
    assert scaler._tracker in ledger._guarding
    number = len(ledger._guarding)
    del scaler
    gc.collect()
    assert len(ledger._guarding) < number
    assert list(_global_optimizer_pre_hooks.values()).count(ledger._ask_trackers) == 1


def test_a_scaler_may_end_while_torch_runs_its_hooks() -> None:
    """The garbage collector comes when it likes; removing a hook then would break the step of another optimizer."""
    model, scalers = net(3, 4, 1), [GradScaler("cpu")]
    steps = sgd(model)

    def collect(*_: object) -> None:
        scalers.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    try:
        scalers[0].scale(model(torch.randn(4, 3)).mean()).backward()
        steps.zero_grad()
        steps.step()
    finally:
        handle.remove()
    assert not scalers


def test_overflow_in_any_micro_batch_voids_the_group() -> None:
    model = net(3, 4, 1)
    steps, scaler = sgd(model), GradScaler("cpu")
    before = flat(model)
    for factor in (1.0, math.inf, 1.0):
        scaler.scale((model(torch.randn(4, 3)) * factor).mean()).backward()
    scaler.step(steps)
    assert not scaler.last_step.applied and torch.equal(flat(model), before)


def test_one_optimizer_skips_and_the_other_steps() -> None:
    """As torch's scaler does; the scale backs off for both."""
    one, two = net(3, 4, 1), net(3, 4, 1)
    before = flat(one)
    steps_one, steps_two, scaler = sgd(one), sgd(two), GradScaler("cpu")
    scaler.scale(one(torch.randn(4, 3)).mean() * math.inf).backward()
    scaler.scale(two(torch.randn(4, 3)).mean()).backward()
    applied = []
    for steps in (steps_one, steps_two):
        scaler.step(steps)
        applied.append(scaler.last_step.applied)
    scaler.update()
    assert applied == [False, True] and scaler.get_scale() == 32768.0
    assert torch.equal(flat(one), before)


def test_two_scalers_do_not_judge_each_others_gradients() -> None:
    one, two = net(3, 4, 1), net(3, 4, 1)
    pairs = [(model, sgd(model), GradScaler("cpu", init_scale=scale)) for model, scale in ((one, 4.0), (two, 64.0))]
    for _ in range(3):
        for model, steps, scaler in pairs:
            steps.zero_grad()
            scaler.scale(model(torch.randn(4, 3)).mean()).backward()
        for _, steps, scaler in pairs:
            scaler.step(steps)
            scaler.update()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()

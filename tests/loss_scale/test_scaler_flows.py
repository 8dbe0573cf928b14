"""Training loops that are right: none is refused, and each ends with the weights of plain fp32, bit for bit.

Each flow runs twice: with a scaler whose scale moves every other step, and with the scaler switched off.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from mezzo.errors import ScalerError
from mezzo.loss_scale import GradScaler, accumulation
from mezzo.optim import AdamW, MasterWeights

from .scaler_flows import FLOWS, Flow, flat, flow, net, sgd


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


def stepped_inside_of_backward(
    scaler: GradScaler, is_unscaled: bool, is_dropped: bool, is_updated: bool = False
) -> Tensor:
    """Each weight has an optimizer of its own, which a hook steps when its gradient has arrived: no two are there at once."""
    model = net(3, 8, 8, 1)
    steps = {param: torch.optim.SGD([param], lr=0.125, momentum=0.5) for param in model.parameters()}

    def step(param: Tensor) -> None:
        if is_unscaled:
            scaler.unscale_(steps[param])
            nn.utils.clip_grad_norm_([param], 0.5)
        scaler.step(steps[param])
        if is_dropped:
            steps[param].zero_grad()
        if is_updated:
            scaler.update()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _ in range(6):
        model.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
        if not is_updated:
            scaler.update()
    return flat(model)


@pytest.mark.parametrize("is_unscaled", [True, False])
@pytest.mark.parametrize("is_dropped", [True, False])
@pytest.mark.parametrize("is_updated", [True, False])
def test_steps_inside_of_backward(is_unscaled: bool, is_dropped: bool, is_updated: bool) -> None:
    assert_equal_to_fp32(lambda scaler: stepped_inside_of_backward(scaler, is_unscaled, is_dropped, is_updated))


def test_a_step_inside_of_backward_that_goes_past_the_scaler_is_refused() -> None:
    param, scaler = nn.Parameter(torch.ones(2)), GradScaler("cpu")
    optimizer = torch.optim.SGD([param], lr=0.125)
    param.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(ScalerError, match="still multiplied by the loss scale"):
        scaler.scale(param.sum()).backward()
    assert param.tolist() == [1.0, 1.0]


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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch, as it traces
def test_compiled_backward_passes_whose_hooks_are_traced() -> None:
    def run(scaler: GradScaler) -> Tensor:
        model = net(3, 4, 1)
        steps = sgd(model)
        for _ in range(2):
            steps.zero_grad()
            loss = scaler.scale(model(torch.randn(4, 3)).pow(2).mean())
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            scaler.unscale_(steps)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    assert scaler._tracker in accumulation._asked
    number = len(accumulation._asked)
    del scaler
    gc.collect()
    assert len(accumulation._asked) < number
    assert list(_global_optimizer_pre_hooks.values()).count(accumulation.ask_watchers) == 1


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

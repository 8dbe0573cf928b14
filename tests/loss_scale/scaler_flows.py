"""Training loops that are right, each run by a scaler: what they leave is held against fp32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.loss_scale import GradScaler

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

"""An ensemble trained at once with vmap and functional_call."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

torch.manual_seed(0)
MEMBERS = 5
x = torch.linspace(-3, 3, 256)[:, None]
y = torch.sin(2 * x) * torch.exp(-x.abs() / 3)


def make():
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


template = make().to("meta")
parameters, buffers = stack_module_state([make() for _ in range(MEMBERS)])
parameters = {k: v.detach() for k, v in parameters.items()}


def member_loss(p, b, inputs, target):
    return (functional_call(template, (p, b), (inputs,)) - target).pow(2).mean()


step_all = vmap(grad_and_value(member_loss), in_dims=(0, 0, 0, 0))
velocity = {k: torch.zeros_like(v) for k, v in parameters.items()}
for step in range(4):
    rows = torch.randint(0, 256, (MEMBERS, 64))
    grads, losses = step_all(parameters, buffers, x[rows], y[rows])
    for k, g in grads.items():
        velocity[k] = 0.9 * velocity[k] + g
        parameters[k] = parameters[k] - 0.05 * velocity[k]
    if step % 30 == 0:
        print(f"step {step} losses {[round(v, 4) for v in losses.tolist()]}")

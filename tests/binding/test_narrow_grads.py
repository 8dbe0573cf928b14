"""Gradients in 16 bit beside fp32 weights: who steps on them trains, and who does not is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mezzo
from mezzo.errors import PolicyError

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


class MyAdamW(optim.AdamW):
    pass


class MySGD(optim.SGD):
    pass


class Noisy(optim.SGD):
    """Draws random numbers, as samplers do."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p) + p.grad, alpha=-group["lr"])


class Unlike(optim.SGD):
    """Its constructor does not take the options of its groups."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.long().abs()[:, 0] % 10))


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


TAKES: dict[str, Make] = {
    "AdamW": optim.AdamW,
    "SGD": lambda params: optim.SGD(params, momentum=0.9),
    "RMSprop": optim.RMSprop,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
    "a subclass of SGD": lambda params: MySGD(params, lr=0.1),
    "one that draws": lambda params: Noisy(params, lr=0.1),
}
TAKES_NOT: dict[str, Make] = {
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "Rprop": optim.Rprop,
    "LBFGS": optim.LBFGS,
    "Adafactor": optim.Adafactor,
    "centered RMSprop with momentum": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "a subclass of AdamW": MyAdamW,
    "a subclass of SGD with momentum": lambda params: MySGD(params, momentum=0.9),
    "momentum in the second group": lambda params: MySGD(
        [{"params": [p], "momentum": 0.9 * i} for i, p in enumerate(params)], lr=0.1
    ),
}
GRADS = pytest.mark.parametrize("policy", ["bf16, grads=bf16", "fp16, grads=fp16"])


def train(model: nn.Module, optimizer: optim.Optimizer, policy: str) -> None:
    amp = mezzo.prepare(model, optimizer, policy)
    for _ in range(4):
        amp.zero_grad()
        amp.backward(model(torch.randn(8, 8)).float().square().mean())
        amp.step()
    amp.report(strict=True)


@GRADS
@pytest.mark.parametrize("name", TAKES)
def test_who_takes_them_trains(name: str, policy: str) -> None:
    model, drawn = nn.Linear(8, 4), torch.get_rng_state()
    mezzo.prepare(model, TAKES[name](model.parameters()), policy).release()
    assert torch.equal(torch.get_rng_state(), drawn)
    train(model, TAKES[name](model.parameters()), policy)


@GRADS
@pytest.mark.parametrize("name", TAKES_NOT)
def test_who_does_not_is_refused_in_a_sentence(name: str, policy: str) -> None:
    model = nn.Linear(8, 4)
    optimizer, low = TAKES_NOT[name](model.parameters()), policy[:4]
    with pytest.raises(PolicyError) as caught:
        mezzo.prepare(model, optimizer, policy)
    said = str(caught.value)
    assert said.startswith(f"the policy declares grads={low}, and {type(optimizer).__name__} ")
    assert ("beside fp32 weights: " in said) or (f"in {low} too, where it declares state=fp32" in said)
    assert said.endswith("Leave grads out of the policy: gradients then have the dtype of their weights.")
    assert not optimizer.state and model.weight.grad_dtype is torch.float32 and type(model) is nn.Linear
    if name != "LBFGS":
        train(model, optimizer, low)  # what is advised


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (lambda params: optim.SGD(params, lr=0.1, momentum=0.9), Table),
        (optim.NAdam, Normed),
    ],
)
def test_masters_take_them_but_what_stays_fp32_beside_them_does_not(make: Make, model: type[nn.Module]) -> None:
    net = model()
    with pytest.raises(PolicyError, match="grads=bf16"):
        mezzo.prepare(net, make(net.parameters()), "bf16-master, grads=bf16")
    train(net, make(net.parameters()), "bf16-master")
    layer = nn.Linear(8, 4)
    train(layer, make(layer.parameters()), "bf16-master, grads=bf16")


def test_nothing_is_said_of_one_that_cannot_be_tried() -> None:
    model = nn.Linear(8, 4)
    train(model, Unlike(model), "bf16, grads=bf16")
    table = nn.Embedding(10, 8, sparse=True)
    mezzo.prepare(table, optim.SparseAdam(table.parameters()), "fp32, grads=bf16")


def test_hooks_of_every_optimizer_see_no_trial() -> None:
    seen: list[optim.Optimizer] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        model = nn.Linear(8, 4)
        mezzo.prepare(model, optim.RMSprop(model.parameters()), "bf16, grads=bf16")
    finally:
        handle.remove()
    assert not seen


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "Adadelta", "ASGD"])
@pytest.mark.parametrize(
    ("policy", "max_norm"),
    [("bf16-master", 0.01), ("fp16-master, scaling=256", None), ("fp16-master, scaling=256", 0.01)],
)
def test_fp32_weights_beside_masters_take_narrow_gradients_that_are_divided_or_clipped(
    name: str, policy: str, max_norm: float | None
) -> None:
    ends = []
    for grads in ("none", policy[:4]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        amp = mezzo.prepare(model, getattr(torch.optim, name)(model.parameters()), f"{policy}, grads={grads}")
        for x in torch.randn(3, 8, 4):
            amp.zero_grad()
            amp.backward(model(x).square().mean())
            assert amp.step(max_norm=max_norm)
        amp.report(strict=True)
        ends.append(amp.export_weights())
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {model[0].weight.dtype}
    eps = torch.finfo(model[0].weight.dtype).eps
    torch.testing.assert_close(*ends, rtol=4 * eps, atol=4 * eps)

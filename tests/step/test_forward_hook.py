"""What a model has now beside what it had: modules, groups and frozen parameters that changed are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mezzo
from mezzo.binding import bound_of
from mezzo.step.forward_hook import ForwardHook
from mezzo.step.report import ParameterNames


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model[0].bias.requires_grad_(False)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


CHANGES: dict[str, tuple[Callable[[nn.Sequential, torch.optim.Optimizer], object], bool]] = {
    "nothing": (lambda model, optimizer: None, False),
    "values": (lambda model, optimizer: model[0].weight.data.zero_(), False),
    "a module added": (lambda model, optimizer: model.append(nn.Identity()), True),
    "a module added to a leaf": (lambda model, optimizer: model[0].add_module("adapter", nn.Identity()), True),
    "a module replaced": (lambda model, optimizer: model[1].__setitem__(0, nn.Linear(2, 2)), True),
    "a module taken away": (lambda model, optimizer: model[1].__delitem__(1), True),
    "a group added": (
        lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        True,
    ),
    "a parameter added to a group": (
        lambda model, optimizer: optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1))),
        True,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_until_it_was_looked_at(change: str) -> None:
    make, is_one = CHANGES[change]
    model, optimizer = made()
    amp = mezzo.prepare(model, optimizer, "bf16")
    hook = ForwardHook(amp._engine)
    make(model, optimizer)
    assert hook.is_changed() is is_one
    hook.snapshot()
    assert not hook.is_changed()


@pytest.mark.parametrize(("policy", "is_stored_anew"), [("bf16-master", True), ("bf16", False)])
def test_a_parameter_that_is_unfrozen_counts_where_it_is_stored_anew(policy: str, is_stored_anew: bool) -> None:
    model, optimizer = made()
    amp = mezzo.prepare(model, optimizer, policy)
    hook = ForwardHook(amp._engine)
    model[0].bias.requires_grad_(True)
    assert hook.is_changed() is is_stored_anew


def test_what_the_model_holds_does_not_keep_the_engine() -> None:
    model, optimizer = made()
    amp = mezzo.prepare(model, optimizer, "bf16")
    before_forward = bound_of(model).binding.before_forward  # type: ignore[union-attr]  # it is bound
    del amp
    assert before_forward is not None and before_forward(model, (), {}) is None


def test_parameters_have_the_models_names_and_others_numbers() -> None:
    model, _ = made()
    alone = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([model[1][0].weight, alone], lr=0.1)
    names = ParameterNames(model, [optimizer])
    assert (names[model[1][0].weight], names[alone]) == ("1.0.weight", "optimizer 0 parameter 1")
    model.append(nn.Linear(2, 2))
    assert names[model[2].weight] == "2.weight", "found when asked"
    assert names[torch.ones(1)] == "a parameter"


def grown(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[2].parameters())})


def replaced(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model[1][0] = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model[1][0].parameters())})


def unfrozen(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model[0].bias]})


def assigned(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = model[0].weight.detach().float() + 2**-12


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling.init_scale=16"])
@pytest.mark.parametrize("change", [grown, replaced, unfrozen, assigned])
def test_a_change_is_followed_where_parts_are_called_as_where_the_model_is(
    change: Callable[[nn.Sequential, torch.optim.Optimizer], None], policy: str
) -> None:
    """A GAN in one `ModuleDict`, or a `training_step` that calls `self.net`, never calls the whole."""

    def run(model: nn.Sequential, x: torch.Tensor, by_parts: bool) -> torch.Tensor:
        for part in [*model] if by_parts else [model]:
            x = part(x)
        return x

    def trained(by_parts: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, optimizer = made()
        amp, x = mezzo.prepare(model, optimizer, policy), torch.randn(4, 2)
        for step in range(6):
            with torch.no_grad():
                run(model, x, by_parts)
            if step == 3:
                change(model, optimizer)
            amp.zero_grad()
            amp.backward(run(model, x, by_parts).float().square().mean())
            assert amp.step()
        return [p.detach() for p in model.parameters()]

    for whole, part in zip(trained(False), trained(True), strict=True):
        assert part.dtype is whole.dtype and torch.allclose(part, whole, rtol=2 * torch.finfo(whole.dtype).eps, atol=0)

"""What a model has now beside what it had: modules, groups and frozen parameters that changed are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mezzo.step.model_changes import ModelChanges, ParameterNames


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
    changes = ModelChanges(model, [optimizer], with_frozen=False)
    make(model, optimizer)
    assert changes.are_there() is is_one
    changes.look()
    assert not changes.are_there()


@pytest.mark.parametrize("with_frozen", [True, False])
def test_a_parameter_that_is_unfrozen_counts_where_it_is_stored_anew(with_frozen: bool) -> None:
    model, optimizer = made()
    changes = ModelChanges(model, [optimizer], with_frozen=with_frozen)
    model[0].bias.requires_grad_(True)
    assert changes.are_there() is with_frozen


def test_parameters_have_the_models_names_and_others_numbers() -> None:
    model, _ = made()
    alone = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([model[1][0].weight, alone], lr=0.1)
    names = ParameterNames(model, [optimizer])
    assert (names[model[1][0].weight], names[alone]) == ("1.0.weight", "optimizer 0 parameter 1")
    model.append(nn.Linear(2, 2))
    assert names[model[2].weight] == "2.weight", "found when asked"
    assert names[torch.ones(1)] == "a parameter"

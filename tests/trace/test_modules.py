"""Which module runs, and what tensors are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.binding import named_tensors
from mezzo.trace import modules
from mezzo.trace.modules import ModuleStack, Place


@dataclass
class Output:
    logits: Tensor
    text: str = "x"


def test_tensors_in_nests_are_named_by_the_way_to_them() -> None:
    x = torch.ones(1)
    nest = {"a": [x, "no tensor", (x,)], 2: Output(x), "kind": Output}
    assert [n for n, _ in named_tensors(nest, "input")] == ["input['a'][0]", "input['a'][2][0]", "input[2].logits"]


class Inner(nn.Module):
    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise KeyError
        return x * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), nn.Linear(3, 3)])
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        return self.layers[1](self.layers[0](x))


@contextmanager
def followed(model: nn.Module | None) -> Iterator[tuple[ModuleStack, list[Place], list[nn.Module]]]:
    places: list[Place] = []
    roots: list[nn.Module] = []
    stack = ModuleStack(model, roots.append, lambda module, place, out: places.append(place))
    with stack.following():
        yield stack, places, roots


def test_a_part_of_a_prepared_model_that_is_called_by_itself_is_named_as_rules_name_it() -> None:
    net = Net()
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16")
    with followed(None) as (stack, places, roots):
        net.layers[1](torch.ones(1, 3))
        assert (places[0].root, places[0].module, roots) == ("Net", "layers.1", [net.layers[1]])
        assert stack.parameter_name(net.layers[1].weight) == "layers.1.weight"
    amp.release()


def test_a_part_that_is_called_by_itself_has_its_name_in_the_model_that_holds_it() -> None:
    net = Net()
    system = nn.Sequential(net, nn.Linear(3, 3))
    with followed(None) as (stack, places, _):
        net.layers[1](torch.ones(1, 3))
        assert stack.parameter_name(net.layers[1].weight) == "0.layers.1.weight"
    assert (places[0].root, places[0].module) == ("Sequential", "0.layers.1")
    del system


def test_parts_that_are_called_one_by_one_are_looked_for_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, walk = [], modules.living
    monkeypatch.setattr(modules, "living", lambda cls: walks.append(1) or walk(cls))  # type: ignore[func-returns-value]
    parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))
    with followed(None) as (_, places, _):
        for part in parts:
            part(torch.ones(1, 3))
        assert len(walks) == 1
        late = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        late[0](torch.ones(1, 3))
    assert len(walks) == 2
    assert (places[-1].root, places[-1].module) == ("Sequential", "0")


def test_modules_that_are_made_in_every_step_are_looked_for_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, walk = [], modules.living
    monkeypatch.setattr(modules, "living", lambda cls: walks.append(1) or walk(cls))  # type: ignore[func-returns-value]
    with mezzo.diagnose.trace() as t:
        for _ in range(20):
            nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2)).log().sum().backward()
    assert 0 < len(walks) <= 8
    assert t.report.record.backwards == 20


def test_modules_that_hold_each_other_are_named_too() -> None:
    net = Net()
    system = nn.Sequential(net, nn.Linear(3, 3))
    net.layers[0].owner = system
    with followed(None) as (_, places, _):
        net.layers[1](torch.ones(1, 3))
    assert (places[0].root, places[0].module) == ("Net", "layers.1")  # which holds as much as the other does
    del net.layers[0].owner


@pytest.mark.parametrize("around", [nn.ModuleList, lambda parts: nn.ModuleDict({"net": parts[0]}), nn.Sequential])
def test_what_holds_a_model_alone_is_no_model_of_its_own(around: Any) -> None:
    net = Net()
    held = around([net]) if around is not nn.Sequential else nn.Sequential(net)
    with followed(None) as (_, places, _):
        net(torch.ones(1, 3))
    assert (places[-1].root, places[-1].module) == ("Net", "")
    del held


def test_a_part_that_ran_before_is_renamed_by_the_model_that_calls_it() -> None:
    net = Net()
    with followed(None) as (_, places, _):
        net(torch.ones(1, 3))
        whole = nn.Sequential(net, nn.Linear(3, 3))
        whole(torch.ones(1, 3))
    assert [p.module for p in places] == ["layers.0", "layers.1", "", "0.layers.0", "0.layers.1", "0", "1", ""]


def test_modules_are_placed_below_the_outermost_one() -> None:
    net = Net()
    with followed(None) as (stack, places, roots):
        net(torch.ones(3))
        assert stack.is_outside and stack.place == Place()
    assert [(p.root, p.module) for p in places] == [("Net", "layers.0"), ("Net", "layers.1"), ("Net", "")]
    assert places[1].classes == ("Net", "Linear")
    assert roots == [net]


def test_a_submodule_called_by_itself_has_its_name_in_the_given_model() -> None:
    net = Net()
    with followed(net) as (_, places, _):
        net.layers[1](torch.ones(3))
        nn.Sequential(net.layers[0])(torch.ones(3))
    assert [(p.root, p.module) for p in places] == [("Net", "layers.1"), ("Net", "layers.0"), ("Sequential", "")]


def test_an_error_inside_does_not_shift_what_follows() -> None:
    net = Net()
    with followed(net) as (stack, places, _):
        with pytest.raises(KeyError):
            net.layers[0](torch.ones(3), fail=True)
        assert stack.is_outside
        net(torch.ones(3))
    assert places[-1] == Place("Net", "", ("Net",))


class Interrupted(BaseException):
    """torch calls no hook of a module that ends with it."""


class Retries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.part.register_forward_pre_hook(self.interrupt)

    def interrupt(self, *_: Any) -> None:
        raise Interrupted

    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(Interrupted):
            self.part(x)
        return x


def test_a_module_that_was_interrupted_is_left_with_the_one_around_it() -> None:
    with followed(None) as (stack, places, _):
        Retries()(torch.ones(1))
        assert stack.is_outside
    assert places == [Place("Retries", "", ("Retries",))]


def test_memory_is_called_by_parameter_buffer_or_input() -> None:
    net, x, scale = Net(), torch.ones(3), torch.ones(1)
    names: list[str] = []
    with followed(None) as (stack, _, _):
        net.layers[0].register_forward_hook(
            lambda *_: names.extend(
                stack.name_of(t) for t in (x[1:], scale, net.layers[1].weight.t(), net.mean, torch.ones(1))
            )
        )
        net(x, scale=scale)
        assert stack.parameter_name(net.layers[1].bias) == "layers.1.bias"
        assert stack.parameter_name(nn.Parameter(torch.ones(1))) == ""
    assert names == ["input [0] of Net", "input ['scale'] of Net", "parameter layers.1.weight", "buffer mean", ""]


def test_nothing_is_left_behind() -> None:
    hooks: tuple[dict[int, Any], ...] = (
        nn.modules.module._global_forward_pre_hooks,
        nn.modules.module._global_forward_hooks,
    )
    before = [dict(each) for each in hooks]
    with followed(Net()):
        assert [len(each) for each in hooks] == [len(each) + 1 for each in before]
    assert [dict(each) for each in hooks] == before

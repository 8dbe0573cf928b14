"""Copies of prepared models whose classes say themselves how instances are made, and traced ones, whose graph is their class's."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo

from ..saved import through_a_file


class Sized(nn.Module):
    """What stands for a model of a size: its product is no layer's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.randn(size, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Positional(Sized):
    def __new__(cls, size: int) -> Positional:
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[int]:
        return (self.size,)


class Keyword(Sized):
    def __new__(cls, *, size: int) -> Keyword:
        return super().__new__(cls)

    def __init__(self, *, size: int) -> None:
        super().__init__(size)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": self.size}


class Reduced(Sized):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size,), self.__dict__


class Deep(Sized):
    def __deepcopy__(self, memo: Any) -> Deep:
        made = type(self)(self.size)
        made.load_state_dict(self.state_dict())
        return made


def traced(size: int) -> torch.fx.GraphModule:
    model = torch.fx.symbolic_trace(Sized(size))
    for node in model.graph.nodes:  # torch pickles none of annotations that are strings
        node.type = None
    model.recompile()
    return model


MODELS = [Positional, lambda size: Keyword(size=size), Reduced, Deep, traced]
COPIERS = [
    copy.copy,
    copy.deepcopy,
    lambda m: pickle.loads(pickle.dumps(m)),
    lambda m: through_a_file(m, weights_only=False),
]


@pytest.mark.parametrize("copier", COPIERS, ids=["copy", "deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("make", MODELS, ids=["newargs", "newargs_ex", "reduce", "deepcopy", "traced"])
def test_a_copy_keeps_the_policy_and_leaves_it_where_it_was(
    make: Callable[[int], nn.Module], copier: Callable[[nn.Module], nn.Module]
) -> None:
    model, x = make(4), torch.randn(2, 4)
    amp = mezzo.prepare(model, None, "bf16, output=none")
    low = model(x)
    assert low.dtype is torch.bfloat16
    for one in (copier(model), copier(copier(model)), model):
        assert torch.equal(one(x), low) and one(x).dtype is torch.bfloat16
    amp.release()
    assert torch.equal(model(x), make(4)(x)) and torch.equal(copier(model)(x), model(x))


def test_a_graph_that_is_edited_and_compiled_anew_runs_in_the_policy() -> None:
    model, x = traced(4), torch.randn(2, 4)
    amp = mezzo.prepare(model, None, "bf16, output=none")
    low = model(x)
    (product,) = [node for node in model.graph.nodes if node.target is operator.matmul]
    with model.graph.inserting_after(product):
        negated = model.graph.call_function(operator.neg, (product,))
    product.replace_all_uses_with(negated, delete_user_cb=lambda user: user is not negated)
    model.recompile()
    assert torch.equal(model(x), -low) and model(x).dtype is torch.bfloat16
    amp.release()
    assert torch.equal(model(x), -Sized(4)(x))

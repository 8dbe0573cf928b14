"""What a compiler asks of the modules of a prepared model at each call: little, and enough to notice another policy."""

from __future__ import annotations

import pytest
import torch
from tests.torch_versions import traces_regions
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter

import mezzo

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:While compiling"),
    pytest.mark.skipif(not traces_regions(), reason="the compiler of this torch leaves regions out"),
]


class Chain(nn.Sequential):
    """A class of this file's own, so that its compiled graphs are its own too."""


def chain(policy: str) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.0))]
    model = Chain(*parts)
    mezzo.prepare(model, policy=policy)
    return model


def test_a_plain_module_is_asked_for_its_class_and_one_name() -> None:
    model = chain("bf16")
    model.compile(backend="eager", fullgraph=True)
    model(torch.randn(2, 8))
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    asked = [
        line for line in str(entry.guard_manager).splitlines() if "_mezzo_bound" in line and " source=" not in line
    ]
    inside = [line for line in asked if "_modules[" in line]
    assert len(inside) == 2 * 12, inside[:6]
    assert not any(" is L['self']" in line for line in inside), "an identity, which Python compares at each call"


def test_models_under_one_policy_share_a_graph_and_another_policy_is_noticed() -> None:
    torch.compiler.reset()
    counter, x = CompileCounter(), torch.randn(2, 8)
    for policy, graphs, dtype in (("bf16", 1, torch.bfloat16), ("bf16", 1, torch.bfloat16), ("fp16", 2, torch.float16)):
        model = chain(f"{policy}, output={policy}")
        model.compile(backend=counter, fullgraph=True)
        assert model(x).dtype is dtype
        assert counter.frame_count == graphs
    mezzo.prepare(model, policy="bf16, output=bf16")
    assert model(x).dtype is torch.bfloat16


def test_a_module_with_a_rule_and_one_of_another_model_keep_their_own() -> None:
    seen: list[torch.dtype] = []

    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    other = Chain(Seen(8, 8))
    mezzo.prepare(other, policy="fp16")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.wide = Seen(8, 8), Seen(8, 8)
            self.__dict__["other"] = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.low(x)) + self.other[0](x)

    model = Outer()
    mezzo.prepare(model, policy="bf16, module:wide=fp32")
    model.compile(backend="eager")
    model(torch.randn(2, 8))
    assert seen == [torch.bfloat16, torch.float32, torch.float16]
    model.low, model.wide = model.wide, model.low  # a compiled graph is of what stood where
    model(torch.randn(2, 8))
    assert seen[3:] == [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize(("policy", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float32)])
def test_a_part_of_another_model_under_an_equal_policy_is_a_part_of_this_one(
    backend: str | None, policy: str, dtype: torch.dtype
) -> None:
    other = Chain(nn.Linear(8, 8))
    mezzo.prepare(other, policy=policy)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["other"], self.seen, self.own = other, None, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.other[0](self.own(x))
            self.seen = out.dtype
            return out

    model = Outer()
    mezzo.prepare(model, policy="bf16")
    if backend is not None:
        model.compile(backend=backend)
    assert model(torch.randn(2, 8)).dtype is torch.float32
    assert model.seen is dtype

"""A forward that returns before its body has run would compute outside of its region."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.errors import PolicyError


class Stages(nn.Module):
    """Yields what each layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = torch.mm(x, layer.weight.t())
            yield x


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = Stages()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.stages(x)))


class Served(nn.Linear):
    async def forward(self, x: Tensor) -> Tensor:
        return super().forward(self, x)


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "bf16, ops=mezzo"])
@pytest.mark.parametrize("model", [Stages(), Served(4, 4)], ids=["yield", "async"])
def test_it_is_refused_with_nothing_changed(model: nn.Module, policy: str) -> None:
    with pytest.raises(PolicyError, match=r"forward of (Stages|Served), a generator or coroutine, whose body runs"):
        mezzo.prepare(model, None, policy)
    assert type(model) in (Stages, Served) and all(p.dtype is torch.float32 for p in model.parameters())


def test_fp32_has_no_region_to_be_in() -> None:
    model = Stages()
    mezzo.prepare(model, None, "fp32")
    assert len(list(model(torch.ones(1, 4)))) == 2


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_inside_of_a_model_its_body_runs_in_the_region(policy: str) -> None:
    model, x = Collected(), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(x)
    mezzo.prepare(model, None, f"{policy}, output=none")
    got = model(x)
    assert got.dtype is torch.bfloat16 and torch.equal(got, want)


def test_a_rule_of_its_own_would_not_hold() -> None:
    with pytest.raises(PolicyError, match="forward of Stages, a generator or coroutine"):
        mezzo.prepare(Collected(), None, "bf16, stages*=fp32")

"""A forward that yields runs in its region from one value to the next; one that is awaited, or has a rule of its own, would run outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
def test_a_coroutine_is_refused_with_nothing_changed(policy: str) -> None:
    model = Served(4, 4)
    with pytest.raises(PolicyError, match="forward of Served, a generator or coroutine, whose body runs"):
        mezzo.prepare(model, None, policy)
    assert type(model) is Served and all(p.dtype is torch.float32 for p in model.parameters())


class Listed(Stages):
    def forward(self, x: Tensor) -> Any:
        return list(super().forward(x))


class Heads(Stages):
    """Returns a generator that it did not write as a function."""

    def forward(self, x: Tensor) -> Any:
        return (torch.mm(x, layer.weight.t()) for layer in self.layers)


class ListedHeads(Heads):
    def forward(self, x: Tensor) -> Any:
        return list(super().forward(x))


@pytest.mark.parametrize("kinds", [(Stages, Listed), (Heads, ListedHeads)])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16", "fp16-master", "bf16, ops=mezzo"])
def test_what_it_yields_trains_as_a_list_of_it(policy: str, kinds: tuple[type[Stages], type[Stages]]) -> None:
    losses, weights = [], []
    for kind in kinds:
        torch.manual_seed(0)
        model, x = kind(), torch.randn(8, 4)
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy)
        for _ in range(4):
            amp.zero_grad()
            found = list(model(x))
            assert [out.dtype for out in found] == [torch.float32] * 2
            loss = sum(((out - x) ** 2).mean() for out in found)
            amp.backward(loss)
            assert amp.step()
            losses.append(loss.detach())
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert losses[:4] == losses[4:] and torch.equal(*weights)
    assert not torch.is_autocast_enabled("cpu")


class Answers(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        seen = []
        try:
            while True:
                try:
                    given = yield super().forward(x)
                except KeyError as error:
                    given = error
                seen.append((given, torch.is_autocast_enabled("cpu")))
                if given == "end":
                    return seen
        finally:
            self.is_closed = True


def test_what_is_sent_thrown_and_returned_goes_through() -> None:
    model = Answers(4, 4)
    mezzo.prepare(model, None, "bf16")
    answers, error = model(torch.ones(1, 4)), KeyError()
    assert next(answers).dtype is torch.float32
    answers.send("a")
    answers.throw(error)
    with pytest.raises(StopIteration) as ended:
        answers.send("end")
    assert ended.value.value == [("a", True), (error, True), ("end", True)]
    other = model(torch.ones(1, 4))
    next(other)
    model.is_closed = False
    other.close()
    assert model.is_closed


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.head(x)
        yield self.head(self.norm(x))


def test_a_skipped_step_takes_back_what_the_body_wrote() -> None:
    model = Normed()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16")
    for factor, applied in ((1.0, True), (torch.inf, False), (1.0, True)):
        before = model.norm.running_mean.clone()
        amp.zero_grad()
        amp.backward(sum(out.square().mean() for out in model(torch.randn(8, 4) * factor)))
        assert bool(amp.step()) is applied
        assert torch.equal(model.norm.running_mean, before) is not applied


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


def test_a_part_that_is_called_by_itself_runs_in_its_region() -> None:
    model, x = Collected(), torch.randn(3, 4)
    mezzo.prepare(model, None, "bf16")
    assert torch.equal(torch.stack(list(model.stages(x))), model(x))


def test_a_rule_of_its_own_would_not_hold() -> None:
    with pytest.raises(PolicyError, match="forward of Stages, a generator or coroutine"):
        mezzo.prepare(Collected(), None, "bf16, stages*=fp32")

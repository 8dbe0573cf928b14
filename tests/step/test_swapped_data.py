"""Weights that `p.data = ...` changed: refused before anything is written, between steps and in the middle of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch_versions import ADAGRAD_STARTS_LATE
from torch import nn

import mezzo
from mezzo.errors import OperandError, StepError


def grown(model: nn.Embedding) -> None:
    model.weight.data = torch.cat([model.weight.data, torch.zeros(3, 4, dtype=model.weight.dtype)])


def recast(model: nn.Embedding) -> None:
    model.weight.data = model.weight.data.to(torch.float16 if model.weight.dtype is torch.float32 else torch.float32)


class TestMemoryThatDataSwaps:
    """`p.data = ...`: what optimizers keep of a weight does not fit it any more, and half the step may be taken before one notices."""

    POLICIES = pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master"])
    KINDS = pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, mezzo.optim.AdamW])

    def fresh(self, kind: Any, policy: str) -> tuple[mezzo.Stepper, Any]:
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
        own = {"master": "split"} if kind is mezzo.optim.AdamW and "master" in policy else {}
        optimizer = kind(model.parameters(), lr=0.1, **own)
        return mezzo.prepare(model, optimizer, policy), optimizer

    def run(self, kind: Any, policy: str, change: Callable[[nn.Embedding], None]) -> tuple[mezzo.Stepper, Any]:
        amp, optimizer = self.fresh(kind, policy)
        self.take(amp, 10)
        change(amp.model[0])
        return amp, optimizer

    def take(self, amp: mezzo.Stepper, size: int) -> mezzo.StepResult:
        amp.zero_grad()
        amp.backward(amp.model(torch.arange(size)).float().square().mean())
        return amp.step()

    @POLICIES
    @KINDS
    def test_a_table_that_grew(self, kind: Any, policy: str) -> None:
        amp, _ = self.run(kind, policy, grown)
        before = copy.deepcopy(amp.model.state_dict())
        words = r"0\.weight was \w+\[10,4\] .* is \w+\[13,4\] now.*\.data.*state\.pop"
        for _ in range(2):
            with pytest.raises(StepError, match=words):
                self.take(amp, 13)
        assert all(torch.equal(value, before[name]) for name, value in amp.model.state_dict().items())
        if kind is torch.optim.Adagrad and not ADAGRAD_STARTS_LATE:
            return
        amp.optimizers[0].state.pop(amp.model[0].weight)
        for _ in range(2):
            assert self.take(amp, 13)
        assert amp.model[0].weight[10:].any() and amp.report(strict=True)

    @pytest.mark.parametrize("policy", ["fp32", "bf16"])
    @KINDS
    def test_another_dtype_by_hand(self, kind: Any, policy: str) -> None:
        amp, _ = self.run(kind, policy, recast)
        with pytest.raises(StepError, match=r"0\.weight was \w+\[10,4\] .* is (fp16|fp32)\[10,4\] now.*\.data.*policy"):
            self.take(amp, 10)

    @pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
    def test_fp32_values_for_16_bit_weights_are_taken_as_loaded_ones(self, kind: Any, policy: str) -> None:
        """As an average put in for evaluation, or the weights of the first step that pruning goes back to."""
        generator = torch.Generator().manual_seed(0)
        values = {
            "0.weight": torch.randn(10, 4, generator=generator),
            "1.weight": torch.randn(1, 4, generator=generator),
        }
        ended = []
        for by_data in (True, False):
            torch.manual_seed(0)
            amp, _ = self.run(kind, policy, lambda model: None)
            for name, value in values.items() if by_data else ():
                amp.model.get_parameter(name).data = value.clone()
            if not by_data:
                amp.model.load_state_dict(values, strict=False)
            self.take(amp, 10), self.take(amp, 10)
            assert amp.report(strict=True)
            ended.append(amp.state_dict()["model"] | amp.export_weights())
        torch.testing.assert_close(*ended, rtol=0, atol=0)

    @POLICIES
    @KINDS
    @pytest.mark.parametrize("change", [grown, recast])
    @pytest.mark.parametrize("steps", [0, 2])
    def test_what_changes_between_backward_and_step_is_refused_before_anything_is_written(
        self, kind: Any, policy: str, change: Callable[[nn.Embedding], None], steps: int
    ) -> None:
        amp, optimizer = self.run(kind, policy, lambda model: None) if steps else self.fresh(kind, policy)
        amp.zero_grad()
        amp.backward(amp.model(torch.arange(10)).float().square().mean())
        change(amp.model[0])
        before, state = copy.deepcopy(amp.model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
        with pytest.raises(
            StepError, match=r"0\.weight was \w+\[10,4\] in the last forward and is \w+\[1[03],4\] now.*\.data"
        ):
            amp.step()
        assert all(torch.equal(value, before[name]) for name, value in amp.model.state_dict().items())
        torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)

    def test_a_table_that_grows_before_its_first_step(self) -> None:
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16")
        grown(model[0])
        assert self.take(amp, 13)


KEPT = {
    "bf16": ("weight", "exp_avg"),
    "bf16-master": ("weight", "exp_avg_sq", "remainder"),
    "fp16-master": ("weight", "master"),
}


@pytest.mark.parametrize(("policy", "which"), [(policy, name) for policy, names in KEPT.items() for name in names])
def test_memory_that_was_freed_is_told_by_name_before_anything_is_written(policy: str, which: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    for num_steps in range(2):
        amp.zero_grad()
        amp.backward(model(torch.ones(2, 4)).float().mean())
        if num_steps == 0:
            amp.step()
    weight = model[1].weight
    freed = weight.data if which == "weight" else amp.optimizers[0].state[weight][which]
    before = {p: p.detach().clone() for p in model.parameters() if p is not weight}
    freed.untyped_storage().resize_(0)
    name = "it" if which == "weight" else f"its {which}"
    with pytest.raises(OperandError, match=rf"^1\.weight \S+ cpu cannot be stepped: {name} .*storage of 0 bytes"):
        amp.step()
    assert all(torch.equal(p, value) for p, value in before.items())


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_parameters_replaced_in_module_and_group_between_backward_and_step_are_told_when_to_be(policy: str) -> None:
    """As densifying a cloud of Gaussians does, which loses the gradients of a step without a word in torch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy)
    x = torch.randn(8, 4)

    def replace() -> None:
        model.weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(model.weight.detach() * 2)

    amp.backward(model(x).square().mean())
    replace()
    with pytest.raises(StepError, match=r"replace parameters after amp\.step\(\), not before it"):
        amp.step()
    amp.zero_grad()
    for _ in range(3):
        amp.backward(model(x).square().mean())
        assert amp.step()
        before = model.weight.detach().clone()
        replace()
        amp.zero_grad()
        assert torch.equal(model.weight, before * 2)

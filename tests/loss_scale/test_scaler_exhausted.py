"""fp16 weights, a scale at its floor, and patience that runs out."""

from __future__ import annotations

import math

import pytest
import torch
from tests.messages import message_of
from torch import Tensor, nn

from mezzo.errors import LossScaleExhausted, MasterError
from mezzo.loss_scale import GradScaler
from mezzo.optim import MasterWeights

from .scalers import Make, Scaler, one, sgd


def test_fp16_weights_are_refused_with_the_remedies() -> None:
    half = [nn.Parameter(torch.ones(2, 3, dtype=torch.float16)) for _ in range(2)]
    full, frozen = one(), one().requires_grad_(False)
    optimizer, scaler = sgd(full, *half, frozen), GradScaler("cpu")
    scaler.scale(full.sum() + sum(param.sum() for param in half)).backward()
    before = [param.grad.clone() for param in (full, *half)]  # type: ignore[union-attr]
    with pytest.raises(MasterError) as refusal:
        scaler.step(optimizer)
    assert str(refusal.value) == (
        "unscale_() got fp16 gradients for 2 of the 3 trainable parameters of this SGD: parameter 1 (fp16[2,3] cpu), "
        "parameter 2 (fp16[2,3] cpu). Dividing them in fp16 would flush to zero what scaling saved. Keep trainable "
        "weights in fp32 (module.float(); adapters too) and let the region cast them, or keep fp16 weights with fp32 "
        'masters: mezzo.prepare(model, optimizer, policy="fp16-master"), or mezzo.optim.MasterWeights(optimizer).'
    )
    assert all(torch.equal(param.grad, old) for param, old in zip((full, *half), before, strict=True))
    assert isinstance(refusal.value, ValueError)  # as torch's refusal is


def test_fp16_weights_with_masters_need_no_unscale() -> None:
    half = nn.Parameter(torch.ones(2, 3, dtype=torch.float16))
    optimizer, scaler = MasterWeights(sgd(half)), GradScaler("cpu", 16.0)
    scaler.scale(half.sum()).backward()
    assert message_of(MasterError, scaler.unscale_, optimizer) == (
        "unscale_() got fp16 gradients for 1 of the 1 trainable parameters of this MasterWeights: parameter 0 "
        "(fp16[2,3] cpu). Dividing them in fp16 would flush to zero what scaling saved. This optimizer divides by itself, "
        "in fp32: leave unscale_() out, and clip with mezzo.prepare(model, optimizer).step(max_norm=...)."
    )
    scaler.step(optimizer)
    assert half.unique().tolist() == [0.5]


def test_a_frozen_fp16_base_with_fp32_adapters_trains() -> None:
    base, adapter = nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD([*base.parameters(), *adapter.parameters()], lr=0.5), GradScaler("cpu")
    before = adapter.weight.detach().clone()
    scaler.scale(adapter(base(torch.randn(2, 4).half()).float()).sum()).backward()
    scaler.step(optimizer)
    assert scaler.last_step.applied and not torch.equal(adapter.weight, before)


# Scale exhausted (S6)


def overflow(scaler: Scaler, param: nn.Parameter, optimizer: torch.optim.Optimizer, bad: int = 2) -> None:
    optimizer.zero_grad()
    scaler.scale((param * torch.tensor([math.inf] * bad + [1.0] * (2 - bad))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_the_floor_is_an_error_and_weights_survive_it(fused: bool, make: Make) -> None:
    """S6: 200 overflows in a row; torch's scale is 0 after them, and its next healthy step writes NaN."""

    def run(scaler: Scaler) -> tuple[Tensor, list[str]]:
        param, messages = one(), []
        optimizer = make([param], lr=0.5, fused=fused)
        for _ in range(200):
            try:
                overflow(scaler, param, optimizer, bad=1)
            except LossScaleExhausted as error:
                messages.append(str(error))
        assert param.tolist() == [1.0, 1.0] and not optimizer.state[param].get("step")
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return param.detach(), messages

    theirs = Scaler("cpu")
    assert not run(theirs)[0].isfinite().all() or theirs.get_scale() == 0.0
    scaler = GradScaler("cpu")
    param, messages = run(scaler)
    reference = one()
    plain = make([reference], lr=0.5, fused=fused)
    reference.sum().backward()
    plain.step()
    assert torch.equal(param, reference) and scaler.get_scale() == 1.0
    assert len(messages) == 200 - 16
    assert messages[0] == (
        "17 steps in a row had inf or NaN gradients and the loss scale is at its floor of 1; no weight was changed by "
        "them. Non-finite gradients: parameter 0 (fp32[2] cpu): 1 of 2. A loss scale can no longer be the cause: look "
        "for inf or NaN in the loss, the inputs, the weights and the buffers, or allow more with "
        "GradScaler(min_scale=...)."
    )


def test_patience_is_an_error_too() -> None:
    scaler, param = GradScaler("cpu", patience=3), one()
    optimizer = sgd(param)
    for _ in range(2):
        overflow(scaler, param, optimizer)
    assert message_of(LossScaleExhausted, overflow, scaler, param, optimizer) == (
        "3 steps in a row had inf or NaN gradients and patience is 3 (the loss scale is 8192); no weight was changed by "
        "them. Non-finite gradients: parameter 0 (fp32[2] cpu): 2 of 2. A loss scale can no longer be the cause: look "
        "for inf or NaN in the loss, the inputs, the weights and the buffers, or allow more with "
        "GradScaler(patience=...)."
    )


def test_the_error_does_without_gradients_that_were_dropped() -> None:
    scaler, param = GradScaler("cpu", patience=1), one()
    optimizer = sgd(param)
    scaler.scale((param * math.nan).sum()).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    with pytest.raises(LossScaleExhausted, match=r"changed by them\. A loss scale can"):
        scaler.update()


def test_a_floor_below_one_still_never_applies_what_division_overflowed() -> None:
    """A gradient that is finite and not after dividing by a scale under one."""
    scaler, param = GradScaler("cpu", init_scale=2.0**-100, min_scale=0.0), one()
    optimizer = sgd(param)
    scaler.scale((param * 2.0**120).sum() * 2.0**100).backward()
    scaler.step(optimizer)
    assert not scaler.last_step.applied and param.tolist() == [1.0, 1.0]

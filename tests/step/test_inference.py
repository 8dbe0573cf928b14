"""Models that only answer: prepared anew under another policy, made or stepped inside of torch.inference_mode()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo

X = torch.ones(2, 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("first", ["bf16-master", "fp16-master"])
def test_a_policy_in_fp32_takes_back_weights_that_one_before_stored_in_16_bit(first: str) -> None:
    model = net()
    mezzo.prepare(model, None, first)
    stored = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # and again
        mezzo.prepare(model, None, "fp32")
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(torch.equal(p, stored[name].float()) for name, p in model.named_parameters())
        plain = net()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(X), plain(X))


def test_a_model_that_was_16_bit_before_any_policy_stays_so_in_fp32() -> None:
    model = net().to(torch.bfloat16)
    mezzo.prepare(model, None, "fp32")
    assert model(X.to(torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "bf16, ops=mezzo", "fp16-master"])
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("prepared_inside", [False, True])
def test_inference_mode_around_making_and_preparing(policy: str, made_inside: bool, prepared_inside: bool) -> None:
    with torch.inference_mode(made_inside):
        torch.manual_seed(0)
        model = net()
    with torch.inference_mode(prepared_inside):
        amp = mezzo.prepare(model, None, policy)
    torch.manual_seed(0)
    plain = net()
    mezzo.prepare(plain, None, policy)
    for inside in (True, False):
        with torch.inference_mode(inside), torch.no_grad():
            assert torch.equal(model(X), plain(X))
    amp.release()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert model(X).isfinite().all()


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16, scaling.init_scale=16"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_inside_of_inference_mode_is_the_step_it_is_outside(
    cls: type[torch.optim.Optimizer], policy: str
) -> None:
    weights = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = net()
        options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        amp = mezzo.prepare(model, cls(model.parameters(), lr=0.1, **options), policy)
        for number in range(3):
            amp.zero_grad()
            amp.backward(model(X).float().square().mean())
            with torch.inference_mode(inside and number == 0):
                assert amp.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_closure_of_a_step_inside_of_inference_mode_has_gradients() -> None:
    model = net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")

    def closure() -> torch.Tensor:
        amp.zero_grad()
        loss = model(X).square().mean()
        amp.backward(loss)
        return loss

    before = [p.detach().clone() for p in model.parameters()]
    with torch.inference_mode():
        assert amp.step(closure)
    assert not torch.equal(before[-1], next(reversed(list(model.parameters()))))


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling=16"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_step_inside_of_a_region_is_the_step_it_is_outside(low: torch.dtype, policy: str) -> None:
    weights = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = net()
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
        for _ in range(3):
            amp.zero_grad()
            amp.backward(model(X).float().square().mean())
            with torch.autocast("cpu", low, enabled=inside):
                assert amp.step(max_norm=0.1)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))

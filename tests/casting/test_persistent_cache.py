"""`cache="persistent"`: writes through `.data` are noticed, slices stay within bounds, other models are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo
from mezzo.casting import weight_casts

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh() -> None:
    weight_casts.clear()


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), mezzo.autocast("cpu", cache="persistent"):
        return model(x)


@pytest.mark.parametrize("bias", [False, True])
def test_a_merge_through_data_is_noticed(bias: bool) -> None:
    model, x = nn.Linear(64, 32, bias=bias), torch.randn(4, 64)
    run(model, x)
    model.weight.data += torch.randn(32, 8) @ torch.randn(8, 64)  # as an adapter is merged
    want = nn.functional.linear(x.to(BF16), *(p.to(BF16) for p in model.parameters()))
    assert torch.equal(run(model, x), want)


def test_a_row_written_through_data_is_noticed_when_its_turn_comes() -> None:
    model, x = nn.Linear(16, 8, bias=False), torch.eye(16)
    run(model, x)
    model.weight.data[3] = 7.0
    for _ in range(8):
        out = run(model, x)
    assert (out[:, 3] == 7.0).all()


def test_a_transposed_weight_is_looked_at_too() -> None:
    model, x = nn.Linear(8, 16, bias=False), torch.randn(2, 8)
    model.weight = nn.Parameter(torch.randn(8, 16).t())
    run(model, x)
    model.weight.data.mul_(3.0)
    assert torch.equal(run(model, x), nn.functional.linear(x.to(BF16), model.weight.to(BF16)))


def test_a_weight_that_did_not_change_is_not_cast_again() -> None:
    model, x = nn.Linear(16, 8), torch.randn(2, 16)
    run(model, x)
    before = {key: (cast.copy, cast.copy._version) for key, cast in weight_casts._casts.items()}
    for _ in range(20):
        run(model, x)
    assert {key: (cast.copy, cast.copy._version) for key, cast in weight_casts._casts.items()} == before


def test_slices_take_no_more_than_the_weight() -> None:
    weight, x = nn.Parameter(torch.randn(256, 64)), torch.randn(2, 64)
    with torch.no_grad(), mezzo.autocast("cpu", cache="persistent"):
        for start in range(200):
            got = nn.functional.linear(x, weight[start : start + 50])
            assert torch.equal(got, nn.functional.linear(x.to(BF16), weight[start : start + 50].to(BF16)))
        for part in weight.chunk(4):  # a fused projection's parts are kept, all of them
            nn.functional.linear(x, part)
    assert weight_casts.nbytes() == weight.numel() * 2


def test_a_model_without_casts_keeps_its_versions() -> None:
    """Two backward passes through one graph with a fused step between them: torch allows it, and so do we."""
    cached, x = nn.Linear(4, 4), torch.randn(2, 4)
    run(cached, x)
    for policy in (None, "bf16, modules=none, op:tanh=fp32"):
        with mezzo.autocast("cpu", policy=policy):
            cached(x)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    loss = other(x).square().sum()
    loss.backward(retain_graph=True)
    before = [p._version for p in other.parameters()]
    optimizer.step()
    assert [p._version for p in other.parameters()] == before
    loss.backward()


def test_a_kept_cast_of_a_weight_without_a_gradient_stays_in_a_fused_step() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model.weight.requires_grad_(False)
    (run(model, x).float() + model.bias).square().sum().backward()
    before = [p._version for p in model.parameters()]
    optimizer.step()
    after = [p._version for p in model.parameters()]
    assert after[0] == before[0] and after[1] > before[1]


def test_a_fused_step_makes_a_kept_cast_stale() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    run(model, x)
    model(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(run(model, x), nn.functional.linear(x.to(BF16), *(p.to(BF16) for p in model.parameters())))


def test_a_report_of_a_prepared_model_says_what_its_kept_casts_hold() -> None:
    model = torch.nn.Linear(32, 16, bias=False).eval()
    amp = mezzo.prepare(model, policy="bf16", cache="persistent")
    assert "kept casts" not in str(amp.report())
    with torch.no_grad():
        model(torch.randn(2, 32))
    (row,) = [row for row in amp.report().rows if row.what == "kept casts"]
    assert (row.observed, row.nbytes) == ((("bf16", 1),), 32 * 16 * 2)

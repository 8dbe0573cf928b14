from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.train.small import tiny
from tests.train.test_tokens import TEXTS
from torch import Tensor, nn

from mezzo import Policy
from mezzo.errors import LossScaleExhausted, NonFiniteStep
from mezzo.train import TrainConfig
from mezzo.train.model import build_model, parameter_groups
from mezzo.train.tokens import train_tokenizer
from mezzo.train.update import Updater, warmup_then_decay

CPU = torch.device("cpu")
UPDATES = 8
POISONED = 3
TOKENIZER = train_tokenizer(TEXTS, 300, 24)


def config() -> TrainConfig:
    return tiny(Path("x.tsv"), Path("out"), dropout=0.0, lr=1e-3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(config(), ("bad", "good"), TOKENIZER)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(5, 300, (4, 12), generator=draw), torch.randint(0, 2, (4,), generator=draw)


def loss_of(net: nn.Module, step: int, poison: bool) -> Tensor:
    ids, labels = batch(step)
    return F.cross_entropy(net(input_ids=ids).logits.float(), labels) * (math.inf if poison else 1.0)


def by_torch_alone(policy: str, poisoned: int) -> nn.Module:
    """The same updates, written with torch's own region, scaler, optimizer and schedule."""
    net, dtype = model(), {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[policy]
    optimizer = torch.optim.AdamW(parameter_groups(net, config().weight_decay), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_decay(UPDATES, config().warmup))
    scaler = torch.amp.GradScaler("cpu", enabled=policy == "fp16")
    for step in range(UPDATES):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = loss_of(net, step, step == poisoned)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), config().max_norm)
        if policy == "fp16" or norm.isfinite():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if norm.isfinite():
            schedule.step()
    return net


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("poisoned", [-1, 0, POISONED])
def test_updates_are_those_of_torch_bit_for_bit(policy: str, poisoned: int) -> None:
    net = model()
    updater = Updater(net, Policy.parse(policy), config(), updates=UPDATES, device=CPU)
    applied, scales, rates = [], [], []
    for step in range(UPDATES):
        with updater.region():
            loss = loss_of(net, step, step == poisoned)
        update = updater.step(loss)
        applied.append(update.applied)
        scales.append(update.scale)
        rates.append(update.lr)
    wanted = by_torch_alone(policy, poisoned)
    assert [step for step, done in enumerate(applied) if not done] == [step for step in [poisoned] if step >= 0]
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), wanted.state_dict().values(), strict=True))
    factor = warmup_then_decay(UPDATES, config().warmup)
    counted = [sum(applied[:step]) for step in range(UPDATES)]
    assert rates == [1e-3 * factor(done) for done in counted]  # a skipped update does not move the schedule
    if policy == "fp16":
        assert scales == [65536.0 if poisoned < 0 or step <= poisoned else 32768.0 for step in range(UPDATES)]
    else:
        assert set(scales) == {1.0}


@pytest.mark.parametrize("updates", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.99])
def test_the_rate_rises_to_its_peak_and_falls_towards_zero(updates: int, warmup: float) -> None:
    factor = warmup_then_decay(updates, warmup)
    rates = [factor(done) for done in range(updates + 1)]
    peak = max(1, round(warmup * updates)) - 1
    assert rates[peak] == 1.0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == 0.0
    assert min(rates[:-1]) > 0.0


@pytest.mark.parametrize(("policy", "error", "most"), [("bf16", NonFiniteStep, 25), ("fp16", LossScaleExhausted, 25)])
def test_a_training_that_only_skips_ends_with_an_error(policy: str, error: type[Exception], most: int) -> None:
    net = model()
    updater = Updater(net, Policy.parse(policy), config(), updates=UPDATES, device=CPU)
    with pytest.raises(error):  # the loop is what must end
        for _ in range(most):
            with updater.region():
                loss = loss_of(net, 0, poison=True)
            updater.step(loss)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), model().state_dict().values(), strict=True))


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp16"), ("fp16", "fp32"), ("fp16", "fp16")])
def test_a_run_may_go_on_in_another_precision(before: str, after: str) -> None:
    net = model()
    first = Updater(net, Policy.parse(before), config(), updates=UPDATES, device=CPU)
    first.step(loss_of(net, 0, poison=before == "fp16"))
    second = Updater(net, Policy.parse(after), config(), updates=UPDATES, device=CPU)
    second.load_state_dict(first.state_dict())
    with second.region():
        loss = loss_of(net, 1, poison=False)
    update = second.step(loss)
    assert update.applied
    assert update.scale == {"fp32": 1.0, "fp16": 32768.0 if before == "fp16" else 65536.0}[after]
    assert second.state_dict()["schedule"]["last_epoch"] == (1 if before == "fp16" else 2)

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.train.small import tiny
from tests.train.test_tokens import texts
from torch import Tensor, nn
from transformers import get_scheduler

from mezzo import Policy
from mezzo.errors import LossScaleExhausted, NonFiniteStep
from mezzo.train import TrainConfig
from mezzo.train.config import SCHEDULES
from mezzo.train.dist_context import one_rank
from mezzo.train.model import build_model, parameter_groups, train_tokenizer
from mezzo.train.train_step import Updater

UPDATES = 8
ALONE = one_rank(torch.device("cpu"))
POISONED = 3
LR = 1e-3
NEVER_CLIPS = 1e6


@functools.cache
def tokenizer() -> Any:
    return train_tokenizer(texts(), 300, 24)


def config(max_norm: float = NEVER_CLIPS) -> TrainConfig:
    return tiny(Path("x.tsv"), Path("out"), dropout=0.0, lr=LR, max_norm=max_norm)


def model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(config(), ("bad", "good"), tokenizer())


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(5, 300, (4, 12), generator=draw), torch.randint(0, 2, (4,), generator=draw)


def loss_of(net: nn.Module, step: int, poison: bool) -> Tensor:
    """A finite loss; with poison its gradients are not."""
    ids, labels = batch(step)
    logits = net(input_ids=ids).logits.float()
    if poison:
        logits.register_hook(lambda grad: grad * math.inf)
    return F.cross_entropy(logits, labels)


def by_torch_alone(policy: str, poisoned: int, max_norm: float = NEVER_CLIPS) -> nn.Module:
    """The same updates, written with torch's own region, scaler, optimizer and schedule."""
    net, dtype = model(), {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[policy]
    optimizer = torch.optim.AdamW(parameter_groups(net, config().weight_decay), lr=LR, fused=True)
    schedule = get_scheduler("linear", optimizer, round(0.1 * UPDATES), UPDATES)
    scaler = torch.amp.GradScaler("cpu", enabled=policy == "fp16")
    for step in range(UPDATES):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = loss_of(net, step, step == poisoned)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        if policy == "fp16" or norm.isfinite():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if norm.isfinite():
            schedule.step()
    return net


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def rounding(compute: torch.dtype | None) -> float:
    """How far rounding may drive two runs: AdamW moves a weight by the relative error of its gradient times the rate."""
    assert compute is not None
    return UPDATES * LR * max(torch.finfo(compute).eps, 100 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("poisoned", [-1, 0, POISONED])
def test_updates_are_those_of_torch(policy: str, poisoned: int) -> None:
    net = model()
    chosen = Policy.parse(policy).replace(modules=())  # torch's region has no rule for norms
    updater = Updater(net, chosen, config(), updates=UPDATES, world=ALONE)
    applied, scales, rates = [], [], []
    for step in range(UPDATES):
        update = updater.step(lambda step=step: loss_of(net, step, step == poisoned))  # type: ignore[misc]
        applied.append(update.applied)
        scales.append(update.scale)
        rates.append(update.lr)
    wanted = by_torch_alone(policy, poisoned)
    assert [step for step, done in enumerate(applied) if not done] == [step for step in [poisoned] if step >= 0]
    assert distance(net, wanted) < rounding(chosen.compute) < LR / 10
    counted = [sum(applied[:step]) for step in range(UPDATES)]
    wanted_rates = _rates_of_transformers("linear", 0.1)
    assert rates == [wanted_rates[done] for done in counted]  # a skipped update does not move the schedule
    if policy == "fp16":
        assert scales == [65536.0 if poisoned < 0 or step <= poisoned else 32768.0 for step in range(UPDATES)]
    else:
        assert set(scales) == {1.0}


@pytest.mark.parametrize("max_norm", [0.1, 1.0])
def test_clipped_updates_are_those_of_torch(max_norm: float) -> None:
    net = model()
    updater = Updater(net, Policy.parse("fp32"), config(max_norm), updates=UPDATES, world=ALONE)
    norms = [updater.step(lambda step=step: loss_of(net, step, False)).grad_norm for step in range(UPDATES)]  # type: ignore[misc]
    assert max(norms) > max_norm
    wanted, plain = by_torch_alone("fp32", -1, max_norm), by_torch_alone("fp32", -1)
    assert distance(net, wanted) < rounding(torch.float32) < distance(wanted, plain)


def _rates_of_transformers(name: str, warmup: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    schedule, rates = get_scheduler(name, optimizer, round(warmup * UPDATES), UPDATES), []
    for _ in range(UPDATES):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_the_one_of_its_name_in_transformers(name: str) -> None:
    warmup = None if name == "constant" else 0.5
    asked = config().replace(schedule=name, warmup=warmup)
    updater = Updater(model(), Policy.parse("fp32"), asked, updates=UPDATES, world=ALONE)
    rates = [updater.step(lambda step=step: loss_of(updater.model, step, False)).lr for step in range(UPDATES)]  # type: ignore[misc]
    assert rates == _rates_of_transformers(name, warmup or 0.0)
    assert name != "constant" or rates == [LR] * UPDATES


def test_without_a_limit_nothing_is_clipped() -> None:
    net, asked = model(), config().replace(max_norm=None)
    updater = Updater(net, Policy.parse("fp32"), asked, updates=UPDATES, world=ALONE)
    for step in range(UPDATES):
        updater.step(lambda step=step: 100.0 * loss_of(net, step, False))  # type: ignore[misc]
    other = model()
    limited = Updater(other, Policy.parse("fp32"), asked.replace(max_norm=NEVER_CLIPS), updates=UPDATES, world=ALONE)
    for step in range(UPDATES):
        limited.step(lambda step=step: 100.0 * loss_of(other, step, False))  # type: ignore[misc]
    assert distance(net, other) == 0.0


@pytest.mark.parametrize(("policy", "error", "most"), [("bf16", NonFiniteStep, 25), ("fp16", LossScaleExhausted, 25)])
def test_a_training_that_only_skips_ends_with_an_error(policy: str, error: type[Exception], most: int) -> None:
    net = model()
    updater = Updater(net, Policy.parse(policy), config(), updates=UPDATES, world=ALONE)
    with pytest.raises(error):  # the loop is what must end
        for _ in range(most):
            updater.step(lambda: loss_of(net, 0, poison=True))
    assert distance(net, model()) == 0


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp16"), ("fp16", "fp32"), ("fp16", "fp16")])
def test_a_run_may_go_on_in_another_precision(before: str, after: str) -> None:
    net = model()
    first = Updater(net, Policy.parse(before), config(), updates=UPDATES, world=ALONE)
    first.step(lambda: loss_of(net, 0, poison=before == "fp16"))
    net = model()
    second = Updater(net, Policy.parse(after), config(), updates=UPDATES, world=ALONE)
    second.load_state_dict(first.state_dict())
    update = second.step(lambda: loss_of(net, 1, poison=False))
    assert update.applied
    assert update.scale == {"fp32": 1.0, "fp16": 32768.0 if before == "fp16" else 65536.0}[after]
    assert second.state_dict()["schedule"]["last_epoch"] == (1 if before == "fp16" else 2)


@pytest.mark.parametrize(
    "policy", ["bf16-master", "fp16-master", "bf16-master, master=stochastic, state=bf16", "bf16, *LayerNorm*=fp32"]
)
def test_a_run_stopped_and_resumed_goes_the_same_way(policy: str) -> None:
    def updates(updater: Updater, net: nn.Module, steps: range) -> None:
        for step in steps:
            assert updater.step(lambda: loss_of(net, step, False)).applied  # noqa: B023

    def fresh() -> tuple[Updater, nn.Module]:
        net = model()
        return Updater(net, Policy.parse(policy), config(), updates=UPDATES, world=ALONE), net

    whole, first, second = fresh(), fresh(), fresh()
    updates(*whole, range(UPDATES))
    updates(*first, range(3))
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    updates(*second, range(3, UPDATES))
    assert distance(whole[1], second[1]) == 0
    assert distance(whole[1], model()) > LR / 2
    weights = second[0].amp.export_weights()
    low = whole[1].classifier.weight.dtype
    assert low is {"bf16-master": torch.bfloat16, "fp16-master": torch.float16}.get(
        policy.split(",", maxsplit=1)[0], torch.float32
    )
    assert all(tensor.dtype is torch.float32 for tensor in weights.values() if tensor.is_floating_point())


def test_retry_computes_the_loss_again_at_a_smaller_scale() -> None:
    net, calls = model(), []
    updater = Updater(net, Policy.parse("fp16, guard.on_overflow=retry"), config(), updates=UPDATES, world=ALONE)

    def forward() -> Tensor:
        calls.append(updater.amp.scale)
        return loss_of(net, 0, poison=len(calls) == 1)

    update = updater.step(forward)
    assert update.applied
    assert calls == [65536.0, 32768.0]
    assert update.scale == 32768.0

"""Prepared models on several ranks: two ranks go the way of one, and a fault anywhere is everybody's."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from datetime import timedelta
from fcntl import LOCK_EX, LOCK_SH, flock
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import hear, outcomes, run, tell
from tests.tolerance import relative
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import comm_stats, group
from mezzo.distributed.ddp import connect
from mezzo.errors import DistributedError, InvariantError, NonFiniteStep, PolicyError

pytestmark = pytest.mark.distributed

MICRO = 4
STEPS = 3
INF = float("inf")


class Net(nn.Module):
    """Products, a norm, and statistics that only the first micro-batch's rank may write."""

    def __init__(self, has_statistics: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.statistics = nn.BatchNorm1d(8) if has_statistics else nn.Identity()
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.statistics(self.first(x)).relu())).float()


def _batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(MICRO, 6, generator=torch.Generator().manual_seed(10 * step + part))
    return x, x.sum(1, keepdim=True)


def _optimizer(model: nn.Module, policy: str) -> torch.optim.Optimizer:
    master = mezzo.Policy.parse(policy).master
    return mezzo.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, master=master)


def _prepared(
    world: int, policy: str, wrapped_first: bool, has_statistics: bool = False
) -> tuple[mezzo.Stepper, nn.Module]:
    torch.manual_seed(0)
    model: nn.Module = Net(has_statistics)
    if world > 1 and wrapped_first:
        model = DistributedDataParallel(model)
    amp = mezzo.prepare(model, _optimizer(model, policy), policy)
    return amp, DistributedDataParallel(model) if world > 1 and not wrapped_first else model


def _state(amp: mezzo.Stepper) -> dict[str, Tensor]:
    """Return weights, masters, moments and buffers, by names without wrappers."""
    optimizer, found = amp.optimizers[0], {}
    for name, p in amp.model.named_parameters():
        found[name] = p.detach().clone()
        found[f"{name} master"] = optimizer.master(p).clone()
        found.update({f"{name} {key}": value.clone() for key, value in optimizer.state[p].items()})
    found.update({name: buffer.clone() for name, buffer in amp.model.named_buffers()})
    return {name.removeprefix("module."): value for name, value in found.items()}


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _train(rank: int, world: int, policy: str, wrapped_first: bool, parts: int) -> dict[str, Tensor]:
    """Train on `parts` micro-batches a step, divided over the ranks."""
    amp, model = _prepared(world, policy, wrapped_first)
    own = range(rank, parts, world)
    for step in range(STEPS):
        amp.zero_grad()
        for part in own:
            with model.no_sync() if world > 1 and part != own[-1] else nullcontext():
                x, y = _batch(step, part)
                amp.backward(nn.functional.mse_loss(model(x), y) / len(own))
        assert amp.step()
    return _state(amp)


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling.init_scale=256"])
def test_two_ranks_go_the_way_of_one_bit_for_bit(policy: str, wrapped_first: bool) -> None:
    wanted = run(1, _train, policy, wrapped_first, 2)[0]
    for state in run(2, _train, policy, wrapped_first, 2):
        assert _differing(state, wanted) == []


@pytest.mark.parametrize("policy", ["bf16-master", "bf16-master, grads=fp32", "fp16-master, scaling.init_scale=256"])
def test_ranks_with_16_bit_weights_stay_together(policy: str) -> None:
    first, second = run(2, _train, policy, False, 6)
    assert _differing(first, second) == []


def test_16_bit_weights_with_fp32_sums_go_the_way_of_one_rank() -> None:
    # One micro-batch a rank: the mean of two bf16 gradients is rounded once, here and in the sum of one rank.
    policy = "bf16-master"
    wanted = run(1, _train, policy, False, 2)[0]
    for state in run(2, _train, policy, False, 2):
        assert _differing(state, wanted) == []


def _refused(rank: int, world: int) -> str:
    try:
        _prepared(world, "bf16-master", wrapped_first=True)
    except PolicyError as error:
        return str(error)
    return "accepted"


def test_storing_anew_what_is_wrapped_is_refused() -> None:
    message = (
        "4 parameters (first.weight, first.bias, last.weight and 1 more) would be stored anew, and "
        "DistributedDataParallel took hold of them as they are. Write amp = mezzo.prepare(model, optimizer, policy) "
        "first, then ddp = DistributedDataParallel(amp.model)."
    )
    assert run(2, _refused) == [message, message]


def _reduced(rank: int, world: int, policy: str) -> tuple[dict[str, Tensor], int]:
    amp, model = _prepared(world, policy, wrapped_first=True)
    x, y = _batch(0, rank)
    amp.backward(nn.functional.mse_loss(model(x), y))
    return {n: p.grad.clone() for n, p in amp.model.named_parameters()}, comm_stats(model).payload_bytes


def test_16_bit_traffic_halves_the_bytes_within_its_rounding() -> None:
    wide, narrow = run(2, _reduced, "fp32"), run(2, _reduced, "fp32, reduce=bf16")
    assert narrow[0][1] * 2 == wide[0][1] > 0
    parts = [run(1, _local_part, rank)[0] for rank in range(2)]
    for name, exact in wide[0][0].items():
        size = sum(part[name.removeprefix("module.")].abs() for part in parts) / 2
        error = (narrow[0][0][name] - exact).abs()
        assert bool((error <= relative(torch.bfloat16, 2) * size).all())
        assert torch.equal(narrow[0][0][name], narrow[1][0][name])


def _reported(rank: int, world: int, wrapped_first: bool) -> tuple[list[object], list[object], str]:
    amp, model = _prepared(world, "bf16, reduce=bf16", wrapped_first)
    before = [row.what for row in amp.report().rows]
    x, y = _batch(0, rank)
    for _ in range(2):
        amp.zero_grad()
        amp.backward(nn.functional.mse_loss(model(x), y))
        amp.step()
    row = amp.report(strict=True).rows[-1]
    found = [row.what, row.declared, row.observed, row.differing]
    assert isinstance(model, DistributedDataParallel)
    connect(model, mezzo.Policy.parse("bf16, reduce=fp32"))  # somebody else's idea, behind the policy's back
    amp.zero_grad()
    amp.backward(nn.functional.mse_loss(model(x), y))
    try:
        amp.report(strict=True)
    except InvariantError as error:
        return before, found, str(error)
    return before, found, "no error"


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_the_report_has_what_really_travelled(wrapped_first: bool) -> None:
    for before, found, error in run(2, _reported, wrapped_first):
        assert ("reductions" in before) is wrapped_first
        assert found == ["reductions", "bf16", (("bf16", 2),), ()]  # one bucket a step
        assert "reductions are declared bf16, and 1 are not (1 in fp32)" in error


def _reported_low(rank: int, world: int) -> tuple[object, ...]:
    amp, model = _prepared(world, "bf16-master", wrapped_first=False)
    x, y = _batch(0, rank)
    amp.backward(nn.functional.mse_loss(model(x), y))
    amp.step()
    row = amp.report(strict=True).rows[-1]
    return row.what, row.declared, dict(row.observed), row.differing


def test_gradients_that_travel_as_they_are_keep_what_was_declared() -> None:
    for what, declared, observed, differing in run(2, _reported_low):
        assert (what, declared, differing) == ("reductions", "fp32", ())
        assert set(observed) == {"bf16"} or set(observed) == {"bf16", "fp32"}  # norms are fp32


def _local_part(rank: int, world: int, part: int) -> dict[str, Tensor]:
    amp, model = _prepared(1, "fp32", wrapped_first=False)
    x, y = _batch(0, part)
    amp.backward(nn.functional.mse_loss(model(x), y))
    return {n: p.grad.clone() for n, p in amp.model.named_parameters()}


def _faulty(
    rank: int, world: int, fault: str, policy: str, at: int | None
) -> tuple[dict[str, Tensor], list[bool], list[float]]:
    """Train two micro-batches a step; in step `at` rank 1 has a fault. Without `at`, that step is left out."""
    amp, model = _prepared(world, policy, wrapped_first=True, has_statistics=True)
    model.train()
    applied, scales = [], []
    for step in range(4):
        if at is None and step == 2:
            continue
        here = rank == 1 and step == at
        amp.zero_grad()
        for part in range(2):
            x, y = _batch(step, 2 * rank + part)
            if here and fault == "micro-batch" and part == 0:
                x[0, 0] = INF
            with model.no_sync() if part == 0 else nullcontext():
                loss = nn.functional.mse_loss(model(x), y) / 2
                loss = loss * INF if here and fault == "loss" and part == 1 else loss
                if here and fault == "gradient" and part == 1:
                    amp.model.module.last.weight.register_hook(_once_inf())
                amp.backward(loss)
        result = amp.step(max_norm=1.0)
        applied.append(result.applied)
        scales.append(result.scale)
    return _state(amp), applied, scales


def _once_inf():
    left = [True]

    def hook(grad: Tensor) -> Tensor:
        spoil, left[0] = left[0], False
        return torch.full_like(grad, INF) if spoil else grad

    return hook


@pytest.mark.parametrize("fault", ["gradient", "loss", "micro-batch"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling.init_scale=256"])
def test_a_fault_on_one_rank_is_skipped_by_all_and_leaves_nothing(fault: str, policy: str) -> None:
    found = run(2, _faulty, fault, policy, 2)
    undisturbed = run(2, _faulty, "none", policy, None)
    for rank, (state, applied, scales) in enumerate(found):
        assert applied == [True, True, False, True]
        assert scales == found[0][2]
        if fault == "gradient" and "fp16" in policy:
            assert scales == [256.0, 256.0, 256.0, 128.0]
        # The step after a skip runs at another scale; powers of two leave no trace in what it does.
        assert _differing(state, undisturbed[rank][0]) == []


def _never_averaged(rank: int, world: int) -> str:
    amp, model = _prepared(world, "fp32", wrapped_first=True)
    with model.no_sync():
        x, y = _batch(0, rank)
        amp.backward(nn.functional.mse_loss(model(x), y))
    try:
        amp.step()
    except DistributedError as error:
        return str(error)
    return "accepted"


def test_weights_that_drift_apart_are_noticed() -> None:
    for message in run(2, _never_averaged):
        assert message.startswith(
            "ranks disagree after step 0: the checksum of parameter 'module.first.weight' (one of "
        )
        assert "end each no_sync() block before the step's last backward" in message


def _ends_in_backward(rank: int, world: int, path: Path, is_awaited: bool) -> str:
    held = path.open()
    if rank == 1:
        flock(held, LOCK_EX)  # until the process has ended
    amp, model = _prepared(world, "fp32", wrapped_first=True)
    amp.consensus.group.timeout = timedelta(seconds=20)  # half of it is what a busy machine may take to end a process
    group._GRACE = timedelta(seconds=2)
    for step in range(2):
        amp.zero_grad()
        x, y = _batch(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        if step == 1 and rank == 1:
            if is_awaited:
                hear("2 is inside")
                time.sleep(0.5)
            os._exit(1)
        if step == 1 and rank == 2 and is_awaited:
            tell("2 is inside")  # what it sends to rank 1 arrives, and it waits for rank 0 from then on
        elif step == 1:
            flock(held, LOCK_SH)
        try:
            amp.backward(loss)
        except DistributedError as error:
            tell(f"{rank} was told")
            hear("0 was told", "2 was told")  # who ends first would be one more that has ended
            return str(error)
        amp.step()
    return "nothing was noticed"


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_rank_that_ends_in_backward_is_named(tmp_path: Path, is_awaited: bool) -> None:
    """Where another already waits in the average, for who notices the loss, it notices as well and isn't named beside it."""
    path = tmp_path / "held by rank 1"
    path.touch()
    found = outcomes(3, _ends_in_backward, path, is_awaited)
    for rank in (0, 2):
        assert found[rank].value == (
            f"rank 1 ended, and rank {rank} waits for it. The output of rank 1 says why; if it holds no error, its batches ran "
            "out: give each rank as many batches (DistributedSampler, drop_last=True). Start again from the last checkpoint."
        )


def _rank_zero_asks(rank: int, world: int) -> list[object]:
    amp, model = _prepared(world, "fp32", wrapped_first=True)
    answers: list[object] = []
    for step in range(3):
        amp.zero_grad()
        x, y = _batch(step, rank)
        amp.backward(nn.functional.mse_loss(model(x), y) * (INF if step == 1 and rank == 1 else 1.0))
        result = amp.step()
        if rank == 0:  # as a run does that logs on one rank only
            answers += [
                result.applied,
                result.reason,
                result.skipped_in_a_row,
                len(result.nonfinite) > 0,
                amp.counters().seen,
            ]
    return answers


def test_one_rank_may_ask_alone() -> None:
    first, second = run(2, _rank_zero_asks)
    assert first == [True, None, 0, False, 1, False, "loss", 1, True, 2, True, None, 0, False, 3]
    assert second == []


def _stops(rank: int, world: int) -> tuple[str, str]:
    amp, model = _prepared(world, "fp32", wrapped_first=True)
    for step in range(2):
        amp.zero_grad()
        x, y = _batch(step, rank)
        amp.backward(nn.functional.mse_loss(model(x), y))
        if step == 0 and rank == 1:
            with amp.unscaled_grads() as grads:
                next(iter(grads.values())).fill_(INF)
            with torch.no_grad():
                amp.consensus.every = 0  # the comparison of weights would see it first
                amp.model.module.last.bias.fill_(INF)
        elif step == 0:
            amp.consensus.every = 0
        try:
            amp.step()
        except NonFiniteStep as error:
            return type(error).__name__, str(error)
    return "went on", ""


def test_a_rank_that_cannot_go_on_stops_all() -> None:
    first, second = run(2, _stops)
    assert first == (
        "NonFiniteStep",
        "step 0 was skipped, and another rank stops the run: its message says why. Load the last good checkpoint.",
    )
    assert second[0] == "NonFiniteStep"
    assert "inf or NaN in 1 parameter: module.last.bias (1)" in second[1]


def _unused(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1)})

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor, spare: bool) -> Tensor:
            return self.parts["used"](x) + (self.parts["spare"](x) if spare else 0.0)

    ddp = DistributedDataParallel(Chooses(), find_unused_parameters=True)
    amp = mezzo.prepare(ddp, mezzo.optim.AdamW(ddp.parameters(), lr=0.1), "bf16, output=fp32, reduce=bf16")
    for step in range(3):
        amp.zero_grad()
        amp.backward(ddp(torch.ones(1, 2), spare=step == 1 and rank == 0).sum())
        assert amp.step()
    return [str(p.tolist()) for p in ddp.parameters()]


def test_a_layer_that_some_ranks_leave_out_stays_equal() -> None:
    first, second = run(2, _unused)
    assert first == second

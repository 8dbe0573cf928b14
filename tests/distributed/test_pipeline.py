"""Stages of a pipeline: a schedule of torch's runs backward, and the stages step as one rank that holds them all."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import outcomes, run
from tests.tolerance import relative
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import RankConsensus, group
from mezzo.errors import DistributedError, StepError

pytestmark = pytest.mark.distributed

Result = tuple[dict[str, Tensor], list[bool], list[float]]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def _batch(step: int, bad_step: int | None) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True) * (torch.inf if step == bad_step else 1.0)


def _loss(found: Tensor, wanted: Tensor) -> Tensor:
    return (found.float() - wanted).square().mean()


def _optimizer(net: nn.Module, policy: str) -> torch.optim.Optimizer:
    return mezzo.optim.AdamW(net.parameters(), lr=0.05, master=mezzo.Policy.parse(policy).master)


def _whole(rank: int, world: int, policy: str, max_norm: float | None, bad_step: int | None) -> Result:
    net = _net()
    amp, applied, norms = mezzo.prepare(net, _optimizer(net, policy), policy), [], []
    for step in range(4):
        amp.zero_grad()
        for x, y in zip(*(part.chunk(2) for part in _batch(step, bad_step)), strict=True):
            amp.backward(_loss(net(x), y) / 2)
        result = amp.step(max_norm=max_norm)
        applied.append(result.applied)
        norms.append(result.grad_norm)
    return {name: p.detach().clone() for name, p in net.named_parameters()}, applied, norms


def _staged(rank: int, world: int, policy: str, max_norm: float | None, bad_step: int | None) -> Result:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    net = _net()
    part = net[:2] if rank == 0 else net[2:]
    amp, applied, norms = mezzo.prepare(part, _optimizer(part, policy), policy), [], []
    amp.consensus = RankConsensus()
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda found, wanted: amp.scaled(_loss(found, wanted)))
    for step in range(4):
        amp.zero_grad()
        x, y = _batch(step, bad_step)
        with amp.external_backward():
            schedule.step(x) if rank == 0 else schedule.step(target=y)
        result = amp.step(max_norm=max_norm)
        applied.append(result.applied)
        norms.append(result.grad_norm)
    return {name: p.detach().clone() for name, p in part.named_parameters()}, applied, norms


@pytest.mark.parametrize(("max_norm", "bad_step"), [(None, None), (0.1, None), (None, 2)])
@pytest.mark.parametrize("policy", ["fp32", "bf16, output=fp32", "bf16-master, output=fp32", "fp16, output=fp32, scaling.init_scale=1024"])  # fmt: skip
def test_two_stages_go_the_way_of_one_rank(policy: str, max_norm: float | None, bad_step: int | None) -> None:
    ((wanted, applied, norms),) = run(1, _whole, policy, max_norm, bad_step)
    found: dict[str, Tensor] = {}
    for stage, stage_applied, stage_norms in run(2, _staged, policy, max_norm, bad_step):
        found |= stage
        assert stage_applied == applied == [step != bad_step for step in range(4)]
        finite = [(one, other) for one, other in zip(stage_norms, norms, strict=True) if abs(other) < torch.inf]
        # Each stage sums its own squares in fp32; an fp16 clip moves weights by a rounding of 16 bit.
        assert all(abs(one - other) <= relative(torch.bfloat16, 8) * other for one, other in finite)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name].float(), value.float(), rtol=0.0, atol=relative(torch.bfloat16, 4) * 1.0)


def _alike(rank: int, world: int, seed: int, is_written: bool) -> tuple[list[float], float | str]:
    """Train stages of one shape, by a schedule or by hand; the norms, and that of the last step's true gradients over all ranks."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(seed * rank)
    part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    amp = mezzo.prepare(part, torch.optim.SGD(part.parameters(), lr=0.05), "fp32")
    amp.consensus = RankConsensus(has_parts=is_written)
    stage = None if is_written else PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = stage and ScheduleGPipe(stage, 2, loss_fn=lambda found, wanted: amp.scaled(_loss(found, wanted)))
    norms = []
    for step in range(5):
        amp.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        if schedule is None:
            amp.backward(_loss(part(x), x.flip(rank)))
        else:
            with amp.external_backward():
                schedule.step(x) if rank == 0 else schedule.step(target=x.flip(1))
        norms.append(amp.step().grad_norm)
    square = torch.stack([p.grad.double().square().sum() for p in part.parameters()]).sum()
    torch.distributed.all_reduce(square)
    return norms, float(square.sqrt())


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_stages_of_one_shape_are_no_copies(seed: int, is_written: bool) -> None:
    (first, norm), (second, _) = run(2, _alike, seed, is_written)
    assert first == second and len(first) == 5
    assert first[-1] == pytest.approx(norm, rel=relative(torch.float32, 72))


def _replicated(
    rank: int, world: int, max_norm: float, is_own: bool, which: str
) -> tuple[list[float], dict[str, Tensor]] | str:
    """Train 2 stages in 2 replicas each, by torch alone or by a stepper told of some ranks."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    lines, columns = ([dist.new_group(ranks) for ranks in pairs] for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    stages, replicas = lines[rank // 2], columns[rank % 2]
    net = _net()
    part = net[2:] if rank % 2 else net[:2]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05)
    amp = mezzo.prepare(part, optimizer, "fp32") if is_own else None
    if amp and which != "none":
        amp.consensus = RankConsensus(stages if which == "stages" else None)
    # Without it torch's reducer fails in the second step behind a schedule (2.13).
    ddp = DistributedDataParallel(part, process_group=replicas, find_unused_parameters=True)
    stage = PipelineStage(ddp, rank % 2, 2, torch.device("cpu"), group=stages)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, y: amp.scaled(_loss(out, y)) if amp else _loss(out, y))
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        x, y = (half.chunk(2)[rank // 2] for half in _batch(step, None))
        try:
            with amp.external_backward() if amp else nullcontext():
                schedule.step(target=y) if rank % 2 else schedule.step(x)
        except DistributedError as error:
            return str(error)
        if amp:
            norms.append(amp.step(max_norm=max_norm).grad_norm)
        else:
            grads = [p.grad for p in part.parameters() if p.grad is not None]
            square = torch.stack([grad.double().square().sum() for grad in grads]).sum()
            dist.all_reduce(square, group=stages)
            norms.append(float(square.sqrt()))
            torch.nn.utils.clip_grads_with_norm_(part.parameters(), max_norm, square.sqrt().float())
            optimizer.step()
    return norms, {name: p.detach().clone() for name, p in part.named_parameters()}


@pytest.mark.parametrize("which", ["all", "stages"])
def test_stages_in_replicas_have_the_norm_of_one_model(which: str) -> None:
    wanted = run(4, _replicated, 0.5, False, which)
    for (norms, weights), (right, own) in zip(run(4, _replicated, 0.5, True, which), wanted, strict=True):
        assert norms == pytest.approx(right, rel=relative(torch.float32, 137))
        assert all(torch.allclose(weights[n], p, rtol=0.0, atol=relative(torch.float32, 137)) for n, p in own.items())


def test_stages_in_replicas_are_told_to_name_all_ranks() -> None:
    for rank, sentence in enumerate(run(4, _replicated, 0.5, True, "none")):
        assert sentence == (
            f"this model is a stage of a pipeline, and DistributedDataParallel around it joins ranks {rank % 2}, {rank % 2 + 2} alone: the "
            "norm would be that of the stage. Write amp.consensus = mezzo.distributed.RankConsensus(group), of the ranks of all "
            "stages, before the first backward."
        )


def _in_plain_copies(rank: int, world: int) -> str:
    """Train stages whose DistributedDataParallel, each of one rank, was not told that a backward pass may leave weights out."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    alone = [dist.new_group([one]) for one in range(world)][rank]
    net = _net()
    part = net[2:] if rank else net[:2]
    amp = mezzo.prepare(part, torch.optim.SGD(part.parameters(), lr=0.05), "fp32")
    amp.consensus = RankConsensus(
        timeout=timedelta(seconds=20)
    )  # half of it is what a busy machine may take to end a process
    group._GRACE = timedelta(seconds=2)
    stage = PipelineStage(DistributedDataParallel(part, process_group=alone), rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda found, wanted: amp.scaled(_loss(found, wanted)))
    for step in range(2):
        amp.zero_grad()
        x, y = _batch(step, None)
        try:
            with amp.external_backward():
                schedule.step(target=y) if rank else schedule.step(x)
        except DistributedError as error:
            if rank == 0:
                dist.destroy_process_group()  # as it does when the error ends its process
            return str(error)
        amp.step()
    return "trained"


def test_what_torch_asserts_of_stages_in_plain_copies_is_told_and_the_other_stages_hear_who_ended() -> None:
    first, second = (found.value for found in outcomes(2, _in_plain_copies))
    if first == second == "trained":
        pytest.skip("this torch asserts nothing of such a stage, and trains it")
    assert first == (
        "DistributedDataParallel around a stage of a pipeline took the micro-batches of one step for several (torch asserts "
        "'rebuilt_param_indices_'). Write DistributedDataParallel(stage, find_unused_parameters=True), and start again from the last checkpoint."
    )
    assert second.startswith("rank 0 ended, and rank 1 waits for it."), second


def _not_said(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    part = nn.Linear(6, 6)
    amp = mezzo.prepare(part, torch.optim.SGD(part.parameters(), lr=0.05), "fp32")
    amp.consensus = RankConsensus()
    amp.backward(_loss(part(torch.ones(2, 6)), torch.ones(2, 6)))
    with pytest.raises(DistributedError) as caught:
        amp.step()
    return str(caught.value)


def test_parts_that_look_like_copies_are_told_what_to_write() -> None:
    for sentence in run(2, _not_said):
        assert sentence.endswith(
            "Where ranks hold different parts of one model, write RankConsensus(group, has_parts=True)."
        )


def test_a_step_behind_a_schedule_says_how() -> None:
    net = nn.Linear(2, 1)
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32")
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(StepError, match=r"with amp\.external_backward\(\): schedule\.step"):
        amp.step()


def test_a_loss_is_scaled_inside_the_block_only() -> None:
    net = nn.Linear(2, 1)
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32")
    with pytest.raises(StepError, match=r"outside of `with amp\.external_backward"):
        amp.scaled(net(torch.ones(1, 2)).sum())


def test_an_error_inside_the_block_voids_the_step() -> None:
    net = nn.Linear(2, 1)
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32")
    with pytest.raises(KeyError), amp.external_backward():
        net(torch.ones(1, 2)).sum().backward()
        raise KeyError
    with pytest.raises(StepError, match="failed halfway"):
        amp.step()
    amp.zero_grad()
    amp.backward(net(torch.ones(1, 2)).sum())
    assert amp.step()


def _unscaled(rank: int, world: int, is_staged: bool) -> str:
    """Run backward by somebody else, of stages or of copies, and forget the loss scale."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    net = _net()
    part = (net[:2] if rank == 0 else net[2:]) if is_staged else DistributedDataParallel(net)
    amp = mezzo.prepare(part, torch.optim.SGD(part.parameters(), lr=0.05), "fp16, output=fp32, scaling.init_scale=1024")
    before, (x, y) = amp.export_weights(), _batch(0, None)
    with pytest.raises((StepError, DistributedError), match="without the loss scale") as caught:
        if is_staged:
            amp.consensus = RankConsensus()
            schedule = ScheduleGPipe(PipelineStage(part, rank, world, torch.device("cpu")), 2, loss_fn=_loss)
            with amp.external_backward():
                schedule.step(x) if rank == 0 else schedule.step(target=y)
            amp.step()
        else:
            with amp.external_backward():
                _loss(part(x), y).backward()
    assert all(torch.equal(value, before[name]) for name, value in amp.export_weights().items())
    return str(caught.value)


@pytest.mark.parametrize("is_staged", [True, False])
def test_a_loss_without_the_loss_scale_is_told_on_every_rank(is_staged: bool) -> None:
    assert all("amp.scaled(loss" in sentence for sentence in run(2, _unscaled, is_staged))

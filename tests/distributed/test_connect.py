"""A wrapper that is connected again goes the way of a new one; one that is released goes torch's way."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
from tests.distributed.models import Bare, dyadic
from tests.distributed.ranks import logged, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import Policy
from mezzo.distributed import comm_stats, is_summed_apart
from mezzo.distributed.ddp import connect
from mezzo.errors import ConfigError, PolicyError

pytestmark = pytest.mark.distributed


def _prepare(ddp: nn.Module, policy: str) -> mezzo.Stepper:
    return mezzo.prepare(ddp, mezzo.optim.SGD(ddp.parameters(), lr=0.125), policy)


def _step(amp: mezzo.Stepper, ddp: nn.Module, rank: int) -> None:
    amp.zero_grad()
    amp.backward((ddp(dyadic(4, 6, seed=rank)).float() + 0.3).square().mean())
    amp.step()


def _wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(Bare(), find_unused_parameters=True)


def _prepared_again(rank: int, world: int, policies: list[str]) -> tuple[list[Tensor], dict[torch.dtype, int]]:
    ddp = _wrapped()
    for policy in policies[:-1]:
        amp = _prepare(ddp, policy)
        _step(amp, ddp, rank)
        amp.release()
    ddp.module.load_state_dict(Bare().state_dict())
    amp = _prepare(ddp, policies[-1])
    for _ in range(4):
        _step(amp, ddp, rank)
    amp.report(strict=True)
    return [p.detach().clone() for p in ddp.parameters()], dict(comm_stats(ddp).num_by_dtype)


@functools.cache
def _prepared_once(policy: str) -> tuple[list[Tensor], dict[torch.dtype, int]]:
    return run(2, _prepared_again, [policy])[0]


@pytest.mark.parametrize("before", ["fp32", "fp32, reduce=bf16", "fp32, reduce=fp8"])
@pytest.mark.parametrize("policy", ["fp32", "fp32, reduce=bf16", "fp32, reduce=fp8"])
def test_a_wrapper_prepared_again_goes_the_way_of_a_new_one(before: str, policy: str) -> None:
    wanted, sent = _prepared_once(policy)
    for found, again in run(2, _prepared_again, [before, policy]):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert before == policy or again == sent


def _released(rank: int, world: int, policy: str | None) -> list[Tensor]:
    ddp = _wrapped()
    if policy == "refused":
        with pytest.raises(PolicyError, match="demote"):
            _prepare(ddp, "bf16, reduce=bf16, guard.on_overflow=demote")
    elif policy is not None:
        amp = _prepare(ddp, policy)
        _step(amp, ddp, rank)
        amp.release()
        ddp.zero_grad()
    ddp.module.load_state_dict(Bare().state_dict())
    ((ddp(dyadic(4, 6, seed=rank)) + 0.3).square().mean()).backward()
    return [p.grad for p in ddp.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", ["fp32, reduce=bf16", "fp32, reduce=fp8", "fp32", "refused"])
def test_a_released_wrapper_sends_what_torch_sends(policy: str) -> None:
    for found, wanted in zip(run(2, _released, policy), run(2, _released, None), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def _stored_anew(rank: int, world: int, policy: str) -> tuple[list[str], list[Tensor]]:
    model = Bare()
    master = Policy.parse(policy).master
    with logged() as said:
        amp = mezzo.prepare(model, mezzo.optim.SGD(model.parameters(), lr=0.125, master=master), policy)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        _step(amp, ddp, rank)
        amp.release()
    ddp = DistributedDataParallel(model, find_unused_parameters=True) if said else ddp
    ((ddp(dyadic(4, 6, seed=rank)) + 0.3).square().mean()).backward()
    return said, [p.grad for p in ddp.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_a_release_says_that_weights_of_another_dtype_must_be_wrapped_again(policy: str) -> None:
    (said, first), (_, second) = run(2, _stored_anew, policy)
    wanted = (
        "6 weights are stored in fp32 again, and DistributedDataParallel, which took hold of them as they were, averages their gradients "
        "no more. Write ddp = DistributedDataParallel(model) once more"
    )
    assert said == ([] if policy == "fp32" else [wanted])
    assert first and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _micro_batches(rank: int, world: int, grads: list[str]) -> tuple[list[Tensor], bool]:
    model = Bare(torch.bfloat16)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for one in grads:
        connect(ddp, Policy.parse(f"bf16-master{one}"))
    for part in range(40):
        with ddp.no_sync() if part < 39 else nullcontext():
            ddp(dyadic(2, 6, seed=part).bfloat16()).float().mean().backward()
    return [p.grad for p in ddp.parameters() if p.grad is not None], any(map(is_summed_apart, ddp.parameters()))


@pytest.mark.parametrize("grads", ["", ", grads=fp32"])
def test_micro_batches_are_summed_as_the_last_policy_says(grads: str) -> None:
    (wanted, is_apart), _ = run(2, _micro_batches, [grads])
    other = ", grads=fp32" if grads == "" else ""
    for found, again in run(2, _micro_batches, [other, grads]):
        assert again is is_apart is bool(grads)
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def _trained(rank: int, world: int, options: dict[str, bool], is_sparse: bool) -> list[list[Tensor]]:
    """Weights of a run without mezzo, and of a prepared one."""
    found = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, sparse=is_sparse), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, **options)
        amp = mezzo.prepare(ddp, optimizer, "fp32") if is_prepared else None
        for step in range(4):
            (amp or optimizer).zero_grad(set_to_none=False)
            loss = ddp(torch.tensor([rank, step, 7])).square().mean()
            loss.backward() if amp is None else amp.backward(loss)
            (amp or optimizer).step()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("options", "is_sparse"), [({"gradient_as_bucket_view": True}, False), ({"static_graph": True}, True), ({}, True)])  # fmt: skip
def test_zeroed_gradients_in_buckets_and_sparse_ones_train_as_in_torch(
    world: int, options: dict[str, bool], is_sparse: bool
) -> None:
    is_exact = world == 2  # else a rank's share is rounded, once by mezzo and once by torch
    for plain, prepared in run(world, _trained, options, is_sparse):
        torch.testing.assert_close(prepared, plain, rtol=0 if is_exact else 4 * torch.finfo(torch.float32).eps, atol=0)


def _in_parts(rank: int, world: int, policy: str, when: str) -> tuple[list[Tensor], float, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = mezzo.optim.SGD(model.parameters(), lr=0.1)

    def wrap() -> None:
        model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])

    if when == "before":
        wrap()
    amp = mezzo.prepare(model, optimizer, policy)
    if when == "behind":
        wrap()
    called = DistributedDataParallel(model) if when == "whole" else model
    with logged() as said:
        for step in range(4):
            loss = called(dyadic(4, 6, seed=4 * step + rank)).float().square().mean()
            amp.backward(loss * float("inf") if (step, rank) == (1, 1) else loss)
            amp.step()
            amp.zero_grad()
    scale = amp.scale
    amp.release()
    for part in model.modules() if when != "whole" else ():
        if isinstance(part, DistributedDataParallel):
            with pytest.raises(
                ConfigError, match="are counted for a DistributedDataParallel model that mezzo prepared"
            ):
                comm_stats(part)
    return [p.detach() for p in model.parameters()], scale, said


@pytest.mark.parametrize(("policy", "when"), [("fp32", "before"), ("fp16", "before"), ("fp16", "behind"), ("bf16-master", "behind")])  # fmt: skip
def test_wrappers_of_parts_train_as_one_of_the_whole(policy: str, when: str) -> None:
    """Each rank moved its loss scale by itself, and what was averaged carried two; the log said that nothing was averaged."""
    whole, parts = (run(2, _in_parts, policy, each) for each in ("whole", when))
    for (wanted, scale, _), (weights, own_scale, said) in zip(whole, parts, strict=True):
        assert scale == own_scale and all(map(torch.equal, wanted, weights))
        assert not any("nothing averages" in line for line in said)


def test_parts_that_are_wrapped_are_not_stored_anew() -> None:
    with pytest.raises(AssertionError, match="would be stored anew, and DistributedDataParallel took hold of them as they are"):  # fmt: skip
        run(2, _in_parts, "bf16-master", "before")

"""Ranks that were prepared differently, or whose gradients nobody averages: one true sentence on every rank, or they train."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
from tests.distributed.ranks import hear, logged, outcomes, run, tell
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import RankConsensus, group
from mezzo.errors import DistributedError, MezzoError

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Two layers, and one that only some calls use."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, width)
        self.last = nn.Linear(width, 1)
        self.spare = nn.Linear(6, 1)

    def forward(self, x: Tensor, is_spare_used: bool = True) -> Tensor:
        found = self.last(self.first(x).relu())
        return found + self.spare(x) if is_spare_used else found


def _prepared(net: nn.Module, policy: str, lr: float = 0.05, *, is_reversed: bool = False) -> mezzo.Stepper:
    master, params = mezzo.Policy.parse(policy).master, list(net.parameters())
    params = params[::-1] if is_reversed else params
    return mezzo.prepare(net, mezzo.optim.AdamW(params, lr=lr, master=master), policy)


def _train(amp: mezzo.Stepper, call: nn.Module, rank: int, steps: int, **options: bool) -> list[Tensor]:
    for step in range(steps):
        amp.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        amp.backward((call(x, **options).float() - x.sum(1, keepdim=True)).square().mean())
        amp.step()
    (optimizer,) = amp.optimizers
    return [optimizer.master(p).clone() for p in amp.model.parameters()]  # type: ignore[attr-defined]


def _sentence(amp: mezzo.Stepper, call: nn.Module, rank: int, steps: int = 3, **options: bool) -> str:
    try:
        _train(amp, call, rank, steps, **options)
    except MezzoError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


# --- what they were prepared with -------------------------------------------------------------------------------------


def _other_policy(rank: int, world: int, policies: list[str], wrapped_first: bool) -> str:
    net: nn.Module = Net(0)
    net = DistributedDataParallel(net) if wrapped_first else net
    amp = _prepared(net, policies[rank])
    return _sentence(amp, net if wrapped_first else DistributedDataParallel(amp.model), rank)


@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.parametrize(
    "policies", [["bf16, output=fp32", "fp32"], ["bf16", "fp16"], ["fp32", "fp32, reduce=bf16"], ["fp32", "fp32, guard.patience=7"]]
)  # fmt: skip
def test_ranks_with_different_policies_say_which(policies: list[str], wrapped_first: bool) -> None:
    texts = [str(mezzo.Policy.parse(policy)) for policy in policies]
    wanted = (
        f"DistributedError: ranks cannot train together: the policy is '{texts[0]}' on rank 0; '{texts[1]}' on rank 1. Prepare "
        "with one policy on all ranks."
    )
    assert run(2, _other_policy, policies, wrapped_first) == [wanted, wanted]


def _other_setup(rank: int, world: int, what: str) -> str:
    net = Net(0)
    if what == "name" and rank == 1:
        net.other = net.spare
        net.forward = lambda x: net.last(net.first(x).relu()) + net.other(x)  # type: ignore[method-assign]
        del net.spare
    amp = _prepared(
        net, "fp32", lr=0.1 if what == "lr" and rank == 1 else 0.05, is_reversed=what == "order" and rank == 1
    )
    if what == "moments" and rank == 0:
        state = _steps_alone(Net(0))
        amp.load_state_dict(state)
    return _sentence(amp, DistributedDataParallel(net), rank)


def _steps_alone(net: Net) -> dict[str, object]:
    amp = _prepared(net, "fp32")
    amp.consensus = None
    _train(amp, net, 0, 1)
    return amp.state_dict()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("name", "the model has 'spare.weight' fp32[1,6] cpu on rank 0; 'other.weight' fp32[1,6] cpu on rank 1."),
        ("lr", "the optimizer is AdamW, group 0: lr=0.05 on rank 0; AdamW, group 0: lr=0.1 on rank 1."),
        (
            "order",
            "the optimizer is AdamW, group 0: parameter 0 is first.weight on rank 0; AdamW, group 0: parameter 0 is spare.bias on rank 1.",
        ),
        ("moments", "what their optimizers know of earlier steps differs. Load the same checkpoint on all ranks"),
    ],
)
def test_ranks_with_different_models_or_optimizers_say_in_what(what: str, said: str) -> None:
    for sentence in run(2, _other_setup, what):
        assert sentence.startswith("DistributedError: ranks cannot train together: ") and said in sentence


def _seeds(rank: int, world: int, policy: str, seed: int) -> list[Tensor]:
    amp = _prepared(Net(seed * rank), policy)
    return _train(amp, DistributedDataParallel(amp.model), rank, 4)


@pytest.mark.parametrize("policy", ["bf16-master", "bf16-master, master=fp32", "bf16-master, master=kahan"])
def test_masters_follow_the_weights_that_the_wrapper_copied(policy: str) -> None:
    wanted = run(2, _seeds, policy, 0)[0]
    for found in run(2, _seeds, policy, 7):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


# --- whose gradients nobody averaged ----------------------------------------------------------------------------------


def _past_the_wrapper(rank: int, world: int, steps_before: int) -> str:
    amp = _prepared(Net(0), "fp32")
    ddp = DistributedDataParallel(amp.model)
    _train(amp, ddp, rank, steps_before)
    return _sentence(amp, amp.model, rank)


@pytest.mark.parametrize("steps_before", [0, 5])
def test_a_call_past_the_wrapper_is_noticed_in_its_first_step(steps_before: int) -> None:
    for sentence in run(2, _past_the_wrapper, steps_before):
        assert f"ranks disagree after step {steps_before}: " in sentence
        assert sentence.endswith(
            "The model was called past its DistributedDataParallel wrapper, so no gradient was averaged. Call the wrapper, as in "
            "ddp(x), not the model inside it."
        )


def _without_a_wrapper(rank: int, world: int) -> tuple[str, list[str]]:
    with logged() as said:
        amp = _prepared(Net(0), "fp32")
        return _sentence(amp, amp.model, rank), said


def test_a_model_that_nothing_wraps_trains_and_says_so_once() -> None:
    (first, said), (second, nothing) = run(2, _without_a_wrapper)
    assert (first, second, nothing) == ("trained", "trained", [])
    assert len(said) == 1 and said[0].startswith("2 ranks run, and nothing averages the gradients of this Net")


def _unused(rank: int, world: int, steps_before: int) -> str:
    amp = _prepared(Net(0), "fp32")
    ddp = DistributedDataParallel(amp.model)
    _train(amp, ddp, rank, steps_before)
    return _sentence(amp, ddp, rank, is_spare_used=False)


@pytest.mark.parametrize("steps_before", [0, 4])
def test_an_unused_parameter_keeps_torchs_own_hint(steps_before: int) -> None:
    for sentence in run(2, _unused, steps_before):
        assert "The loss does not use spare.weight, spare.bias" in sentence
        assert "find_unused_parameters=True" in sentence and "no_sync" not in sentence


def _joining(rank: int, world: int) -> str:
    amp = _prepared(Net(0), "fp32")
    ddp = DistributedDataParallel(amp.model)
    try:
        with ddp.join():
            _train(amp, ddp, rank, 4 - 2 * rank)
    except DistributedError as error:
        return str(error)
    return "trained"


def test_uneven_inputs_by_join_are_refused_before_anybody_waits() -> None:
    for sentence in run(2, _joining):
        assert sentence.startswith("amp.backward was called inside `with ddp.join():`") and "drop_last=True" in sentence


# --- who is lost, and for how long ------------------------------------------------------------------------------------


def _runs_out(rank: int, world: int) -> str:
    amp = _prepared(Net(0), "fp32")
    amp.consensus.group.timeout = timedelta(seconds=20)  # half of it is what a busy machine may take to end a process
    group._GRACE = timedelta(seconds=2)
    ddp = DistributedDataParallel(amp.model)
    sentence = _sentence(amp, ddp, rank, 3 - rank)
    if rank == 1:
        os._exit(0)
    return sentence


def test_a_rank_whose_batches_ran_out_is_not_called_stuck() -> None:
    assert outcomes(2, _runs_out)[0].value == (
        "DistributedError: rank 1 ended, and rank 0 waits for it. The output of rank 1 says why; if it holds no error, its batches "
        "ran out: give each rank as many batches (DistributedSampler, drop_last=True). Start again from the last checkpoint."
    )


def _sleeps_in_backward(rank: int, world: int, policy: str) -> tuple[str, float]:
    amp = _prepared(Net(0), policy)
    assert amp.consensus is not None  # before the wrapper's first forward
    amp.consensus.group.timeout = timedelta(seconds=2)
    ddp = DistributedDataParallel(amp.model)
    _train(amp, ddp, rank, 2)  # in the second forward torch still deals out its buckets
    if rank == 1:
        hear("0 was told")
        return "slept", 0.0
    started = time.monotonic()
    found = _sentence(amp, ddp, rank), time.monotonic() - started
    tell("0 was told")
    return found


@pytest.mark.parametrize(
    ("world", "policy"), [(2, "fp32"), pytest.param(3, "fp32, reduce=bf16", marks=pytest.mark.slow)]
)
def test_the_limit_holds_in_backward_and_the_time_printed_is_the_time_waited(world: int, policy: str) -> None:
    sentence, seconds = outcomes(world, _sleeps_in_backward, policy)[0].value
    assert sentence == (
        "DistributedError: rank 1 did not answer rank 0 in 2 s: ended, or stuck. The output of rank 1 says why; start again from "
        "the last checkpoint."
    )
    assert seconds < 6  # two to wait, two to call the roll


def _same_object(rank: int, world: int) -> tuple[bool, bool]:
    amp = _prepared(Net(0), "fp32")
    before = amp.consensus
    _train(amp, DistributedDataParallel(amp.model), rank, 1)
    return before is amp.consensus, isinstance(before, RankConsensus)


def test_what_decides_is_there_before_the_wrapper_and_stays() -> None:
    assert run(2, _same_object) == [(True, True)] * 2


def test_on_one_rank_nothing_has_to_be_agreed() -> None:
    assert _prepared(Net(0), "fp32").consensus is None

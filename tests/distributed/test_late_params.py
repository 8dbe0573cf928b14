"""What a wrapper does not know of: layers unfrozen after it, and losses that an optimizer compares."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.ranks import run
from tests.tolerance import relative
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import comm_stats
from mezzo.errors import DistributedError

pytestmark = pytest.mark.distributed


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _loss(model: nn.Module, step: int, share: slice) -> Tensor:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))[share]
    return (model(x).float() - x.sum(1, keepdim=True)).square().mean()


def _unfrozen(rank: int, world: int, is_wrapped_anew: bool) -> str:
    net = _net()
    net[0].requires_grad_(False)
    amp = mezzo.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05), "bf16, reduce=bf16")
    ddp = DistributedDataParallel(net)
    for step in range(6):
        if step == 4:
            net[0].requires_grad_(True)
            ddp = DistributedDataParallel(net) if is_wrapped_anew else ddp
        amp.zero_grad()
        amp.backward(_loss(ddp, step, slice(rank, None, world)))
        try:
            amp.step()
        except DistributedError as error:
            return str(error)
    return str(set(comm_stats(ddp).num_by_dtype))


def test_layers_unfrozen_behind_the_wrapper_are_noticed_in_their_first_step() -> None:
    for message in run(2, _unfrozen, False):
        assert message.startswith("ranks disagree after step 4: the checksum of parameter '0.weight'")
        assert "averages nothing of 0.weight, 0.bias, which came or were unfrozen after it" in message


def test_a_second_wrapper_takes_the_place_of_the_first() -> None:
    assert run(2, _unfrozen, True) == ["{torch.bfloat16}"] * 2


def _with_an_expert(rank: int, world: int, is_compared: bool) -> str:
    net = _net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    nn.init.constant_(net[2].weight, rank + 1.0)
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), "fp32")
    ddp = DistributedDataParallel(net)
    if not is_compared:
        amp.consensus.every = 0
    try:
        for step in range(4):
            amp.zero_grad()
            amp.backward(_loss(ddp, step, slice(rank, None, world)))
            amp.step()
    except DistributedError as error:
        return str(error)
    return str(net[0].weight.sum())


def test_weights_that_the_wrapper_was_told_to_leave_out_are_told_how_to_stay_apart() -> None:
    for message in run(2, _with_an_expert, True):
        assert message.startswith("ranks disagree after step 0: the checksum of parameter '2.weight'")
        assert "told to leave out 2.weight: where they are each rank's own, write amp.consensus.every = 0." in message
    first, second = run(2, _with_an_expert, False)
    assert first == second


def _line_search(rank: int, world: int) -> list[Tensor]:
    net = _net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    amp = mezzo.prepare(net, optimizer, "fp32")
    model = DistributedDataParallel(net) if world > 1 else net
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            amp.zero_grad()
            loss = _loss(model, step, slice(rank, None, world))
            amp.backward(loss)
            return loss

        assert amp.step(closure)
    return [p.detach().clone() for p in net.parameters()]


def test_a_line_search_takes_the_mean_loss_of_all_ranks() -> None:
    (wanted,) = run(1, _line_search)
    found = run(3, _line_search)
    for weights in found:
        assert all(map(torch.equal, weights, found[0]))
        # A search multiplies what the order of sums did to the loss.
        assert all(torch.allclose(a, b, rtol=0.0, atol=relative(torch.float32, 4096)) for a, b in zip(weights, wanted, strict=True))  # fmt: skip

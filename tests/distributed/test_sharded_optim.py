"""Optimizers on sharded weights: every rank steps its part, and the parts together are the whole, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.distributed.ranks import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import mezzo
from mezzo.errors import ConfigError
from mezzo.kernels.dtensor import global_offset, is_dtensor, local, num_shards

pytestmark = pytest.mark.distributed

SHAPES = ((5, 3), (7,), (1, 4), (4, 2, 3))
Spread = Callable[[Tensor], Tensor]


def _values(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _optimizer(name: str, params: list[nn.Parameter], options: dict[str, object]) -> torch.optim.Optimizer:
    if name == "AdamW":
        return mezzo.optim.AdamW(params, lr=0.1, weight_decay=0.1, **options)
    return mezzo.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, **options)


def _train(spread: Spread, name: str, dtype: torch.dtype, options: dict[str, object]) -> list[Tensor]:
    """Return weights, and what the optimizer keeps, whole, after three steps of which the second is blocked."""
    params = [nn.Parameter(spread(value)) for value in _values(0, dtype)]
    optimizer = _optimizer(name, params, options)
    if options.get("master") not in (None, "none", "stochastic"):
        optimizer.set_masters_({p: spread(value) for p, value in zip(params, _values(0, torch.float32), strict=True)})
    for step in range(1, 4):
        for p, grad in zip(params, _values(step, dtype), strict=True):
            p.grad = spread(grad)
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
    kept = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
    masters = [optimizer.master(p) for p in params]
    return [_whole(tensor.detach()) for tensor in (*params, *kept, *masters)]


def _whole(tensor: Tensor) -> Tensor:
    wide = tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor  # no backend sends int16
    return wide.full_tensor() if isinstance(wide, DTensor) else wide


def _compare(
    rank: int, world: int, placements: tuple[Placement, ...], name: str, dtype: torch.dtype, options: dict[str, object]
) -> list[bool]:
    sizes = (world,) if len(placements) == 1 else (2, world // 2)
    mesh = init_device_mesh("cpu", sizes)
    parts = _train(lambda t: distribute_tensor(t, mesh, placements), name, dtype, options)
    whole = _train(lambda t: t.clone(), name, dtype, options)
    return [torch.equal(part, other) for part, other in zip(parts, whole, strict=True)]


_MODES = [
    ("fp32", {}),
    ("bf16", {"master": "split"}),
    ("bf16", {"master": "fp32"}),
    ("bf16", {"master": "kahan"}),
    ("bf16", {"master": "stochastic"}),
    ("fp16", {"master": "fp32"}),
    ("fp16", {"master": "stochastic"}),
    ("bf16", {"master": "split", "state_dtype": torch.bfloat16}),
    ("fp32", {"state_dtype": torch.bfloat16}),
]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize(("dtype", "options"), _MODES, ids=lambda value: str(value))
def test_parts_step_as_the_whole_does(dtype: str, options: dict[str, object], name: str, backend: str) -> None:
    for equal in run(2, _compare, (Shard(0),), name, _DTYPES[dtype], {**options, "backend": backend}):
        assert all(equal)


@pytest.mark.parametrize("placements", [(Shard(0),), (Replicate(), Shard(0)), (Replicate(),)], ids=str)
def test_any_number_of_ranks_and_copies_draws_the_same_noise(placements: tuple[Placement, ...]) -> None:
    options = {"master": "stochastic", "state_dtype": torch.bfloat16}
    for equal in run(4, _compare, placements, "AdamW", torch.bfloat16, options):
        assert all(equal)


def _facts(rank: int, world: int) -> list[object]:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    whole = torch.arange(20.0).view(10, 2)
    found: list[object] = []
    for mesh, placements in ((line, [Shard(0)]), (line, [Replicate()]), (square, [Replicate(), Shard(0)])):
        tensor = distribute_tensor(whole, mesh, placements)
        part = local(tensor)
        first = global_offset(tensor)
        # The values of the whole are their own places.
        found += [num_shards(tensor), torch.equal(part.flatten(), torch.arange(first, first + part.numel()).float())]
    try:
        global_offset(distribute_tensor(whole, line, [Shard(1)]))
    except ConfigError as error:
        found.append(str(error).split(" was asked", maxsplit=1)[0])
    return found


def test_where_a_part_lies_in_the_whole() -> None:
    for rank, found in enumerate(run(4, _facts)):
        assert found[:6] == [4, True, 1, True, 2, True]
        assert found[6:] == (["stochastic rounding"] if rank < 2 else [])  # ranks 2 and 3 have no column
    plain = nn.Parameter(torch.ones(2))
    assert (is_dtensor(plain), local(plain) is plain, num_shards(plain), global_offset(plain)) == (False, True, 1, 0)


def _step(amp: mezzo.Stepper, net: nn.Module, step: int, rank: int) -> None:
    amp.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    amp.backward((net(x).float() - x.sum(1, keepdim=True)).square().mean())
    amp.step()


def _made(policy: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, mezzo.Stepper]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    mezzo.distributed.fully_shard(net, policy)
    optimizer = mezzo.optim.AdamW(net.parameters(), lr=0.05, master=mezzo.Policy.parse(policy).master)
    return net, optimizer, mezzo.prepare(net, optimizer, policy)


def _consolidated(rank: int, world: int, policy: str, is_sent: bool) -> bool:
    net, optimizer, amp = _made(policy, 0)
    _step(amp, net, 0, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        options = StateDictOptions(full_state_dict=True)
        weights, state = get_state_dict(net, optimizer, options=options)
        again, other, later = _made(policy, 1)
        if is_sent:  # by rank 0, which alone has it
            weights, state = ({}, {}) if rank else (weights, copy.deepcopy(state))
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(again, weights, options=options)
            set_optimizer_state_dict(again, other, state, options=options)
        else:
            set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state, options=options)
    for stepper, model in ((amp, net), (later, again)):
        _step(stepper, model, 1, rank)
    return all(
        torch.equal(p.full_tensor(), q.full_tensor()) for p, q in zip(net.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master, master=fp32", "bf16-master", "bf16-master, master=kahan"])
def test_a_state_that_torch_puts_together_goes_on_bit_for_bit(policy: str, is_sent: bool) -> None:
    assert run(2, _consolidated, policy, is_sent) == [True, True]

"""What an evaluation of a sharded model leaves gathered, as torch does with the root's weights: steps, reports and checkpoints know the shards."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.distributed.ranks import run
from torch import Tensor, nn

import mezzo
from mezzo.distributed import fully_shard, load_checkpoint, save_checkpoint
from mezzo.errors import StepError

pytestmark = pytest.mark.distributed


def _net(policy: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    fully_shard(net, policy, units=[net[2]])
    return net


def _prepared(net: nn.Module, policy: str, params: list[nn.Parameter]) -> mezzo.Stepper:
    optimizer = mezzo.optim.AdamW(params, lr=0.05, master=mezzo.Policy.parse(policy).master)
    return mezzo.prepare(net, optimizer, policy)


def _look_at(net: nn.Module, *, is_evaluated: bool) -> None:
    if is_evaluated:
        with torch.no_grad():
            net(torch.ones(2, 6))


def _trained(rank: int, world: int, policy: str, is_evaluated: bool, folder: str) -> dict[str, Tensor]:
    net = _net(policy)
    params = [*net.parameters()]
    _look_at(net, is_evaluated=is_evaluated and policy == "fp32")  # the others gather products alone in bf16
    amp = _prepared(net, policy, params)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        amp.zero_grad()
        loss = net(x).float().square().mean()
        amp.report(strict=True)
        amp.backward(loss)
        _look_at(net, is_evaluated=is_evaluated)
        assert amp.step(max_norm=0.5)
        _look_at(net, is_evaluated=is_evaluated)
        amp.report(strict=True)
        _look_at(net, is_evaluated=is_evaluated)
        if step == 0:
            save_checkpoint(amp, folder)
        if step == 1:  # into another run, and back into this one
            amp.load_state_dict(copy.deepcopy(amp.state_dict()))
            other_net = _net(policy)
            other = _prepared(other_net, policy, [*other_net.parameters()])
            _look_at(other.model, is_evaluated=is_evaluated)
            load_checkpoint(other, folder)
            other.load_state_dict(copy.deepcopy(amp.state_dict()))
            assert all(map(torch.equal, other.export_weights().values(), amp.export_weights().values()))
    return {name: value.full_tensor() for name, value in amp.export_weights().items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_a_sharded_model_is_evaluated_anywhere_in_its_training(
    policy: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = [str(tmp_path_factory.mktemp(name) / "run") for name in ("plain", "evaluated")]
    wanted, found = (run(2, _trained, policy, bool(i), folder) for i, folder in enumerate(folders))
    for rank, weights in enumerate(found):
        assert all(torch.equal(value, wanted[rank][name]) for name, value in weights.items())


def _extended(rank: int, world: int, is_watched: bool) -> list[Tensor]:
    net = _net("bf16")
    params = [*net.parameters()]
    amp = _prepared(net, "bf16", params[:-1])
    for step in range(4):
        if step == 1:
            amp.optimizers[0].add_param_group({"params": params[-1:], "lr": 0.01})
        if step == 2 and is_watched:
            _look_at(net, is_evaluated=True)
            watch = mezzo.diagnose.watch(amp, every=1)
        amp.zero_grad()
        amp.backward(net(torch.full((4, 6), step + 1.0)).float().square().mean())
        assert amp.step()
    assert not is_watched or len(watch.report.steps) == 2
    return [value.full_tensor() for value in amp.export_weights().values()]  # type: ignore[attr-defined]


def test_a_sharded_run_gets_a_group_and_is_watched_from_an_evaluation_on() -> None:
    (found, _), (wanted, _) = run(2, _extended, True), run(2, _extended, False)
    assert all(map(torch.equal, found, wanted))


def _released(rank: int, world: int, policy: str) -> tuple[str, list[Tensor]]:
    net = _net(policy)
    amp = _prepared(net, policy, [*net.parameters()])
    amp.backward(net(torch.ones(4, 6)).float().square().mean())
    said = ""
    try:
        amp.release()
    except StepError as error:
        said = str(error)
    else:
        return said, [p.detach().full_tensor() for p in net.parameters()]  # type: ignore[attr-defined]
    assert amp.step()  # the gradients are still there, and so is the stepper
    weights = amp.export_weights()
    return said, [p.full_tensor() for p in weights.values()]  # type: ignore[attr-defined]


def test_sharded_16_bit_weights_are_exported_and_not_released() -> None:
    """torch gathers weights in the dtype that they had in the first forward, so fp32 ones would end the next forward in its words."""
    (plain, kept), (said, exported) = run(2, _released, "fp32")[0], run(2, _released, "bf16-master")[0]
    assert not plain and "amp.export_weights()" in said and "fully_shard" in said
    assert all(weight.dtype is torch.float32 for weight in (*kept, *exported))

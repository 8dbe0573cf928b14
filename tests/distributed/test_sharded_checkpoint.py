"""Checkpoints of runs on many ranks: saved on some, resumed on others, and the optimizer goes on bit for bit."""

from __future__ import annotations

import functools
import io
import re
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.models import Language
from tests.distributed.ranks import run
from tests.step.test_interrupted import interrupted
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import mezzo
from mezzo.distributed import fully_shard, load_checkpoint, save_checkpoint
from mezzo.errors import CheckpointError

pytestmark = pytest.mark.distributed

State = dict[str, Any]
INF = float("inf")
IDS = torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(5))


class Seen(Language):
    """The language model with a buffer that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids)


def _optimizer(name: str, params: list[Tensor], policy: mezzo.Policy) -> torch.optim.Optimizer:
    if name == "torch":
        return torch.optim.AdamW(params, lr=0.05)
    if name == "sgd":
        return mezzo.optim.SGD(params, lr=0.05, momentum=0.9, master=policy.master)
    options = {"master": policy.master, "state_dtype": policy.state, "rounding_seed": 7}
    return mezzo.optim.AdamW(params, lr=0.05, weight_decay=0.1, **options)


def _start(world: int, kind: str, policy: str, optimizer: str, seed: int) -> mezzo.Stepper:
    """Return a run: its model from the seed, in shards, in copies, or plain on one rank."""
    torch.manual_seed(seed)
    model = Seen()
    if kind == "sharded" and world > 1:
        fully_shard(model, policy, units=model.layers)
    wrapped = DistributedDataParallel(model) if kind == "wrapped" else model
    made = _optimizer(optimizer, list(model.parameters()), mezzo.Policy.parse(policy))
    amp = mezzo.prepare(wrapped, made, policy)
    if kind == "copies" and world > 1:
        amp.called = DistributedDataParallel(amp.model)
    else:
        amp.called = amp.model
    return amp


def _give_(grads: State, step: int) -> None:
    """Overwrite gradients with ones that are the same however they are spread."""
    for index, grad in enumerate(grads.values()):
        generator = torch.Generator().manual_seed(100 * step + index)
        whole = torch.randn(grad.shape, generator=generator).to(grad.dtype)
        if isinstance(grad, DTensor):
            part = distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)
            grad.to_local().copy_(part.to_local())
        else:
            grad.copy_(whole)


def _steps(amp: mezzo.Stepper, steps: range) -> None:
    for step in steps:
        amp.zero_grad()
        logits = amp.called(IDS).float()
        amp.backward(F.cross_entropy(logits.flatten(0, 1), IDS.flatten()) * (INF if step == 1 else 1.0))
        with amp.unscaled_grads() as grads:
            _give_(grads, step)
        amp.step()


def _whole(tensor: Tensor) -> Tensor:
    wide = tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor  # no backend sends int16
    return (wide.full_tensor() if isinstance(wide, DTensor) else wide).detach().clone()


def _state(amp: mezzo.Stepper) -> State:
    """Return everything that decides how a run goes on, whole."""
    saved = amp.state_dict()
    found = {name: _whole(value) for name, value in saved["model"].items()}
    for index, entry in saved["optimizers"][0]["state"].items():
        found.update({f"{index} {name}": _whole(value) for name, value in entry.items()})
    return {**found, **(saved["scaling"] or {}), **saved["counters"]}


def _saves(rank: int, world: int, kind: str, policy: str, optimizer: str, folder: str) -> State:
    amp = _start(world, kind, policy, optimizer, seed=0)
    _steps(amp, range(4))
    save_checkpoint(amp, folder, extra={"epoch": 3, "rates": torch.arange(3.0)})
    return _state(amp)


def _resumes(rank: int, world: int, kind: str, policy: str, optimizer: str, folder: str) -> tuple[State, State, object]:
    amp = _start(world, kind, policy, optimizer, seed=1)
    _steps(amp, range(10, 12))  # what is there before loading must not matter
    extra = load_checkpoint(amp, folder)
    loaded = _state(amp)
    _steps(amp, range(4, 7))
    return loaded, _state(amp), extra


def _straight(rank: int, world: int, policy: str, optimizer: str) -> State:
    amp = _start(world, "plain", policy, optimizer, seed=0)
    _steps(amp, range(7))
    return _state(amp)


@functools.cache
def _uninterrupted(policy: str, optimizer: str) -> State:
    return run(1, _straight, policy, optimizer)[0]


def _differing(found: State, wanted: State) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not _is_equal(found[name], value)]


def _is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


RUNS = [
    ("fp32", "adamw"),
    ("fp16, scaling.init_scale=256, scaling.growth_interval=2", "torch"),
    ("bf16-master", "adamw"),
    ("bf16-master, state=bf16", "adamw"),
    ("bf16-master, master=fp32", "sgd"),
    ("bf16-master, master=kahan", "adamw"),
    ("bf16-master, master=stochastic", "adamw"),
    ("fp16-master, scaling.init_scale=256", "sgd"),
]


FEW = [RUNS[1], RUNS[3], RUNS[6]]
"""A loss scale; split masters beside moments that are rounded by chance; weights that are."""


@pytest.mark.parametrize(
    ("policy", "optimizer", "first", "then", "kind"),
    [
        *[(*each, 1, 2, "sharded") for each in RUNS],
        *[
            pytest.param(*each, *way, marks=pytest.mark.slow if way[1] == 4 and each is not FEW[0] else ())
            for way in ((2, 1, "sharded"), (2, 4, "sharded"), (1, 2, "copies"), (2, 1, "copies"))
            for each in FEW
        ],
    ],
)
def test_what_some_ranks_saved_others_go_on_with_bit_for_bit(
    policy: str, optimizer: str, first: int, then: int, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "at-4"
    saved = run(first, _saves, kind, policy, optimizer, str(folder))
    wanted = _uninterrupted(policy, optimizer)
    for loaded, at_end, extra in run(then, _resumes, kind, policy, optimizer, str(folder)):
        assert _differing(loaded, saved[0]) == []
        assert _differing(at_end, wanted) == []
        assert extra["epoch"] == 3 and torch.equal(extra["rates"], torch.arange(3.0))
    assert [path.name for path in tmp_path.iterdir()] == ["at-4"]


@pytest.mark.parametrize(("kind", "then_kind"), [("sharded", "wrapped"), ("wrapped", "copies"), ("copies", "sharded")])
def test_shards_and_copies_read_each_others(kind: str, then_kind: str, tmp_path: Path) -> None:
    saved = run(2, _saves, kind, "bf16", "adamw", str(tmp_path / "c"))
    wanted = _uninterrupted("bf16", "adamw")
    for loaded, at_end, _ in run(2, _resumes, then_kind, "bf16", "adamw", str(tmp_path / "c")):
        assert (_differing(loaded, saved[0]), _differing(at_end, wanted)) == ([], [])


def _converts(rank: int, world: int, policy: str, folder: str) -> State:
    amp = _start(world, "sharded", policy, "adamw", seed=1)
    load_checkpoint(amp, folder)
    found = {name: _whole(value) for name, value in amp.export_weights().items()}
    _steps(amp, range(4, 5))
    return found


@pytest.mark.parametrize(
    "saved", ["fp32", "bf16-master", pytest.param("bf16-master, master=kahan", marks=pytest.mark.slow)]
)
def test_another_policy_takes_the_masters_over_in_shards_too(saved: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    run(2, _saves, "sharded", saved, "adamw", folder)
    masters = run(1, _converts, saved, folder)[0]
    for policy in ("fp32", "bf16-master, master=fp32"):
        for found in run(2, _converts, policy, folder):
            assert _differing(found, masters) == []


def _refused(rank: int, world: int, folder: str, what: str) -> str:
    amp = _start(world, "sharded", "fp32", "adamw", seed=0)
    try:
        if what == "save":
            save_checkpoint(amp, folder)
        else:
            load_checkpoint(amp, folder)
    except CheckpointError as error:
        return str(error)
    return "done"


def test_what_cannot_be_read_or_would_be_overwritten_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def both(folder: Path, what: str) -> set[str]:
        return set(run(2, _refused, str(folder), what))

    assert both(tmp_path / "a", "save") == {"done"}
    taken = (
        f"save_checkpoint was given {tmp_path / 'a'}, which is there already. Name a new folder for each checkpoint, and "
        "remove old ones when the new one is whole."
    )
    assert both(tmp_path / "a", "save") == {taken}
    assert both(tmp_path / "b", "load") == {
        f"there is no checkpoint in {tmp_path / 'b'}. Name a folder that save_checkpoint wrote."
    }
    (tmp_path / "file").write_text("no folder")
    (found,) = both(tmp_path / "file" / "c", "save")
    assert found.startswith(f"cannot write {tmp_path / 'file' / 'c'}: ") and found.endswith(
        "The checkpoints before it are kept."
    )
    shard = next(iter((tmp_path / "a").glob("__1_*")))
    shard.unlink()
    (found,) = both(tmp_path / "a", "load")
    assert found.startswith(f"cannot read {tmp_path / 'a'}: ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"amp": None}, "save_checkpoint was given NoneType for amp; give what mezzo.prepare returned."),
        ({"amp": torch.nn.Linear(2, 2)}, "save_checkpoint was given Linear for amp; give what mezzo.prepare returned."),
        ({"folder": None}, "save_checkpoint was given NoneType for folder; give a path."),
        ({"folder": "a\0"}, "save_checkpoint was given 'a\\x00' for folder, which no file can be called"),
        ({"extra": object()}, "save_checkpoint was given object for extra; give a dict."),
        ({"extra": []}, "save_checkpoint was given list for extra; give a dict."),
    ],
)
def test_what_is_no_run_is_refused(given: State, said: str, tmp_path: Path) -> None:
    amp = _start(1, "plain", "fp32", "torch", seed=0)
    for call in (save_checkpoint, load_checkpoint) if "extra" not in given else (save_checkpoint,):
        with pytest.raises(CheckpointError) as refusal:
            call(**{"amp": amp, "folder": tmp_path / "a", **given})
        assert said.replace("save_checkpoint", call.__name__) in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def _divided(rank: int, world: int, folder: str) -> str:
    with warnings.catch_warnings():  # it still goes through torch.jit.script (2.13)
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=mezzo.optim.AdamW, lr=0.05)
    amp = mezzo.prepare(net, optimizer, "bf16-master")
    amp.backward(DistributedDataParallel(amp.model)(torch.ones(4, 6)).float().mean())
    amp.step()
    optimizer.consolidate_state_dict(
        to=0
    )  # after which the first rank alone has a state, and would wait for the others
    try:
        save_checkpoint(amp, folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_divided_state_which_one_rank_alone_puts_together_is_refused_by_all(tmp_path: Path) -> None:
    for said in run(2, _divided, str(tmp_path / "divided")):
        assert said.startswith(
            "save_checkpoint was given a run with a ZeroRedundancyOptimizer, which puts its state together on one rank"
        )
        assert "torch.save(amp.state_dict(), file) on rank 0." in said
    assert run(1, _divided, str(tmp_path / "whole")) == ["saved"]


@pytest.mark.parametrize("at", [50, 200, "moved"])
def test_ctrl_c_in_a_checkpoint_goes_on_and_the_other_ranks_are_told(at: int | str, tmp_path: Path) -> None:
    told = run(2, _interrupted, str(tmp_path / "a"), at)
    assert told[0] == "interrupted"
    assert told[1].startswith(f"cannot write {tmp_path / 'a'}: ") and "rank 0" in told[1]
    assert run(1, _interrupted, str(tmp_path / "b"), at) == ["interrupted"]
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def _interrupted(rank: int, world: int, folder: str, at: int | str) -> str:
    amp = _start(world, "copies", "bf16-master", "mezzo", seed=0)
    inside = mezzo.files.__file__ if at == "moved" else filesystem.__file__
    try:
        if rank:
            save_checkpoint(amp, folder)
        elif interrupted(lambda: save_checkpoint(amp, folder), 18 if at == "moved" else int(at), inside):
            return "interrupted"
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_disk_that_is_full_after_ctrl_c_is_told(tmp_path: Path) -> None:
    amp = _start(1, "plain", "fp32", "torch", seed=0)
    (tmp_path / "file").write_text("no folder")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(CheckpointError, match="cannot write"):
            save_checkpoint(amp, tmp_path / "file" / "a")


def test_bits_that_changed_on_the_disk_are_refused_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert set(run(2, _refused, str(folder), "save")) == {"done"}
    stored = filesystem.FileSystemReader(folder).read_metadata().storage_data.values()
    part = max((one for one in stored if one.relative_path == "__1_0.distcp"), key=lambda one: one.length)
    shard = folder / part.relative_path
    content = bytearray(shard.read_bytes())
    saved = content[part.offset : part.offset + part.length]
    weight = torch.load(io.BytesIO(saved), weights_only=True).numpy().tobytes()
    content[part.offset + saved.index(weight) + len(weight) // 2] ^= 16
    shard.write_bytes(content)
    (found,) = set(run(2, _refused, str(folder), "load"))
    assert re.match(rf"cannot read {folder}: rank . says __1_0.distcp has changed since it was written\. Load", found)
    (found,) = run(1, _refused, str(folder), "load")
    assert "has changed since it was written. Load an earlier checkpoint." in found


def test_a_full_disk_is_told_as_that(tmp_path: Path) -> None:
    model = nn.Linear(64, 256)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"rank 0 says \[Errno 27\] File too large\. The checkpoints before"):
            save_checkpoint(amp, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    save_checkpoint(amp, tmp_path / "a")


def _refused_by_the_disk(rank: int, world: int, folder: str, full: int) -> str:
    model = nn.Linear(256, 512)
    fully_shard(model, "fp32")
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if rank == full else limits[0], limits[1]))
    try:
        save_checkpoint(amp, folder)
    except CheckpointError as error:
        return str(error)
    finally:  # the ranks run other tests too
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    return "done"


@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_that_is_full_for_one_rank_is_told_on_all(full: int, tmp_path: Path) -> None:
    (found,) = set(run(2, _refused_by_the_disk, str(tmp_path / "a"), full))
    assert re.match(rf"cannot write .*: rank {full} says \[Errno 27\] File too large\. The checkpoints", found), found


def test_a_tensor_that_could_not_be_read_back_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), requires_grad=False)
    amp = mezzo.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), "fp32")
    with pytest.raises(
        CheckpointError, match=r"0\.weight, a TwoTensor, which load_checkpoint could not read.*torch\.save"
    ):
        save_checkpoint(amp, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []

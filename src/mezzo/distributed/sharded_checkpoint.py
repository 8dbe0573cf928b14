"""Checkpoints that many ranks write together, each its own part, and any other number of ranks can read."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from zipfile import ZipFile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointError, MezzoError, first_line, interrupt_in, is_out_of_memory, kind_of
from ..files import as_path, move_into_place
from ..kernels import is_dtensor, like_dtensor, local
from ..optim import parameters
from .group import Group, is_distributed, is_running

KeyPath = tuple[str | int, ...]
"""Keys and numbers on the way to a value inside nested dicts and lists."""

_PLAIN = "plain"
"""Under this name lies, as bytes, everything that is not a tensor, and where the tensors belong."""
_TENSOR = "tensor at"
"""Marks where a tensor belongs in it."""


@runtime_checkable
class Saveable(Protocol):
    """What `mezzo.prepare` returns, as far as a checkpoint needs it."""

    model: nn.Module

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """What is stepped."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything a run needs to go on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Go on from a checkpoint."""


def save_checkpoint(amp: Saveable, folder: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> None:
    """Save a prepared run through torch.distributed.checkpoint: called on every rank, between `step` and `backward`.

    Each rank writes the shards that only it has; what all have, rank 0 writes. The folder takes its name when it is whole.

    Args:
        amp: what `mezzo.prepare` returned.
        folder: a new one, on a file system that all ranks share.
        extra: what else the run needs, the same on all ranks: nested dicts and lists of tensors, numbers and words, such as
            a scheduler's state and the epoch.

    Raises:
        CheckpointError: no run, no dict, a tensor that could not be read back, a ZeroRedundancyOptimizer on several ranks, or the folder is there already or could not be written. Raised on all ranks.
        DistributedError: a rank is lost.

    Writes: the folder; while at it, one beside it that ends in ".partial". Syncs: yes, with the slowest rank.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        """Says what torch's writer hid before other ranks are told, whom an error's cause does not reach."""

        def write_data(self, *given: Any) -> Any:
            """Write this rank's part."""
            try:
                return super().write_data(*given)
            except RuntimeError as error:
                raise OSError(first_line(error)) from error

    path = _folder("save_checkpoint", amp, folder)
    if not isinstance(extra, Mapping | None):
        raise CheckpointError(f"save_checkpoint was given {kind_of(extra)} for extra; give a dict.")
    aside = path.with_name(f"{path.name}.partial")
    if path.exists():
        raise CheckpointError(
            f"save_checkpoint was given {path}, which is there already. Name a new folder for each checkpoint, and remove old ones when the new one is whole."
        )
    if is_distributed() and any(hasattr(o, "consolidate_state_dict") for o in amp.optimizers):
        raise CheckpointError(
            "save_checkpoint was given a run with a ZeroRedundancyOptimizer, which puts its state together on one rank alone. Call "
            "optimizer.consolidate_state_dict(to=0) on every rank, and torch.save(amp.state_dict(), file) on rank 0."
        )
    tensors: dict[str, Tensor] = {}

    def take_out(value: Any, location: KeyPath) -> Any:
        if not isinstance(value, Tensor):
            return None
        tensors[_key(location)] = value.detach()
        return {_TENSOR: location}

    plain = _exchanged({"amp": amp.state_dict(), "extra": dict(extra or {})}, take_out)
    for name, tensor in tensors.items():
        if hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor):  # made of others, as quantized weights are
            _check_read_back(name, tensor)
    with _refusing(f"cannot write {path}", "The checkpoints before it are kept."):
        tensors[_PLAIN] = _packed(plain)
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save(tensors, storage_writer=Writer(aside), planner=planner, no_dist=not is_running())
        is_first = not is_running() or dist.get_rank() == 0
        _on_all_ranks(lambda: move_into_place(aside, path) if is_first else None)


def load_checkpoint(amp: Saveable, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Go on from what `save_checkpoint` wrote, on any number of ranks; called on every one.

    Weights, masters, moments, loss scale and counters are those that were saved, bit for bit; each rank reads its own part.
    Under another policy or master mode they are converted, and the log says so, as `amp.load_state_dict` does.

    Args:
        amp: what `mezzo.prepare` returned, for such a model and optimizers.
        folder: of the checkpoint. Reading one may run code that lies in it: load only what you trust.

    Returns:
        What `save_checkpoint` was given as `extra`; tensors on the CPU.

    Raises:
        CheckpointError: there is none, it cannot be read, or it is not one of such a model and optimizers.
        DistributedError: a rank is lost.

    Writes: weights, buffers, optimizer states, loss scale, counters; drops gradients. Syncs: yes.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    path = _folder("load_checkpoint", amp, folder)
    if not (path / ".metadata").exists():
        raise CheckpointError(f"there is no checkpoint in {path}. Name a folder that save_checkpoint wrote.")
    with _refusing(f"cannot read {path}", "Load an earlier checkpoint."):
        found = FileSystemReader(path).read_metadata()
        _on_all_ranks(lambda: _check_sums(path, found.storage_data.values()))
        saved = found.state_dict_metadata
        plain = _empty(saved[_PLAIN], None)
        _read_(path, {_PLAIN: plain})
        like = _belonging(amp)
        tensors: dict[str, Tensor] = {}

        def put_in(value: Any, location: KeyPath) -> Tensor | None:
            if not isinstance(value, dict) or value.keys() != {_TENSOR}:
                return None
            return tensors.setdefault(_key(location), _empty(saved[_key(location)], like(location)))

        whole = _exchanged(_unpacked(plain), put_in)
        _read_(path, tensors)
    amp.load_state_dict(whole["amp"])
    extra: dict[str, Any] = whole["extra"]
    return extra


def _folder(call: str, amp: object, folder: object) -> Path:
    if not isinstance(amp, Saveable):
        raise CheckpointError(f"{call} was given {kind_of(amp)} for amp; give what mezzo.prepare returned.")
    return as_path(call, "folder", folder, CheckpointError)


def _key(location: KeyPath) -> str:
    return ".".join(map(str, location))


def _exchanged(value: Any, exchange: Callable[[Any, KeyPath], Any], location: KeyPath = ()) -> Any:
    """Return a nested value with what `exchange` returns in the place of each part for which that is not None."""
    if (found := exchange(value, location)) is not None:
        return found
    if isinstance(value, Mapping):
        return {key: _exchanged(item, exchange, (*location, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_exchanged(item, exchange, (*location, k)) for k, item in enumerate(value))
    return value


def _check_read_back(name: str, tensor: Tensor) -> None:
    """Refuse, by a CheckpointError, a tensor that loading could not bring back. Syncs: yes."""
    try:
        torch.empty(tensor.shape, dtype=tensor.dtype).copy_(_unpacked(_packed(tensor)))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"save_checkpoint was given {name}, a {type(tensor).__name__}, which load_checkpoint could not read: {first_line(error)}. Write torch.save(amp.state_dict(), file)."
        ) from error


def _packed(plain: Any) -> Tensor:
    packed = io.BytesIO()
    torch.save(plain, packed)
    found = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
    _unpacked(found)  # what cannot be read back is refused before it is written
    return found


def _unpacked(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)


def _belonging(amp: Saveable) -> Callable[[KeyPath], Tensor | None]:
    """Return a function that says which weight of a run a saved tensor is, or belongs to, and so how it must be sharded."""
    state, params = amp.state_dict(), [parameters(optimizer) for optimizer in amp.optimizers]

    def like(location: KeyPath) -> Tensor | None:
        found: Tensor | None = None
        match location:
            case ("amp", "model" | "outside" as part, str(name)):
                found = state.get(part, {}).get(name)
            case ("amp", "optimizers", int(which), "state", int(number), _):
                known = params[which] if which < len(params) else []
                found = known[number] if number < len(known) else None
        return found

    return like


def _empty(saved: Any, like: Tensor | None) -> Tensor:
    """Return memory for a saved tensor: on this rank its part of a sharded weight, else all of it."""
    dtype: torch.dtype = saved.properties.dtype
    if like is not None and is_dtensor(like) and like.shape == saved.size:
        return like_dtensor(torch.empty_like(local(like), dtype=dtype), like)
    return torch.empty(saved.size, dtype=dtype)


def _read_(path: Path, tensors: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load(tensors, checkpoint_id=path, no_dist=not is_running())


@contextmanager
def _refusing(what: str, hint: str) -> Iterator[None]:
    """Turn what torch raises inside the block, on this rank or another, into one sentence, the same on all; Ctrl-C goes on here, and the others are told."""
    from torch.distributed.checkpoint.api import CheckpointException

    handled = sys.exc_info()[1]
    try:
        with warnings.catch_warnings(), Group().watching() if is_running() else nullcontext():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is no news on one rank
            yield
    except MezzoError:
        raise
    except (Exception, CheckpointException) as error:  # the latter, torch's answer even to a full disk, is no Exception
        failures = {rank: cause for rank, (cause, _) in getattr(error, "failures", {}).items()}
        own = failures.get(dist.get_rank() if is_running() else 0) if failures else error
        if interrupt := interrupt_in(own, handled):
            raise interrupt from None
        rank = min(failures, default=None)
        told = first_line(error) if rank is None else f"rank {rank} says {first_line(failures[rank])}"
        raise CheckpointError(f"{what}: {told}. {hint}") from error


def _check_sums(path: Path, stored: Iterable[Any]) -> None:
    """Refuse tensors whose bits changed on the disk, which torch loads as they are: each rank looks at some. Raises: OSError, BadZipFile."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_running() else (0, 1)
    for one in list(stored)[rank::world] if torch.serialization.get_crc32_options() else ():
        with open(path / one.relative_path, "rb") as file:
            file.seek(one.offset)
            with ZipFile(io.BytesIO(file.read(one.length))) as saved:
                if saved.testzip():
                    raise OSError(f"{one.relative_path} has changed since it was written")


def _on_all_ranks(action: Callable[[], object]) -> None:
    """Do something while the other ranks do; if it fails on one, it fails on all."""
    failure: BaseException | None = None
    try:
        action()
    except BaseException as error:
        failure = error
    told = "" if failure is None else first_line(failure)
    said = Group().gather_text(told and f"rank {dist.get_rank()} says {told}") if is_running() else [told]
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    if reason := next(filter(None, said), ""):
        raise OSError(reason) from failure

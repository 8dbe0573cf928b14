"""The ranks of a run as they are started here and meet: which this is, on which device; what is added up over all, and who says what went wrong."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import TIMEOUT, Group, is_running
from ..errors import ConfigError, DistributedError, MezzoError, first_line, shown
from ..formats import is_one_of, why_not_here

_joined = itertools.count()


class FailedOnOtherRank(MezzoError):
    """The run has failed, and another rank says why."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DistContext:
    """The ranks of a run as one of them sees them.

    Attributes:
        group: of all ranks; None if there is one.
        launch: names the launcher's job, which restarts share; "" without a launcher.
        restarts: how often the launcher has started the ranks again.
    """

    device: torch.device
    rank: int = 0
    group: Group | None = None
    launch: str = ""
    restarts: int = 0

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self.group is None else self.group.size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Return a CPU tensor added up over the ranks, the same bits on all.

        Raises: DistributedError: a rank is lost. Writes: perhaps `value`. Syncs: with the slowest rank.
        """
        return value if self.group is None else self.group.sum_(self.group.to_device(value)).cpu()

    def any(self, is_so: bool) -> bool:
        """Return whether something holds on any rank; called on all. Raises: DistributedError. Syncs: yes."""
        return bool(self.sum(torch.tensor(float(is_so))))

    def wait(self) -> None:
        """Wait for the other ranks. Raises: DistributedError. Syncs: yes."""
        self.any(False)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return what to call instead of a model so that gradients are averaged over the ranks."""
        return model if self.group is None else DistributedDataParallel(model, process_group=self.group.handle)


def maybe_no_sync(model: nn.Module, is_more_to_come: bool) -> AbstractContextManager[None]:
    """Return a block in which the gradients of a wrapped model stay on their rank, if more of the batch is to come."""
    if is_more_to_come and isinstance(model, DistributedDataParallel):
        block: AbstractContextManager[None] = model.no_sync()
        return block
    return nullcontext()


def one_rank(device: torch.device) -> DistContext:
    """Return the context of a run of one rank, with what a launcher says of its job."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    # All attempts of a job have one agent as their parent.
    launch = "" if elastic is None else f"{elastic} {socket.gethostname()} {os.getppid()}"
    return DistContext(device=device, launch=launch, restarts=_restarts())


def _restarts() -> int:
    return _launched("TORCHELASTIC_RESTART_COUNT", "0")


_INSTEAD = "Start the ranks with --nproc N or torchrun, or unset WORLD_SIZE and RANK to train in one process."


def _launched(name: str, default: str) -> int:
    """Return a number that a launcher has set in the environment. Raises: ConfigError: what is set is no whole number."""
    given = os.environ.get(name, default)
    if not given.isdecimal():
        raise ConfigError(f"{name} is {shown(given)} in the environment, and is to be a whole number. {_INSTEAD}")
    return int(given)


def _init_from_environment() -> None:
    """Initialise torch.distributed as torchrun's environment says."""
    from torch.distributed.rendezvous import rendezvous

    rank, size, _ = map(_launched, ("RANK", "WORLD_SIZE", "MASTER_PORT"), "000")
    if rank >= size:
        raise ConfigError(
            f"RANK is {rank} in the environment, and WORLD_SIZE {size}, so ranks are 0 to {size - 1}. {_INSTEAD}"
        )
    try:
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    except ValueError as error:  # of a variable that is not set
        raise ConfigError(f"WORLD_SIZE is {size}, and {first_line(error)}. {_INSTEAD}") from None
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        # The store outlives a restart (torch 2.13), and a fast rank would find the address of one that is dead. Agents of
        # several machines count restarts apart, so there the name would not be the same on all.
        store = dist.PrefixStore(f"mezzo/attempt/{_restarts()}", store)  # type: ignore[attr-defined]  # not in __all__
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


@contextmanager
def join(device: str) -> Iterator[DistContext]:
    """Take part in the run that torchrun, or whoever initialised torch.distributed, has started; alone, be all of it.

    Args:
        device: a name, as `choose_device` takes it; of several accelerators each rank takes one.

    Raises:
        ConfigError: no such device here, or fewer than ranks.
        DistributedError: a rank is lost; raised in the block.
        FailedOnOtherRank: the block failed here, and another rank says why.

    Writes: torch.distributed's default group, for the length of the block; the level of the logger "mezzo" on ranks but 0.
    """
    is_ours = not is_running() and _launched("WORLD_SIZE", "1") > 1
    if not is_ours and not is_running():
        yield one_rank(choose_device(device))
        return
    if is_ours:
        _init_from_environment()
    group, key, is_done = Group(), f"mezzo/failed/{_restarts()}/{next(_joined)}", False
    try:
        with _errors_only(dist.get_rank() > 0), group.watching():
            mine = one_rank(_of_this_rank(choose_device(device)))
            yield replace(mine, rank=dist.get_rank(), group=group)
        is_done = True
    except MezzoError as error:
        if not group.is_first_at(key):
            raise FailedOnOtherRank(str(error)) from error
        raise
    finally:
        # gloo's threads abort a process that ends without this; NCCL would wait here for ranks that are lost.
        if is_ours and (is_done or not torch.cuda.is_available()):
            dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    """Return the device a name stands for; "auto" is the accelerator where there is one. Raises: ConfigError: no such device here."""
    if is_one_of(name, ["auto"]):
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        why = why_not_here(device)
    except (RuntimeError, TypeError, ValueError):  # torch's own names twenty
        why = "torch has no such device"
    if why:
        raise ConfigError(f"device={shown(name)} cannot be used here: {why}. Write cpu or auto.")
    return device


def _of_this_rank(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    here, count = _launched("LOCAL_RANK", "0"), torch.accelerator.device_count()
    if here >= count:
        raise ConfigError(
            f"{here + 1} or more ranks were started on a machine with {count} {device.type} devices. Start one for each, or write --device cpu."
        )
    torch.accelerator.set_device_index(here)
    return torch.device(device.type, here)


@contextmanager
def _errors_only(is_on: bool) -> Iterator[None]:
    logger = logging.getLogger("mezzo")
    before = logger.level
    if is_on:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _launch_environment(nproc: int) -> Iterator[None]:
    """Share the machine's threads among ranks that do not say how many they want, and keep the agent from talking."""
    before = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


def launch(command: Sequence[str], *, nproc: int, max_restarts: int) -> int:
    """Run `python -m mezzo` with some words as several ranks, which find each other by themselves; return 0, or the exit code of the first that failed and said why.

    Raises:
        ConfigError: fewer ranks than 1, fewer restarts of all of them than 0, or a launcher has started this process already.
        DistributedError: a rank ended without a word.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: give a number of processes of at least 1, or leave it out to start none.")
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: give 0 or more.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"--nproc {nproc} was asked for inside torchrun, which has started the ranks already. Leave --nproc out."
        )
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=max_restarts, logs_specs=DefaultLogsSpecs(),
    )  # fmt: skip
    with _launch_environment(nproc):
        try:
            elastic_launch(config, sys.executable)("-m", "mezzo", *command)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = int(failure.exitcode)
        except SignalException as error:
            return 128 + int(error.sigval)
        else:
            return 0
    if code > 0:
        return code
    raise DistributedError(
        f"rank {rank} was ended by {signal.Signals(-code).name}, and the others were stopped. Go on from the last checkpoint with --resume, or let --max-restarts do so."
    )

"""The ranks of a run as they are started on this machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import ConfigError, DistributedError


@contextmanager
def _surroundings(nproc: int) -> Iterator[None]:
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
    """Run `python -m mezzo` with some words as several ranks, which find each other by themselves.

    Args:
        command: the words.
        nproc: how many ranks.
        max_restarts: how often all are started again after one has failed.

    Returns:
        The exit code: 0, or that of the first rank that failed and said why.

    Raises:
        ConfigError: fewer ranks than 1, fewer restarts than 0, or a launcher has started this process already.
        DistributedError: a rank ended without a word.

    Writes: nothing of its own.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if nproc < 1 or max_restarts < 0:
        raise ConfigError(f"--nproc {nproc} must be at least 1, and --max-restarts {max_restarts} not negative.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"--nproc {nproc} was asked for inside torchrun, which has started the ranks already. Leave --nproc out."
        )
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=max_restarts, logs_specs=DefaultLogsSpecs(),
    )  # fmt: skip
    with _surroundings(nproc):
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
        f"rank {rank} was ended by {signal.Signals(-code).name}, and the others were stopped. Go on from the last checkpoint "
        "with --resume, or let --max-restarts do so."
    )

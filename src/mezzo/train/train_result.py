"""What a training run came to, and the memory it took."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError

_STATUS = Path("/proc/self/status")


class RunFolder:
    """Where the files of a run lie.

    Attributes:
        config: the options, JSON.
        checkpoint: what `--resume` goes on from.
        best: the model with the best dev accuracy and its tokenizer, as the transformers library has them.
        metrics: a JSON object a line, for every update and evaluation.
        curves: the picture of loss, accuracy and scale.
        result: the `TrainResult`, JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.checkpoint, self.best = path / "config.json", path / "checkpoint.pt", path / "best"
        self.metrics, self.curves, self.result = path / "metrics.jsonl", path / "curves.png", path / "result.json"

    @property
    def replaced(self) -> list[str]:
        """The names of what lies in the folder that a training replaces."""
        partial = self.path / "best.partial"
        own = (self.config, self.checkpoint, self.best, partial, self.metrics, self.curves, self.result)
        return [path.name for path in own if path.exists()]

    @property
    def is_run(self) -> bool | None:
        """Whether the options in it are those of a run: a model has a config.json too. None where none can be read."""
        try:
            saved = json.loads(self.config.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return {"data", "policy", "out"} <= saved.keys() if isinstance(saved, dict) else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, which exists, inside the block: a ConfigError while another process does. Not on Windows, nor where files cannot be locked. Writes: nothing."""
        if sys.platform == "win32":
            yield
            return
        import fcntl

        handle = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):  # of a file system without locks
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(
                        f"another process is training into {self.path}. Wait for its end, or write another --out."
                    ) from None
            yield
        finally:
            os.close(handle)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a training run came to.

    Attributes:
        accuracy: of the best model on the test rows.
        dev_accuracy: of the best model on the dev rows; None without evaluation.
        best_step: update after which the best model was saved.
        seconds: of training with its evaluations, over all resumes.
        peak_memory_bytes: most memory held by this rank: allocated on CUDA, the process's resident set elsewhere.
        final_loss: mean training loss of the last epoch.
        applied_steps: updates that changed the weights.
        skipped_steps: updates left out because gradients held inf or NaN.
        policy: the text of the policy of the last update, with what "auto" became on the device.
        device: where it ran, or the first rank did.
        ranks: how many processes shared the work.
        rows: rows in train, dev and test, and dropped by cleaning.
        comm: what this rank handed to gradient all-reduces: how many by dtype, and bytes; empty on one rank.
        report: precision, recall, F1 and support by class, on the test rows.
        report_text: the same as a table.
    """

    accuracy: float
    dev_accuracy: float | None
    best_step: int
    seconds: float
    peak_memory_bytes: int
    final_loss: float
    applied_steps: int
    skipped_steps: int
    policy: str
    device: str
    ranks: int
    rows: dict[str, int]
    comm: dict[str, Any]
    report: dict[str, Any]
    report_text: str
    out: Path

    @property
    def folder(self) -> RunFolder:
        """The files of the run."""
        return RunFolder(path=self.out)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**asdict(self), "out": str(self.out)}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: allocated on CUDA, this process's resident set elsewhere. Syncs: no."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():  # unlike ru_maxrss, not inherited from the process that started this one
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""The record of a run: one JSON object a line, one line an update or an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checkpoint import write_whole, writing

Record = dict[str, Any]


def read_metrics(path: Path) -> list[Record]:
    """Return the records of a metrics file; a last line that a kill cut short is left out.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        records = [json.loads(line) for line in lines[:-1]]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not _KEYS[record.get("kind") == "update"] <= record.keys():
            raise _damaged(path, f"line {number} is no record of an update or an evaluation")
    return records


_KEYS = ({"kind", "step", "loss", "accuracy"}, {"kind", "step", "loss", "scale", "applied"})
"""What a record of an evaluation has at least, and one of an update."""


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. Remove it, and the run goes on with a new one.")


class MetricsLog:
    """Appends records to a file; they reach it at every `flush`.

    Args:
        path: the file.
        step: records after this update belong to a part of the run that is done again; they are taken out.

    Raises:
        CheckpointError: the file cannot be written.

    Writes: the file.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [record for record in read_metrics(path) if record["step"] <= step] if step else []
        text = "".join(_line(record) for record in kept)
        write_whole(path, lambda file: file.write(text.encode()))
        self._pending: list[str] = []

    def add(self, **record: Any) -> None:
        """Note a record; "step" is required."""
        self._pending.append(_line(record))

    def flush(self) -> None:
        """Append what was noted. Raises: CheckpointError. Writes: the file."""
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.writelines(self._pending)
        self._pending.clear()


class NoLog:
    """Keeps no records: on ranks that do not write."""

    def add(self, **record: Any) -> None:
        """Forget a record."""

    def flush(self) -> None:
        """Do nothing."""


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"

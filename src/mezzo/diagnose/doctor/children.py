"""Traces the processes that a script starts: ranks of mp.spawn and torchrun, and whatever else imports torch."""

from __future__ import annotations

import atexit
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path

from torch.utils.data import get_worker_info

from ...trace import Trace, TraceReport

_FOLDER = "MEZZO_DOCTOR_FOLDER"
_PARENT = "MEZZO_DOCTOR_PARENT"
_STOPS = "MEZZO_DOCTOR_STOPS"
# Runs in every Python that is started with this folder on its path. It waits for torch, so that other programs pay nothing.
_SITECUSTOMIZE = """
import importlib.abc, importlib.machinery, os, sys

here = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        from mezzo.diagnose.doctor.children import start
        start()


if os.environ.get("MEZZO_DOCTOR_PARENT") != str(os.getpid()):
    sys.meta_path.insert(0, AfterTorch())
own = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != here])
if own is not None and own.loader is not None:
    own.loader.exec_module(importlib.util.module_from_spec(own))
"""


class _ChildEnough(BaseException):
    """Ends a rank: its report is written."""


def _write(trace: Trace) -> None:
    """Leave the report where the parent finds it, whole or not at all. Writes: one file."""
    if get_worker_info() is not None or not trace.record.ops:
        return
    folder = Path(os.environ[_FOLDER])
    part = folder / f"{os.getpid()}.part"
    part.write_bytes(pickle.dumps(trace.report))
    part.replace(folder / f"{os.getpid()}.report")


def _on_reached(trace: Trace) -> None:
    if get_worker_info() is None and trace.is_running and os.environ[_STOPS] == "1" and trace.report.faults:
        _write(trace)
        trace.stop(_ChildEnough("at the first fault"))


def start() -> None:
    """Trace this process until it ends. Writes: its modes, and a report in the doctor's folder."""
    if _FOLDER not in os.environ or os.environ.get(_PARENT) == str(os.getpid()):
        return
    trace = Trace(None, on_reached=_on_reached)
    trace.__enter__()
    pid = os.getpid()

    def finish() -> None:
        if trace.is_running and os.getpid() == pid:
            trace.__exit__(None, None, None)
            _write(trace)

    atexit.register(finish)
    # multiprocessing forgets what was registered before its own start
    util.register_after_fork(trace, lambda _: util.Finalize(None, finish, exitpriority=100))


@contextmanager
def followed_children(*, stop_at_fault: bool) -> Iterator[list[TraceReport]]:
    """Trace what the block starts as processes of their own.

    Args:
        stop_at_fault: end each at its first fault.

    Yields:
        A list that holds their reports after the block, by rank.

    Writes: the environment, and a folder of temporary files; both as they were after.
    """
    reports: list[TraceReport] = []
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="mezzo-doctor-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        path = os.pathsep.join(p for p in (folder, before.get("PYTHONPATH", "")) if p)
        os.environ.update({
            _FOLDER: folder, _PARENT: str(os.getpid()), _STOPS: "1" if stop_at_fault else "0", "PYTHONPATH": path,
        })  # fmt: skip
        try:
            yield reports
        finally:
            for name in (_FOLDER, _PARENT, _STOPS, "PYTHONPATH"):
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]
            # files of our own processes, in a folder that only this user can write
            found = [pickle.loads(p.read_bytes()) for p in Path(folder).glob("*.report")]
            reports += sorted(found, key=lambda r: r.record.rank)

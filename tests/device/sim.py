"""The simulated accelerator of sim.cpp: builds it, names it "sim", and writes down what runs on it.

Importing this registers a device with torch, which cannot be undone: only programs in a process of their own do.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tests.triton_interpreter import quicken
from torch import Tensor

from mezzo.kernels import registry
from mezzo.kernels.backends.cpp.build import compiler

_TORCH = Path(torch.__file__).parent
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mezzo-tests"
_FLAGS = ("-std=c++20", "-O0", "-shared", "-fPIC", "-w")


def build() -> Path:
    """Compile sim.cpp for this torch, once; most of a minute."""
    source = Path(__file__).with_name("sim.cpp")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    folders = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [compiler(), *_FLAGS, abi, *(f"-I{folder}" for folder in folders), f"-L{_TORCH / 'lib'}"]
    key = hashlib.sha256("\0".join([torch.__version__, source.read_text(), *command]).encode()).hexdigest()[:16]
    command += [str(source), "-lc10", "-ltorch_cpu", "-ltorch"]
    built = _CACHE / f"sim-{key}.so"
    if not built.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        partial.replace(built)
    return built


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("sim_device", build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _DeviceModule(ModuleType):
    """What torch looks for at torch.sim."""

    DEVICES = 2
    capturing: int | None = None
    """The device on which torch.cuda would say that a graph is captured, where it is the current one."""

    def is_current_stream_capturing(self) -> bool:
        return self.capturing == self.current_device() or native.is_capturing()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None: ...

    def device_count(self) -> int:
        return self.DEVICES

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        native.manual_seed(self.current_device(), seed)

    def manual_seed_all(self, seed: int) -> None:
        for device in range(self.DEVICES):
            native.manual_seed(device, seed)

    def get_rng_state(self, device: Any = "sim") -> Tensor:
        return torch.ops.sim.rng_state(self._index(device))

    def get_rng_state_all(self) -> list[Tensor]:
        return [self.get_rng_state(device) for device in range(self.DEVICES)]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        for device, state in enumerate(states):
            self.set_rng_state(state, device)

    def set_rng_state(self, state: Tensor, device: Any = "sim") -> None:
        torch.ops.sim.set_rng_state(self._index(device), state)

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index


native = _load()
torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _DeviceModule("torch.sim"))
torch.utils.generate_methods_for_privateuse1_backend()
land = native.land
"""Lets every copy on its way to the host arrive."""


@dataclass
class Seen:
    """What ran inside `watching`.

    Attributes:
        launches: kernels by name.
        stops: reads and blocking copies, each with the lines that led to it: the host waits for all that is queued.
        waits: for an event, a stream or a device that had not got there yet, likewise.
    """

    launches: collections.Counter[str] = field(default_factory=collections.Counter)
    stops: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def note(self, what: str, name: str, device: int) -> None:
        if what == "launch":
            self.launches[name] += 1
        else:
            lines = [f"{f.filename}:{f.lineno} {f.line}" for f in traceback.extract_stack() if _is_ours(f.filename)]
            known = self.waits if what == "wait" else self.stops
            known.append("\n    ".join([f"{what}: {name} on sim:{device}", *lines]))


def _is_ours(filename: str) -> bool:
    return f"{os.sep}mezzo{os.sep}" in filename or filename.endswith("program.py")


_observers: list[Callable[[str, str, int], None] | None] = [None]


def observe(note: Callable[[str, str, int], None] | None) -> None:
    """Call a function at each launch, stop and wait; None: no more."""
    _observers[0] = note
    native.observe(note)


@contextmanager
def watching() -> Iterator[Seen]:
    """Write down every launch, and every place where the host waits for the device."""
    seen = Seen()
    observe(seen.note)
    try:
        yield seen
    finally:
        observe(None)


@contextmanager
def late_uploads() -> Iterator[None]:
    """Have what is copied from pinned memory be there for the stream of the copy alone, until that is waited for."""
    native.set_late_uploads(True)
    try:
        yield
    finally:
        native.set_late_uploads(False)
        torch.accelerator.synchronize("sim:0")


def _on_host(tensor: Any) -> Any:
    """Return a tensor's memory as one of the CPU's; anything else as it is."""
    if not isinstance(tensor, Tensor) or tensor.device.type != "sim":
        return tensor
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )


def _by_address(arg: Any) -> Any:
    """Return an argument as a graph knows it: a tensor of the device by a number."""
    is_there = isinstance(arg, Tensor) and arg.device.type == "sim"
    return _There(torch.ops.sim.operand(arg)) if is_there else arg


@dataclass(frozen=True)
class _There:
    number: int


def _looked_up(arg: Any) -> Any:
    return torch.ops.sim.operand_there(arg.number) if isinstance(arg, _There) else arg


def _choose_anew() -> None:
    registry.choose.cache_clear()
    registry._triton_fails.cache_clear()


@contextmanager
def triton_kernels(failure: Exception | None = None, on: int | None = None) -> Iterator[None]:
    """Have mezzo's Triton kernels run here, by Triton's interpreter on the device's memory; each launch counts as one.

    A launch on another device than the current one is an error, as on a GPU.

    Args:
        failure: what each launch raises, as where a kernel cannot be compiled.
        on: the device where it does; None: on each.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, which is here
    from triton.runtime.interpreter import GridExecutor

    quicken()
    run, take, give = GridExecutor.__call__, GridExecutor._init_args_hst, GridExecutor._restore_args_dev

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        (device,) = {arg.device for arg in args if isinstance(arg, Tensor)}
        if failure is not None and on in (None, device.index):
            raise failure
        current = torch.accelerator.current_device_index()
        assert device.index == current, f"{self.fn.__name__} was launched on {current}, its tensors are on {device}"
        if _observers[0] is not None:
            _observers[0]("launch", f"triton::{self.fn.__name__}", current)
        if not native.is_capturing():
            run(self, *args, **kwargs)
        else:  # its tables are not filled yet
            known, named = [_by_address(arg) for arg in args], {name: _by_address(arg) for name, arg in kwargs.items()}
            native.record(
                lambda: run(self, *map(_looked_up, known), **{name: _looked_up(arg) for name, arg in named.items()})
            )

    GridExecutor.__call__ = launch
    GridExecutor._init_args_hst = lambda self, args, kwargs: (
        [_on_host(arg) for arg in args],
        {name: _on_host(arg) for name, arg in kwargs.items()},
    )
    GridExecutor._restore_args_dev = lambda *_: None
    _choose_anew()
    try:
        yield
    finally:
        GridExecutor.__call__, GridExecutor._init_args_hst, GridExecutor._restore_args_dev = run, take, give
        del os.environ["TRITON_INTERPRET"]
        _choose_anew()

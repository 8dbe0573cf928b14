"""Tensors of a GPU without memory, where there is no GPU: programs run on them as on one, and compute nothing.

Import it before torch, in a process of its own: from then on this process has a device "cuda", for tensors without memory alone. Rules of
torch.autocast and mezzo answer as they do for CUDA; attention and LSTMs call the kernels that CUDA has for them. A number
read from such a tensor is 1, so every check finds a healthy run.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes.util import find_library
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

TORCH = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]  # torch is installed


def _load_device() -> ctypes.CDLL:
    """Compile and load the device: torch asks once, when it is imported, whether there is one."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_gpu.so"
        subprocess.run(
            [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", "-w", f"-I{TORCH}/include",
             Path(__file__).with_suffix(".cpp"), "-o", library, f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu"],
            check=True,
        )  # fmt: skip
        needed = [*TORCH.glob("lib/libgomp*"), TORCH / "lib/libc10.so", TORCH / "lib/libtorch_cpu.so"]
        return [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in (*needed, library)][-1]


HAS_DEVICE = (TORCH / "lib/libtorch_cuda.so").exists() and find_library(
    "cuda"
) is not None  # follows such tensors by itself
LIBRARY = None if HAS_DEVICE or "torch" in sys.modules else _load_device()

import torch  # noqa: E402
import transformers.utils.import_utils  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mezzo.kernels import registry  # noqa: E402

if LIBRARY is not None:
    LIBRARY.take_guard()
    HAS_DEVICE = True

aten = torch.ops.aten
LSTM = 2
"""Of cuDNN's modes (cudnnRNNMode_t)."""


class _Healthy(TorchDispatchMode):
    """Answers 1 to whoever reads a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return True
        return func(*args, **(kwargs or {}))


@contextmanager
def entered() -> Iterator[None]:
    """Have every tensor made inside be a fake one, and programs find a GPU on which Triton runs.

    Raises:
        RuntimeError: torch was imported first.

    Writes: `torch.cuda` and transformers, which takes other paths where it sees fake tensors, until it ends; torch's kernels for CUDA.
    """
    if not HAS_DEVICE:
        raise RuntimeError("torch was imported before fake_gpu, and has found no GPU by then. Import fake_gpu first.")
    _take_kernels()
    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        patch.object(torch.backends.cudnn, "is_acceptable", return_value=False),
        patch.object(registry, "_triton_fails", return_value=""),
        patch.object(transformers.utils.import_utils, "is_fake_tensor", return_value=False),
        warnings.catch_warnings(),
        torch.autograd.set_multithreading_enabled(
            False
        ),  # a thread that lets go of a backward at Python's end aborts the process
        FakeTensorMode(),
        _Healthy(),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def placed(model: nn.Module) -> nn.Module:
    """Return the model with parameters and buffers of the same shapes on the GPU; shared ones stay shared. Writes: the model."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, given in held.items():
                if given is not None:
                    held[name] = made.setdefault(id(given), on_gpu(given))  # type: ignore[assignment]
    return model


def on_gpu(given: Tensor) -> Tensor:
    tensor = torch.empty(given.shape, dtype=given.dtype, device="cuda")
    return nn.Parameter(tensor, given.requires_grad) if isinstance(given, nn.Parameter) else tensor


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by flash, or with a mask or in fp32 by the memory-efficient kernel, as torch chooses on CUDA (sdp_utils.cpp)."""
    if enable_gqa:
        key, value = [t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value)]
    if mask is None and query.element_size() == 2:
        found: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, scale=scale)[0]
        return found
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, query.requires_grad, dropout, is_causal, scale=scale
    )[0]
    return found


def _lstm(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, is_training: bool, is_bidirectional: bool, is_batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """An LSTM by cuDNN, in a region with every operand cast, as torch does (AutocastRNN.cpp)."""
    if torch.is_autocast_enabled("cuda"):
        x, *rest = [t.to(torch.get_autocast_dtype("cuda")) for t in (x, *state, *weights)]
        state, weights = rest[:2], rest[2:]
    with torch.autocast("cuda", enabled=False):
        out, hidden, cell, _, _ = aten._cudnn_rnn(
            x, weights, len(weights) // num_layers, x.new_empty(0), *state, LSTM, state[0].shape[-1], 0, num_layers,
            is_batch_first, dropout, is_training, is_bidirectional, [], None,
        )  # fmt: skip
    return out, hidden, cell


def _lstm_backward(
    x: Tensor, weights: Sequence[Tensor], stride: int, buffer: Tensor, hidden: Tensor, cell: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    like = torch.empty_like
    return like(x), like(hidden), None if cell is None else like(cell), [like(w) for w in weights]


@cache
def _take_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradCUDA")
    library.impl("lstm.input", _lstm, "AutogradCUDA")
    library.impl("_cudnn_rnn_backward", _lstm_backward, "Meta")
    return library

"""Handing many tensors to one Triton launch: a table of addresses and a list of blocks, kept on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ....errors import ConfigError
from ...device_numbers import constant, is_in_foreign_graph, kept_on_device, on_device, table
from ...operands import FORMATS, MODES, Operands, addresses_of

BLOCK = 1024
"""Elements a program takes."""
WARPS = 8
"""Of a program: 4 elements a thread, so that no variant spills or holds more than 64 registers."""
SCALARS = 128
"""Parameters whose numbers a program writes."""


@kept_on_device
def blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return, for each block of each tensor, the tensor and the first element: shape (2, blocks), int64. Syncs: no."""
    pairs = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, BLOCK)]
    return on_device([index for index, _ in pairs] + [start for _, start in pairs], device).view(2, -1)


@functools.lru_cache(maxsize=64)
def is_aligned(addresses: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Say whether every address and every size is a multiple of 16: what the kernels' vectors of 4 elements need."""
    return not any(number % 16 for number in chain(addresses, sizes))


def launch(
    step_kernel: Any, operands: Operands, scalars: Tensor, step: Tensor, numbers: Sequence[float], **constants: object
) -> None:
    """Launch a step's kernel once over all tensors that it can walk.

    The kernel takes the addresses of weights, aux state, gradients and three lists of moments, one list after the other; sizes, 0 for one that
    is left to the reference; seeds and offsets of random bits; what `blocks` returns; `scalars` [n, 3] and `step` [n]; the factors of gradients
    and `found_inf`; the counts of tensors and blocks; then `numbers`, and `constants` beside those that every step has.

    Raises:
        ConfigError: somebody else than `amp.capture` captures a graph on the device.

    Writes: weights, their aux state, moments; none of them if `found_inf` is set. Syncs: no.
    """
    device, weights, grads = step.device, operands.weights, operands.grads
    if is_in_foreign_graph(device):
        raise ConfigError(
            f"an optimizer of mezzo's was stepped while a graph is captured on {device}: its kernel reads tables of addresses "
            "that the host fills, and nobody would keep them for the replays. Write step = amp.capture(function), take the "
            "step outside of the graph, or give the optimizer backend='reference'."
        )
    where = operands.layout
    if where is None or operands.grad_addresses is None or operands.grad_formats is None:
        return
    sizes, (grad_format,) = tuple(where.sizes), set(operands.grad_formats)
    lists = (where.values, where.aux, operands.grad_addresses, *where.moments, *[()] * (3 - len(where.moments)))
    addresses = tuple(chain.from_iterable(held or [0] * len(sizes) for held in lists))
    tables = [table(held, device) for held in (addresses, sizes, tuple(where.seeds), tuple(where.offsets))]
    of_blocks = blocks(sizes, device)
    scaled = grads.inv_scale is not None or grads.clip_coef is not None
    inv_scale, clip_coef, found = (_number(x, device) for x in (grads.inv_scale, grads.clip_coef, grads.found_inf))
    count = of_blocks.shape[1]
    start(
        step_kernel, count, device,
        *tables, of_blocks, scalars, step, inv_scale, clip_coef, found,
        len(weights.values), count, *numbers, **constants,
        MODE=MODES[weights.mode], VALUE=FORMATS[weights.values[0].dtype], GRAD=grad_format,
        MEAN=FORMATS[where.moment_dtype], MAXIMIZE=grads.maximize, SCALED=scaled, GUARDED=grads.found_inf is not None, SIZE=BLOCK,
        ALIGNED=is_aligned(addresses, sizes), num_warps=WARPS,
    )  # fmt: skip
    torch.autograd.graph.increment_version(list(weights.values))


def launch_scalars(scalars_kernel: Any, step: Tensor, *numbers: float) -> Tensor:
    """Return the three numbers that a kernel writes for each step count: [n, 3], fp32, on its device. Syncs: no."""
    found = torch.empty((*step.shape, 3), dtype=torch.float32, device=step.device)
    count = step.numel()
    start(scalars_kernel, -(-count // SCALARS), step.device, step, found, count, *numbers, SIZE=SCALARS, num_warps=4)
    return found


def launch_once(one_kernel: Any, first: Tensor, *rest: object, **constants: object) -> None:
    """Launch one program of one warp where the first argument lies, for what is a handful of numbers. Writes: as the kernel. Syncs: no."""
    start(one_kernel, 1, first.device, first, *rest, **constants, num_warps=1)


def start(a_kernel: Any, programs: int, device: torch.device, *args: object, **constants: Any) -> None:
    """Launch a kernel on a device, by the compiled one of the last such launch: Triton's own way to it takes the host five times as long.

    No whole number among `args` may be compiled in; `constants` are the rest of its arguments, and options of Triton's.

    Writes: what the kernel does. Syncs: no.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    aligned = [address % 16 == 0 for address in addresses_of(tensors)]
    key = (id(a_kernel), device, *map(_kind, args), *aligned, *constants.values())
    known = _compiled.get(key)
    with on(device):
        if known is not None:
            compiled_kernel, rest = known
            compiled_kernel[programs, 1, 1](*args, *rest)
            return
        compiled = a_kernel[(programs,)](*args, **constants, enable_fp_fusion=False)
    if compiled is not None:  # the interpreter has none
        _compiled[key] = compiled, [constants[name] for name in a_kernel.arg_names[len(args) :]]


def _kind(arg: object) -> tuple[object, ...]:
    """Return what of an argument Triton compiles in, beside whether an address is a multiple of 16."""
    if isinstance(arg, Tensor):
        return arg.dtype, _IS_HIP and arg.untyped_storage().nbytes() < _WORD
    return type(arg), isinstance(arg, int) and not -_WORD <= arg < _WORD


_IS_HIP, _WORD = torch.version.hip is not None, 1 << 31
_compiled: dict[tuple[object, ...], tuple[Any, list[Any]]] = {}
"""Compiled kernels, and the constants that they take after their arguments."""


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on a device: by itself it takes the current one, whatever the pointers."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return nullcontext()
    return torch.accelerator.device_index(device.index)


def _number(given: Tensor | None, device: torch.device) -> Tensor:
    """Return a number as a kernel reads it; 1 where there is none. Syncs: no."""
    return constant(1.0, device) if given is None else given.reshape(()).to(torch.float32)

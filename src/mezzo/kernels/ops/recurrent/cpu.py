"""One direction of a layer of an LSTM or a GRU on the CPU, forward and back in time; `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...._torch import has_no_memory
from ...backends.cpp.batch import int64s
from ...backends.cpp.build import Kernel
from ...operands import addresses_or_none, check_read
from . import is_gru

_kernel = Kernel(
    "recurrent", forward="PPPPiPi", backward="PPPPPiPi", products=":q", forward_workspace="P:q",
    backward_workspace="P:q",
)  # fmt: skip

GROUP = 16
"""Units that lie together in what forward keeps."""
_LAYERS = "recurrent layers"


def forward(operands: Sequence[Tensor], is_reversed: bool, keeps: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take a layer through all steps of time.

    Products are of bf16, sums, gates and states fp32; any number of threads gives the same bits.

    Args:
        operands: x [T, B, D], h [B, H], the state [B, H], which is c or a GRU's h, w_ih [4 H, D] or [3 H, D], w_hh [4 H, H]
            or [3 H, H], and both biases [4 H] or [3 H] if it has any; bf16, the state fp32 or bf16.
        is_reversed: time runs backward.
        keeps: whether backward may follow.

    Returns:
        y, which is h, bf16 [T, B, H]; the states from the first on, fp32 [T + 1, B, H up to a multiple of 16], of an LSTM that does not
        keep only the last, [1, ...]; for backward what it needs of the gates, bf16 [T, B, groups of 16 units, 4, 16], else None.

    Syncs: no.
    """
    x = operands[0] if operands[0].stride(-1) == 1 else operands[0].contiguous()
    h, state, *weights = (one.contiguous() for one in operands[1:])
    (steps, batch, _), units = x.shape, h.shape[-1]
    groups, has_all = -(-units // GROUP), keeps or is_gru(operands)
    y = torch.empty((steps, batch, units), dtype=torch.bfloat16, device="cpu")
    states = torch.empty((steps + 1 if has_all else 1, batch, groups * GROUP), dtype=torch.float32, device="cpu")
    states[-1 if is_reversed else 0] = torch.constant_pad_nd(state, (0, groups * GROUP - units))
    kept = torch.empty((steps, batch, groups, 4, GROUP), dtype=torch.bfloat16, device="cpu") if keeps else None
    sizes = _sizes(operands)
    memory = torch.empty(_kernel.forward_workspace(sizes) // 4, dtype=torch.float32, device="cpu")
    addresses = addresses_or_none([x, y, *weights, *[None] * (4 - len(weights)), h, kept, states, memory])
    threads = min(torch.get_num_threads(), batch)
    strides = [*x.stride()[:2], *y.stride()[:2], states.stride(0) * has_all]
    _kernel.forward(
        (ctypes.c_void_p * 8)(*addresses[:8]), addresses[8], int64s(strides), sizes, is_reversed, addresses[9], threads
    )  # fmt: skip
    return y, states, kept


def backward(
    grads: Sequence[Tensor | None], operands: Sequence[Tensor], y: Tensor, states: Tensor, kept: Tensor,
    is_reversed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Go back through all steps of time, after `forward`, which took the operands and returned `y`, `states` and `kept`.

    `grads` are of y [T, B, H], of the last h and of the last state [B, H], in the state's dtype; None: none.

    Returns:
        the gradients of the sums that the gates are made of, bf16, of an LSTM [1, T, B, 4 H], of a GRU [2, T, B, 3 H]: of what
        the input adds, then of what h adds; and of the first state, [B, H], in its dtype.

    Raises: OperandError: one that is not what it is said to be. Syncs: no.
    """
    grads = [None if one is None or has_no_memory(one) else one.resolve_neg() for one in grads]
    _check(grads, operands, y, states, kept)
    states, kept = states.contiguous(), kept.contiguous()  # hooks on saved tensors may lay them out anew
    (steps, batch, units), sums = y.shape, operands[4].shape[0]
    dy, dh = (None if one is None else one.to(torch.bfloat16) for one in grads[:2])
    dy = dy if dy is None or dy.stride(-1) == 1 else dy.contiguous()
    w_hh, dh = (None if one is None else one.contiguous() for one in (operands[4], dh))
    d_sums = torch.empty((1 + is_gru(operands), steps, batch, sums + sums % 2), dtype=torch.bfloat16, device="cpu")
    d_sums[..., sums:] = 0  # read in pairs
    d_state = torch.zeros((batch, states.shape[-1]), dtype=torch.float32, device="cpu")
    if grads[2] is not None:
        d_state[:, :units] = grads[2]
    sizes = _sizes(operands)
    memory = torch.empty(_kernel.backward_workspace(sizes) // 4, dtype=torch.float32, device="cpu")
    addresses = addresses_or_none([dy, dh, w_hh, kept, d_sums[0], d_sums[-1], states, d_state, memory])
    _kernel.backward(
        (ctypes.c_void_p * 6)(*addresses[:6]), *addresses[6:8], int64s([0, 0] if dy is None else list(dy.stride()[:2])), sizes,
        is_reversed, addresses[8], min(torch.get_num_threads(), batch),
    )  # fmt: skip
    return d_sums[..., :sums], d_state[:, :units].to(operands[2].dtype)


def _sizes(operands: Sequence[Tensor]) -> Any:
    units = operands[1].shape[-1]
    return int64s([*operands[0].shape, units, operands[4].shape[0] // units])


def _check(grads: Sequence[Tensor | None], operands: Sequence[Tensor], y: Tensor, states: Tensor, kept: Tensor) -> None:
    """Refuse what hooks on saved tensors changed."""
    (steps, batch, units), inputs, low, wide = y.shape, operands[0].shape[-1], torch.bfloat16, operands[2].dtype
    of_batch, of_sums, groups = (batch, units), ((3 if is_gru(operands) else 4) * units,), -(-units // GROUP)
    given = {
        "input": ((steps, batch, inputs), low), "first h": (of_batch, low), "first state": (of_batch, wide),
        "input weight": ((*of_sums, inputs), low), "hidden weight": ((*of_sums, units), low),
        "input bias": (of_sums, low), "hidden bias": (of_sums, low),
    }  # fmt: skip
    for (name, (shape, dtype)), one in zip(given.items(), operands, strict=False):
        check_read(_LAYERS, name, one, shape, dtype)
    for name, grad, shape in zip(["output", "last h", "last state"], grads, [y.shape, of_batch, of_batch], strict=True):
        if grad is not None:
            check_read(_LAYERS, f"gradient of the {name}", grad, shape, wide)
    check_read(_LAYERS, "output", y, y.shape, low)
    check_read(_LAYERS, "states", states, (steps + 1, batch, groups * GROUP), torch.float32)
    check_read(_LAYERS, "gates", kept, (steps, batch, groups, 4, GROUP), low)


@functools.cache
def products() -> int:
    """Return what multiplies: 1 pairs of bf16, 0 nothing that the kernel is written for, or tiles, on which torch's is the faster one. Host only."""
    return int(_kernel.products())

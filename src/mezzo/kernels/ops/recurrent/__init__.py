"""Layers of LSTMs and GRUs in bf16 on the CPU, forward and backward, by a kernel of mezzo's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...._torch import dispatch_modes, is_unwatched
from ...dtensor import PLAIN, is_wrapped
from ...operands import FORMATS
from ...registry import compiled

SMALLEST = 2_300_000
"""Products of an LSTM layer's gate from which it is faster than torch's, for each of its rows and for 16 more, since weights are cast and packed
whatever their number: 1.06 times at 64 rows of 128 units, 0.93 at 256 of 64 (EPYC, one thread)."""
FEWEST_GRU_STEPS = 5
"""Steps of time from which a GRU of any size is faster than torch's, which computes each by a dozen ops: 1.03 to 2.7 times at 6, 0.98 to 1.5 at 4."""


def is_large_lstm(rows: int, inputs: int, units: int) -> bool:
    """Whether a layer of an LSTM is of a size, by rows of its input (T times B), their width and its units, from which `recurrent` is faster than torch's. Host only."""
    return (rows + 16) * units * (inputs + units) >= SMALLEST


def takes_recurrent(
    input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> bool:  # fmt: skip
    """Whether `recurrent` takes these arguments of `torch.lstm` or `torch.gru`, is faster than torch unless they are small, and is seen by nobody. Host only.

    With `train` there is dropout: a backward pass may follow although gradients are off.
    """
    state = _state(hx)
    given = (input, *state, *params)
    if not (is_unwatched() and all([_is_plain(one) for one in given])):
        return False
    if not (input.dim() == state[0].dim() == 3 and input.numel() > 0 < state[0].numel()):
        return False
    directions, units, batch = 1 + bidirectional, state[0].shape[-1], input.shape[0 if batch_first else 1]
    sums = (4 if len(state) == 2 else 3) * units
    shapes: list[tuple[int, ...]] = [(num_layers * directions, batch, units)] * len(state)
    for layer in range(num_layers):
        inputs = directions * units if layer else input.shape[2]
        shapes += directions * [(sums, inputs), (sums, units), *[(sums,)] * (2 * has_biases)]
    return (
        [one.shape for one in given[1:]] == shapes  # another number of weights: projections
        and (train or len(state) == 1 or _may_be_differentiated(given))
        and 2 * batch >= torch.get_num_threads()  # they share out the batch
        and (kernel := compiled("recurrent")) is not None
        and kernel.products() > 0
    )


def _state(hx: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [hx] if isinstance(hx, Tensor) else hx


def _is_plain(tensor: Tensor) -> bool:
    is_strided = type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided
    return is_strided and tensor.dtype in FORMATS and not tensor.is_neg()


def _may_be_differentiated(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any([one.requires_grad for one in tensors])


def recurrent(
    input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return output and last h and c of an LSTM, or last h of a GRU, for which `takes_recurrent` says yes: all that torch.autocast to bf16 returns.

    `input` is [T, B, D], fp32, bf16 or fp16, or [B, T, D] with `batch_first`; `hx` the first h and c, or the first h alone, a GRU's, [layers times
    directions, B, H] each; `params` of each direction of each layer w_ih, w_hh and, with biases, b_ih and b_hh. Dropout is drawn as torch draws it.

    Returns:
        [T, B, directions times H], or [B, T, ...], and what is like `hx`; bf16, of a GRU fp32 unless its first h is bf16.

    Syncs: no.
    """
    state = _state(hx)
    keeps, is_lstm, low = _may_be_differentiated((input, *state, *params)), len(state) == 2, torch.bfloat16
    x, first_h = input.transpose(0, 1) if batch_first else input, state[0].to(low).unbind(0)
    first_c = state[-1].to(low if is_lstm else torch.promote_types(state[0].dtype, low)).unbind(0)
    directions, count = 1 + bidirectional, 2 + 2 * has_biases
    last: list[list[Tensor]] = []
    for layer in range(num_layers):
        outs, x = [], x.to(low)
        for n in range(layer * directions, (layer + 1) * directions):
            weights = [one.to(low) for one in params[n * count : (n + 1) * count]]
            y, *ends = _Layer.apply(n % directions == 1, keeps, x, first_h[n], first_c[n], *weights)  # type: ignore[no-untyped-call]  # torch's own
            outs.append(y)
            last.append(ends if is_lstm else ends[1:])
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        if dropout and train and layer + 1 < num_layers:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(ends) for ends in zip(*last, strict=True))


class _Layer(torch.autograd.Function):
    """One direction of one layer; torch's own where somebody watches ops, or differentiates twice."""

    @staticmethod
    def forward(ctx: Any, is_reversed: bool, keeps: bool, *operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, states, kept = compiled("recurrent").forward(operands, is_reversed, keeps)
        ctx.set_materialize_grads(False)
        if keeps:
            ctx.save_for_backward(y, states, kept, *operands)
            ctx.is_reversed = is_reversed
        end, real = 0 if is_reversed else -1, states[..., : y.shape[-1]]
        last = y[end].clone(), real[end].to(operands[2].dtype, copy=True)
        if is_gru(operands):  # not rounded twice, and as torch's it may be written
            y = (real[:-1] if is_reversed else real[1:]).to(operands[2].dtype, copy=True)
        return y, *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        y, states, kept, *operands = ctx.saved_tensors
        wanted, there = ctx.needs_input_grad[2:], [grad for grad in grads if grad is not None]
        if not there:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() or dispatch_modes() or any(map(is_wrapped, there)):
            return (None, None, *gradients(grads, operands, ctx.is_reversed, wanted))
        d_sums, d_c = compiled("recurrent").backward(grads, operands, y, states, kept, ctx.is_reversed)
        return (None, None, *_gradients(d_sums, d_c, operands, y, ctx.is_reversed, wanted))


def _gradients(
    d_sums: Tensor, d_c: Tensor, operands: Sequence[Tensor], y: Tensor, is_reversed: bool, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of a layer's operands from those of the sums that its gates are made of."""
    x, h, _, w_ih, w_hh, *_ = operands
    of_x, of_h = d_sums[0].flatten(0, 1), d_sums[-1].flatten(0, 1)
    before = [y[1:], h[None]] if is_reversed else [h[None], y[:-1]]
    found: list[Tensor | None] = [
        (of_x @ w_ih).view_as(x) if wanted[0] else None,
        d_sums[-1, -1 if is_reversed else 0] @ w_hh if wanted[1] else None,
        d_c if wanted[2] else None,
        of_x.t() @ x.flatten(0, 1) if wanted[3] else None,
        of_h.t() @ torch.cat(before).flatten(0, 1) if wanted[4] else None,
    ]
    if any(wanted[5:]):
        sums = d_sums.flatten(1, 2).sum(1, dtype=torch.float32).to(torch.bfloat16)
        found += [one.clone() if want else None for one, want in zip((sums[0], sums[-1]), wanted[5:], strict=True)]
    return found + [None] * (len(operands) - len(found))


def is_gru(operands: Sequence[Tensor]) -> bool:
    """Whether operands of a layer, as `gradients` takes them, are those of a GRU, by the rows of a weight. Host only."""
    return operands[4].shape[0] == 3 * operands[1].shape[-1]


def gradients(
    grads: Sequence[Tensor | None], operands: Sequence[Tensor], is_reversed: bool, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Run the layer again and return the gradients of its operands, None where it is not wanted; differentiable where gradients are on. Syncs: no.

    Args:
        grads: of its results y [T, B, H], h [B, H] and c [B, H]; None: none. A GRU's c is its h.
        operands: x [T, B, D], h [B, H], c [B, H], then w_ih [4 H, D] and w_hh [4 H, H], and both biases [4 H] if it has any;
            of a GRU 3 H, and c is h as it was before it was rounded, which is read.
        is_reversed: time runs backward.
        wanted: of each operand, whether its gradient is.
    """
    again = torch.is_grad_enabled()
    given = [one if again else one.detach().requires_grad_(want) for one, want in zip(operands, wanted, strict=True)]
    with torch.enable_grad():
        found = zip(layer(given, is_reversed), grads, strict=True)
        outs, there = zip(*[(out, grad) for out, grad in found if grad is not None], strict=True)
        inputs = [one for one, want in zip(given, wanted, strict=True) if want]
        got = iter(torch.autograd.grad(outs, inputs, there, create_graph=again, allow_unused=True))
    return [next(got) if want else None for want in wanted]


def layer(operands: Sequence[Tensor], is_reversed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last h and the last c of a layer, given what `gradients` is given. Syncs: no."""
    x, h, c, *weights = operands
    x = x.flip(0) if is_reversed else x
    flags = len(weights) == 4, 1, 0.0, True, False, False
    if is_gru(operands):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # the state may be fp32
            y, h_n = torch.gru(x, c[None], weights, *flags)
        c_n = h_n
    else:
        y, h_n, c_n = torch.lstm(x, (h[None], c[None]), weights, *flags)
    return y.flip(0) if is_reversed else y, h_n[0], c_n[0]

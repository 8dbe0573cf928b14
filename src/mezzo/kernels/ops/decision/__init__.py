"""Definition of a step's decision, from what was found which optimizers skip and by how much gradients are clipped: plain torch on one vector."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

CLIP_EPS = 1e-6
"""Added to the norm by torch.nn.utils.clip_grad_norm_, so that clipping equals torch's."""
_ONE = ("early", "elsewhere", "loss_bad", "buffers_bad", "scale", "grad_norm", "flushed", "max_norm")
_ORDER = (
    "gradients_bad", "skipped",
    "early", "elsewhere", "optimizers", "loss_bad", "buffers_bad",
    "scale", "grad_norm", "flushed", "max_norm", "norms",
    "clip_coefs", "divisors",
)  # fmt: skip
_DECIDED = ("gradients_bad", "skipped", "clip_coefs", "divisors")


@functools.cache
def decision_slots(num: int) -> Mapping[str, slice]:
    """Return where each number stands in the vector of a decision about `num` optimizers.

    Found are flags, each 0 or anything else: `early` and `elsewhere` beside those of the `optimizers`, `loss_bad` and
    `buffers_bad`. Given are `scale`, `grad_norm`, `flushed`, `max_norm` and the `norms` of the optimizers. Decided are
    `gradients_bad`, and for each optimizer `skipped`, `clip_coefs` and `divisors`.
    """
    lengths = [1 if name in _ONE or name == "gradients_bad" else num for name in _ORDER]
    ends = list(accumulate(lengths))
    return {name: slice(end - n, end) for name, n, end in zip(_ORDER, lengths, ends, strict=True)}


def num_decided(vector: Tensor) -> int:
    """Return the number of optimizers that the vector of a decision is about. Host only."""
    return (vector.numel() - len(_ONE) - 1) // 5


def pack_decision(numbers: Mapping[str, Sequence[Tensor]], zero: Tensor) -> Tensor:
    """Return a vector with what was found and given, each of shape (), in its slots, and zeros where nothing is decided yet.

    Shape (9 + 5 n,) for n optimizers, fp32, on the device of all. Syncs: no.
    """
    num = len(numbers["norms"])
    given = {**dict.fromkeys(_DECIDED, (zero,) * num), "gradients_bad": (zero,), **numbers}
    every = [value for name in _ORDER for value in given[name]]
    return torch.stack([value if value.dtype is torch.float32 else value.to(torch.float32) for value in every])


@torch.no_grad()
def decide_(vector: Tensor, num: int, *, together: bool, clips: bool) -> None:
    """Decide which of `num` optimizers skip, and by how much gradients are clipped.

    With `together` all skip if one must, and gradients are clipped by the norm of all; else each by its own. Without `clips` the slots of
    clipping stay as they are.

    Writes: `vector`: flags become 0 or 1, and the decided slots are filled. `divisors` are what torch's fused optimizers take:
    the loss scale over the clip coefficient. Syncs: no.
    """
    at = decision_slots(num)
    flags = vector[at["early"].start : at["buffers_bad"].stop].ne_(0.0)
    gradients, skipped = vector[0], vector[at["skipped"]]
    torch.amax(flags[: 2 + num], 0, out=gradients)
    if together:
        torch.amax(flags.expand(num, -1), 1, out=skipped)
    else:
        early, _, *own, loss, buffers = flags.unbind()
        # a loss that spoilt no optimizer's gradients: then all
        unexplained = torch.where(gradients != 0, gradients - gradients, loss)
        all_skip = torch.stack([early, buffers, unexplained]).amax()
        torch.maximum(torch.stack(own), all_skip, out=skipped)
    if clips:
        norms = vector[at["grad_norm"]].expand(num) if together else vector[at["norms"]]
        wanted = (norms + CLIP_EPS).reciprocal() * vector[at["max_norm"]]
        coefs = torch.clamp(wanted, max=1.0, out=vector[at["clip_coefs"]])
        torch.div(vector[at["scale"]], coefs, out=vector[at["divisors"]])


move_scale_ = None
"""The loss scale is moved by `loss_scale.next_state`, its definition; Triton's kernel of that name does it in one launch."""

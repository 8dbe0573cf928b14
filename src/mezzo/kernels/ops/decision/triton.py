"""A step's decision on CUDA: one launch, and one for the loss scale; the folder and `next_state` define them."""

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...backends.triton import launch_once
from . import CLIP_EPS, decision_slots, num_decided


@triton.jit
def flag_at(p_flag):
    """Return 1 where a flag is not 0, and write it back so."""
    flag = (tl.load(p_flag) != 0).to(tl.float32)
    tl.store(p_flag, flag)
    return flag


@triton.jit
def decide_kernel(
    p_vector,
    NUM: tl.constexpr, TOGETHER: tl.constexpr, CLIPS: tl.constexpr, SKIPPED: tl.constexpr, EARLY: tl.constexpr,
    ELSEWHERE: tl.constexpr, OPTIMIZERS: tl.constexpr, LOSS_BAD: tl.constexpr, BUFFERS_BAD: tl.constexpr, SCALE: tl.constexpr,
    GRAD_NORM: tl.constexpr, MAX_NORM: tl.constexpr, NORMS: tl.constexpr, CLIP_COEFS: tl.constexpr, DIVISORS: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Decide for each optimizer. One program; fp32, each operation rounded as torch rounds it."""
    early, loss, buffers = flag_at(p_vector + EARLY), flag_at(p_vector + LOSS_BAD), flag_at(p_vector + BUFFERS_BAD)
    gradients = tl.maximum(early, flag_at(p_vector + ELSEWHERE))
    for i in tl.static_range(NUM):
        gradients = tl.maximum(gradients, flag_at(p_vector + OPTIMIZERS + i))
    tl.store(p_vector, gradients)
    everybody = tl.maximum(early, tl.maximum(buffers, tl.where(gradients != 0, 0.0, loss)))
    for i in tl.static_range(NUM):
        if TOGETHER:
            tl.store(p_vector + SKIPPED + i, tl.maximum(gradients, tl.maximum(loss, buffers)))
        else:
            tl.store(p_vector + SKIPPED + i, tl.maximum(everybody, tl.load(p_vector + OPTIMIZERS + i)))
        if CLIPS:
            norm = tl.load(p_vector + (GRAD_NORM if TOGETHER else NORMS + i))
            coef = tl.div_rn(1.0, norm + EPS) * tl.load(p_vector + MAX_NORM)
            coef = tl.where(coef > 1.0, 1.0, coef)
            tl.store(p_vector + CLIP_COEFS + i, coef)
            tl.store(p_vector + DIVISORS + i, tl.div_rn(tl.load(p_vector + SCALE), coef))


@functools.cache
def constants(num: int) -> dict[str, float]:
    """Return what the kernel knows of a vector when it is compiled: where each number stands, for a number of optimizers."""
    begins = {name.upper(): slot.start for name, slot in decision_slots(num).items()}
    return {"NUM": num, "EPS": CLIP_EPS, **{name: begins[name] for name in decide_kernel.arg_names if name in begins}}


def decide_(vector: Tensor, num: int, *, together: bool, clips: bool) -> None:
    """Decide; arguments and writes are those of `decision.decide_`, the results its bits. Syncs: no."""
    launch_once(decide_kernel, vector, **constants(num), TOGETHER=together, CLIPS=clips)


@triton.jit(do_not_specialize=["interval", "hysteresis"])
def move_scale_kernel(
    p_vector, p_scale, p_tracker, p_row, growth, backoff, low, high, interval, hysteresis,
    LOSS: tl.constexpr, BUFFERS: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    """Move the loss scale and its counters, unless what was found says nothing about them."""
    found = tl.load(p_vector) != 0
    if (tl.load(p_vector + LOSS) == 0) & (found | (tl.load(p_vector + BUFFERS) == 0)):
        scale = tl.load(p_scale)
        row = tl.where(found, tl.load(p_row) + 1, 0)
        tracker = tl.where(found, 0, tl.load(p_tracker) + 1)
        if DYNAMIC:
            grows = tracker >= interval
            larger, smaller = scale * growth, scale * backoff
            larger = tl.where(larger > high, high, larger)
            smaller = tl.where(smaller < low, low, smaller)
            moved = tl.where(found & (row >= hysteresis), smaller, scale)
            tl.store(p_scale, tl.where(grows & (larger < float("inf")), larger, moved))
            tracker = tl.where(grows, 0, tracker)
        tl.store(p_tracker, tracker)
        tl.store(p_row, row)


def move_scale_(vector: Tensor, state: Any, *numbers: float, dynamic: bool) -> None:
    """Move the loss scale after a step, in one launch; bit for bit `loss_scale.next_state`.

    Of `state`, a `loss_scale.LossScale`, each has shape (), fp32 or int32. `numbers` are the factors of growth and of backoff, floor, ceiling, clean steps before
    growth, skipped steps before backoff; a scale that is not dynamic has its steps counted alone.

    Writes: `state`; nothing after a bad loss, or bad buffers beside good gradients. Syncs: no.
    """
    at = decision_slots(num_decided(vector))
    launch_once(
        move_scale_kernel, vector, state.scale, state.growth_tracker, state.skipped_in_a_row, *numbers,
        LOSS=at["loss_bad"].start, BUFFERS=at["buffers_bad"].start, DYNAMIC=dynamic,
    )  # fmt: skip

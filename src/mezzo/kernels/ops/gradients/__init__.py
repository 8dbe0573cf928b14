"""One pass over the gradients before a step, what it says about the step, and how the step itself reads them: 16 bit, scaled, perhaps not finite."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ...._torch import foreach_add_
from ....read_only import read_only
from ... import registry
from ...device_numbers import kept_on_device, on_device
from ...dtensor import PLAIN, as_plain, local_tensors

# A running fp32 sum stops absorbing terms once it is 2^24 times as large as they are: a 33-million-element
# gradient summed in one run came out 0.2 % short. Parts this long, then their norms, keep it below 1e-5,
# and a part in fp32 (256 KiB) stays in a core's cache.
CHUNK = 65536


def tensor_norms(grads: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient: dense, real, of one device and dtype. Syncs: no.

    Shape (len(grads),), fp32, that device; inf or NaN where an element is, or where fp32 cannot hold the square.
    """
    return torch.stack([_norm(grad) for grad in grads])


def _norm(grad: Tensor) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    flat = grad.flatten()
    if grad.device.type != "cpu" and len(flat) > CHUNK:  # in two launches however many chunks there are
        num_whole = len(flat) // CHUNK * CHUNK
        chunks = torch.linalg.vector_norm(flat[:num_whole].view(-1, CHUNK), dim=1, dtype=wide)
        if num_whole < len(flat):
            chunks = torch.cat([chunks, torch.linalg.vector_norm(flat[num_whole:], dtype=wide).view(1)])
    else:
        found = [torch.linalg.vector_norm(part, dtype=wide) for part in torch.split(flat, CHUNK)]
        chunks = torch.stack(found) if len(found) > 1 else found[0]
    whole: Tensor = torch.linalg.vector_norm(chunks) if chunks.dim() else chunks
    return whole.to(torch.float32)


def add_one_(counts: Sequence[Tensor]) -> None:
    """Add 1 to the step counts of one optimizer on one device: torch takes as long for them as for small weights. Writes: them. Syncs: no."""
    chosen = registry.choose("gradients", counts[0].device, torch.float32)
    plain = [type(c) is Tensor and c.dtype is torch.float32 and c.is_cpu and not c.is_inference() for c in counts]
    if chosen.backend == "cpu" and all(plain):
        chosen.module.add_one_(counts)
    else:
        foreach_add_(list(counts), 1)


@read_only
class ScaledGradients:
    """Gradients of one device, and how a step must read them.

    Attributes:
        values: any shapes and floating dtypes, each in its own.
        inv_scale: shape (), fp32: multiplies every gradient first; None: not scaled.
        clip_coef: shape (), fp32: multiplies after that; None: not clipped.
        found_inf: shape () or (1,), fp32: anything but 0 leaves everything as it is; None: the step is taken.
        maximize: step up the gradient instead of down.
    """

    values: Sequence[Tensor]
    inv_scale: Tensor | None = None
    clip_coef: Tensor | None = None
    found_inf: Tensor | None = None
    maximize: bool = False

    @property
    def skip(self) -> Tensor | None:
        """Whether the step must change nothing: shape (), bool, on the device; None: it may. Syncs: no."""
        return None if self.found_inf is None else self.found_inf.reshape(()) != 0

    def read(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return one gradient in `dtype`, no narrower than it is, unscaled, clipped and pointing the way to step down; itself if nothing had to be done. Syncs: no."""
        grad = self.values[index].to(dtype)
        for factor in (self.inv_scale, self.clip_coef):
            if factor is not None:
                grad = grad * factor.reshape(())
        return -grad if self.maximize else grad


class LateNorm:
    """The norm of fp32 norms that the host knows, to torch's last bit: `float` makes it, of three tensor ops, which few steps need. Host only."""

    __slots__ = ("_norms",)

    def __init__(self, norms: array[float]) -> None:
        self._norms = norms

    def __float__(self) -> float:
        return float(_norm_of(torch.frombuffer(self._norms, dtype=torch.float32)).numpy())

    def __repr__(self) -> str:
        return repr(float(self))

    def is_finite(self) -> bool:
        """Whether it is neither inf nor NaN."""
        return sum(self._norms) < _LARGE or math.isfinite(float(self))

    def is_at_most(self, bound: float, scale: float) -> bool:
        """Whether it is, times `scale`, no larger than `bound`."""
        return not max(self._norms) * scale > bound and float(self) * scale <= bound


class GradientCheck:
    """The norm of all gradients and whether a step may be taken with them.

    Attributes:
        norms: shape (number of gradients,), fp32, the device of the first: the unscaled norm of each; or as many numbers of fp32.
        known: the norm of all, where the host can have it; else None.
        grads: that were read, not copied; of sharded ones, the parts that lie on this rank.
        is_plain: whether each of them is a plain tensor, which lies whole on this rank.
    """

    __slots__ = ("_norm", "grads", "is_plain", "known", "norms")

    def __init__(
        self, norm: Tensor | None, norms: Tensor | array[float], grads: tuple[Tensor, ...], *, is_plain: bool
    ) -> None:
        self._norm, self.norms, self.grads, self.is_plain = norm, norms, grads, is_plain
        self.known = None if isinstance(norms, Tensor) else LateNorm(norms)

    @property
    def norm(self) -> Tensor:
        """Shape (), fp32, the device of the first gradient: L2 norm of the unscaled gradients. Syncs: no."""
        return _norm_of(self.tensor_norms) if self._norm is None else self._norm

    @property
    def tensor_norms(self) -> Tensor:
        """Shape (number of gradients,), fp32, same device: the unscaled norm of each. Syncs: no."""
        return self.norms if isinstance(self.norms, Tensor) else torch.frombuffer(self.norms, dtype=torch.float32)

    def count_nonfinite(self) -> Tensor:
        """Count inf and NaN in each gradient, as it is now; a second pass, for reports. Shape (number of gradients,), int64, the device of `norm`. Syncs: no."""
        home = self.tensor_norms.device
        counts = [(~values(grad).isfinite()).sum().to(home) for grad in self.grads]
        return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64, device=home)


def values(grad: Tensor) -> Tensor:
    """Return a gradient, or a weight, as one dense real tensor: the values of a sparse one, both parts of a complex one, whole numbers of a quantized one.

    Syncs: for a sparse one that is not coalesced, on an accelerator.
    """
    if grad.layout is torch.strided and not grad.is_complex():
        return grad.int_repr() if grad.is_quantized else grad
    dense = grad if grad.layout is torch.strided else (grad.coalesce() if grad.is_sparse else grad).values()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def norm_and_finite(grads: Sequence[Tensor], inv_scale: Tensor | None = None) -> GradientCheck:
    """Read every gradient once: the norm of all of them, and whether any is inf or NaN.

    On the CPU a norm whose square fp32 cannot hold (above 1.8e19, or below 1e-12 with its digits) is computed again in
    fp64. Elsewhere, where the host does not look, one above counts as non-finite.

    Args:
        grads: any shapes, devices and layouts; fp16, bf16, fp32 or fp64, sparse or complex; squares are summed in fp32.
            Of sharded ones the part that lies on this rank is read.
        inv_scale: shape (), fp32: the reciprocal of the loss scale, a power of two; None: not scaled.

    Returns:
        Norms of the unscaled gradients and the finite flag, on the device of the first gradient.

    Syncs: no; copies one vector between devices if the gradients lie on several.

    >>> check = norm_and_finite([torch.tensor([6.0, 8.0]).bfloat16()], torch.tensor(0.5))
    >>> check.norm.item()
    5.0
    """
    is_plain = all([type(grad) in PLAIN for grad in grads])
    parts = grads if is_plain else [as_plain(part) for part in local_tensors(grads)]
    detached = tuple([part.detach() if part.requires_grad else part for part in parts])
    home = detached[0].device if detached else inv_scale.device if inv_scale is not None else torch.device("cpu")
    host_looks = home.type == "cpu" and not torch.compiler.is_compiling()
    known = _known_norms(detached) if host_looks else None
    if known is not None and inv_scale is None:
        return GradientCheck(None, known, detached, is_plain=is_plain)
    norms = _gather(detached, home) if known is None else torch.frombuffer(known, dtype=torch.float32)
    if host_looks and known is None:
        _bring_in_range_(norms, detached)
    if inv_scale is not None:
        norms = norms * inv_scale.to(home)
    norm = _norm_of(norms) if host_looks else torch.linalg.vector_norm(norms)
    return GradientCheck(norm, norms, detached, is_plain=is_plain)


def _norm_of(norms: Tensor) -> Tensor:
    """Return the norm of norms as torch has it on every device, in fp64 where fp32 cannot hold its square; CPU only."""
    norm: Tensor = torch.linalg.vector_norm(norms)
    if not _SMALL < float(norm.numpy()) < _LARGE:
        norm = torch.linalg.vector_norm(norms, dtype=torch.float64).to(torch.float32)
    return norm


def _known_norms(grads: Sequence[Tensor]) -> array[float] | None:
    """Return the norm of each gradient where one compiled pass reads all of them, so that no tensor is made; else None."""
    if not grads or not all([g.is_cpu and g.layout is torch.strided for g in grads]):
        return None
    choices = [registry.choose("gradients", grads[0].device, dtype) for dtype in {g.dtype for g in grads}]
    if any([choice.backend != "cpu" for choice in choices]):
        return None
    norms: array[float] = choices[0].module.known_norms(grads)  # which reads each gradient in its own format
    _bring_in_range_(norms, grads)
    return norms


_SMALL, _LARGE = 1e-12, 1e18
"""Norms between these are sums of squares that fp32 holds with all their digits, but for terms that do not count."""


def _bring_in_range_(norms: Tensor | array[float], grads: Sequence[Tensor]) -> None:
    """Compute norms that are out of fp32's range again in fp64. Writes: `norms`. Syncs: no; CPU only."""
    numbers = norms.numpy() if isinstance(norms, Tensor) else norms
    if len(numbers) and _SMALL < min(numbers) and sum(numbers) < _LARGE:  # a NaN makes the sum one
        return
    for index in [k for k, norm in enumerate(numbers.tolist()) if not _SMALL < norm < _LARGE]:
        parts = torch.split(values(grads[index]).flatten(), CHUNK)
        squares = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts])
        numbers[index] = float(squares.sum().sqrt().to(torch.float32).numpy())


def _gather(grads: Sequence[Tensor], home: torch.device) -> Tensor:
    """Return the norm of each gradient on one device; one kernel call for each device and dtype present."""
    if not grads:
        return torch.zeros(0, dtype=torch.float32, device=home)
    is_plain = all([grad.layout is torch.strided and not grad.dtype.is_complex for grad in grads])
    dense = grads if is_plain else [values(grad) for grad in grads]
    distinct = {(grad.device, grad.dtype) for grad in dense}
    if len(distinct) == 1:
        return _norms(dense, *distinct.pop()).to(home)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(dense):
        kinds.setdefault((grad.device, grad.dtype), []).append(index)
    found = [_norms([dense[i] for i in indices], *kind).to(home) for kind, indices in kinds.items()]
    order = tuple(i for indices in kinds.values() for i in indices)
    return torch.cat(found).index_select(0, _indices_of(order) if home.type == "cpu" else _indices_on(order, home))


@functools.lru_cache(maxsize=64)
def _indices_of(order: tuple[int, ...]) -> Tensor:
    """Return where each number stands in an order; from step to step it is the same."""
    return torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.int64, device="cpu")


@kept_on_device
def _indices_on(order: tuple[int, ...], device: torch.device) -> Tensor:
    return on_device(_indices_of(order), device)


def _norms(grads: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_compiling():
        return tensor_norms(grads)
    norms: Tensor = registry.choose("gradients", device, dtype).module.tensor_norms(grads)
    return norms

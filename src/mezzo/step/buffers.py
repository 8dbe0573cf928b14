"""Buffers as a transaction: what the forward of a skipped step wrote is taken back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._torch import NormBase, foreach_copy_, own_buffers, version


@dataclass(slots=True, eq=False)
class _Kept:
    """One buffer and its value before the step.

    Attributes:
        name: in the model.
        module: that owns it.
        key: its name there.
        is_statistic: written by batch norm's kernel, which does not move the version of what it writes.
        value: a copy from before the step.
        source: the tensor it was copied from.
        version: of that tensor then.
        may_be_written: a statistic whose module was in training mode when the step began.
    """

    name: str
    module: nn.Module
    key: str
    is_statistic: bool
    value: Tensor
    source: Tensor
    version: int
    may_be_written: bool = False

    @property
    def buffer(self) -> Tensor | None:
        return own_buffers(self.module)[self.key]

    def written(self) -> Tensor | None:
        """Return the buffer if it was, or may have been, written since it was copied."""
        buffer = self.buffer
        if self.may_be_written or (self.is_statistic and self.module.training):
            return buffer
        return buffer if buffer is not self.source or version(self.source) != self.version else None

    def renew_source(self, buffer: Tensor) -> None:
        """Take note that the copy is of the buffer as it is now."""
        self.source, self.version, self.may_be_written = buffer, version(buffer), False


class Buffers:
    """The buffers of a model that training may write: floating ones and counters.

    A copy of each is kept and renewed when its version moved, so buffers that are never written cost one copy in all;
    the statistics of batch norm are copied in every step. A custom kernel that writes a buffer behind the version
    counter's back is not seen.

    Args:
        model: where the buffers are; those it has now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            _Kept(
                name=f"{prefix}.{key}" if prefix else key,
                module=module,
                key=key,
                is_statistic=isinstance(module, NormBase),
                value=buffer.detach().clone(),
                source=buffer,
                version=version(buffer),
            )
            for prefix, module in model.named_modules()
            for key, buffer in own_buffers(module).items()
            if buffer is not None and _is_tracked(buffer)
        ]
        self._is_open = False
        self.forgive()

    def forgive(self) -> None:
        """Take the buffers as they are, and what is not finite in them as meant, such as a mask of -inf. Syncs: yes."""
        self._is_open = False
        self._renew()
        self._exempt = {kept.name for kept in self._kept if not bool(kept.value.isfinite().all())}

    def begin(self) -> None:
        """Open the transaction of a step, with the buffers as they are; does nothing in an open one. Syncs: no."""
        if not self._is_open and torch.is_grad_enabled():
            self._is_open = True
            self._renew()
            for kept in self._kept:
                kept.may_be_written = kept.is_statistic and kept.module.training

    def written(self) -> list[Tensor]:
        """Return the floating buffers that may have been written in this step and must be finite. Syncs: no."""
        found = [kept.written() for kept in self._kept if kept.name not in self._exempt]
        return [buffer for buffer in found if buffer is not None and buffer.is_floating_point()]

    def settle(self, void: Tensor | bool) -> None:
        """Close the transaction: give written buffers their old values if the step is void.

        Args:
            void: shape (), bool, any device, or a bool where the host knows: the step was skipped.

        Writes: the buffers. Syncs: no.
        """
        self._is_open = False
        if void is not False:
            with torch.no_grad():
                for kept in self._kept:
                    _restore(kept, void)
        self._renew()

    def nonfinite(self) -> dict[str, int]:
        """Return how many elements of each buffer were inf or NaN before this step, where any were. Syncs: yes."""
        counts = {
            kept.name: int((~kept.value.isfinite()).sum()) for kept in self._kept if kept.name not in self._exempt
        }
        return {name: count for name, count in counts.items() if count}

    def tensors(self) -> dict[str, Tensor]:
        """Return every tracked buffer by name."""
        return {kept.name: buffer for kept in self._kept if (buffer := kept.buffer) is not None}

    def _renew(self) -> None:
        moved = [(kept, buffer) for kept in self._kept if (buffer := kept.written()) is not None]
        same = [(kept, buffer) for kept, buffer in moved if _is_alike(kept.value, buffer)]
        with torch.no_grad():
            if same:
                foreach_copy_([kept.value for kept, _ in same], [buffer for _, buffer in same])
            for kept, buffer in moved:
                if not _is_alike(kept.value, buffer):
                    kept.value = buffer.detach().clone()
                kept.renew_source(buffer)


def _is_alike(value: Tensor, buffer: Tensor) -> bool:
    return value.shape == buffer.shape and value.dtype is buffer.dtype and value.device == buffer.device


def _restore(kept: _Kept, void: Tensor | bool) -> None:
    buffer = kept.written()
    if buffer is None or not _is_alike(kept.value, buffer):
        return
    buffer.copy_(torch.where(void.to(buffer.device), kept.value, buffer) if isinstance(void, Tensor) else kept.value)


def _is_tracked(buffer: Tensor) -> bool:
    is_counter = buffer.dim() == 0 and buffer.dtype is not torch.bool and not buffer.is_complex()
    return buffer.layout is torch.strided and (buffer.is_floating_point() or is_counter)

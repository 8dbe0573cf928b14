"""Which kernel a layer norm of 16-bit activations takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.binding.norms import layer_norm

LOW = torch.bfloat16


class Ops(TorchDispatchMode):
    """Notes ops and the dtype of their first operand."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if args and isinstance(args[0], torch.Tensor):
            self.seen.append((func.overloadpacket.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def ops(device: str, weights: torch.dtype | None) -> list[tuple[str, torch.dtype]]:
    """Return what a norm of a large bf16 input launches on a device that need not be there."""
    with FakeTensorMode(), torch.no_grad():
        options = {"elementwise_affine": False} if weights is None else {"dtype": weights}
        module = nn.LayerNorm(64, device=device, **options)
        x = torch.empty(512, 64, device=device, dtype=LOW)
        with Ops() as seen:
            assert layer_norm(module, x).dtype is LOW
    return seen.seen


@pytest.mark.parametrize("weights", [LOW, None])
def test_a_kernel_that_sums_in_fp32_reads_16_bit(weights: torch.dtype | None) -> None:
    assert ops("cuda", weights) == [("native_layer_norm", LOW)]


@pytest.mark.parametrize(("device", "weights"), [("cuda", torch.float32), ("xpu", LOW), ("cuda", torch.float16)])
def test_any_other_gets_fp32(device: str, weights: torch.dtype) -> None:
    assert ("native_layer_norm", torch.float32) in ops(device, weights)

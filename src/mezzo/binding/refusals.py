"""Attributes by which a prepared model refuses compilers and quantizers that cannot follow a policy."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import StepError


def _refuse_script(module: nn.Module) -> None:
    raise StepError(
        "torch.jit.script was given a prepared model, and its compiler cannot follow a policy. Call amp.release() first, "
        "which gives the plain model back; torch.export takes prepared models."
    )


def _no_qconfig(module: nn.Module) -> None:
    raise AttributeError("qconfig")


def _refuse_quantization(module: nn.Module, qconfig: object) -> None:
    raise StepError(
        "torch.ao.quantization was given a prepared model, and it replaces modules by their exact class, so it would "
        "quantize none of them. Call amp.release() first, which gives the plain model back."
    )


REFUSALS: dict[str, Any] = {
    "__prepare_scriptable__": _refuse_script,
    "qconfig": property(_no_qconfig, _refuse_quantization),
}
"""Of every bound class."""

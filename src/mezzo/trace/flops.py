"""How many floating-point operations an op does, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload

Formula = Callable[..., int]


@cache
def formulas() -> Mapping[Any, Formula]:
    """Return torch's formulas by op, and those of the CPU's fused attention, which torch leaves out."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]  # torch's own

    def attention_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any
    ) -> int:
        return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]  # torch's own

    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


def flops_of(func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call; 0 for ops that are not made of products.

    Args:
        func: the op.
        args: its positional arguments.
        kwargs: its named arguments.
        out: its result.

    Syncs: no.
    """
    formula = formulas().get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))

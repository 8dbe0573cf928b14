"""The function mode as an engine by itself: ruled ops are cast although torch's autocast is off, and no other op is."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.casting.cast_cache import RegionCache
from mezzo.casting.mode import CastMode
from mezzo.casting.op_rule_table import OpRuleTable


class Standalone(CastMode):
    """Turns torch's autocast on, in a dtype, for the call of a ruled op alone."""

    def __init__(self, op_rules: OpRuleTable, cache: RegionCache | None, low: torch.dtype) -> None:
        super().__init__(op_rules, cache)
        self._low = low

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        device = next(iter(self.rows))
        if func not in self.rows[device]:
            return super().__torch_function__(func, types, args, kwargs)
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, self._low)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])

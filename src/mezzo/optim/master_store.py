"""The fp32 masters of a model's 16-bit parameters, as parameters that another optimizer can step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..errors import MasterError
from ..formats import LOW_DTYPES, describe
from ..kernels import WEIGHT_STREAM, is_dtensor, param_seed, random_bits, random_key, read_master, store_master, write_
from ..policy import Master

Mode = Literal["split", "fp32", "kahan", "stochastic"]


def check_whole(param: Tensor) -> None:
    """Refuse, by a MasterError, masters for a sharded parameter. Host only."""
    if is_dtensor(param):
        raise MasterError(
            f"MasterWeights was given the sharded parameter {describe(param)} to keep a master of, and it lends its masters to an "
            "optimizer that knows nothing of shards. Write mezzo.optim.AdamW or SGD, whose masters lie in shards, or params=fp32 in the policy."
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Masters:
    """Masters of 16-bit parameters: one fp32 parameter for each, whose memory may exist during a step only.

    What lies beside a weight between steps is in the state of the optimizer, under the name that `AUX_STATE` gives it.

    Attributes:
        mode: what is kept between steps: the masters, remainders, 16-bit compensations, or nothing.
        seed: of the random bits in mode "stochastic".
        fp32_params: the fp32 parameter of each 16-bit one; empty between steps unless the mode is "fp32".
        count: shape (), fp32: steps taken, which decides the random bits; None before the first and in other modes.
    """

    mode: Mode
    seed: int
    fp32_params: dict[Tensor, torch.nn.Parameter] = field(default_factory=dict)
    count: Tensor | None = None

    def mode_of(self, param: Tensor) -> Master:
        """Return how one parameter keeps small updates; a MasterError for split masters of an fp16 parameter. Host only."""
        if self.mode == "split" and param.dtype is torch.float16:
            raise MasterError(
                f"split masters were asked for {describe(param)}: 16 more bits make an fp32 value of a bf16 weight, but not "
                "of an fp16 one, whose exponent is another. Write mode='fp32', or params in bf16."
            )
        return self.mode if param.dtype in LOW_DTYPES else "none"

    def fp32_param(self, param: Tensor) -> torch.nn.Parameter:
        """Return the fp32 parameter that stands for a 16-bit one; an empty one the first time. Syncs: no."""
        if param not in self.fp32_params:
            check_whole(param)
            self.fp32_params[param] = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device=param.device))
        return self.fp32_params[param]

    def open(self, param: Tensor, aux: Tensor | None) -> None:
        """Give the fp32 parameter of a 16-bit one its value. Syncs: no."""
        fp32_param, value = self.fp32_param(param), read_master(self.mode_of(param), param.detach(), aux)
        if self.mode == "fp32" and fp32_param.shape == value.shape:
            fp32_param.data.copy_(value)
        else:
            fp32_param.data = value

    def close(self, param: Tensor) -> None:
        """Free what an fp32 parameter needs during a step only. Syncs: no."""
        fp32_param = self.fp32_param(param)
        fp32_param.grad = None
        if self.mode != "fp32":
            fp32_param.data = torch.empty(0, dtype=torch.float32, device=param.device)

    def advance(self, device: torch.device, skip: Tensor | None) -> None:
        """Count a step, unless it is blocked. Syncs: no."""
        if self.mode == "stochastic":
            if self.count is None:
                self.count = torch.zeros((), dtype=torch.float32, device=device)
            self.count += 1 if skip is None else skip.logical_not().to(self.count.device)

    def write_(self, param: Tensor, index: int, aux: Tensor | None, skip: Tensor | None) -> Tensor | None:
        """Write a 16-bit parameter, and its aux state, which is returned, as its open fp32 parameter says, unless `skip`, shape () and bool.

        Its number among all parameters decides its random bits. Writes: `param` and `aux`. Syncs: no.
        """
        master, bits = self.fp32_param(param).detach(), None
        if self.count is not None:
            key = random_key(param_seed(self.seed, index), self.count.to(param.device), WEIGHT_STREAM)
            bits = random_bits(key, master)
        weight, new = store_master(self.mode, master, param.dtype, bits)
        if new is None or self.mode == "fp32":
            write_(param, weight, skip)
            return new
        if aux is None:
            aux = store_master(self.mode, param.detach().to(torch.float32), param.dtype, None)[1]
        assert aux is not None
        write_(param, weight, skip)
        write_(aux, new, skip)
        return aux

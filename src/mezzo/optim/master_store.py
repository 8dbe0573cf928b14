"""The fp32 masters of a model's 16-bit parameters, as parameters that another optimizer can step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..errors import MasterError
from ..formats import LOW_DTYPES, describe
from ..kernels.dtensor import is_dtensor
from ..kernels.ops.rounding import mix, random_key
from ..kernels.weights import AUX_STATE, WEIGHT_STREAM, read_master, store_master, write_
from ..policy import Master

Mode = Literal["fp32", "kahan", "stochastic"]


def check_whole(param: Tensor) -> None:
    """Refuse masters for a sharded parameter.

    Raises:
        MasterError: it is one.
    """
    if is_dtensor(param):
        raise MasterError(
            f"MasterWeights was given the sharded 16-bit parameter {describe(param)}, and it lends its masters to an "
            "optimizer that knows nothing of shards. Write mezzo.optim.AdamW or SGD, whose masters lie in shards, or "
            "params=fp32 in the policy."
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Masters:
    """Masters of 16-bit parameters: one fp32 parameter for each, whose memory may exist during a step only.

    Attributes:
        mode: what is kept between steps: the masters, 16-bit compensations, or nothing.
        seed: of the chance in mode "stochastic".
        stand_ins: the fp32 parameter of each 16-bit one; empty between steps unless the mode is "fp32".
        aux_state: the compensation of each.
        count: shape (), fp32: steps taken, which decides the random bits; None before the first and in other modes.
    """

    mode: Mode
    seed: int
    stand_ins: dict[Tensor, torch.nn.Parameter] = field(default_factory=dict)
    aux_state: dict[Tensor, Tensor] = field(default_factory=dict)
    count: Tensor | None = None

    def mode_of(self, param: Tensor) -> Master:
        """Return how one parameter keeps small updates."""
        return self.mode if param.dtype in LOW_DTYPES else "none"

    def fp32_param(self, param: Tensor) -> torch.nn.Parameter:
        """Return the fp32 parameter that stands for a 16-bit one; an empty one the first time."""
        if param not in self.stand_ins:
            check_whole(param)
            self.stand_ins[param] = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device=param.device))
        return self.stand_ins[param]

    def value(self, param: Tensor) -> Tensor:
        """Return what a parameter stands for: its shape, fp32; itself if it is not 16 bit. Syncs: no."""
        mode, aux = self.aux_of(param)
        return read_master(mode, param.detach(), aux)

    def aux_of(self, param: Tensor) -> tuple[Master, Tensor | None]:
        """Return how one parameter keeps small updates, and its aux state now; None if nothing does."""
        return self.mode_of(param), self.aux(param).get(AUX_STATE.get(self.mode, ""))

    def aux(self, param: Tensor) -> dict[str, Tensor]:
        """Return what a checkpoint must hold for a parameter, by the names that mezzo's optimizers use."""
        if param.dtype not in LOW_DTYPES:
            return {}
        if self.mode == "fp32" and param in self.stand_ins and self.stand_ins[param].shape == param.shape:
            return {AUX_STATE["fp32"]: self.stand_ins[param].detach()}
        if self.mode == "kahan" and param in self.aux_state:
            return {AUX_STATE["kahan"]: self.aux_state[param]}
        if self.mode == "stochastic" and self.count is not None:
            return {"rounding_step": self.count.clone()}
        return {}

    def keep(self, param: Tensor, aux: Mapping[str, Tensor]) -> None:
        """Take over what `aux` returned, here or from a checkpoint."""
        if self.mode == "fp32" and AUX_STATE["fp32"] in aux:
            self.fp32_param(param).data = aux[AUX_STATE["fp32"]]
        if self.mode == "kahan" and AUX_STATE["kahan"] in aux:
            self.aux_state[param] = aux[AUX_STATE["kahan"]]
        if self.mode == "stochastic" and "rounding_step" in aux:
            self.count = aux["rounding_step"].to(param.device).clone()

    def open(self, param: Tensor) -> None:
        """Give the stand-in of a parameter its value. Syncs: no."""
        fp32_param, value = self.fp32_param(param), self.value(param)
        if self.mode == "fp32" and fp32_param.shape == value.shape:
            fp32_param.data.copy_(value)
        else:
            fp32_param.data = value

    def close(self, param: Tensor) -> None:
        """Free what a stand-in needs during a step only."""
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

    def write_(self, param: Tensor, index: int, skip: Tensor | None) -> None:
        """Write a parameter, and its aux state, as its stand-in says.

        Args:
            param: the 16-bit parameter, its stand-in open.
            index: its number among all parameters, which decides its random bits.
            skip: shape (), bool: write nothing; None: write.

        Writes: `param` and its compensation. Syncs: no.
        """
        key = None
        if self.count is not None:
            seed = mix((mix(self.seed) + index) & 0xFFFFFFFF)
            key = random_key(seed, self.count.to(param.device), WEIGHT_STREAM)
        weight, aux = store_master(self.mode, self.fp32_param(param).detach(), param.dtype, key)
        write_(param, weight, skip)
        if self.mode == "kahan" and aux is not None:
            write_(self.aux_state.setdefault(param, torch.zeros_like(param.detach())), aux, skip)

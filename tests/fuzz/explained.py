"""Where bits may differ from plain torch's, and why. What is not here is a fault."""

from __future__ import annotations

from collections.abc import Callable

from .program import Program, Train
from .recipes import OPTIMIZERS, POLICIES

EXPLAINED: dict[str, Callable[[Program], bool]] = {
    "the compiled kernels round the square root, torch's vectors do not": lambda program: (
        OPTIMIZERS[program.optimizer].backend == "auto"
    ),
    "layer and RMS norms that hand on 16 bit are other kernels on the CPU, which sum in another order": lambda program: (
        POLICIES[program.policy].compute is not None
        and bool({"layer norm", "rms norm", "transformer"} & set(program.blocks))
    ),
    "torch's fused kernels round elsewhere than mezzo's, which step 16-bit weights in their place": lambda program: (
        program.optimizer.endswith("fused") and bool(POLICIES[program.policy].rounds)
    ),
    "torch's fused kernels know one divisor, so the clip coefficient is in it": lambda program: (
        program.optimizer.endswith("fused") and any(isinstance(e, Train) and e.clip == "norm" for e in program.events)
    ),
    "gradients of 16-bit embedding tables, and rows of bags, are summed in fp32, torch's in 16 bit": lambda program: (
        bool({"embedding", "bag"} & set(program.blocks)) and bool(POLICIES[program.policy].rounds)
    ),
}
"""Reasons, and the programs they hold for; there the twin is compared within the rounding of the compute dtype."""

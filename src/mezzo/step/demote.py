"""Demotion: a module or op of the model that overflowed 16 bit gets an fp32 rule, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..distributed.consensus import RankConsensus
from ..errors import PolicyError
from ..formats import LOW_DTYPES, dtype_name
from ..policy import Policy
from .guard import SkipInfo

if TYPE_CHECKING:
    from ..trace import Diagnosis

_log = logging.getLogger("mezzo.step")


def check_demotion(policy: Policy, consensus: RankConsensus | None) -> None:
    """Refuse demotion where it could not be kept.

    Raises:
        PolicyError: the policy asks for it without a guard, with weights stored in 16 bit, or on several ranks.
    """
    if policy.guard.on_overflow != "demote":
        return
    if not policy.guard.enabled:
        raise PolicyError(
            "guard.on_overflow=demote was asked for with guard.enabled=false, and without the guard nobody sees an "
            "overflow. Leave guard.enabled=false out."
        )
    if policy.params in LOW_DTYPES:
        raise PolicyError(
            f"guard.on_overflow=demote was asked for with params={dtype_name(policy.params)}, and a module that gets an "
            "fp32 rule needs fp32 weights, which were given away when the model was prepared. Write params=fp32, or "
            "guard.on_overflow=skip and the rule that the error names."
        )
    if consensus is not None:
        raise PolicyError(
            "guard.on_overflow=demote was asked for on several ranks, and each would demote what overflowed on its own "
            "batch, so their models would differ. Write guard.on_overflow=skip, and add the rule that the error names."
        )


def demote(
    policy: Policy,
    known: Sequence[str],
    trouble: SkipInfo,
    diagnose: Callable[[], Diagnosis | None],
    adopt: Callable[[Policy], None],
) -> tuple[str, ...]:
    """Give fp32 rules to what overflowed 16 bit, one after the other, until the last batch no longer overflows.

    Args:
        policy: in force.
        known: edits that were made before, which have not helped if they are named again.
        trouble: the step that was skipped.
        diagnose: runs its batch again.
        adopt: binds another policy.

    Returns:
        The edits that were made; none where the cause is another one, or the loss scale may still mend it.

    Writes: what `adopt` writes. Syncs: at every op of the replays.
    """
    is_scales = trouble.reason == "gradients" and policy.scaling is not None and trouble.stop is None
    if policy.guard.on_overflow != "demote" or is_scales or (trouble.stop and not trouble.stop.is_batch_to_blame):
        return ()
    edits: list[str] = []
    found = diagnose()
    while found is not None and found.edit and found.edit not in (*known, *edits):
        policy = Policy.parse(f"{policy}, {found.edit}")
        adopt(policy)
        edits.append(found.edit)
        _log.warning("step %d skipped; '%s' added to the policy: %s", trouble.step + 1, found.edit, found.sentence)
        found = diagnose()
    return tuple(edits)

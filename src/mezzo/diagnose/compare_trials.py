"""Edits of the policy, tried by running the step again."""

from __future__ import annotations

import math
from collections.abc import Callable

from .compare_propose import candidates, is_worth_it, proposal, together
from .compare_records import Measurement, Proposal


class Trials:
    """Runs the step again under edited policies.

    Args:
        found: the step under the policy as it is.
        again: measures the step under the policy with an edit.
        tries: edits to try by themselves.

    Attributes:
        tried: edits that were tried by themselves.
        proposals: those that pay, and what they give together, the best first.
    """

    def __init__(self, found: Measurement, again: Callable[[str], Measurement], tries: int) -> None:
        self._found, self._again = found, again
        self.tried: list[str] = []
        self.proposals: list[Proposal] = []
        worthy = []
        for candidate in candidates(found, tries):
            self.tried.append(candidate.edit)
            result = self._attempt(candidate.edit)
            if result is not None:
                worthy.append((candidate, result))
        union = together(worthy, found)
        if union is not None:
            self._attempt(union.edit)
        if tries and found.figure == -math.inf and not self.proposals:
            self._follow_overflow(tries)
        self.proposals.sort(key=lambda p: -p.gain)

    def _attempt(self, edit: str) -> Proposal | None:
        result = proposal(edit, self._found, self._again(edit))
        if not is_worth_it(result):
            return None
        self.proposals.append(result)
        return result

    def _follow_overflow(self, tries: int) -> None:
        """Add a rule for whatever overflows next, as a value too large for one op is for the op that reads it."""
        edits: list[str] = []
        now = self._found
        while now.figure == -math.inf and len(edits) < tries:
            worst = next(iter(candidates(now, 1)), None)
            if worst is None:
                return
            edits.append(worst.edit)
            now = self._again(", ".join(edits))
        if now.figure != -math.inf:
            self.proposals.append(proposal(", ".join(edits), self._found, now))

"""Which ops of a module must run in fp32 so that one of them is finite: tried on what the module was given."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

import torch
from torch import Tensor

from .._torch import tree_map
from ..formats import LOW_DTYPES
from .fix import edit_of
from .measure import is_finite, rerun_wide
from .ops import CASTS, Call, is_product
from .records import Site
from .wide_values import WideValues

Ops = Sequence[tuple[Site, Call]]
_CLOSE = 1 / 16
"""How far from the result of all in fp32 that of some may lie: what is finite by chance is not with the next batch."""


def draws(call: Call) -> bool:
    """Say whether an op's result depends on random numbers; attention without dropout only might."""
    given = dict(zip(call.facts.arguments, call.args, strict=False)) | call.kwargs
    is_attention = "dropout_p" in call.facts.arguments
    return call.facts.draws and not (is_attention and given.get("dropout_p", 0.0) == 0.0)


def run_wide(call: Call, values: dict[int, Tensor], dtype: torch.dtype) -> list[Tensor] | None:
    """Run an op in a wider format with some inputs exchanged, on the draws of the run.

    `values` are put in the place of arguments, by their ids; the format is fp32 or fp64.

    Returns:
        One tensor for each of `call.out`; None where the format has no kernel, or cannot have the same draws: those of
        fused dropout are known, since it returns its mask.

    Syncs: no.
    """
    if call.facts.kernel == "aten.native_dropout":
        source, share = values.get(id(call.args[0]), call.args[0]), float(call.args[1])
        return [source.to(dtype) * call.returned[1] / (1 - share if share < 1 else 1)]
    if draws(call):
        return None
    wide = rerun_wide(call, dtype, tree_map(lambda v: values.get(id(v), v), call.given))
    is_same = wide is not None and [t.shape for t in wide] == [t.shape for t in call.out]
    return wide if is_same else None


run_in_fp32 = partial(run_wide, dtype=torch.float32)


def is_repaired(call: Call, wide: list[Tensor] | None) -> bool:
    """Say whether results in fp32 are finite where those of the op are not. Syncs: yes."""
    return wide is not None and all(is_finite(w[~t.isfinite()]) for t, w in zip(call.out, wide, strict=True))


class Widening:
    """Runs the last ops of a module again, some of them in fp32; the one that failed is the last."""

    def __init__(self, made: Ops) -> None:
        self._made = made

    def one_op(self) -> tuple[Site, ...]:
        """Return the last op whose result, kept in fp32, would have spared the one that failed. Syncs: yes."""
        for index in reversed(range(len(self._made))):
            first = self._made[index][1]
            if not any(t.dtype in LOW_DTYPES for t in first.out):
                continue
            wide = self._run(self._made[index:], partial(_follows, first))
            if wide is not None and all(map(is_finite, wide)):
                return (self._made[index][0],)
        return ()

    def some_ops(self) -> tuple[Site, ...]:
        """Return an op for each of the fewest rules under which the one that failed gives what it does with all of them. Syncs: yes."""
        rules = {rule: site for site, _ in reversed(self._made) if (rule := edit_of(site))}
        want = self._under(rules)
        if want is None or not all(map(is_finite, want)):
            return ()
        for rule in list(rules):
            fewer = {name: site for name, site in rules.items() if name != rule}
            if _are_close(self._under(fewer), want):
                rules = fewer
        return tuple(reversed(rules.values()))

    def _under(self, rules: Container[str]) -> list[Tensor] | None:
        """Return what the last op gives under rules: an op without one takes fp32 where it is given some, a product does not."""

        def is_wide(site: Site, call: Call, known: dict[int, Tensor]) -> bool:
            by_hand = call.facts.name == "to" and site.called in CASTS
            return edit_of(site) in rules or (bool(known) and not by_hand and not is_product(call.func))

        return self._run(self._made, is_wide)

    def _run(self, made: Ops, is_wide: Callable[[Site, Call, dict[int, Tensor]], bool]) -> list[Tensor] | None:
        values, wide = WideValues(), None
        for site, call in made:
            known = values.known(call)
            wide = run_in_fp32(call, known) if is_wide(site, call, known) else None
            for i, tensor in enumerate(call.out):
                if wide is None:
                    values.forget(tensor)
                else:
                    values.put(tensor, wide[i])
        return wide


def _follows(first: Call, _: Site, call: Call, known: dict[int, Tensor]) -> bool:
    return bool(known) or call is first


def _are_close(found: list[Tensor] | None, want: list[Tensor]) -> bool:
    pairs = () if found is None else zip(found, want, strict=True)
    return found is not None and all(bool(((f - w).abs() <= _CLOSE * w.abs()).all()) for f, w in pairs)

"""What ranks tell each other with a step: heard alike by all, whatever number of them there is."""

from __future__ import annotations

import pytest

from mezzo.distributed.rank_consistency import Signals, read_signals

QUIET = Signals(call=("amp.step()", "SGD, group 0: lr=0.1"))
LOADED = Signals(is_loaded=True, call=QUIET.call)
WRITTEN = Signals(is_written=True, call=QUIET.call)
OTHER = Signals(call=("amp.step()", "SGD, group 0: lr=0.2"))


@pytest.mark.parametrize(
    ("ranks", "wants", "differs"),
    [
        ([QUIET] * 3, False, False),
        ([QUIET, LOADED, QUIET], True, False),
        ([LOADED] * 3, True, False),
        ([WRITTEN, QUIET, QUIET], True, False),
        ([WRITTEN] * 3, False, False),
        ([OTHER, QUIET, OTHER], False, True),
        ([QUIET] * 4095 + [OTHER], False, True),
    ],
)
def test_sums_say_who_differs(ranks: list[Signals], wants: bool, differs: bool) -> None:
    sums = [sum(column) for column in zip(*(one.numbers() for one in ranks), strict=True)]
    assert read_signals(sums, len(ranks)) == (wants, differs, False)


def test_a_loss_scale_is_missed_where_no_rank_took_it() -> None:
    last, other = Signals(), Signals(lacks_scale=True)
    for ranks, is_missed in (([other, other, last], False), ([other] * 3, True), ([last] * 3, False)):
        sums = [sum(column) for column in zip(*(one.numbers() for one in ranks), strict=True)]
        assert read_signals(sums, 3) == (False, False, is_missed)


def test_a_call_is_told_in_as_many_numbers_whatever_it_says() -> None:
    assert {len(one.numbers()) for one in (QUIET, LOADED, OTHER, Signals())} == {19}
    assert all(set(one.numbers()) <= {0.0, 1.0} for one in (QUIET, LOADED, OTHER, Signals()))

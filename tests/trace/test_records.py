"""What a trace writes down speaks as a reader does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.trace.events import event, facts

from mezzo.trace.records import OUTSIDE, Frame, Site

OWN, PACKAGE = Frame(file="train.py", line=3, function="main"), Frame(file="lib.py", line=9, function="run")


@pytest.mark.parametrize(
    ("changes", "path", "frame"),
    [
        ({"user": OWN, "library": PACKAGE}, "body", OWN),
        ({"library": PACKAGE}, "body", PACKAGE),
        ({"module": ""}, "Net", None),
        ({"module": "", "root": ""}, OUTSIDE, None),
    ],
)
def test_a_site_names_module_and_line(changes: dict[str, object], path: str, frame: Frame | None) -> None:
    site: Site = replace(event().site, **changes)
    assert (site.path, site.frame) == (path, frame)


def test_a_tensor_is_shown_by_dtype_and_sizes_and_its_bad_values_are_added_up() -> None:
    assert str(facts()) == "fp16[4]"
    assert facts(nan=1, posinf=2, neginf=4, zeros=8).nonfinite == 7
    assert str(OWN) == "train.py:3"

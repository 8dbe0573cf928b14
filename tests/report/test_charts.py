"""Charts are drawn to scale, whatever their numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from tests.report.samples import DOCUMENT

from mezzo.report import Chart, Document, Series, render_text
from mezzo.report.charts import draw, draw_heat


@pytest.mark.parametrize("kind", ["lines", "bars"])
@pytest.mark.parametrize(
    "values",
    [(1e308, -1e308), (1e308, 1e308), (5e-324, 0.0), (1e-310, 2e-310), (math.inf, -math.inf), (math.nan, 1.0), ()],
)
def test_any_numbers_are_drawn(values: tuple[float, ...], kind: Any) -> None:
    labels = tuple("x" for _ in values)
    chart = Chart(title="c", kind=kind, labels=labels, unit="u", series=(Series(name="s", values=values),))
    document = Document(title="t", verdict="v", is_good=True, blocks=(chart,))
    assert "nan" not in re.sub("<title>.*?</title>", "", draw(chart)) and "c" in render_text(document)


def test_a_line_breaks_where_a_value_is_missing() -> None:
    drawn = draw(DOCUMENT.blocks[4])
    assert re.search(r'd="(M[^"]*)"', drawn)[1].count("M") == 2
    assert drawn.count("<circle") == 2


@pytest.mark.parametrize(
    "values", [(-2.195, -2.1950001), (1.0001, 1.0002), (3e20, 3e20), (1.7e308, 1.7e308), (7.0,), (0.0,)]
)
def test_values_that_labels_do_not_tell_apart_lie_beside_one_another(values: tuple[float, ...]) -> None:
    labels = tuple("x" for _ in values)
    drawn = draw(Chart(title="c", kind="lines", labels=labels, unit="u", series=(Series(name="s", values=values),)))
    numbers = re.findall(r'text-anchor="end">([-+.e\d]+)</text>', drawn)
    assert len(set(numbers)) == len(numbers) >= 2
    heights = [float(y) for y in re.findall(r'<circle cx="[^"]*" cy="([^"]*)"', drawn)]
    assert max(heights) - min(heights) < 4


def test_bars_start_at_zero_and_keep_their_ratio() -> None:
    heights = [
        float(h)
        for h in re.findall(r'<rect x="[^"]*" y="[^"]*" width="[^"]*" height="([^"]*)" fill', draw(DOCUMENT.blocks[5]))
    ]
    assert len(heights) >= 2 and math.isclose(heights[1] / heights[0], 3, rel_tol=0.01)


@pytest.mark.parametrize("count", [2, 5, 6, 11])
def test_every_name_of_a_legend_has_room(count: int) -> None:
    names = [f"prepare-master+compile{n:02}" for n in range(count)]
    series = tuple(Series(name=name, values=(1.0, 2.0)) for name in names)
    drawn = draw(Chart(title="c", kind="bars", labels=("a", "b"), unit="x", series=series))
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', drawn).groups())
    places = [tuple(map(int, re.search(rf'x="(\d+)" y="(\d+)">{re.escape(name)}<', drawn).groups())) for name in names]
    assert all(0 < x <= width - 5 * len(names[0]) for x, _ in places)
    assert len(set(places)) == count
    below = int(re.search(r"translate\(0 (\d+)\)", drawn)[1])
    assert max(y for _, y in places) == below + 12
    assert height > below + max(
        float(y) for y in re.findall(r'<rect x="[^"]*" y="([^"]*)" width="[^"]*" height', drawn)
    )


def test_a_heat_map_is_darkest_where_most_of_a_row_lies() -> None:
    drawn = draw_heat(DOCUMENT.blocks[6])
    found = [float(v) for v in re.findall(r'fill-opacity="([^"]*)"', drawn)]
    assert found == [round(0.12 + 0.88 / 3, 2), 1.0, 1.0]
    assert drawn.count('class="band"') == 1 and ">fp16<" in drawn

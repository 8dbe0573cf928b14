"""A report: data that prints, turns into JSON, and into one HTML page."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..errors import as_flag
from ..extras import check_installed, is_there
from ..files import as_path, write_text
from ..formats import dtype_name
from . import plain_text
from .charts import draw, draw_heat
from .document import Chart, Document, Heat, printable


def to_plain(value: object) -> Any:
    """Return data as JSON knows it: dataclasses as mappings, sets sorted, inf and NaN as words.

    >>> to_plain({"x": (1.0, float("inf"))}), to_plain(torch.float16)
    ({'x': [1.0, 'inf']}, 'fp16')
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (frozenset, set)):
        return [to_plain(v) for v in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def render_page(document: Document) -> str:
    """Set a document as one self-contained HTML page: nothing in it is loaded from elsewhere and no script runs."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def svg(block: Chart | Heat) -> Markup:
        # every text inside is escaped where it is drawn
        return Markup(draw(block) if isinstance(block, Chart) else draw_heat(block))

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(svg=svg, cell=plain_text.cell, kind=lambda block: type(block).__name__)
    template = environment.from_string(files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(doc=printable(document))


class Report:
    """Base of every diagnosis. A subclass is a frozen dataclass that says how it is laid out."""

    __slots__ = ()

    def document(self) -> Document:
        """Return the layout."""
        raise NotImplementedError

    @property
    def is_healthy(self) -> bool:
        """Whether the diagnosis found nothing to change."""
        return self.document().is_good

    def __str__(self) -> str:
        return self.to_text(full=False)

    def to_text(self, *, full: bool = True) -> str:
        """Return the report as text: all of it, or what fits one screen."""
        return plain_text.render_text(self.document(), full=as_flag("to_text", "full", full))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page in a frame of its own, or the text where jinja2 is not installed."""
        if not is_there("jinja2"):
            return f"<pre>{escape(str(self))}</pre>"
        page = escape(render_page(self.document()))
        return f'<iframe srcdoc="{page}" style="width:100%;height:36em;border:0"></iframe>'

    def to_json(self) -> str:
        """Return the data as JSON text; inf and NaN are written as words."""
        return json.dumps({"report": type(self).__name__, **to_plain(self)}, indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page that opens without a network.

        Args:
            path: file to write; its folder must exist.

        Returns:
            The path.

        Raises:
            ConfigError: jinja2 is not installed.
            OSError: the page cannot be written; the file is what it was.
        """
        check_installed("to_html", ["jinja2"])
        path = as_path("to_html", "path", path)
        write_text(path, render_page(self.document()))
        return path

"""Sets a document as one self-contained HTML page."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .charts import draw, draw_heat
from .document import Chart, Document, Heat
from .plain import cell


def _svg(block: Chart | Heat) -> Markup:
    # every text inside is escaped where it is drawn
    return Markup(draw(block) if isinstance(block, Chart) else draw_heat(block))


def render(document: Document) -> str:
    """Return the page. Nothing in it is loaded from elsewhere and no script runs."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = _svg
    environment.filters["cell"] = cell
    environment.filters["kind"] = lambda block: type(block).__name__
    template = environment.from_string(files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(doc=document)

"""Reports: one layout, set as text, JSON or one HTML page."""

from .charts import draw as draw
from .charts import thinned as thinned
from .document import Band as Band
from .document import Block as Block
from .document import Cell as Cell
from .document import Chart as Chart
from .document import Document as Document
from .document import Heading as Heading
from .document import Heat as Heat
from .document import Note as Note
from .document import Pairs as Pairs
from .document import Series as Series
from .document import Source as Source
from .document import Table as Table
from .report_base import Report as Report
from .report_base import render_page as render_page
from .report_base import render_text as render_text
from .report_base import table_text as table_text

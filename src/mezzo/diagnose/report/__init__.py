"""Reports: one layout, set as text, JSON or one HTML page."""

from .base import Report as Report
from .document import Chart as Chart
from .document import Document as Document
from .document import Facts as Facts
from .document import Heading as Heading
from .document import Heat as Heat
from .document import Note as Note
from .document import Series as Series
from .document import Source as Source
from .document import Table as Table

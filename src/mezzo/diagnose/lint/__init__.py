"""Lint rules that a step breaks."""

from .linter import LintReport as LintReport
from .linter import lint as lint

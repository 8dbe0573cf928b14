"""The `mezzo` command: one file per command."""

from .main import main as main

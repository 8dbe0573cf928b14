"""The gradient pass on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

from pathlib import Path

from ...backends.cpp.batch import compiled_norms

SOURCE = Path(__file__).with_suffix(".cpp")

tensor_norms, known_norms = compiled_norms(SOURCE, "mezzo_norms")

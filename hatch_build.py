"""Wheels with the CPU kernels compiled: built where MEZZO_KERNELS=1 asks for it, as `make wheel` does; pure Python else."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPP = Path("src/mezzo/kernels/backends/cpp")


class KernelHook(BuildHookInterface[Any]):
    """Compiles the kernels and puts them beside their headers."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say that the wheel is for this kind of machine."""
        if os.environ.get("MEZZO_KERNELS") != "1" or version == "editable":
            return
        root = Path(self.root)
        built = targets(root / CPP / "targets.py").compile_all(root / "build" / "kernels")
        build_data["force_include"].update({str(path): f"mezzo/kernels/backends/cpp/built/{path.name}" for path in built})
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def targets(path: Path) -> Any:
    """Return the module of a file without importing its package, which needs torch."""
    spec = importlib.util.spec_from_file_location("targets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

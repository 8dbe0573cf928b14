"""The site builds without a broken link or an unknown name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Mixed precision for PyTorch" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'id="mezzo.step.prepare.prepare"' in (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")

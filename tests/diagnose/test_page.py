"""The page, looked at by a browser: no complaint on the console, plots drawn, nothing fetched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.zoo import sick_state

import mezzo.diagnose as diagnose

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if b), None)
BLUE, RED = (0x25, 0x63, 0xEB), (0xDC, 0x26, 0x26)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")


def look(page: Path, shot: Path) -> str:
    """Open a page in a headless browser without a network, take its picture, return the console."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    done = subprocess.run(
        [str(BROWSER), *flags, f"--user-data-dir={shot.parent / 'profile'}", "--enable-logging=stderr",
         "--window-size=1000,3000", f"--screenshot={shot}", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def count(shot: Path, colour: tuple[int, int, int]) -> int:
    return sum(1 for pixel in Image.open(shot).convert("RGB").get_flattened_data() if pixel == colour)


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    with diagnose.trace() as t:
        sick_state.growing_residual(torch.float16)()
    page = t.report.to_html(tmp_path / "report.html")
    assert look(page, tmp_path / "page.png") == ""
    for colour in (BLUE, RED):
        assert count(tmp_path / "page.png", colour) > 500, "a series is not drawn"


def test_a_page_with_an_error_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><link rel=icon href='data:,'><script>undefinedFunction()</script>", encoding="utf-8"
    )
    assert "undefinedFunction" in look(page, tmp_path / "page.png")
    assert count(tmp_path / "page.png", BLUE) == 0

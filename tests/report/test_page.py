"""The page, looked at by a browser: no complaint on the console, plots drawn, nothing fetched."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.zoo import faulty_state
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.diagnose import Report

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if b), None)
BLUE, RED, GREEN = (0x25, 0x63, 0xEB), (0xDC, 0x26, 0x26), (0x05, 0x96, 0x69)
INK = (0x1F, 0x29, 0x37)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")


WIDTH, HEIGHT, COLUMNS = 1000, 3000, 4


def look(page: Path, shot: Path, size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
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
         f"--window-size={size[0]},{size[1]}", f"--screenshot={shot}", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def count(shot: Path, colour: tuple[int, int, int], index: int = 0) -> int:
    """Count the pixels of a colour in the picture of one page."""
    left, top = index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT
    with Image.open(shot) as image:
        pixels = image.convert("RGB").crop((left, top, left + WIDTH, top + HEIGHT))
        return dict((c, n) for n, c in pixels.getcolors(WIDTH * HEIGHT)).get(colour, 0)


class Encoder(nn.Module):
    """Two layers with attention, one of which adds an error that bf16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x) + 64 - 64
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch() -> Tensor:
    return torch.randn(4, 6, 8)


def traced() -> Report:
    with diagnose.trace() as t:
        faulty_state.growing_residual(torch.float16)()
    return t.report


def stopped() -> Report:
    """The report that an exception carries."""
    model = Encoder()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16, output=fp32, guard.patience=1")
    nn.init.constant_(model.layers[0].norm2.weight, 6e4)
    amp.backward(model(batch()).mean())
    with pytest.raises(mezzo.errors.NonFiniteStep) as caught:
        amp.step()
    return caught.value.report


def watched() -> Report:
    model = Encoder()
    amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), "fp16, output=fp32, scaling.init_scale=1e9")
    with diagnose.watch(amp, every=2) as w:
        for _ in range(20):
            amp.zero_grad()
            amp.backward(model(batch()).square().mean())
            amp.step()
    return w.report


def compared() -> Report:
    return diagnose.compare(Encoder(), batch(), None, "bf16", tries=2)


def explained() -> Report:
    return diagnose.explain(Encoder(), batch(), "bf16", budget_s=0.01)


class Likelihood(Encoder):
    """An encoder whose constant rounds to 0 in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.inp(x).square() + 1e-9)


def linted() -> Report:
    return diagnose.lint(Likelihood(), batch(), policy="fp16")


def remembered() -> Report:
    model = Encoder()
    return diagnose.memory(model, torch.optim.AdamW(model.parameters()), "bf16", batch=batch())


PAGES: dict[str, tuple[Callable[[], Report], tuple[tuple[int, int, int], ...]]] = {
    "trace": (traced, (BLUE, RED)),
    "stopped": (stopped, (BLUE, RED)),
    "watch": (watched, (BLUE, RED, GREEN)),
    "compare": (compared, (BLUE, GREEN)),
    "memory": (remembered, (BLUE,)),
    "explain": (explained, ()),
    "lint": (linted, ()),
}


FRAME = "<iframe width={w} height={h} srcdoc='{page}' style='border:0;position:absolute;left:{x}px;top:{y}px'></iframe>"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """All pages side by side in one browser: its console, and the picture."""
    folder = tmp_path_factory.mktemp("pages")
    frames = [
        FRAME.format(w=WIDTH, h=HEIGHT, x=i % COLUMNS * WIDTH, y=i // COLUMNS * HEIGHT, page=html.escape(text))
        for i, (make, _) in enumerate(PAGES.values())
        if (text := make().to_html(folder / "one.html").read_text(encoding="utf-8"))
    ]
    (folder / "all.html").write_text(
        f'<!doctype html><meta charset=utf-8><link rel=icon href="data:,">{"".join(frames)}', encoding="utf-8"
    )
    shot = folder / "page.png"
    return look(folder / "all.html", shot, (COLUMNS * WIDTH, -(-len(frames) // COLUMNS) * HEIGHT)), shot


@pytest.mark.parametrize("name", PAGES)
def test_each_page_in_a_browser(name: str, pictures: tuple[str, Path]) -> None:
    console, shot = pictures
    index = list(PAGES).index(name)
    assert console == ""
    for colour in PAGES[name][1]:
        assert count(shot, colour, index) > 300, "a series is not drawn"
    assert count(shot, INK, index) > 100, "no text is drawn"


NARROW = """<!doctype html><link rel=icon href="data:,"><iframe width=390 height=900></iframe><script>
const frame = document.querySelector("iframe"); frame.srcdoc = PAGE;
frame.onload = () => {
  const page = frame.contentDocument, parts = [page.documentElement, ...page.querySelectorAll(".wide, .source, h1, h2, p")];
  console.log("cut off: " + parts.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className || e.tagName).join());
};</script>"""


@pytest.mark.parametrize("name", ["trace", "compare"])
def test_on_a_telephone_no_table_text_or_source_is_cut_off(name: str, tmp_path: Path) -> None:
    page = PAGES[name][0]().to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    outer = tmp_path / "narrow.html"
    outer.write_text(NARROW.replace("PAGE", json.dumps(page).replace("</", "<\\/")), encoding="utf-8")
    found = re.search(r'"cut off: ([^"]*)"', look(outer, tmp_path / "page.png"))
    assert found is not None and found[1] == ""


def test_a_page_with_an_error_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><link rel=icon href='data:,'><script>undefinedFunction()</script>", encoding="utf-8"
    )
    assert "undefinedFunction" in look(page, tmp_path / "page.png")
    assert count(tmp_path / "page.png", BLUE) == 0

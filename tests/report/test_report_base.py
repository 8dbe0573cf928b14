"""A report is data: JSON that is whole, and a page that opens without a network."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from tests.report.samples import DOCUMENT, sample
from tests.zoo import faulty_forward

import mezzo.diagnose as diagnose
from mezzo.errors import ConfigError
from mezzo.report import render_page
from mezzo.report.report_base import to_plain


def test_json_is_strict_and_whole() -> None:
    data = json.loads(sample().to_json(), parse_constant=lambda word: (_ for _ in ()).throw(ValueError(word)))
    assert data == {"report": "Sample", "values": [1.5, "inf", "nan"], "names": ["a", "b"], "dtype": "bf16"}


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = sample().to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert links == ["data:,"]
    assert [w for w in re.findall(r"https?://[^\s\"'<>]+", page) if "www.w3.org/2000/svg" not in w] == []


def test_a_page_shows_every_block_escaped() -> None:
    page = render_page(DOCUMENT)
    for part in ("a &lt;title&gt;", "Faulty: &amp; more", "heading", "because", "12,345", "a note", "y &lt; 2", "2^3"):
        assert part in page, part
    assert page.count("<svg ") == 3


def test_a_trace_report_holds_its_record() -> None:
    with diagnose.trace() as t:
        faulty_forward.feed_forward(torch.float16)()
    data = json.loads(t.report.to_json())
    assert data["report"] == "TraceReport"
    assert data["findings"][0]["verdict"] == "overflow"
    assert data["record"]["events"][0]["wide"][0]["dtype"] == "fp32"
    assert len(data["record"]["sizes"]) == len(t.record.sizes) > 0
    assert to_plain(t.report.findings[0].fix) == data["findings"][0]["fix"]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    with diagnose.trace() as t:
        torch.zeros(2, requires_grad=True).log().sum().backward()
    shown = t.report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "singularity" in shown and "<script" not in shown


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"
    page.write_text("what was there")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        sample().to_html(page)
    assert page.read_text() == "what was there" and [*tmp_path.iterdir()] == [page]


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"to_html was given the folder .*; name the file to write, such as .*report\.html\."
    ):
        sample().to_html(tmp_path)
    assert not [*tmp_path.iterdir()]

"""The description of the machine: JSON values, the commit of this checkout, names fit for files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from mezzo.bench import hardware


def test_it_is_json_and_names_what_figures_depend_on() -> None:
    facts = hardware.describe_machine(torch.device("cpu"))
    assert json.loads(json.dumps(facts)) == facts
    assert facts["threads"] == torch.get_num_threads()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["cpu"]["cores"] >= 1
    assert set(facts["cpu"]["flags"]) <= set(hardware.CPU_FLAGS)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc/meminfo")
def test_free_memory_is_read_anew() -> None:
    free = hardware.free_memory_bytes()
    assert free is not None
    assert 0 < free <= hardware.cpu()["memory_bytes"]


def test_settings_of_allocator_and_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4294967296")
    monkeypatch.setenv("MEZZO_NOTHING", "1")
    found = hardware.describe_machine(torch.device("cpu"))["settings"]
    assert found["MALLOC_TRIM_THRESHOLD_"] == "4294967296"
    assert "MEZZO_NOTHING" not in found


def test_the_commit_is_that_of_the_checkout() -> None:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    assert hardware.commit().removesuffix("+edits") == head[:12]


def test_a_missing_tool_is_no_error() -> None:
    assert hardware._output("no-such-tool-anywhere") == ""
    assert hardware._output("false") == ""


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"device": "cpu", "cpu": {"model": "Intel(R) Xeon(R) @ 2.0GHz"}, "threads": 2}, "intel-r-xeon-r-2-0ghz-2t"),
        ({"device": "cuda", "gpu": {"name": "NVIDIA H200"}, "threads": 2}, "nvidia-h200"),
    ],
)
def test_short_names(facts: dict[str, object], name: str) -> None:
    assert hardware.short_name(facts) == name

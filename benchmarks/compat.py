"""The whole suite on another torch: `python benchmarks/compat.py 2.15.0`, or `make compat TORCH=2.15.0`.

Makes a virtual environment in build/compat with that torch, runs every part of the suite in it, and stores what passed and
failed in benchmarks/compat, and into the README's table, which is made from there: `python benchmarks/compat.py --table`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORE = Path(__file__).parent / "compat"
README = ROOT / "README.md"
HEAD = "| torch | Python | parts of the suite | passed | failed | skipped | taken |\n|---|---|---:|---:|---:|---:|---|"


def parts() -> list[str]:
    """Return the folders of the suite that hold tests, and "." for the files beside them."""
    folders = sorted(
        {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    )
    return [folder for folder in folders if folder.split("/")[0] == folder]


def environment(torch: str) -> Path:
    """Return the Python of a virtual environment with one torch and everything the tests need, made if it is not there."""
    home = ROOT / "build" / "compat" / torch
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={torch}"], check=True)
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        kept = home / "constraints.txt"
        kept.write_text(
            "\n".join(line for line in lines if not line.startswith(("torch==", "triton=="))), encoding="utf-8"
        )
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", kept, "-e", f"{ROOT}[dev]"], check=True)
        (home / "ready").touch()
    return python


def run(python: Path, part: str) -> tuple[dict[str, int], list[str]]:
    """Run one part of the suite; return how many tests passed, failed and were skipped, and the names of those that failed."""
    tests = sorted((ROOT / "tests").glob("test_*.py")) if part == "." else [ROOT / "tests" / part]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT, check=False,
        )  # fmt: skip
        if not report.exists():
            return {"passed": 0, "failed": 1, "skipped": 0}, [f"{part}: pytest ended without a report"]
        return counted(ET.parse(report).getroot())


def counted(report: ET.Element) -> tuple[dict[str, int], list[str]]:
    """Return the counts of a report that pytest wrote, and the names of the tests that failed."""
    cases = list(report.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in bad})
    return {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped}, names


def commit() -> str:
    """Return the commit of the checkout; empty outside of one."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip()


def facts(python: Path) -> dict[str, str]:
    """Return what the result depends on."""
    code = "import platform, torch; print(torch.__version__, platform.python_version())"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {"torch": said[0], "python": said[1], "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}


def stored_as(torch: str, python: str, store: Path = STORE) -> Path:
    """Return the file of a torch's results; a second Python has one of its own."""
    plain = store / f"torch-{torch}.json"
    minor = python.rsplit(".", 1)[0]
    if not plain.exists() or json.loads(plain.read_text(encoding="utf-8"))["python"].startswith(f"{minor}."):
        return plain
    return store / f"torch-{torch}-python-{minor}.json"


def store(torch: str, python: Path, chosen: list[str]) -> dict[str, Any]:
    """Run parts of the suite and write the result beside those of other parts that are stored. Writes: one file, the README's table."""
    path = stored_as(torch, facts(python)["python"])
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}, "failed": {}}
    for part in chosen:
        counts, failed = run(python, part)
        known["parts"][part] = {**counts, "commit": commit()}
        known["failed"] = {**known["failed"], part: failed}
        known = {
            **facts(python),
            "parts": known["parts"],
            "failed": {p: names for p, names in known["failed"].items() if names},
        }
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    return known


def row(result: dict[str, Any]) -> str:
    """Return a result as a line of the table."""
    sums = [sum(part[key] for part in result["parts"].values()) for key in ("passed", "failed", "skipped")]
    share = f"{len({*parts()} & {*result['parts']})} of {len(parts())}"
    return (
        f"| {result['torch']} | {result['python']} | {share} | {sums[0]} | {sums[1]} | {sums[2]} | {result['date']} |"
    )


def table() -> str:
    """Return the table of all stored results, the newest torch first."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in STORE.glob("torch-*.json")]
    newest = sorted(
        results,
        key=lambda r: [int(n) for key in ("torch", "python") for n in r[key].split("+")[0].split(".")],
        reverse=True,
    )
    return "\n".join([HEAD, *map(row, newest)])


def with_table(page: str) -> str:
    """Return a page with the table of versions in it made anew."""
    begin = page.index(HEAD)
    return page[:begin] + table() + page[page.index("\n\n", begin) :]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="?", help="a version that the registry has")
    parser.add_argument("--parts", nargs="+", default=parts(), help="folders of tests; left out, all of them")
    parser.add_argument("--python", type=Path, help="an interpreter that has that torch already")
    parser.add_argument("--table", action="store_true", help="print the table of stored results")
    asked = parser.parse_args()
    if asked.table or asked.torch is None:
        print(table())
        return
    STORE.mkdir(exist_ok=True)
    result = store(asked.torch, asked.python or environment(asked.torch), asked.parts)
    print(table(), *(name for names in result["failed"].values() for name in names), sep="\n")
    raise SystemExit(bool(result["failed"]))


if __name__ == "__main__":
    main()

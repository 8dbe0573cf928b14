"""What the kernels are compiled with, and the processors that a wheel carries them for. Knows no torch: builds of wheels read it.

As a program, `python targets.py FOLDER`, it compiles every kernel for every processor into a folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp",
    # no product and sum are joined, and no operation dropped or reordered, except where the source says so
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
HEADERS = Path(__file__).parent
OPS = HEADERS.parents[1] / "ops"
MARK = b"mezzo-sha256:"
"""Between a library's code and its digest."""
LEVELS = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v3": "avx2 bmi1 bmi2 f16c fma movbe",
}
"""Processors, the best first, as compilers name them, with the flags that Linux gives those that are one. On all of them torch
rounds a product and the sum after it once. Compiled with -mavx512bf16 too the code is the same, bit for bit."""


def sources() -> list[Path]:
    """Return the kernels' C++ files."""
    return sorted(OPS.glob("*/cpu.cpp"))


def texts(source: Path) -> list[str]:
    """Return all that is compiled with a source: itself and the headers."""
    return [path.read_text(encoding="utf-8") for path in (source, *sorted(HEADERS.glob("*.h")))]


def file_name(source: Path, level: str) -> str:
    """Return what a wheel calls a compiled kernel: another name for other sources or flags."""
    digest = hashlib.sha256(chr(0).join([*FLAGS, *texts(source)]).encode()).hexdigest()[:16]
    return f"{source.parent.name}-{level}-{digest}.so"


def levels(cpu_flags: Sequence[str]) -> list[str]:
    """Return the processors that one with these flags is, the best first."""
    return [level for level, needed in LEVELS.items() if set(needed.split()) <= set(cpu_flags)]


def sealed(code: bytes) -> bytes:
    """Return a library with the digest by which it is known to be whole."""
    return code + MARK + hashlib.sha256(code).digest()


def is_sealed(content: bytes) -> bool:
    """Whether a library has its digest and is whole."""
    code, mark, digest = content.rpartition(MARK)
    return bool(mark) and hashlib.sha256(code).digest() == digest


def compile_into(folder: Path, source: Path, level: str) -> Path:
    """Compile one kernel for one processor, with the compiler that CXX names, else g++. Writes: one file."""
    target = folder / file_name(source, level)
    command = [os.environ.get("CXX", "g++"), *FLAGS, f"-march={level}", "-DMEZZO_FMA=1", f"-I{HEADERS}", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    target.write_bytes(sealed(target.read_bytes()))
    return target


def compile_all(folder: Path) -> list[Path]:
    """Compile every kernel for every processor of this machine's kind; none for kinds that have no level here."""
    known = LEVELS if (platform.system(), platform.machine()) == ("Linux", "x86_64") else {}
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(source, level) for source in sources() for level in known]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda pair: compile_into(folder, *pair), pairs))


if __name__ == "__main__":
    print(*compile_all(Path(sys.argv[1])), sep="\n")

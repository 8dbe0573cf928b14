"""The Triton kernels compiled for GPUs that are not here: registers, spills, and loads of several words at once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from tests.bench.script import load_script

pytest.importorskip("triton", reason="triton, an optional import, is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # of Triton 3.8 on Python 3.13
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MOST_REGISTERS = 64
"""Of a thread, on NVIDIA: 1024 threads a multiprocessor, half of what it has room for."""


@pytest.fixture
def offline() -> ModuleType:
    return load_script("offline_kernels")


def check(offline: ModuleType, target: str, names: Any) -> None:
    for kernel, name, constants in offline.variants(target=target):
        if not names(name):
            continue
        cost = offline.cost(offline.build(kernel, constants, target))
        assert cost.spilled == 0, (name, cost)
        assert cost.registers <= MOST_REGISTERS, (name, cost)
        if "ALIGNED" not in constants:  # a handful of numbers
            continue
        # On AMD a thread has 2 elements: 16-bit ones are one word.
        is_wide = constants["ALIGNED"] and not (target == "gfx942" and name.endswith("bf16/bf16/bf16"))
        least = 1 if target == "gfx942" else 3 if name.startswith("rms_norm bf16") else 4  # no bias, no mean
        assert (cost.vectors >= least) == is_wide, (name, cost)
        if is_wide:
            plain = offline.build(kernel, {**constants, "ALIGNED": False}, target)
            assert cost.memory < offline.cost(plain).memory


@pytest.mark.parametrize("target", TARGETS)
def test_split_weights_take_no_spill_few_registers_and_vectors(target: str, offline: ModuleType) -> None:
    check(offline, target, lambda name: "split bf16/bf16/fp32" in name or name.startswith(("decide", "move")))


@pytest.mark.parametrize("target", TARGETS)
def test_norms_take_no_spill_few_registers_and_vectors(target: str, offline: ModuleType) -> None:
    check(offline, target, lambda name: "_norm" in name and name.endswith(" 768"))


@pytest.mark.parametrize("kernel", ["adamw", "sgd", "decide", "move_scale", "layer_norm", "layer_norm_backward"])
def test_no_number_of_a_launch_has_a_kernel_compiled_anew(kernel: str, offline: ModuleType) -> None:
    """Triton makes one kernel for 1, one for multiples of 16 and one for the rest, of each whole number that it may."""
    numbers = [p for p in offline.function_of(kernel).params if p.name in offline._INTEGERS]
    assert len(numbers) == {"decide": 0, "layer_norm": 1}.get(kernel, 2)
    assert all(p.do_not_specialize for p in numbers), numbers


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS[:3])
def test_every_variant_takes_no_spill_few_registers_and_vectors(target: str, offline: ModuleType) -> None:
    check(offline, target, lambda name: True)


def test_vectors_are_for_addresses_and_sizes_that_allow_them() -> None:
    from mezzo.kernels.backends.triton import is_aligned

    assert is_aligned((1 << 20, 0, (1 << 20) + 16), (1024, 48))
    assert not is_aligned((1 << 20,), (1000,))
    assert not is_aligned(((1 << 20) + 2,), (1024,))

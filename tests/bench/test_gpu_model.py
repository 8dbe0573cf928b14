"""Predictions for a GPU: the operations are those torch counts, a batch lies on the straight line through two others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mezzo.bench import find_workload


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_model.py"
    spec = importlib.util.spec_from_file_location("gpu_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


SMALL = find_workload("resnet")().quick()


@pytest.mark.parametrize("variant", ["torch-autocast", "prepare", "prepare-master"])
def test_products_are_counted_and_grow_in_a_line(script: ModuleType, variant: str) -> None:
    two, four, six = script.trace(SMALL, variant, (2, 4, 6))
    assert script.at_batch(two, four, (2, 4), 6) == six
    assert SMALL.batch_size == 2
    assert sum(op.flops for op in two) == sum(phase.flops for phase in SMALL.roofline("bf16"))


def test_products_of_an_lstm_are_counted(script: ModuleType) -> None:
    small = find_workload("lstm")().quick()
    (ops,) = script.trace(small, "torch-autocast", (2,))
    forward, backward, _ = small.roofline("bf16")
    # The kernel of the CPU computes the gradient of the first state too, which nobody asked for.
    unasked = small.layers * 2 * small.batch_size * 4 * small.width**2
    assert sum(op.flops for op in ops) == forward.flops + backward.flops + unasked


def test_views_are_no_launches_and_writes_are(script: ModuleType) -> None:
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    with script.Recorder() as recorder:
        x.t()[0].add_(1.0)
        (x @ y).relu_()
    assert [(op.name, op.flops, op.moved_bytes) for op in recorder.ops] == [
        ("add_.Tensor", 0.0, 16.0), ("mm.default", 128.0, 192.0), ("relu_.default", 0.0, 64.0),
    ]  # fmt: skip


def test_the_slower_of_host_and_device_counts(script: ModuleType) -> None:
    gpu = script.Gpu(flops={2: 100.0, 4: 10.0}, bandwidth=50.0)
    ops = [
        script.Op(name="mm", flops=200.0, moved_bytes=10.0, width=2),
        script.Op(name="add", flops=0.0, moved_bytes=50.0, width=4),
    ]
    model = torch.nn.Linear(2, 2)
    found = script.predict(ops, model, "prepare-master", gpu, 1.0)
    assert found.launches == 2 + 1 + script.STEP_LAUNCHES["prepare-master"]
    assert found.moved_bytes == 60.0 + 28 * 6
    assert found.device_s == pytest.approx(2.0 + 1.0 + 28 * 6 / 50.0)
    assert found.step_s == found.host_s == found.launches * 1.0


def test_other_ops_at_another_batch_are_refused(script: ModuleType) -> None:
    one = script.Op(name="mm", flops=1.0, moved_bytes=1.0, width=2)
    with pytest.raises(ValueError, match="other ops at another batch"):
        script.at_batch([one], [one, one], (2, 4), 8)

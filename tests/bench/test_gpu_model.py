"""Predictions for a GPU: the operations are those torch counts, and the rules those of CUDA, not of the CPU that is there."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.bench.script import FOLDER, load_script

from mezzo.bench import find_workload


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    module = load_script("gpu_model")
    sys.path.remove(str(FOLDER))
    return module


TRACED = """
import json
import gpu_model
import torch
import mezzo
from mezzo.bench import find_workload
from mezzo.kernels import for_capture
for name in ("resnet", "lstm", "vit"):
    for variant in gpu_model.STEP_BYTES:
        ops = gpu_model.trace(find_workload(name)().quick(), variant)
        print(json.dumps([name, variant, [(op.name, op.flops, op.width, sorted(op.devices)) for op in ops]]))
model = torch.nn.Sequential(torch.nn.Linear(768, 768, device="meta"), torch.nn.LayerNorm(768, device="meta"))
with gpu_model.fake_gpu.entered():
    x = torch.empty(2048, 768, device="cuda")
    mezzo.prepare(gpu_model.fake_gpu.placed(model), None, "bf16")
    with gpu_model.Recorder() as recorder, for_capture():
        model(x).sum().backward()
print(json.dumps(["norm", "prepare", [(op.name, op.flops, op.width, sorted(op.devices)) for op in recorder.ops]]))
"""
Traced = dict[tuple[str, str], list[tuple[str, float, int, list[str]]]]


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Ops of small models on a GPU without memory, which a process has from its start or never."""
    if torch.version.cuda is not None and not torch.cuda.is_available():
        pytest.skip("torch built for CUDA takes no other device of that name")
    ran = subprocess.run([sys.executable, "-c", TRACED], cwd=FOLDER, check=True, capture_output=True, text=True)
    found = map(json.loads, ran.stdout.splitlines())
    return {(name, variant): [(*op,) for op in ops] for name, variant, ops in found}


VARIANTS = ["torch-autocast", "prepare", "prepare-master"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_are_those_of_the_model(traced: Traced, variant: str) -> None:
    phases = find_workload("resnet")().quick().roofline("bf16")
    assert sum(flops for _, flops, _, _ in traced["resnet", variant]) == sum(phase.flops for phase in phases)


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_of_an_lstm_are_counted(traced: Traced, variant: str) -> None:
    small: Any = find_workload("lstm")().quick()
    forward, backward, _ = small.roofline("bf16")
    # The kernel computes the gradient of the first state too, which nobody asked for.
    unasked = small.layers * 2 * small.batch_size * 4 * small.width**2
    assert sum(flops for _, flops, _, _ in traced["lstm", variant]) == forward.flops + backward.flops + unasked


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_predicted_for_a_gpu_ran_on_one(traced: Traced, variant: str) -> None:
    for name in ("resnet", "lstm", "vit"):
        assert {device for *_, devices in traced[name, variant] for device in devices} == {"cuda"}
    assert not [op for op, *_ in traced["lstm", variant] if "mkldnn" in op or "cell" in op]


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_is_not_widened_as_on_a_cpu(traced: Traced, variant: str) -> None:
    forward, backward = [
        {
            (op, width)
            for op, _, width, _ in traced["vit", variant]
            if "attention" in op and ("backward" in op) == is_backward
        }
        for is_backward in (False, True)
    ]
    assert forward == {("_scaled_dot_product_flash_attention.default", 2)}
    assert backward == {("_scaled_dot_product_flash_attention_backward.default", 2)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_follows_the_rules_of_cuda(traced: Traced, variant: str) -> None:
    widths = {width for op, _, width, _ in traced["vit", variant] if op.startswith("native_layer_norm")}
    assert widths == {4}


def test_norms_take_the_kernel_of_a_gpu_with_triton(traced: Traced) -> None:
    """16-bit activations and fp32 weights, in a step that is captured: one launch forward, two backward, and no copy of what is normalised."""
    pytest.importorskip("triton", reason="triton, an optional import, is not installed")
    ops = [(op, width) for op, _, width, _ in traced["norm", "prepare"]]
    forward, backward = ops.index(("layer_norm.default", 2)), ops.index(("layer_norm_backward.default", 2))
    assert ops[forward - 1][0] == "addmm.default" and ops[backward + 1] == ("sum.dim_IntList", 4), ops
    assert not [op for op, _ in ops if op.startswith("native_layer_norm")]


def test_a_device_that_comes_after_torch_is_refused(script: ModuleType) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch built for CUDA has the device from the start where there is one")
    with pytest.raises(RuntimeError, match="torch was imported before fake_gpu"):
        script.trace(find_workload("resnet")().quick(), "prepare")


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
        script.Op(name="mm", flops=200.0, moved_bytes=10.0, width=2, devices=frozenset({"cuda"})),
        script.Op(name="add", flops=0.0, moved_bytes=50.0, width=4, devices=frozenset({"cuda"})),
    ]
    model = torch.nn.Linear(2, 2)
    found = script.predict(ops, model, "prepare-master", gpu, 1.0)
    assert found.launches == 2 + 1 + script.STEP_LAUNCHES["prepare-master"]
    assert found.moved_bytes == 60.0 + 28 * 6
    assert found.device_s == pytest.approx(2.0 + 1.0 + 28 * 6 / 50.0)
    assert found.step_s == found.host_s == found.launches * 1.0

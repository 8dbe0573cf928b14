"""What `mezzo.autocast` shares with `torch.autocast`: type, attributes, absent devices, other dtypes, types of errors."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_versions import TORCH, knows_subclasses

import mezzo
from mezzo import Policy
from mezzo.errors import FormatError, RegionError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without CUDA")


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    "arguments",
    [("cpu",), ("cpu", FP16), ("cpu", BF16, False), ("cpu", BF16, True, False), ("mps",), ("xpu",), ("hpu",)],
)
def test_attributes_are_those_of_torchs_region(arguments: tuple[Any, ...]) -> None:
    ours, theirs = mezzo.autocast(*arguments), torch.autocast(*arguments)
    for name in ("device", "fast_dtype", "_enabled", "_cache_enabled"):
        assert getattr(ours, name) == getattr(theirs, name), name
    with ours:
        assert torch.is_autocast_enabled(arguments[0]) is theirs._enabled
        assert torch.get_autocast_dtype(arguments[0]) is theirs.fast_dtype
    assert not torch.is_autocast_enabled(arguments[0])


@knows_subclasses
def test_a_region_is_one_of_torchs() -> None:
    assert isinstance(mezzo.autocast("cpu"), torch.autocast)


@no_cuda
@pytest.mark.parametrize("device", ["cuda", "gpu", torch.device("cuda", 0)])
def test_without_cuda_the_region_warns_and_casts_nothing(device: str) -> None:
    with pytest.warns(UserWarning, match="this machine has no cuda device, so the region is disabled"):
        region = mezzo.autocast(device)
    with region:
        assert not torch.is_autocast_enabled("cuda") and product() is FP32
    with pytest.raises(RegionError, match=re.escape(f"autocast({device!r}): this machine has no cuda device")):
        mezzo.autocast(device, strict=True)
    with pytest.warns(UserWarning):
        mezzo.autocast("cuda", policy="auto")


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_another_dtype_warns_and_casts_nothing(dtype: torch.dtype) -> None:
    with pytest.warns(
        UserWarning, match="CPU Autocast only supports dtypes of torch.bfloat16, torch.float16 currently"
    ):
        region = mezzo.autocast("cpu", dtype=dtype)
    with region:
        assert product() is FP32
    with pytest.raises(RegionError, match="a region casts to fp16 or bf16"):
        mezzo.autocast("cpu", dtype=dtype, strict=True)
    with warnings.catch_warnings(), mezzo.autocast("cpu", dtype=dtype, enabled=False):
        warnings.simplefilter("error")
        assert product() is FP32


def test_a_dtype_may_be_written_by_name() -> None:
    with mezzo.autocast("cpu", dtype="fp16"):
        assert product() is FP16
    with mezzo.autocast(dtype="bf16"):
        assert product() is BF16
    with pytest.raises(FormatError, match="Did you mean 'bf16'"):
        mezzo.autocast("cpu", dtype="bf61")


@pytest.mark.parametrize(
    ("call", "torchs", "sentence"),
    [
        (lambda amp: amp("cpu")(torch.ones(1)), TypeError, r"autocast\(\)\(func\) requires a callable, but got Tensor"),
        (lambda amp: amp("no such device"), RuntimeError, "Invalid device string: 'no such device'"),
        (lambda amp: amp(3), ValueError, "a device type such as 'cpu' or 'cuda' is wanted, not a int"),
    ],
)
def test_errors_are_also_of_the_type_torch_raises(call: Any, torchs: type[Exception], sentence: str) -> None:
    if TORCH >= (2, 12) or torchs is not TypeError:  # 2.11 decorates whatever it is given
        with pytest.raises(torchs):
            call(torch.autocast)
    with pytest.raises(torchs, match=sentence) as caught:
        call(mezzo.autocast)
    assert isinstance(caught.value, RegionError)


def test_the_signature_of_the_old_namespace_is_named() -> None:
    with pytest.raises(RegionError, match=r"mezzo\.cuda\.amp\.autocast"):
        mezzo.autocast(True, FP16, True)  # type: ignore[arg-type]
    with pytest.raises(RegionError, match=r"a dtype such as torch\.bfloat16 or 'bf16' is wanted"):
        mezzo.autocast("cpu", True)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_torchscript_says_what_to_write() -> None:
    def scripted(x: torch.Tensor) -> torch.Tensor:
        with mezzo.autocast("cpu"):
            return x @ x

    with pytest.raises(Exception, match=r"torch\.jit\.script cannot compile this class: write torch\.autocast"):
        torch.jit.script(scripted)


def test_a_policy_may_be_text_value_dict_path_or_dtype(tmp_path: Path) -> None:
    policy = Policy.parse("fp16, modules=none, op:softmax=fp32")
    policy.save(tmp_path / "p.toml")
    for form in (policy, str(policy), policy.to_dict(), tmp_path / "p.toml", str(tmp_path / "p.toml")):
        with mezzo.autocast("cpu", policy=form):
            assert product() is FP16
            assert torch.ones(2, dtype=FP16).softmax(-1).dtype is FP32
    with mezzo.autocast("cpu", policy=FP16):
        assert product() is FP16

"""Which weights are gathered together, and in what: the policy's plan for a sharded model."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.models import Bare, Language
from torch import nn

from mezzo import Policy
from mezzo.distributed.shard_plan import ParamDtypes, ShardPlan, plan_shards
from mezzo.errors import PolicyError

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STORED = ParamDtypes(stored=FP32, unsharded=FP32)
CAST = ParamDtypes(stored=FP32, unsharded=BF16)
LOW = ParamDtypes(stored=BF16, unsharded=BF16)


def _plan(model: nn.Module, policy: str, *units: nn.Module) -> dict[tuple[str, ...], ParamDtypes]:
    plan = plan_shards(model, Policy.parse(policy), units)
    assert sum(group.num_parameters for group in plan.groups) == sum(p.numel() for p in model.parameters())
    return {group.modules: group.param_dtypes for group in plan.groups}


def test_norms_are_gathered_apart_from_the_products_of_their_unit() -> None:
    model = Language()
    norms = {(f"layers.{i}.norm1", f"layers.{i}.norm2"): STORED for i in range(2)}
    layers = {("layers.0",): CAST, ("layers.1",): CAST}
    # The bare parameter of the root can be gathered by the root only, and adds itself to fp32 activations.
    assert _plan(model, "bf16", *model.layers) == {**norms, **layers, ("",): STORED}
    assert _plan(model, "bf16-master, Language=fp32", *model.layers) == {
        ("layers.0",): STORED, ("layers.1",): STORED, ("",): STORED,
    }  # fmt: skip


def test_weights_stored_in_16_bit_are_gathered_so() -> None:
    model = Language()
    found = _plan(model, "bf16-master", *model.layers)
    assert found[("layers.0",)] == found[("embed", "head")] == LOW
    assert found[("layers.0.norm1", "layers.0.norm2")] == found[("",)] == STORED


def test_inner_groups_come_first() -> None:
    model = Language()
    order = [group.modules for group in plan_shards(model, Policy.parse("bf16"), model.layers).groups]
    assert order[-1] == ("",)
    assert order.index(("layers.0.norm1", "layers.0.norm2")) < order.index(("layers.0",))


def test_fp32_is_one_group_a_unit() -> None:
    model = Language()
    assert _plan(model, "fp32", *model.layers) == {("layers.0",): STORED, ("layers.1",): STORED, ("",): STORED}


@pytest.mark.parametrize(
    ("policy", "unsharded"),
    [
        ("bf16", BF16),
        ("fp16", FP16),
        ("bf16, module:first=fp16", FP16),
        ("bf16, module:first=fp32", FP32),
        ("bf16, op:linear=fp32", FP32),
        ("bf16, op:softmax=fp32", BF16),
        ("fp32", FP32),
    ],
)
def test_products_are_gathered_in_the_dtype_of_their_ops(policy: str, unsharded: torch.dtype) -> None:
    model = Bare()
    found = _plan(model, policy, model.first)
    assert found[("first",)] == ParamDtypes(stored=FP32, unsharded=unsharded)


def test_a_tied_weight_is_gathered_as_its_embedding_needs_it() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.LayerNorm(4))
    assert _plan(model, "bf16") == {("0", "2"): STORED, ("",): CAST}
    model[1].weight = model[0].weight
    assert _plan(model, "bf16") == {("",): STORED}


def test_a_weight_that_units_share_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(PolicyError, match="'0' shares a weight between the units '0' and '1', which are gathered at"):
        plan_shards(model, Policy.parse("bf16"), [model[0], model[1]])
    assert _plan(model, "bf16") == {("",): CAST}


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(2))
        self.narrow = nn.Parameter(torch.ones(2, dtype=BF16))


def test_two_storage_dtypes_in_one_module_are_refused() -> None:
    with pytest.raises(PolicyError, match="weights of 'part' would be stored in bf16 and fp32, and what is gathered"):
        plan_shards(nn.ModuleDict({"part": _Mixed()}), Policy.parse("bf16"))


def test_a_plan_reads_as_a_table() -> None:
    model = Language()
    plan = plan_shards(model, Policy.parse("bf16, reduce=bf16"), model.layers)
    assert str(plan) == (
        "gradients are reduced in bf16\n"
        "32 weights stored in fp32, gathered in fp32: layers.0.norm1, layers.0.norm2\n"
        "568 weights stored in fp32, gathered in bf16: layers.0\n"
        "32 weights stored in fp32, gathered in fp32: layers.1.norm1, layers.1.norm2\n"
        "568 weights stored in fp32, gathered in bf16: layers.1\n"
        "248 weights stored in fp32, gathered in fp32: the root"
    )
    assert isinstance(plan, ShardPlan)

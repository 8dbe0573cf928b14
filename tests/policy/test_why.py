"""Why: the rule that wins is the one that acts and stands where the answer says, and so is the engine that a policy needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.policies import policies
from torch import nn

import mezzo
from mezzo.errors import FormatError, PolicyError
from mezzo.formats import dtype_name
from mezzo.policy import PRESETS, ModuleRule, OpRules, Policy, Reason, Rule
from mezzo.policy.spelling import write_module_rule
from mezzo.policy.table import op_table, registered
from mezzo.policy.text import written

NAMED = Policy.parse("bf16, op:softmax=low, *.norm*=fp32, op:softmax=fp32, module:head=fp16, *.mlp=low")


@pytest.mark.parametrize(
    ("module", "op", "class_name", "answer"),
    [
        (None, None, (), """\
code outside modules with a rule on cpu: bf16
  because compute=bf16 (preset bf16)"""),
        ("encoder.norm1", None, "LayerNorm", """\
encoder.norm1 on cpu: fp32
  because *.norm*=fp32 (edit 3)
  over ?LayerNorm=fp32_low_out (preset bf16)
  over compute=bf16 (preset bf16)"""),
        ("ln", None, ("FastLayerNorm", "LayerNorm", "Module"), """\
ln on cpu: fp32, result bf16
  because ?LayerNorm=fp32_low_out (preset bf16)
  over compute=bf16 (preset bf16)"""),
        (None, "softmax", "LayerNorm", """\
softmax in a module of class LayerNorm on cpu: fp32
  because ?LayerNorm=fp32_low_out (preset bf16)
  over op:softmax=fp32 (edit 2)
  over op:softmax=low (edit 1)"""),
        ("", None, (), """\
the root module on cpu: bf16
  because compute=bf16 (preset bf16)"""),
        ("encoder.mlp", None, (), """\
encoder.mlp on cpu: bf16
  because *.mlp=low (edit 5)
  over compute=bf16 (preset bf16)"""),
        ("encoder.norm1", "softmax", (), """\
softmax in encoder.norm1 on cpu: fp32
  because *.norm*=fp32 (edit 3)
  over op:softmax=fp32 (edit 2)
  over op:softmax=low (edit 1)"""),
        (None, "softmax", (), """\
softmax on cpu: fp32
  because op:softmax=fp32 (edit 2)
  over op:softmax=low (edit 1)"""),
        ("head.out", "mm", (), """\
mm in head.out on cpu: fp16
  because mm=low (torch table, cpu): matrix product: 16-bit units, products summed in fp32 inside the kernel"""),
        (None, "tanh", (), """\
tanh on cpu: the dtype of its inputs
  because tanh=as_is (torch table, cpu): the table has no row for it"""),
    ],
)  # fmt: skip
def test_the_answer_is_readable(module: str | None, op: str | None, class_name: object, answer: str) -> None:
    why = NAMED.why(module, op, class_name=class_name)  # type: ignore[arg-type]
    text = "bf16, op:softmax=low, op:softmax=fp32, *.norm*=fp32, module:head=fp16, *.mlp=low"
    assert str(why) == f"{answer}\n  policy: {text}"


def test_a_row_of_the_table_is_overridden_by_an_edit() -> None:
    why = Policy.parse("fp16, op:softmax=low").why(None, "softmax", device="cuda")
    row = op_table("torch", "cuda")["softmax"]
    assert why.winner == Reason(text="op:softmax=low", written="edit 1")
    assert why.overrides == (Reason(text="softmax=fp32", written="torch table, cuda", why=row.reason),)
    assert why.precision == "fp16"


def test_another_spelling_of_an_op_has_the_same_rule() -> None:
    policy = Policy.parse("bf16, op:special_softmax=low")
    assert policy.why(None, "softmax").winner.text == "op:special_softmax=low"
    assert Policy.parse("bf16, ops=mezzo").why(None, "special_logsumexp").winner.text.startswith("logsumexp=")


def test_a_forbidden_op_names_its_replacement() -> None:
    why = Policy.parse("fp16").why(None, "binary_cross_entropy", device="cuda")
    assert why.winner.text == "binary_cross_entropy=forbid"
    assert why.precision.startswith("refused; write binary_cross_entropy_with_logits")
    assert Policy.parse("fp16, op:exp=forbid").why(None, "exp").precision == "refused"
    assert Policy.parse("fp16").why("loss", "binary_cross_entropy", "cuda").precision == why.precision
    fp32_loss = Policy.parse("fp16, module:loss=fp32")
    assert fp32_loss.why("loss", "binary_cross_entropy", "cuda").precision == "fp32"


def test_fp32_compute_switches_the_op_rules_off() -> None:
    why = Policy.parse("fp32, op:mm=low").why(None, "mm")
    assert (why.precision, why.winner.text) == ("fp32", "compute=fp32")
    assert why.overrides[0].text == "op:mm=low"


@pytest.mark.parametrize("rule", ["Linear=bf16", "Linear=low", "?Linear=fp32_low_out", "Linear=fp32"])
def test_fp32_compute_switches_the_module_rules_off(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    policy, model = Policy.parse(f"fp32, {rule}"), torch.nn.Sequential(torch.nn.Linear(2, 2))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    mezzo.prepare(model, None, policy).model(torch.ones(2, 2))
    why = policy.why("0", class_name="Linear")
    assert (why.precision, why.winner.text, why.overrides[0].text) == ("fp32", "compute=fp32", rule)
    told = f"so {rule} does nothing. Write 'bf16, *=fp32, {rule}' for fp32 in every other module."
    assert (told in caplog.text) == (rule in ("Linear=bf16", "Linear=low"))
    assert seen == [torch.float32] and policy.why("0", "mm", class_name="Linear").precision == "fp32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a device that is not there")
def test_auto_on_a_device_that_is_not_there() -> None:
    assert PRESETS["auto"].why(None, device="cuda").precision == "decided by the device"
    assert PRESETS["auto"].why(None, "mm", device="cuda").precision == "decided by the device"


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"unknown op 'softmx'\. Did you mean 'softmax'\?"):
        NAMED.why(None, "softmx")


X, W = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float16)
CALLS = {
    "mm": lambda: torch.mm(X, W),
    "linear": lambda: torch.nn.functional.linear(X, W.float()),
    "softmax": lambda: torch.softmax(X, 0),
    "tanh": lambda: torch.tanh(X.half()),
    "mse_loss": lambda: torch.nn.functional.mse_loss(X.bfloat16(), X.bfloat16()),
    "cat": lambda: torch.cat([X, X.bfloat16()]),
    "bmm": lambda: torch.bmm(X[None], X[None]),
    "cumsum": lambda: X.bfloat16().cumsum(0),
}
INPUTS = {"softmax": "fp32", "tanh": "fp16", "cumsum": "bf16"}


@pytest.mark.parametrize("op", CALLS)
def test_the_answer_is_what_torch_does(op: str) -> None:
    """The torch table on this CPU against torch's own autocast, by the dtype that comes out."""
    with torch.autocast("cpu", torch.bfloat16):
        observed = dtype_name(CALLS[op]().dtype)
    predicted = Policy.parse("bf16").why(None, op).precision
    predicted = {"the dtype of its inputs": INPUTS.get(op), "the widest dtype among its inputs": "fp32"}.get(
        predicted, predicted
    )
    assert observed == predicted


def test_the_nearest_module_around_decides() -> None:
    policy = Policy.parse("bf16, module:a=fp16, a.b=fp32, a.b.c.d=low")
    asked = ["a", "a.x", "a.b", "a.b.x", "a.b.c.x", "a.b.c.d", "a.b.c.d.x", "b"]
    assert [policy.why(fqn).precision for fqn in asked] == ["fp16", "fp16", *["fp32"] * 3, "bf16", "bf16", "bf16"]


names = st.sampled_from(["", "head", "encoder.norm", "encoder.norm.inner", "a,b.c", "model.encoder"])
classes = st.lists(st.sampled_from(["LayerNorm", "Linear", "LlamaRMSNorm", "Module"]), max_size=2)


@given(policies(), names, classes)
def test_the_winner_is_the_rule_that_module_rule_finds(policy: Policy, fqn: str, class_names: list[str]) -> None:
    why = policy.why(fqn, class_name=class_names)
    rule = policy.module_rule(fqn, class_names)
    if rule is not None:
        assert why.winner.text == write_module_rule(rule)
    for around in (fqn.rpartition(".")[0], ""):
        outer = policy.module_rule(around)
        if rule is None and outer is not None:
            assert why.winner.text == write_module_rule(outer)
            break
        if rule is not None or not around:
            break


@given(
    policies(),
    names,
    classes,
    st.sampled_from([None, "softmax", "mm", "cumsum", "tanh"]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_every_reason_stands_where_it_says(
    policy: Policy, fqn: str, class_names: list[str], op: str | None, device: str
) -> None:
    why = policy.why(fqn, op, device=device, class_name=class_names)
    text = written(policy)
    assert why.policy == str(policy)
    for reason in (why.winner, *why.overrides):
        kind, _, number = reason.written.partition(" ")
        if kind == "edit":
            assert list(text.edits.values())[int(number) - 1] == reason.text
        elif kind == "preset":
            preset = PRESETS[number]
            field = f"compute={'auto' if preset.compute is None else dtype_name(preset.compute)}"
            assert reason.text in [field, *map(write_module_rule, preset.modules)]
        else:
            assert reason.written == f"{policy.op_rules.table} table, {device}"


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_torchs_own_table_needs_no_mode(device: str) -> None:
    assert Policy().why_engine(device).engine == "dispatcher"
    assert Policy(ops="mezzo").why_engine(device).engine == "mode"


def test_an_edit_that_changes_nothing_stays_with_the_dispatcher() -> None:
    same = Policy(ops=OpRules(edits=(("matmul", Rule.LOW), ("tanh", Rule.AS_IS))))
    assert same.why_engine("cpu").engine == "dispatcher"
    assert Policy(ops=OpRules(edits=(("softmax", Rule.FP32),))).why_engine("cuda").engine == "dispatcher"


def test_the_choice_names_the_ops_that_differ() -> None:
    choice = Policy(ops=OpRules(edits=(("softmax", Rule.FP32),))).why_engine("cpu")
    assert str(choice) == "mode: 1 ops have another rule than torch's on cpu: softmax"


def test_a_row_is_there_only_if_the_installed_torch_casts_the_op() -> None:
    for device in ("cpu", "cuda", "mps", "xpu"):
        listed = set(op_table("torch", device))
        assert registered(device) <= listed
        assert listed - registered(device) <= {"linalg_multi_dot", "chain_matmul"}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"module": 3}, "why was asked about the module 3; write its full name, or None."),
        ({"module": b"a"}, "why was asked about the module b'a'"),
        ({"module": "a", "op": 3}, "the op 3 must be text."),
        ({"module": "a", "op": []}, "the op [] must be text."),
        ({"module": "a", "class_name": 3}, "class_name=3 must be the name of a class, or several."),
        ({"module": "a", "class_name": ["LayerNorm", 3]}, "class_name=['LayerNorm', 3] must be"),
    ],
)
def test_what_is_no_name_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        NAMED.why(**asked)
    assert why in str(refusal.value)


@pytest.mark.parametrize(
    "policy",
    [
        "bf16",
        "bf16, module:0=fp32",
        "bf16, module:0=fp32_low_out",
        "bf16, module:0=fp16",
        "bf16, module:0=fp16, module:0.0=fp32",
        "fp16, module:0=fp32, module:0.0=low",
        "bf16, module:0=fp32, 0.0.*=fp32_low_out",
    ],
)
@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.Linear(4, 4)], ids=lambda layer: type(layer).__name__)
def test_the_result_of_a_layer_inside_others_is_that_of_a_run(policy: str, layer: nn.Module) -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(copy.deepcopy(layer))))
    seen: list[torch.Tensor] = []
    model[0][0][0].register_forward_hook(lambda module, args, result: seen.append(result))
    mezzo.prepare(model, policy=policy)
    model(torch.randn(2, 4))
    precision = Policy.parse(policy).why("0.0.0", class_name=type(layer).__name__).precision
    assert precision.split()[-1] == dtype_name(seen[0].dtype)


@pytest.mark.parametrize("device", ["zz", None, [], 3.5])
def test_what_is_no_device_is_refused(device: Any) -> None:
    for policy in (NAMED, PRESETS["auto"]):
        for ask in (lambda given, p=policy: p.why("a", device=given), policy.resolve, policy.why_engine):
            with pytest.raises(FormatError, match="there is no device"):
                ask(device)


def test_an_engine_is_chosen_for_a_device_and_a_cache() -> None:
    assert Policy(ops="mezzo").why_engine("cuda:0") == Policy(ops="mezzo").why_engine("cuda")
    with pytest.raises(PolicyError, match=r"unknown cache 'persistnt'. Did you mean 'persistent'?"):
        NAMED.why_engine("cpu", "persistnt")  # type: ignore[arg-type]


def test_where_many_rules_are_written_is_found_in_one_pass_over_them() -> None:
    passes: list[int] = []

    class Edits(dict[Any, Any]):
        def __iter__(self) -> Iterator[Any]:
            passes.append(len(self))
            return super().__iter__()

    rules = tuple(ModuleRule(pattern=f"m{i}", precision=Rule.FP32) for i in range(2_000))
    text = written(Policy(compute=torch.bfloat16, modules=rules))
    text = replace(text, edits=Edits(text.edits))
    places = [text.where(("module", i)) for i in range(len(rules))]
    assert len({*places}) == len(rules) and passes == [len(text.edits)]

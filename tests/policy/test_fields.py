"""The policy value: what it refuses, what it resolves to, what survives copying."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.policy.policies import NO_DEFAULTS, policies

from mezzo.errors import PolicyError
from mezzo.formats import NativeSupport, native_support
from mezzo.policy import PRESETS, GuardConfig, ModuleRule, OpRules, Policy, Rule, ScalingConfig


@pytest.mark.parametrize(
    "value", [NO_DEFAULTS, NO_DEFAULTS.ops, NO_DEFAULTS.modules[0], NO_DEFAULTS.scaling, NO_DEFAULTS.guard]
)
def test_the_example_has_no_default_left(value: object) -> None:
    """Guards every round trip of this folder: a new field must get a value in NO_DEFAULTS."""
    for field in fields(value):  # type: ignore[arg-type]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        assert getattr(value, field.name) != default, field.name


@given(policies())
def test_a_policy_is_a_value(policy: Policy) -> None:
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy.replace()) == hash(policy)
    with pytest.raises(FrozenInstanceError):
        policy.compute = torch.float16  # type: ignore[misc]


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_16_bit_params_need_a_master(low: torch.dtype) -> None:
    modes = "split, fp32, kahan or stochastic" if low is torch.bfloat16 else "fp32, kahan or stochastic"
    with pytest.raises(PolicyError, match=f"loses small updates; write master={modes}"):
        Policy(params=low)
    with pytest.raises(PolicyError, match="master=kahan needs 16-bit params"):
        Policy(master="kahan")
    assert Policy(params=low, master="kahan").params is low


def test_moments_do_not_fit_fp16() -> None:
    """As the optimizers say in the first step: squares of gradients leave its range."""
    with pytest.raises(PolicyError, match="state=fp16 cannot hold moments; write state=bf16 or state=fp32"):
        Policy.parse("fp16-master, state=fp16")
    assert Policy.parse("fp16-master, state=bf16").state is torch.bfloat16


def test_16_more_bits_make_no_fp32_value_of_an_fp16_weight() -> None:
    want = r"params=fp16 with master=split .*; write master=fp32, kahan or stochastic, or params=bf16"
    with pytest.raises(PolicyError, match=want):
        Policy(params=torch.float16, master="split")
    with pytest.raises(PolicyError, match=want):
        Policy.parse("bf16-master, params=fp16")


@pytest.mark.parametrize("name", ["compute", "params", "grads", "reduce", "state", "output", "loss"])
@pytest.mark.parametrize("value", [torch.float64, torch.int8, torch.float8_e5m2, "bf16", 16])
def test_what_is_no_dtype_of_mixed_precision_is_refused(name: str, value: object) -> None:
    known = "fp32, fp16, bf16 or fp8" if name == "reduce" else "fp32, fp16 or bf16"
    with pytest.raises(PolicyError, match=f"{name}=.* is not a dtype of mixed precision: {known}"):
        Policy(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["params", "reduce", "state", "loss"])
def test_none_is_refused_where_a_dtype_is_needed(name: str) -> None:
    with pytest.raises(PolicyError, match=f"{name}=None is not a dtype"):
        Policy(**{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Policy(compute="bf16"),  # type: ignore[arg-type]
         "compute='bf16' is not a dtype of mixed precision: fp32, fp16 or bf16; write a torch dtype, or use Policy.parse."),
        (lambda: Policy(master="spilt"), "master='spilt' is unknown. Did you mean 'split'?"),  # type: ignore[arg-type]
        (lambda: Policy(ops="mezo"), "table='mezo' is unknown. Did you mean 'mezzo'?"),  # type: ignore[arg-type]
        (lambda: Policy(ops=3), "ops=3 must be OpRules, or the name of an op table."),  # type: ignore[arg-type]
        (lambda: Policy(scaling="dynamic"), "scaling='dynamic' must be a ScalingConfig or None."),  # type: ignore[arg-type]
        (lambda: Policy(guard=None), "guard=None must be a GuardConfig."),  # type: ignore[arg-type]
        (lambda: Policy(modules=["a"]), "modules=['a'] must be a tuple of ModuleRule."),  # type: ignore[arg-type]
        (lambda: Policy().replace(comput=1), "unknown policy field 'comput'. Did you mean 'compute'?"),
        (lambda: ScalingConfig(init_scale="1"), "init_scale='1' must be a number."),  # type: ignore[arg-type]
        (lambda: ScalingConfig(init_scale=True), "init_scale=True must be a number."),
        (lambda: ScalingConfig(growth_interval=2.0), "growth_interval=2.0 must be a whole number."),  # type: ignore[arg-type]
        (lambda: ScalingConfig(hysteresis=True), "hysteresis=True must be a whole number."),
        (lambda: ScalingConfig(init_scale=0.5),
         "init_scale=0.5 must lie in [min_scale=1.0, max_scale=None]."),
        (lambda: ScalingConfig(growth_factor=float("inf")), "growth_factor=inf must be finite and >= 1.0."),
        (lambda: ScalingConfig(growth_factor=0.9), "growth_factor=0.9 must be finite and >= 1.0."),
        (lambda: ScalingConfig(backoff_factor=1.0), "backoff_factor=1.0 must be in (0, 1)."),
        (lambda: ScalingConfig(growth_interval=0), "growth_interval=0 must be > 0."),
        (lambda: ScalingConfig(init_scale=float("nan")), "init_scale=nan must be finite and positive."),
        (lambda: ScalingConfig(min_scale=-1.0), "min_scale=-1.0 must be >= 0."),
        (lambda: ScalingConfig(hysteresis=0), "hysteresis=0 must be >= 1."),
        (lambda: ScalingConfig.fixed(1e39),
         "init_scale=1e+39 must be finite and positive in fp32, which holds the loss scale."),
        (lambda: Policy.parse("fp16, scaling=1e39"),
         ("cannot parse policy 'fp16, scaling=1e39' at position 6: init_scale=1e+39 must be finite and positive in fp32, which "
          "holds the loss scale.")),
        (lambda: Policy.from_dict({"scaling": {"init_scale": 10**400}}),
         f"'scaling': init_scale=1{'0' * 56}... must be a number of at most 64 bits."),
        (lambda: Policy.from_dict({"guard": {"patience": 10**5000}}),
         "'guard': patience=int must be a whole number of at most 64 bits."),
        (lambda: Policy.from_dict({"modules": 10**5000}),
         "'modules': a list of texts such as 'name=fp32' is wanted, not int."),
        (lambda: ScalingConfig(growth_factor=10**400),
         f"growth_factor=1{'0' * 56}... must be a number of at most 64 bits."),
        (lambda: GuardConfig(patience=10**400), f"patience=1{'0' * 56}... must be a whole number of at most 64 bits."),
        (lambda: GuardConfig(enabled="no"), "enabled='no' must be true or false."),  # type: ignore[arg-type]
        (lambda: GuardConfig(on_overflow="drop"),  # type: ignore[arg-type]
         "on_overflow='drop' is unknown. Valid: demote, retry, skip."),
        (lambda: GuardConfig(patience=0), "patience=0 must be > 0."),
        (lambda: GuardConfig(check_every=-1), "check_every=-1 must be >= 0."),
        (lambda: ModuleRule(pattern="", precision=Rule.FP32),
         "a module rule needs a pattern, a name glob or a class name; got ''."),
        (lambda: ModuleRule(pattern="a\nb", precision=Rule.FP32),
         "the pattern 'a\\nb' has a line break or another unprintable character; write '?' for it."),
        (lambda: ModuleRule(pattern="a", precision=Rule.PROMOTE),
         "module rule 'a=promote': a module takes one of low, fp32, fp32_low_out, fp16, bf16."),
        (lambda: ModuleRule(pattern="a", precision="fp32"),  # type: ignore[arg-type]
         "module rule 'a=fp32': 'fp32' is text; write a Rule or a torch dtype."),
        (lambda: ModuleRule(pattern="a", precision=Rule.LOW, required=1),  # type: ignore[arg-type]
         "required=1 must be true or false."),
        (
            lambda: OpRules(edits=(("mylib::scale", Rule.LOW),)),
            ("unknown op 'mylib::scale': rules are for torch's ops. An op of your own is cast in every region by what"
             " torch.library.register_autocast('mylib::scale', device, dtype) says."),
        ),
        (lambda: OpRules(edits=(("cumsm", Rule.LOW),)), "unknown op 'cumsm'. Did you mean 'cumsum'?"),
        (lambda: OpRules(edits=((3, Rule.LOW),)), "the op 3 must be text."),  # type: ignore[arg-type]
        (lambda: OpRules(edits=3), "edits=3 must be a tuple of (op, Rule)."),  # type: ignore[arg-type]
        (lambda: OpRules(edits=("cumsum",)), "edits=('cumsum',) must be a tuple of (op, Rule)."),  # type: ignore[arg-type]
        (lambda: OpRules(edits=(("cumsum", "low"),)),  # type: ignore[arg-type]
         "op rule 'cumsum=low': 'low' is not a Rule: low, fp32, fp32_low_out, promote, as_is, forbid."),
    ],
)  # fmt: skip
def test_every_refusal_is_one_clear_sentence(build: object, sentence: str) -> None:
    with pytest.raises(PolicyError) as raised:
        build()  # type: ignore[operator]
    assert str(raised.value) == sentence


def test_fp32_of_a_module_has_one_form() -> None:
    by_dtype = ModuleRule(pattern="head", precision=torch.float32)
    assert by_dtype == ModuleRule(pattern="head", precision=Rule.FP32)
    assert by_dtype.precision is Rule.FP32


def test_auto_resolves_to_what_this_cpu_computes_natively() -> None:
    resolved = PRESETS["auto"].resolve("cpu")
    assert resolved.compute is not None
    assert native_support("cpu", resolved.compute).native
    if resolved.compute is not torch.bfloat16:
        assert not native_support("cpu", torch.bfloat16).native
    assert (resolved.scaling is not None) == (resolved.compute is torch.float16)
    assert resolved.modules == PRESETS["auto"].modules


@pytest.mark.parametrize("scaling", [None, ScalingConfig(init_scale=8.0)])
def test_auto_resolves_to_scaled_fp16_where_only_fp16_has_units(
    monkeypatch: pytest.MonkeyPatch, scaling: ScalingConfig | None
) -> None:
    """Such devices (Volta, Turing) are not here, so what they report is put in their place."""

    def only_fp16(device: object, dtype: torch.dtype) -> NativeSupport:
        return NativeSupport(native=dtype is torch.float16, reason="as a T4 reports")

    monkeypatch.setattr("mezzo.policy.fields.native_support", only_fp16)
    resolved = PRESETS["auto"].replace(scaling=scaling).resolve("cpu")
    assert resolved.compute is torch.float16
    assert resolved.scaling == (scaling or ScalingConfig())


@given(policies())
def test_resolve_changes_nothing_that_is_decided(policy: Policy) -> None:
    resolved = policy.resolve("cpu")
    assert resolved.resolve("cpu") == resolved
    if policy.compute is not None:
        assert resolved == policy


@pytest.mark.cuda
def test_auto_resolves_to_bf16_on_a_gpu_with_bf16_units() -> None:
    expected = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    assert PRESETS["auto"].resolve("cuda").compute is expected


class TestModuleRule:
    """`Policy.module_rule` and `ModuleRule.matches`."""

    policy = Policy.parse("bf16, *.norm*=fp32, LayerNorm=fp32_low_out, module:head=fp16, decoder.*.norm?=bf16")

    @pytest.mark.parametrize(
        ("fqn", "classes", "pattern"),
        [
            ("encoder.norm", (), "*.norm*"),
            ("encoder.norm1.inner", (), "*.norm*"),
            ("norm", (), None),
            ("encoder.norm", ("LayerNorm", "Module"), "LayerNorm"),
            ("x", ("FastLayerNorm", "LayerNorm", "Module"), "LayerNorm"),
            ("x", ("layernorm",), None),
            ("encoder.Norm", (), None),
            ("HEAD", (), None),
            ("Decoder.3.norm1", (), "*.norm*"),
            ("head", (), "head"),
            ("model.head", (), None),
            ("decoder.3.norm1", ("LayerNorm",), "decoder.*.norm?"),
            ("", (), None),
            ("a", ("LlamaRMSNorm",), "*RMSNorm"),
        ],
    )
    def test_the_last_match_wins(self, fqn: str, classes: tuple[str, ...], pattern: str | None) -> None:
        rule = self.policy.module_rule(fqn, classes)
        assert (rule.pattern if rule else None) == pattern

    def test_a_later_rule_wins_whatever_it_matches_by(self) -> None:
        rules = ModuleRule(pattern="a.b", precision=Rule.LOW), ModuleRule(pattern="LayerNorm", precision=Rule.FP32)
        assert Policy(modules=rules).module_rule("a.b", ["LayerNorm"]) is rules[1]
        assert Policy(modules=rules[::-1]).module_rule("a.b", ["LayerNorm"]) is rules[0]


class TestCheckModules:
    """`Policy.check_modules`, on the names and classes of a real model."""

    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    modules = tuple((name, [c.__name__ for c in type(m).__mro__]) for name, m in model.named_modules())

    @pytest.mark.parametrize(
        "text",
        ["bf16", "bf16-master", "bf16, *.norm1=fp32", "bf16, LayerNorm=fp32", "bf16, ?*.absent=fp32", "fp32, *=low"],
    )
    def test_rules_that_match_are_accepted(self, text: str) -> None:
        Policy.parse(text).check_modules(self.modules)

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("bf16, *.nrom1=fp32",
             ("module rule '*.nrom1=fp32': no module of the model has a name or class that matches '*.nrom1'. "
             "The nearest is 'layers.0.norm1' (LayerNorm). A rule that may match nothing is written '?*.nrom1=fp32'.")),
            ("bf16, LayerNrm=fp32",
             ("module rule 'LayerNrm=fp32': no module of the model has a name or class that matches 'LayerNrm'. "
             "The nearest is 'layers.0.norm1' (LayerNorm). A rule that may match nothing is written '?LayerNrm=fp32'.")),
            ("bf16, layers.0.self_atn=fp32",
             ("module rule 'layers.0.self_atn=fp32': no module of the model has a name or class that matches "
             "'layers.0.self_atn'. The nearest is 'layers.0.self_attn' (MultiheadAttention). "
             "A rule that may match nothing is written '?layers.0.self_atn=fp32'.")),
            ("bf16, module:zzz=fp32",
             ("module rule 'module:zzz=fp32': no module of the model has a name or class that matches 'zzz'. "
             "It has 'layers' (ModuleList), 'layers.0' (TransformerEncoderLayer), 'layers.0.self_attn' (MultiheadAttention) and 18 more. "
             "A rule that may match nothing is written '?module:zzz=fp32'.")),
        ],
    )  # fmt: skip
    def test_a_required_rule_without_a_module_is_refused(self, text: str, sentence: str) -> None:
        with pytest.raises(PolicyError) as raised:
            Policy.parse(text).check_modules(iter(self.modules))
        assert str(raised.value) == sentence

    def test_a_model_without_modules_has_no_nearest(self) -> None:
        with pytest.raises(PolicyError, match=r"matches 'a\.b'\. A rule that may"):
            Policy.parse("fp32, a.b=low").check_modules([])


@pytest.mark.parametrize(
    ("kind", "given", "fields", "said"),
    [
        (Policy, ("bf16-mixed",), {}, "takes its fields by name, as in Policy(compute=...). Text is read by Policy.parse('bf16-mixed')"),
        (Policy, (torch.bfloat16,), {}, "takes its fields by name, as in Policy(compute=...)"),
        (Policy, (), {"weights": "bf16"}, "has no argument 'weights'"),
        (ScalingConfig, (1024.0,), {}, "takes its fields by name, as in ScalingConfig(init_scale=...)"),
        (ScalingConfig, (), {"init_scales": 4.0}, "has no argument 'init_scales'. Did you mean 'init_scale'?"),
        (ModuleRule, ("head", Rule.FP32), {}, "takes its fields by name, as in ModuleRule(pattern=...)"),
    ],
)  # fmt: skip
def test_fields_are_given_by_name(kind: Any, given: tuple[Any, ...], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError) as error:
        kind(*given, **fields)
    assert str(error.value).startswith(f"{kind.__name__} {said}")
    assert [*inspect.signature(kind).parameters] == [*kind.__dataclass_fields__]


@pytest.mark.parametrize(
    ("fields", "said"),
    [({}, r"ModuleRule lacks pattern=\.\.\. and precision=\.\.\., and needs pattern, precision\."),
     ({"pattern": "head"}, r"ModuleRule lacks precision=\.\.\., and needs pattern, precision\.")],
)  # fmt: skip
def test_fields_that_are_missing_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        ModuleRule(**fields)


@pytest.mark.parametrize(
    "text", ["fp16, loss=fp16", "fp16-master, loss=fp16", "fp16, scaling.init_scale=1e6, loss=fp16"]
)
def test_a_loss_scale_begins_where_a_loss_in_fp16_holds_it(text: str) -> None:
    policy = Policy.parse(text)
    assert policy.scaling is not None and policy.scaling.init_scale == 32768
    assert Policy.parse(str(policy)) == policy and Policy.from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize(
    ("text", "scale"),
    [("fp16, loss=fp16, scaling=65536", 65536), ("fp16, loss=fp16, scaling.init_scale=40000", 40000), ("fp16", 65536), ("fp16, loss=bf16", 65536)],
)  # fmt: skip
def test_any_other_loss_scale_begins_where_it_is_told(text: str, scale: float) -> None:
    policy = Policy.parse(text)
    assert policy.scaling is not None and policy.scaling.init_scale == scale

"""The text form: what it means, that it round trips, and what its errors say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import message_of
from tests.policy.policies import NASTY, NO_DEFAULTS, policies

from mezzo.errors import PolicyError
from mezzo.formats import parse_dtype
from mezzo.policy import PRESETS, GuardConfig, ModuleRule, OpRules, Policy, Rule, ScalingConfig, as_policy
from mezzo.policy.text import settings as settings_of
from mezzo.policy.text import written


@settings(max_examples=400)
@given(policies())
def test_parse_is_the_inverse_of_str(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy
    assert eval(repr(policy)) == policy


def test_no_field_is_lost() -> None:
    text = (
        "fp16, params=bf16, master=kahan, grads=fp32, reduce=bf16, state=bf16, output=fp16, loss=bf16, "
        "ops=mezzo, op:cumsum=low, op:cumsum=forbid, modules=none, ?module:encoder=bf16, "
        "scaling=1024.5, scaling.growth_factor=3, scaling.backoff_factor=0.1, scaling.growth_interval=7, "
        "scaling.min_scale=0.25, scaling.max_scale=1e+30, scaling.hysteresis=2, guard.enabled=false, "
        "guard.on_overflow=retry, guard.patience=3, guard.restore_buffers=false, guard.check_every=9"
    )
    assert str(NO_DEFAULTS) == text
    assert Policy.parse(text) == NO_DEFAULTS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_own_text(name: str) -> None:
    assert Policy.parse(name) == PRESETS[name]
    assert str(PRESETS[name]) == name


@pytest.mark.parametrize("sign", [",", "=", ";", '"', "\\"])
def test_a_pattern_may_hold_what_separates_edits(sign: str) -> None:
    policy = Policy(modules=(ModuleRule(pattern=f"a{sign}*", precision=Rule.FP32),))
    assert Policy.parse(str(policy)) == policy


@given(policies())
def test_spaces_and_the_case_of_values_do_not_matter(policy: Policy) -> None:
    text = written(policy)
    edits = [edit.rpartition("=") for edit in text.edits.values()]
    mangled = ",\n".join([f"  {text.preset.upper()} ", *(f"\t{key}  = {word.upper()} " for key, _, word in edits)])
    assert Policy.parse(mangled) == policy


@given(policies(), policies())
def test_a_later_edit_wins(first: Policy, second: Policy) -> None:
    """Edits written after a policy give what they say and leave what they do not name."""
    named = {
        "compute": "auto" if second.compute is None else str(second.compute),
        "reduce": str(second.reduce),
        "ops": second.op_rules.table,
        "modules": "none",
        "scaling": "none",
        "guard.patience": str(second.guard.patience),
    }
    text = ", ".join([str(first), *(f"{key}={word}" for key, word in named.items())])
    expected = first.replace(
        compute=second.compute,
        reduce=second.reduce,
        ops=OpRules(table=second.op_rules.table, edits=first.op_rules.edits),
        modules=(),
        scaling=None,
        guard=GuardConfig(
            patience=second.guard.patience,
            enabled=first.guard.enabled,
            on_overflow=first.guard.on_overflow,
            restore_buffers=first.guard.restore_buffers,
            check_every=first.guard.check_every,
        ),
    )
    assert Policy.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("fp16, *.norm*=fp32, op:cumsum=low, output=fp32",
         PRESETS["fp16"].replace(
             output=torch.float32, ops=OpRules(edits=(("cumsum", Rule.LOW),)),
             modules=(*PRESETS["fp16"].modules, ModuleRule(pattern="*.norm*", precision=Rule.FP32)))),
        ("fp32, compute=float16, compute=bfloat16", Policy(compute=torch.bfloat16)),
        ("fp32, compute=auto", Policy(compute=None)),
        ("bf16-master, params=fp16, master=stochastic",
         PRESETS["bf16-master"].replace(params=torch.float16, master="stochastic")),
        ("fp32, scaling=dynamic", Policy(scaling=ScalingConfig())),
        ("fp32, scaling.init_scale=8", Policy(scaling=ScalingConfig(init_scale=8.0))),
        ("fp32, scaling.min_scale=1e5, scaling.init_scale=2e5",
         Policy(scaling=ScalingConfig(min_scale=1e5, init_scale=2e5))),
        ("fp32, scaling.init_scale=8, scaling=dynamic", Policy(scaling=ScalingConfig())),
        ("fp16, scaling.max_scale=1e9, scaling.max_scale=none", PRESETS["fp16"]),
        ("fp32, guard.enabled=off, guard.restore_buffers=NO",
         Policy(guard=GuardConfig(enabled=False, restore_buffers=False))),
        ("fp32, LayerNorm=fp32_low_out", Policy(modules=(ModuleRule(pattern="LayerNorm", precision=Rule.FP32_LOW_OUT),))),
        ("fp32, ? *.n = half", Policy(modules=(ModuleRule(pattern="*.n", precision=torch.float16, required=False),))),
        ("fp32, module:encoder=bf16", Policy(modules=(ModuleRule(pattern="encoder", precision=torch.bfloat16),))),
        ("fp32, ?module:encoder=low", Policy(modules=(ModuleRule(pattern="encoder", precision=Rule.LOW, required=False),))),
        ("fp32, module:loss=low, loss=bf16",
         Policy(loss=torch.bfloat16, modules=(ModuleRule(pattern="loss", precision=Rule.LOW),))),
        ("fp32, module:?x=low", Policy(modules=(ModuleRule(pattern="?x", precision=Rule.LOW),))),
        ('fp32, "[a,b]=\\"c\\""=low', Policy(modules=(ModuleRule(pattern='[a,b]="c"', precision=Rule.LOW),))),
        ('fp32, module:" x "=low', Policy(modules=(ModuleRule(pattern=" x ", precision=Rule.LOW),))),
        ("bf16, modules=none, a.b=low",
         PRESETS["bf16"].replace(modules=(ModuleRule(pattern="a.b", precision=Rule.LOW),))),
    ],
)  # fmt: skip
def test_what_a_text_means(text: str, policy: Policy) -> None:
    assert Policy.parse(text) == policy


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Policy(), "fp32"),
        (Policy(modules=(ModuleRule(pattern="é,*", precision=Rule.LOW),)), 'fp32, module:"é,*"=low'),
        (Policy(compute=torch.bfloat16), "fp32, compute=bf16"),
        (Policy(compute=torch.bfloat16, state=torch.bfloat16), "fp32, compute=bf16, state=bf16"),
        (PRESETS["auto"].replace(scaling=ScalingConfig()), "auto, scaling=dynamic"),
        (PRESETS["fp16"].replace(scaling=None), "fp16, scaling=none"),
        (PRESETS["bf16"].replace(modules=()), "bf16, modules=none"),
        (PRESETS["bf16-master"].replace(state=torch.bfloat16), "bf16-master, state=bf16"),
        (PRESETS["fp16"].replace(scaling=ScalingConfig(init_scale=1024.0)), "fp16, scaling.init_scale=1024"),
    ],
)
def test_the_text_is_the_nearest_preset_and_the_fewest_edits(policy: Policy, text: str) -> None:
    assert str(policy) == text


KEYS = (
    "Keys are compute, params, master, grads, reduce, state, output, loss, ops, modules, scaling, "
    "op:NAME, module:PATTERN, scaling.FIELD, guard.FIELD."
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", " at position 0: unknown preset ''. Valid: auto, bf16, bf16-master, fp16, fp16-master, fp32."),
        ("bf61", " at position 0: unknown preset 'bf61'. Did you mean 'bf16'?"),
        ("fp8", " at position 0: unknown preset 'fp8': no preset computes in fp8; write fp32, fp16, bf16 or auto."),
        ("fp64-master", " at position 0: unknown preset 'fp64-master': no preset computes in fp64; write fp32, fp16, bf16 or auto."),
        ("bf16, op:mm=fp16", " at position 6: unknown op rule 'fp16'. An op runs in the policy's compute dtype, 'op:mm=low', or in fp32."),
        ("  bf16_master", " at position 2: unknown preset 'bf16_master'. Did you mean 'bf16-master'?"),
        ("bf16 output=fp32", " at position 0: write 'bf16, output=fp32', with commas."),
        ("FP16  scaling = none, loss=fp32", " at position 0: write 'FP16, scaling = none', with commas."),
        ("bf16-master; master=fp32", " at position 0: write 'bf16-master, master=fp32', with commas."),
        ("fp16, loss=fp32;output=fp32", " at position 6: write 'loss=fp32,output=fp32', with commas."),
        ("output=fp32", (" at position 0: a policy starts with a preset (fp32, fp16, bf16, fp16-master, bf16-master, "
                        "auto): write 'fp32, output=fp32'.")),
        ("params=float32,compute=float16,output=float32", (" at position 0: a policy starts with a preset (fp32, fp16, bf16, fp16-master, bf16-master, "
                        "auto): write 'fp16, params=float32, compute=float16, output=float32'.")),
        ("compute=auto, lss=fp32", (" at position 0: a policy starts with a preset (fp32, fp16, bf16, fp16-master, bf16-master, "
                        "auto): write 'auto, compute=auto, lss=fp32'.")),
        ("opt_level=O1", " at position 0: a policy starts with a preset: write 'O1'."),
        ("precision=16-mixed, loss=fp32", " at position 0: a policy starts with a preset: write '16-mixed'."),
        ("p=fp32", f" at position 0: unknown key 'p'. {KEYS} A module called 'p' is written 'module:p=fp32'."),
        ("off", " at position 0: unknown preset 'off': write fp32, which casts nothing."),
        ("run/policy.toml", " at position 0: unknown preset 'run/policy.toml': a file is read by Policy.load(path), and is TOML."),
        ("fp16, loss_scale=128", " at position 6: unknown key 'loss_scale': write scaling=dynamic, or a number that never moves, as in scaling=1024."),
        ("bf16, precision=fp16", " at position 6: unknown key 'precision': write the preset first, as in 'bf16', or as the key 'preset' of a table."),
        ("fp16, initial_scale_power=16", " at position 6: unknown key 'initial_scale_power': write scaling.init_scale=65536, the scale itself."),
        ("fp16, enabled=false", " at position 6: unknown key 'enabled': write fp32, and nothing else, where nothing is to be cast."),
        ("fp16, param_dtype=fp16", " at position 6: unknown key 'param_dtype': write params= for the dtype in which weights are stored, compute= for that in which they are multiplied."),
        ("fp16, bf16", " at position 6: 'bf16' is a preset, and a preset only comes first."),
        ("fp16,", " at position 5: an edit is empty; leave out the comma."),
        ("fp16,, loss=fp32", " at position 5: an edit is empty; leave out the comma."),
        ("fp16,k=bf16", f" at position 5: unknown key 'k'. {KEYS} A module called 'k' is written 'module:k=bf16'."),
        ("fp16, ?k=low", f" at position 6: unknown key '?k'. {KEYS} A module called 'k' is written '?module:k=low'."),
        ("fp16, comput=auto", " at position 6: unknown key 'comput'. Did you mean 'compute'?"),
        ("fp16, patience=3", " at position 6: unknown key 'patience'. Did you mean 'guard.patience'?"),
        ("fp16, scalling.init_scale=4", " at position 6: unknown key 'scalling.init_scale'. Did you mean 'scaling.init_scale'?"),
        ("fp16, guard.patienc=3", " at position 6: unknown key 'guard.patienc'. Did you mean 'guard.patience'?"),
        ("fp16, scaling.int_scale=3",
         " at position 6: unknown key 'scaling.int_scale'. Did you mean 'scaling.init_scale'?"),
        ("fp16, op:=low", (" at position 6: unknown key 'op:'. Did you mean 'ops'? A module called 'op:' is written "
                          "'module:op:=low'.")),
        ("fp16, Loss=fp32", (" at position 6: keys are lower case: write 'loss=fp32', or 'module:Loss=fp32' for "
                            "modules called 'Loss'.")),
        ("fp16, Op:exp=low", (" at position 6: keys are lower case: write 'op:exp=low', or 'module:Op:exp=low' for "
                             "modules called 'Op:exp'.")),
        ("fp16, output=bf61", " at position 6: unknown output dtype 'bf61'. Did you mean 'bf16'?"),
        ("fp16, output=fp64", " at position 6: output=fp64 is not a dtype of mixed precision; write fp32, fp16 or bf16."),
        ("fp16, compute=none", " at position 6: unknown compute dtype 'none'. Valid: auto, bf16, fp16, fp32."),
        ("fp16, params=none", " at position 6: unknown params dtype 'none'. Valid: bf16, fp16, fp32."),
        ("fp16, master=spilt", " at position 6: unknown master 'spilt'. Did you mean 'split'?"),
        ("fp16, ops=mezo", " at position 6: unknown op table 'mezo'. Did you mean 'mezzo'?"),
        ("fp16, op:cumsm=low", " at position 6: unknown op 'cumsm'. Did you mean 'cumsum'?"),
        ("fp16, op:cumsum=lo", " at position 6: unknown op rule 'lo'. Did you mean 'low'?"),
        ("fp16, *.n=lwo", " at position 6: unknown module precision 'lwo'. Did you mean 'low'?"),
        ("fp16, *.n=fp64", " at position 6: a module cannot compute in fp64; write fp32, fp16 or bf16."),
        ("fp16, modules=x", " at position 6: modules=x is unknown: 'modules=none' drops the rules so far."),
        ("fp16, scaling=dynamc", " at position 6: unknown scaling 'dynamc'. Did you mean 'dynamic'?"),
        ("fp16, guard.patience=x", " at position 6: guard.patience=x must be a whole number."),
        ("fp16, scaling.max_scale=x", " at position 6: scaling.max_scale=x must be a number or none."),
        ("fp16, guard.enabled=ture", " at position 6: unknown guard.enabled 'ture'. Did you mean 'true'?"),
        ("fp16, guard.on_overflow=retyr", " at position 6: unknown guard.on_overflow 'retyr'. Did you mean 'retry'?"),
        ("fp16, *.[a,b]=fp32", (" at position 6: '*.[a' is not 'key=value'; a pattern with a comma, an equals sign or a "
                               "quote goes in double quotes.")),
        ('fp16, "a=fp32', " at position 6: the quote is not closed."),
        ('fp16, *a"b"=fp32', (" at position 6: the pattern '*a\"b\"' is not one quoted text; inside quotes write \\\" for "
                             "a quote and \\\\ for a backslash.")),
        ("fp16, params=bf16", (": params=bf16 with master=none loses small updates; write master=split, fp32, kahan or "
                              "stochastic, or params=fp32.")),
        ("fp16, guard.patience=0", ": patience=0 must be > 0."),
    ],
)  # fmt: skip
def test_an_error_says_where_and_what_to_write(text: str, reason: str) -> None:
    assert message_of(PolicyError, Policy.parse, text) == f"cannot parse policy {text!r}{reason}"


words = st.sampled_from(
    [*NASTY, *PRESETS, "=", ",", "low", "bf16", "guard.patience", "compute", "3", "-1", "nan", "inf"]
)


@pytest.mark.parametrize(("text", "word"), [("fp16", "dynamic"), ("fp16, scaling=8", "fixed"), ("bf16", "none")])
def test_the_settings_say_how_the_loss_scale_moves(text: str, word: str) -> None:
    assert dict(settings_of(Policy.parse(text)))["scaling"] == word


@settings(max_examples=500)
@given(st.lists(words | st.text(max_size=3), max_size=12), st.sampled_from(["", "fp16,"]))
def test_any_text_is_a_policy_or_a_policy_error(parts: list[str], start: str) -> None:
    try:
        policy = Policy.parse(start + "".join(parts))
    except PolicyError:
        return
    assert Policy.parse(str(policy)) == policy


class TestAsPolicy:
    """What is accepted wherever a policy is."""

    def test_a_policy_passes_through(self) -> None:
        assert as_policy(NO_DEFAULTS) is NO_DEFAULTS

    def test_a_text_is_parsed(self) -> None:
        assert as_policy("bf16, output=fp32") == PRESETS["bf16"].replace(output=torch.float32)

    def test_a_toml_path_is_loaded(self, tmp_path: object) -> None:
        path = tmp_path / "p.toml"  # type: ignore[operator]
        NO_DEFAULTS.save(path)
        assert as_policy(path) == as_policy(str(path)) == NO_DEFAULTS

    def test_a_plain_dict_is_read(self) -> None:
        assert as_policy(NO_DEFAULTS.to_dict()) == NO_DEFAULTS
        assert as_policy({"compute": "bf16"}) == Policy(compute=torch.bfloat16)

    @pytest.mark.parametrize(
        ("document", "text"),
        [
            ({"preset": "bf16"}, "bf16"),
            ({"preset": "BF16-true", "output": "bf16"}, "bf16-master, output=bf16"),
            (
                {"preset": "bf16", "modules": ["head=fp32"], "op_rules": ["cumsum=low"]},
                "bf16, head=fp32, op:cumsum=low",
            ),
            ({"preset": "fp16", "scaling": {"init_scale": 8}}, "fp16, scaling.init_scale=8"),
            ({"preset": "bf16", "guard": {"patience": 3}}, "bf16, guard.patience=3"),
            ({"preset": "fp16", "scaling": "none"}, "fp16, scaling=none"),
        ],
    )
    def test_a_dict_may_start_from_a_preset(self, document: dict[str, object], text: str) -> None:
        assert as_policy(document) == Policy.parse(text.replace("head=", "module:head="))

    @pytest.mark.parametrize(
        ("preset", "reason"),
        [
            ("bf61", "unknown preset 'bf61'. Did you mean 'bf16'?"),
            (16, "'preset': a name such as 'bf16' is wanted, not 16."),
        ],
    )
    def test_a_dict_with_an_unknown_preset_is_refused(self, preset: object, reason: str) -> None:
        assert message_of(PolicyError, as_policy, {"preset": preset}) == reason

    @pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
    def test_a_dtype_is_the_preset_that_computes_in_it(self, name: str) -> None:
        assert as_policy(parse_dtype(name)) == PRESETS[name]

    @pytest.mark.parametrize("value", [None, 16, ["fp16"]])
    def test_anything_else_is_refused(self, value: object) -> None:
        with pytest.raises(
            PolicyError, match=r"a policy is a Policy, a text such as 'bf16, output=fp32', a \.toml path, .* got"
        ):
            as_policy(value)  # type: ignore[arg-type]

    def test_a_batch_is_told_by_its_kind_alone(self) -> None:
        with pytest.raises(PolicyError, match=r"got list\.$"):
            as_policy([torch.ones(64, 64)])  # type: ignore[arg-type]

    def test_a_dtype_that_no_preset_computes_in_is_refused(self) -> None:
        with pytest.raises(PolicyError, match="unknown preset 'fp64'"):
            as_policy(torch.float64)


@pytest.mark.parametrize(
    ("name", "preset"),
    [("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("Float16", "fp16"), ("float32", "fp32"), ("bfloat16-mixed", "bf16"), ("float16-master", "fp16-master"), ("bf16-mixed", "bf16"), ("16-mixed", "fp16"), ("fp16-mixed", "fp16"), ("bf16-true", "bf16-master"), ("16-True", "fp16-master"), ("no", "fp32"), ("O1", "fp16"), ("O2", "fp16-master"),
     ("32-true", "fp32")],
)  # fmt: skip
def test_the_names_of_lightning_are_understood(name: str, preset: str) -> None:
    assert Policy.parse(name) == PRESETS[preset]
    assert Policy.parse(f"{name}, output=fp16") == PRESETS[preset].replace(output=torch.float16)


class TestFixedScale:
    """`scaling=1024`: a loss scale that does not move."""

    def test_the_text_is_a_number(self) -> None:
        policy = Policy.parse("fp16, scaling=1024")
        assert policy.scaling == ScalingConfig.fixed(1024.0)
        assert str(policy) == "fp16, scaling=1024"
        assert Policy.parse(str(policy)) == policy

    def test_a_toml_file_may_have_the_number(self, tmp_path: Path) -> None:
        (tmp_path / "p.toml").write_text('compute = "fp16"\nscaling = 1024')
        assert Policy.load(tmp_path / "p.toml").scaling == ScalingConfig.fixed(1024.0)
        Policy.parse("fp16, scaling=0.5").save(tmp_path / "q.toml")
        assert Policy.load(tmp_path / "q.toml") == Policy.parse("fp16, scaling=0.5")

    @pytest.mark.parametrize("word", ["0", "-1", "inf", "nan"])
    def test_a_number_that_is_no_scale_is_refused(self, word: str) -> None:
        with pytest.raises(PolicyError, match=r"init_scale=.* must be finite and positive"):
            Policy.parse(f"fp16, scaling={word}")


@pytest.mark.parametrize("given", [None, 3, b"bf16", Policy(), Policy, ["bf16"]])
def test_what_is_no_text_is_refused(given: Any) -> None:
    with pytest.raises(PolicyError, match=r"Policy.parse was given .*; give text such as 'bf16, output=fp32'\."):
        Policy.parse(given)


@pytest.mark.parametrize(
    "text", ["{}", "bf16, {}", "bf16, {}=fp32", "bf16, compute={}", 'bf16, "{}', "bf16;{}", "bf16, scaling.{}=1"]
)
def test_a_text_of_a_million_characters_is_quoted_by_its_start_at_once(text: str) -> None:
    with pytest.raises(PolicyError, match="cannot parse policy") as caught:
        Policy.parse(text.format("x" * 1_000_000))
    assert len(str(caught.value)) < 1_200
    many = ", ".join(["bf16", *(f"layer{i}.*=fp32" for i in range(1_000))])
    assert len(Policy.parse(many).modules) >= 1_000
    with pytest.raises(PolicyError, match=r"at position \d+: unknown key") as caught:
        Policy.parse(f"{many}, nothing=1")
    assert len(str(caught.value)) < 2_000

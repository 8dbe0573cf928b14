"""Hypothesis strategies for policies, and one policy in which no field has its default."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from mezzo.policy import PRESETS, GuardConfig, ModuleRule, OpRules, Policy, Rule, ScalingConfig
from mezzo.policy.fields import MODULE_RULES
from mezzo.policy.table import known_ops

LOW = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *LOW)
_WIDER = ("fp32", "kahan", "stochastic")
MASTERS = {torch.float32: ("none",), torch.float16: _WIDER, torch.bfloat16: ("split", *_WIDER)}

# Words that mean something else in a policy's text, and characters that separate there.
NASTY = (
    "loss", "Loss", "ops", "modules", "scaling", "scaling.x", "Guard.y", "op:cumsum", "module:x", "MODULE:x", "?x", "?",
    "fp16", "a,b", "a=b", 'a"b', '"', "\\", "\\\"", " x ", " ", "é*", "[a,b]*", "#", "'", "*.norm*", "encoder", "",
)  # fmt: skip
patterns = st.one_of(
    st.sampled_from([word for word in NASTY if word]),
    st.text(st.sampled_from(',="\\?*[].:# aZ'), min_size=1, max_size=6),
    st.text(min_size=1, max_size=8).filter(str.isprintable),
    st.sampled_from(["*.norm*", "encoder.layer.*.norm", "LayerNorm", "*RMSNorm"]),
)
module_rules = st.builds(
    ModuleRule, pattern=patterns, precision=st.sampled_from([*MODULE_RULES, *LOW]), required=st.booleans()
)
op_rules = st.builds(
    OpRules,
    table=st.sampled_from(["torch", "mezzo"]),
    edits=st.lists(st.tuples(st.sampled_from(sorted(known_ops())), st.sampled_from(list(Rule))), max_size=3).map(tuple),
)


@st.composite
def scalings(draw: Any) -> ScalingConfig:
    low, init, high = sorted(draw(st.tuples(*[st.floats(2.0**-20, 2.0**60)] * 3)))
    return ScalingConfig(
        min_scale=draw(st.sampled_from([low, 0.0])),
        init_scale=init,
        max_scale=draw(st.sampled_from([None, high, float("inf")])),
        growth_factor=draw(st.floats(1.0, 1e6, exclude_min=True)),
        backoff_factor=draw(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)),
        growth_interval=draw(st.integers(1, 2**63 - 1)),
        hysteresis=draw(st.integers(1, 100)),
        dynamic=draw(st.booleans()),
    )


guards = st.builds(
    GuardConfig,
    enabled=st.booleans(),
    on_overflow=st.sampled_from(["skip", "retry", "demote"]),
    patience=st.integers(1, 10**6),
    restore_buffers=st.booleans(),
    check_every=st.integers(0, 10**6),
)


@st.composite
def policies(draw: Any) -> Policy:
    params = draw(st.sampled_from(FLOATS))
    modules = tuple(draw(st.lists(module_rules, max_size=4)))
    return Policy(
        compute=draw(st.sampled_from([None, *FLOATS])),
        params=params,
        master=draw(st.sampled_from(MASTERS[params])),
        grads=draw(st.sampled_from([None, *FLOATS])),
        reduce=draw(st.sampled_from(FLOATS)),
        state=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        output=draw(st.sampled_from([None, *FLOATS])),
        loss=draw(st.sampled_from(FLOATS)),
        ops=draw(op_rules),
        modules=draw(st.sampled_from([(), PRESETS["bf16"].modules])) + modules,
        scaling=draw(st.none() | scalings()),
        guard=draw(guards),
    )


NO_DEFAULTS = Policy(
    compute=torch.float16,
    params=torch.bfloat16,
    master="kahan",
    grads=torch.float32,
    reduce=torch.bfloat16,
    state=torch.bfloat16,
    output=torch.float16,
    loss=torch.bfloat16,
    ops=OpRules(table="mezzo", edits=(("cumsum", Rule.LOW), ("cumsum", Rule.FORBID))),
    modules=(ModuleRule(pattern="encoder", precision=torch.bfloat16, required=False),),
    scaling=ScalingConfig(
        init_scale=1024.5, growth_factor=3.0, backoff_factor=0.1, growth_interval=7, min_scale=0.25, max_scale=1e30,
        hysteresis=2, dynamic=False,
    ),
    guard=GuardConfig(enabled=False, on_overflow="retry", patience=3, restore_buffers=False, check_every=9),
)  # fmt: skip

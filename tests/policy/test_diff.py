"""Diff: every difference between two policies, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from tests.policy.policies import NO_DEFAULTS, policies

from mezzo.policy import ModuleRule, OpRules, Policy, Rule
from mezzo.policy.spelling import write_module_rule


@given(policies(), policies())
def test_a_diff_is_empty_only_between_equals(left: Policy, right: Policy) -> None:
    assert not left.diff(left)
    assert bool(left.diff(right)) == (left != right)
    mirrored = [(change.what, change.right, change.left) for change in right.diff(left).changes]
    forward = [(change.what, change.left, change.right) for change in left.diff(right).changes]
    assert [row for row in forward if "rule" not in row[0]] == [row for row in mirrored if "rule" not in row[0]]


@given(policies(), policies())
def test_a_diff_accounts_for_every_rule(left: Policy, right: Policy) -> None:
    """The rules of the right side, minus those a diff adds, are those of the left side, minus those it drops."""
    changes = [change for change in left.diff(right).changes if change.what == "module rule"]
    ours, theirs = ([write_module_rule(rule) for rule in p.modules] for p in (left, right))
    for change in changes:
        if change.left:
            ours.remove(change.left)
        if change.right:
            theirs.remove(change.right)
    assert sorted(ours) == sorted(theirs)


def test_order_alone_is_a_difference() -> None:
    rules = ModuleRule(pattern="a", precision=Rule.LOW), ModuleRule(pattern="*", precision=Rule.FP32)
    assert Policy(modules=rules).diff(Policy(modules=rules[::-1]))


@pytest.mark.parametrize(
    ("left", "right", "printed"),
    [
        ("bf16", "bf16", "no difference: bf16"),
        ("fp16, op:cumsum=low, *.norm*=fp32, scaling.init_scale=1024", "bf16, ops=mezzo, *.norm*=bf16, head.*=low", """\
left:  fp16, op:cumsum=low, *.norm*=fp32, scaling.init_scale=1024
right: bf16, ops=mezzo, *.norm*=bf16, head.*=low
compute      fp16                              bf16
ops          torch                             mezzo
scaling      dynamic, scaling.init_scale=1024  none
op rule      cumsum=low                        -
module rule  *.norm*=fp32                      *.norm*=bf16
module rule  -                                 head.*=low"""),
        ("fp16", "fp16, scaling.init_scale=8, guard.enabled=false", """\
left:  fp16
right: fp16, scaling.init_scale=8, guard.enabled=false
scaling.init_scale  65536  8
guard.enabled       true   false"""),
        ("fp16, scaling=8, scaling.min_scale=1", "fp16, scaling=none", """\
left:  fp16, scaling=8, scaling.min_scale=1
right: fp16, scaling=none
scaling  8, scaling.min_scale=1  none"""),
    ],
)  # fmt: skip
def test_a_diff_is_readable(left: str, right: str, printed: str) -> None:
    assert str(Policy.parse(left).diff(right)) == printed


def test_a_diff_sees_every_field() -> None:
    changes = {change.what for change in Policy().replace(scaling=None).diff(NO_DEFAULTS).changes}
    assert changes >= {"compute", "params", "master", "grads", "reduce", "state", "output", "loss", "ops", "scaling"}
    assert changes >= {"op rule", "module rule", *(f"guard.{name}" for name in type(NO_DEFAULTS.guard).__slots__)}
    dynamic = Policy.parse("fp32, scaling=dynamic").replace(ops=OpRules()).diff(NO_DEFAULTS)
    assert {change.what for change in dynamic.changes} >= {f"scaling.{n}" for n in type(NO_DEFAULTS.scaling).__slots__}

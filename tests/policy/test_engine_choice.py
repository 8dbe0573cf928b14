"""The engine of a region is computed from the tables, and says why."""

from __future__ import annotations

import pytest

from mezzo import Policy, Rule
from mezzo.policy import OpRules
from mezzo.policy.table import op_table, registered


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

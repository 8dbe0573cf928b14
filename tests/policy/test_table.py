"""The torch column of the table against the dispatcher of the installed torch, for every device it can read."""

from __future__ import annotations

import pytest
import torch

from mezzo.errors import PolicyError
from mezzo.policy import Policy, table
from mezzo.policy.table import DISPATCH_KEYS, FAMILIES, known_ops, op_table, registered

# Ops that only some of the supported torch versions list: (device, op) -> the first version that has it, the first that has not.
BY_VERSION = {
    ("cuda", "linalg_matrix_sqrth"): ("2.14", "99"),
    ("cpu", "linalg_matrix_sqrth"): ("2.14", "99"),
    ("cuda", "rms_norm"): ("2.12", "99"),
    ("xpu", "rms_norm"): ("2.12", "99"),
    ("cpu", "cholesky"): ("2.11", "2.14"),
    ("cpu", "qr"): ("2.11", "2.14"),
}
CUDA_BUILDS = {"_cudnn_rnn"}
"""Ops that no CPU build lists for CUDA."""


def parsed(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def gone(device: str) -> set[str]:
    """Ops of the table that the installed torch does not list."""
    here = parsed(torch.__version__)
    found = {
        op for (d, op), (first, end) in BY_VERSION.items() if d == device and not parsed(first) <= here < parsed(end)
    }
    return found if device != "cuda" or torch.version.cuda else found | CUDA_BUILDS


def drift(device: str) -> tuple[set[str], set[str]]:
    """Ops that torch casts on a device and the table does not name, and ops that the table names and torch does not cast."""
    named = {op for family in FAMILIES if any(device in devices for _, devices in family.torch) for op in family.ops}
    return set(table.registered(device) - named), named - table.registered(device)


@pytest.mark.parametrize("device", DISPATCH_KEYS)
def test_the_table_is_the_dispatcher(device: str) -> None:
    unknown, missing = drift(device)
    assert unknown == set(), f"torch {torch.__version__} casts ops the table does not name: {unknown}"
    assert missing == gone(device)


def test_a_moved_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = registered("cuda") - {"softmax"} | {"brand_new_op"}
    monkeypatch.setattr("mezzo.policy.table.registered", lambda device_type: names)
    assert drift("cuda") == ({"brand_new_op"}, {*gone("cuda"), "softmax"})


def test_every_row_has_a_reason_and_every_op_one_family() -> None:
    ops = [op for family in FAMILIES for op in family.ops]
    assert len(ops) == len(set(ops))
    for name in ("torch", "mezzo"):
        for device in DISPATCH_KEYS:
            assert all(row.reason for row in op_table(name, device).values())


def test_one_mezzo_table_for_all_devices_and_every_difference_explained() -> None:
    assert all(op_table("mezzo", device) == op_table("mezzo", "cpu") for device in DISPATCH_KEYS)
    cuda = op_table("torch", "cuda")
    for family in FAMILIES:
        for op in family.ops:
            row = op_table("mezzo", "cuda").get(op)
            same = (row and row.rule) == (cuda[op].rule if op in cuda else None)
            only_elsewhere = (
                op not in cuda and row is not None and any(op in op_table("torch", d) for d in DISPATCH_KEYS)
            )
            assert same or family.repair or only_elsewhere or op in ("linalg_matrix_sqrth",), op


def test_every_row_can_be_edited() -> None:
    assert {op for name in ("torch", "mezzo") for op in op_table(name, "cpu")} <= known_ops()
    assert {"tanh", "cumsum", "softmax", "matmul"} <= known_ops()


@pytest.mark.parametrize("name", ["svd_lowrank", "pca_lowrank", "lobpcg"])
def test_no_rule_is_promised_for_what_torch_shows_no_mode(name: str) -> None:
    """torch hands plain tensors in these past every function mode: their products ran in 16 bit under a rule that said fp32."""
    assert name not in op_table("mezzo", "cpu")
    with pytest.raises(PolicyError, match=f"unknown op '{name}'"):
        Policy.parse(f"bf16, op:{name}=fp32")

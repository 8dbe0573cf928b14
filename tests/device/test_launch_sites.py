"""Every kernel launch, event and stream says which device it is for; what is left out is the current device's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "mezzo"
GUARDS = {"on", "device", "device_index"}
"""Context managers that make a device the current one."""


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_guarded(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.With) and any(
            isinstance(item.context_expr, ast.Call) and name_of(item.context_expr.func) in GUARDS for item in node.items
        ):
            return True
    return False


def objection(call: ast.Call) -> str:
    """Say what a call leaves to the current device, were it not inside a guard; empty if nothing."""
    name = name_of(call.func)
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(call.func, ast.Subscript) and name_of(call.func.value).endswith("kernel"):
        return "a kernel is launched outside a device's guard"
    if isinstance(call.func, ast.Attribute) and name in ("Event", "Stream"):
        is_whole = any(name_of(value) not in ("type", "") for value in given)
        return "" if is_whole else f"{name} without its device"
    if isinstance(call.func, ast.Attribute) and name in ("record", "current_stream", "synchronize") and not given:
        is_event = name != "synchronize" or name_of(call.func.value) in ("cuda", "accelerator")
        return f"{name}() without its device" if is_event else ""
    return ""


def breaches(source: str) -> list[str]:
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return [
        f"{node.lineno}: {what}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (what := objection(node)) and not is_guarded(node, parents)
    ]


def test_every_launch_event_and_stream_has_its_device() -> None:
    found = {str(path.relative_to(SRC)): breaches(path.read_text()) for path in SRC.rglob("*.py")}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "def step_(blocks, device):\n    adamw_step_kernel[(blocks.shape[1],)](blocks, SIZE=1024)\n",
        "event = torch.Event(flags.device.type)\nevent.record(torch.accelerator.current_stream(flags.device))\n",
        "event = torch.Event(device=flag.device)\nevent.record()\n",
        "stream = torch.Stream()\n",
        "event = torch.Event(flags.device)\nevent.record(torch.accelerator.current_stream())\n",
        "torch.cuda.synchronize()\n",
    ],
)
def test_a_breach_is_found(source: str) -> None:
    assert len(breaches(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "with on(device):\n    adamw_step_kernel[(4,)](blocks)\n",
        "event = torch.Event(flags.device)\nevent.record(torch.accelerator.current_stream(flags.device))\n",
        "event.synchronize()\ntorch.accelerator.synchronize(device)\n",
    ],
)
def test_a_launch_with_its_device_is_left_alone(source: str) -> None:
    assert breaches(source) == []

"""`mezzo policy`: show, explain and compare policies and op tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Literal

import torch
import tyro

from ..errors import ConfigError
from ..policy import PRESETS, as_policy, op_table, rules, settings, written
from ..report import table_text
from .main import terminal_width

PolicyText = Annotated[str, tyro.conf.arg(metavar="POLICY", help="a policy's text, or the path of a .toml file")]
_FILE = "its text, or the path of a .toml file (default: the presets)"
Shown = Annotated[str | None, tyro.conf.arg(metavar="[POLICY]", help=_FILE, help_behavior_hint="")]
_NAME = "its full name, such as encoder.layer.3.norm (default: code in none with a rule)"
ModuleName = Annotated[str | None, tyro.conf.arg(metavar="[MODULE]", help=_NAME, help_behavior_hint="")]
Device = Annotated[Literal["cpu", "cuda", "mps", "xpu"], tyro.conf.arg(help="whose op table and units are meant")]
Json = Annotated[bool, tyro.conf.arg(name="json", help="print JSON instead of tables")]
_json_text = partial(json.dumps, indent=2)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where the output is no terminal a row is one line, whatever its length."""
    print(table_text(columns, rows, width=terminal_width()))


def show(policy: tyro.conf.Positional[Shown] = None, /, *, device: Device = "cpu", as_json: Json = False) -> int:
    """Show a policy's settings and rules, and where each is written; or the presets."""
    if policy is None:
        return _show_presets(as_json)
    value = as_policy(policy)
    text = written(value)
    if as_json:
        print(_json_text({"text": str(text), **value.to_dict()}))
        return 0
    print(f"policy: {text}\n")
    _print_table(("setting", "value", "written"), [(key, word, text.where((key, 0))) for key, word in settings(value)])
    ruled = list(rules(value, text))
    if ruled:
        print()
        _print_table(("kind", "rule", "written"), ruled)
    if value.compute is None:
        absent = device == "cuda" and not torch.cuda.is_available()
        print(f"\non {device}: {'this machine has none to decide' if absent else value.resolve(device)}")
    return 0


def _show_presets(as_json: bool) -> int:
    if as_json:
        print(_json_text({name: preset.to_dict() for name, preset in PRESETS.items()}))
        return 0
    columns = [dict(settings(preset)) for preset in PRESETS.values()]
    rows = [(key, *(column[key] for column in columns)) for key in columns[0] if "." not in key]
    _print_table(("setting", *PRESETS), [*rows, ("module rules", *(str(len(p.modules)) for p in PRESETS.values()))])
    return 0


def ops(*, table: Literal["torch", "mezzo"] = "torch", device: Device = "cpu", as_json: Json = False) -> int:
    """List an op table: what each op runs in on a device, and why.

    An op without a row runs as it is.
    """
    rows = sorted(op_table(table, device).values(), key=lambda row: (row.rule.value, row.op))
    if as_json:
        print(_json_text([{**asdict(row), "rule": str(row.rule)} for row in rows]))
        return 0
    cells = [(row.op, str(row.rule), row.reason, row.instead or "") for row in rows]
    _print_table(("op", "rule", "reason", "instead"), cells)
    return 0


def why(
    policy: tyro.conf.Positional[PolicyText],
    module: tyro.conf.Positional[ModuleName] = None,
    /,
    *,
    op: Annotated[str | None, tyro.conf.arg(help="an op in the module, such as softmax")] = None,
    class_name: Annotated[tuple[str, ...], tyro.conf.arg(help="the module's class and the classes above it")] = (),
    device: Device = "cpu",
    as_json: Json = False,
) -> int:
    """Say which rule decides the precision of a module or an op.

    It also says where the rule is written, and what it overrides.
    """
    own = class_name[:1] if module is None else class_name  # of a list that ends in a module, which has no capital
    if wrong := [name for name in class_name if not name.isidentifier() or (name not in own and name[0].islower())]:
        raise ConfigError(f"--class-name takes classes, and {wrong[0]!r} is none. Write the module before the options.")
    answer = as_policy(policy).why(module, op, device, class_name)
    print(_json_text(asdict(answer)) if as_json else answer)
    return 0


def diff(
    left: tyro.conf.Positional[PolicyText], right: tyro.conf.Positional[PolicyText], /, *, as_json: Json = False
) -> int:
    """List what differs between two policies. Exit code 0: nothing, 1: something."""
    answer = as_policy(left).diff(as_policy(right))
    print(_json_text(asdict(answer)) if as_json else answer)
    return int(bool(answer))


def run(argv: list[str]) -> int:
    """Run `mezzo policy`. Returns: 0 done, 1 `diff` found a difference. Writes: standard output."""
    commands: dict[str, Callable[..., int]] = {"show": show, "ops": ops, "why": why, "diff": diff}
    return int(
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="mezzo policy", description=__doc__, args=argv, config=(tyro.conf.FlagCreatePairsOff,)
        )
    )

"""`mezzo train`: train a BERT text classifier."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from ..errors import ConfigError, DataError
from ..train import FailedOnOtherRank, RunFolder, TrainConfig, TrainResult, launch
from ..train import run as train
from .main import exit_code

_ENDS = {128 + signal.SIGINT: "the keyboard", 128 + signal.SIGTERM: "SIGTERM"}
_OF_NEW_MODELS = ("vocab_size", "layers", "hidden", "heads", "intermediate", "dropout")
_IDLE = {**dict.fromkeys(_OF_NEW_MODELS, "model"), "dev_share": "dev_data", "test_share": "test_data"}
"""Options that have no effect beside another."""
_CALLED = {
    "parts": "micro-batches N", "bf16": "policy bf16", "fp16": "policy fp16", "fp32": "policy fp32", "dtype": "policy TEXT",
    "precision": "policy TEXT", "mixed-precision": "policy TEXT", "learning-rate": "lr RATE", "num-train-epochs": "epochs N",
    "output-dir": "out FOLDER", "model-name-or-path": "model MODEL", "max-grad-norm": "max-norm NORM", "warmup-ratio": "warmup SHARE",
    "lr-scheduler-type": "schedule NAME", "max-seq-length": "max-length N", "train-file": "data FILE", "report-to": "tracker NAME",
    "per-device-train-batch-size": "batch-size N --per-rank", "resume-from-checkpoint": "resume --out FOLDER", "ckpt-path": "resume --out FOLDER",
    "loss-scale": "policy fp16,scaling=N", **dict.fromkeys(("amp-dtype", "amp-level", "opt-level", "torch-dtype"), "policy TEXT"),
    **dict.fromkeys(("gradient-accumulation-steps", "accumulate-grad-batches"), "micro-batches N, which share one --batch-size"),
    **dict.fromkeys(("gradient-clip-val", "grad-clip"), "max-norm NORM"), **dict.fromkeys(("use-cpu", "no-cuda"), "device cpu"),
    **dict.fromkeys(("eval-steps", "save-steps"), "eval-every N"), **dict.fromkeys(("logging-steps", "log-interval"), "log-every N"),
    **dict.fromkeys(("devices", "num-processes", "nproc-per-node"), "nproc N"),
}  # fmt: skip
"""Options by their former names, or by those of other trainers, and what is written here."""
DESCRIPTION = "Train a BERT text classifier, in mixed precision, and test the best model."


def _resumed_folder(argv: Sequence[str]) -> Path | None:
    """Return the folder of the run that a command line goes on with, None if it starts one."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--resume", action="store_true")
    ahead.add_argument("--out", type=Path, nargs="?", default=TrainConfig().out, const=TrainConfig().out)
    known, _ = ahead.parse_known_args(argv)
    out: Path = known.out
    return out if known.resume else None


def _options(default: TrainConfig) -> Any:
    """Return a dataclass with the fields of a config and those of the command, which checks nothing.

    tyro would dress up the error of a config that checks itself; unchecked, the error is the config's own sentence.
    """
    kinds: dict[str, Any] = get_type_hints(TrainConfig)
    shown = tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {float(default):g})")
    kinds["test_share"] = Annotated[float, shown]  # a seventh
    names = [f.name for f in dataclasses.fields(default)]
    fields: list[Any] = [(name, kinds[name], field(default=getattr(default, name))) for name in names]
    own = [("json", bool, False), ("nproc", int, 0), ("max_restarts", int, 0)]
    made = make_dataclass("Options", [*fields, *own], frozen=True, kw_only=True)
    made.__doc__ = (TrainConfig.__doc__ or "").replace(
        "Attributes:",
        """Attributes:
        json: print the result as JSON.
        nproc: processes to start on this machine, which share the work; 0 starts none, as under torchrun.
        max_restarts: how often to start them again, from the last checkpoint, after one has failed.""",
    )
    return made


def _with_none_as_python(argv: Sequence[str]) -> list[str]:
    """Return the words with `none` of any case written as tyro reads it, after the options that take a number or none."""
    kinds = {_option(name): kind for name, kind in get_type_hints(TrainConfig).items()}
    numbers = {option for option, kind in kinds.items() if kind in (float | None, int | None)}
    words = list(argv)
    for i, word in enumerate(words):
        option, is_joined, value = word.partition("=")
        if option.replace("_", "-") not in numbers:
            continue
        if is_joined and value.lower() == "none":
            words[i] = f"{option}=None"
        elif i + 1 < len(words) and words[i + 1].lower() == "none":
            words[i + 1] = "None"
    return words


def _launch_options(argv: Sequence[str]) -> tuple[int, int, list[str]]:
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--nproc", type=int, default=0)
    ahead.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    known, rest = ahead.parse_known_args(argv)
    return known.nproc, known.max_restarts, rest


def parse(argv: Sequence[str]) -> tuple[TrainConfig, bool]:
    """Return the run that a command line asks for, and whether its result is printed as JSON.

    With --resume, options left out are those of the run that goes on.

    Raises:
        ConfigError: an option that cannot be honoured.
        SystemExit: an option that does not exist, or --help.
    """
    for option in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if called := _CALLED.get(option[2:].replace("_", "-")):
            raise ConfigError(f"{option} is called --{called.split()[0]} here: write --{called}.")
    resumed = _resumed_folder(argv)
    default = TrainConfig()
    if resumed is not None and RunFolder(path=resumed).config.exists():
        default = TrainConfig.load(RunFolder(path=resumed).config).replace(overwrite=False)
    words = _with_none_as_python(argv)
    options = tyro.cli(_options(default), prog="mezzo train", description=DESCRIPTION, args=words)
    config = TrainConfig(**{f.name: getattr(options, f.name) for f in dataclasses.fields(default)})
    _refuse_contradictions(config, {word.partition("=")[0].replace("_", "-") for word in argv})
    return config, options.json


def _refuse_contradictions(config: TrainConfig, written: set[str]) -> None:
    """Refuse with a `ConfigError` options that were written and that others which hold leave without effect."""
    for name, given in _IDLE.items():
        is_fine = getattr(config, given) is None or config.resume or (given != "model" and not getattr(config, name))
        if _option(name) in written and not is_fine:
            raise ConfigError(f"{_option(name)} has no effect beside {_option(given)}. Leave one of them out.")
    if "--amp" in written and config.amp and not config.chosen_policy.is_low:
        raise ConfigError(
            f"--amp and --policy {config.policy} contradict each other: that policy computes in fp32. Write --no-amp, or --policy bf16."
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _print(result: TrainResult, as_json: bool) -> None:
    try:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if as_json else _text(result), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(f"the result cannot be printed: {error.strerror}. It is in {result.folder.result}.") from error


def _text(result: TrainResult) -> str:
    folder = result.folder
    shared = f", {result.ranks} ranks" if result.ranks > 1 else ""
    dev = result.dev_accuracy
    kind, found = ("last", "not evaluated") if dev is None else ("best", f"dev accuracy {dev:.4f}")
    lines = (
        result.report_text,
        f"test accuracy   {result.accuracy:.4f}",
        f"{kind} model      update {result.best_step}, {found}",
        f"training        {result.applied_steps} updates, {result.skipped_steps} skipped, {result.seconds:.1f} s",
        f"peak memory     {result.peak_memory_bytes / 2**20:.0f} MiB",
        f"precision       {result.policy} on {result.device}{shared}",
        *(f"{name:<15} {getattr(folder, name)}" for name in ("best", "curves", "metrics", "result")),
    )
    return "\n".join(lines)


def _is_first() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def _written(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is replaced; None where there is none."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _tell_end(config: TrainConfig, nproc: int, before: tuple[int, int] | None, code: int) -> int:
    """Say, on the first rank, of a run that Ctrl-C or SIGTERM ended how to go on. Returns: the exit code it was given."""
    if code in _ENDS and _is_first():
        rest = " before its first checkpoint, with nothing to go on from."
        if config.resume or _written(RunFolder(path=config.out).checkpoint) != before:
            ranks = ("--nproc", str(nproc)) if nproc else ()
            again = shlex.join(["mezzo", "train", "--resume", "--out", str(config.out), *ranks])
            rest = f". Go on from the last checkpoint with: {again}"
        print(f"mezzo train: ended by {_ENDS[code]}{rest}", file=sys.stderr)
    return code


def run(argv: Sequence[str]) -> int:
    """Run `mezzo train` with the words after it.

    Returns 0 done, 2 another rank says what went wrong, 130 ended by Ctrl-C, 143 by SIGTERM, which it tells how to go on from.
    Writes: the run's folder, standard output of the first rank.
    """
    config, as_json = parse(argv)
    nproc, max_restarts, words = _launch_options(argv)
    if max_restarts and not nproc:
        raise ConfigError(
            f"--max-restarts {max_restarts} starts again what --nproc has started, and --nproc was left out. Write --nproc 1, or give it to torchrun."
        )
    ended = partial(_tell_end, config, nproc, _written(RunFolder(path=config.out).checkpoint))
    try:
        if nproc:
            config.num_micro_batches(max(nproc, 1))
            return ended(launch(["train", *words], nproc=nproc, max_restarts=max_restarts))
        result = train(config)
    except FailedOnOtherRank:
        return 2
    except KeyboardInterrupt as end:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher says it
            raise
        return ended(exit_code(end))
    if _is_first():
        _print(result, as_json)
    return 0

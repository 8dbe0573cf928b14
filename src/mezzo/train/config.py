"""What a training run is asked to do, as one frozen value that is saved beside it, and where its files lie."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, did_you_mean, first_line, kind_of, shown
from ..files import as_path
from ..policy import Policy, as_policy, check_kinds
from .text_files import is_text

REVIEWS = "reviews"
"""The name of the built-in data set."""
PRETRAINED_LR = 3e-5
SCRATCH_LR, SCRATCH_WIDTH = 1e-3, 64
WARMUP = 0.1
SCHEDULES = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
)  # fmt: skip
"""Schedules of the transformers library that need nothing but the number of updates."""
RENAMED = {"parts": "micro_batches"}
MAY_DIFFER_ON_RESUME = ("resume", "overwrite", "out", "amp", "policy", "device", "log_every", "tracker")
"""Fields that leave a run comparable with its past: where it lies and in what precision it goes on."""
SEED_BITS = 44
"""More would leave no room for the number of the epoch in the 64 of torch's generator."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Options of a training run.

    Attributes:
        data: a .tsv, .csv or .jsonl file with one labelled text a row, or "reviews", the built-in Chinese reviews.
        dev_data: file for periodic evaluation; left out, `dev_share` of the rows of `data`.
        test_data: file for the final report; left out, `test_share` of the rows of `data`.
        dev_share: part of the rows of `data` that becomes the dev rows.
        test_share: part of the rows of `data` that becomes the test rows; 0 reports on the dev rows.
        text_column: column, or JSON key, of the text.
        label_column: column, or JSON key, of the label; any words or numbers.
        label_map: a .json or .tsv file with the names of the labels in their order; left out, the labels of the data, sorted.
        rows: rows of `data` to use, drawn before it is split; 0 uses all.
        limit: training rows to use; 0 uses all. Dev and test rows stay as they are.
        model: folder of a run, whose best model is meant, folder of a model, or hub name, to start from; left out, a BERT from random weights.
        vocab_size: entries of the tokenizer that is trained when `model` is left out.
        layers: encoder layers of a BERT from random weights.
        hidden: width of its layers.
        heads: attention heads of each layer.
        intermediate: width inside the feed-forward blocks; 0 is four times `hidden`.
        dropout: dropped share of the hidden units of a BERT from random weights.
        token_dropout: share of the tokens that training hides behind the mask token.
        max_length: tokens kept of a text, the two marks around it included.
        batch_size: texts in one update, of all ranks together unless `per_rank`.
        per_rank: `batch_size` is that of each rank.
        micro_batches: micro-batches that a batch is run in, one after the other and on the ranks at once; 0 is one for each rank.
        epochs: passes over the training rows.
        lr: peak learning rate; left out, 3e-5 with `model`, and from random weights 1e-3 for a width of 64 or less, 1e-3 * 64 / `hidden` beyond.
        schedule: of the learning rate, by its name in the transformers library: "constant", "constant_with_warmup", "linear",
            "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt".
        warmup: share of the updates over which the learning rate rises, for schedules that have it; left out, 0.1.
        weight_decay: of AdamW, on matrices only: biases and norms are not decayed.
        max_norm: gradients are clipped to this norm; none clips nothing.
        ema: decay of a moving average of the weights, which then is what is evaluated and saved; 0 keeps none.
        amp: mixed precision as `policy` says; --no-amp trains in fp32.
        policy: a policy's text or .toml file: "auto", "bf16", "fp16", "fp16, output=fp32", ...
        device: "auto", "cpu", "cuda", ...
        evaluate: evaluate on the dev rows now and then and keep the best model, of equally accurate ones that of the lowest loss; --no-evaluate keeps the last.
        eval_every: updates from one evaluation and checkpoint to the next; 0 is once an epoch.
        log_every: updates from one line about the loss to the next, where standard error is no terminal; 0 prints none.
        tracker: "tensorboard" or "wandb" gets losses, learning rate and loss scale as well; "none" nobody.
        seed: of the weights, the order of the rows and dropout; the split has its own, fixed seed.
        out: folder of the run.
        resume: go on from the checkpoint in `out`, bit for bit as if never stopped.
        overwrite: give up a run that lies in `out`.

    Raises:
        ConfigError: a value of another type or outside its range.
        PolicyError: a policy that cannot be read.
    """

    data: str = REVIEWS
    dev_data: Path | None = None
    test_data: Path | None = None
    dev_share: float = 0.05
    test_share: float = 1 / 7
    text_column: str = "text"
    label_column: str = "label"
    label_map: Path | None = None
    rows: int = 0
    limit: int = 0
    model: str | None = None
    vocab_size: int = 8000
    layers: int = 2
    hidden: int = 256
    heads: int = 4
    intermediate: int = 0
    dropout: float = 0.1
    token_dropout: float = 0.0
    max_length: int = 128
    batch_size: int = 32
    per_rank: bool = False
    micro_batches: int = 0
    epochs: int = 3
    lr: float | None = None
    schedule: str = "constant"
    warmup: float | None = None
    weight_decay: float = 0.01
    max_norm: float | None = None
    ema: float = 0.0
    amp: bool = True
    policy: str = "auto"
    device: str = "auto"
    evaluate: bool = True
    eval_every: int = 0
    log_every: int = 50
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    seed: int = 0
    out: Path = Path("runs/train")
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Refuse values of another type or outside their ranges."""
        self._read_paths()
        check_kinds(self, ConfigError)
        for name in ("layers", "hidden", "heads", "batch_size", "epochs"):
            _check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("micro_batches", "limit", "rows", "intermediate", "eval_every", "log_every", "seed"):
            _check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative.")
        _check(self.seed < 2**SEED_BITS, f"seed={self.seed} must be below 2^{SEED_BITS}.")
        for name in ("dropout", "token_dropout", "warmup", "ema", "dev_share", "test_share"):
            _check(0.0 <= (getattr(self, name) or 0) < 1.0, f"{name}={getattr(self, name)} must be at least 0 and below 1.")  # fmt: skip
        for name in ("lr", "max_norm"):
            value = getattr(self, name)
            _check(value is None or 0 < value < math.inf, f"{name}={value} must be positive and finite.")
        shares = self.dev_share + self.test_share
        _check(shares < 1, f"dev_share={self.dev_share} and test_share={self.test_share} leave no row to learn from.")
        has_dev = bool(self.dev_data or self.dev_share)
        _check(has_dev, "dev_share=0 leaves no row for evaluation; write a share, or --dev-data.")
        nearest = did_you_mean(self.schedule, SCHEDULES)
        _check(self.schedule in SCHEDULES, f"there is no schedule {self.schedule!r}.{nearest}")
        _check(
            self.warmup is None or self.schedule != "constant",
            f"warmup={self.warmup} was asked for, and the schedule is constant from its first update. Write --schedule constant_with_warmup.",
        )
        _check(0 <= self.weight_decay < math.inf, f"weight_decay={self.weight_decay} must not be negative, inf or nan.")
        _check(self.max_length >= 3, f"max_length={self.max_length} leaves no token beside the two marks; write 3 or more.")  # fmt: skip
        vocab_size = self.vocab_size
        _check(vocab_size >= 6, f"vocab_size={vocab_size} leaves no entry beside the five marks; write 6 or more.")
        _check(self.hidden % self.heads == 0,
               f"hidden={self.hidden} is not a multiple of heads={self.heads}.")  # fmt: skip
        _check(not (self.resume and self.overwrite), "resume and overwrite contradict each other; write one of them.")
        as_policy(self.policy)

    def _read_paths(self) -> None:
        """Make paths of text, and text of paths and policies, where a field is the other. Writes: those fields."""
        for name in ("data", "dev_data", "test_data", "label_map", "out", "model"):
            value = getattr(self, name)
            if isinstance(value, str | Path):
                path = as_path("train", name, value)
                _check(is_text(str(path)), f"{name}={str(path)!r} is not UTF-8, in which a run's files are written.")
                object.__setattr__(self, name, str(value) if name in ("data", "model") else path)
        if not isinstance(self.policy, str):
            object.__setattr__(self, "policy", str(as_policy(self.policy)))

    @property
    def learning_rate(self) -> float:
        """The peak learning rate that holds."""
        if self.lr is not None:
            return self.lr
        return SCRATCH_LR * min(1.0, SCRATCH_WIDTH / self.hidden) if self.model is None else PRETRAINED_LR

    @property
    def warmup_share(self) -> float:
        """The share of the updates over which the learning rate rises, as it holds."""
        return WARMUP if self.warmup is None else self.warmup

    def of_all_ranks(self, ranks: int) -> TrainConfig:
        """Return the same run with the batch of all ranks together."""
        return self.replace(batch_size=self.batch_size * ranks, per_rank=False) if self.per_rank else self

    @property
    def chosen_policy(self) -> Policy:
        """The policy that holds, before a device has decided what "auto" is."""
        return as_policy(self.policy) if self.amp else as_policy("fp32")

    def num_micro_batches(self, ranks: int) -> int:
        """Return the number of micro-batches that a batch is run in; a ConfigError where they would not be equal, or not as many on each rank."""
        count, size = self.micro_batches or ranks, self.batch_size
        size = size * ranks if self.per_rank else size
        _check(count % ranks == 0, f"micro_batches={count} cannot be shared by {ranks} ranks; write a multiple of {ranks}, or 0.")  # fmt: skip
        below = size // count * count
        fitting = " or ".join(str(fit) for fit in (below, below + count) if fit)
        _check(
            size % count == 0,
            f"batch_size={size} is the batch of all {ranks} ranks together and is run in {count} micro-batches, which would not be equal. Write --batch-size {fitting}.",
        )
        return count

    def replace(self, **changes: object) -> TrainConfig:
        """Return a copy with some fields changed. Raises: ConfigError: unknown field, or a value outside its range."""
        known = [field.name for field in fields(self)]
        for name in changes:
            new = RENAMED.get(name)
            _check(new is None, f"the option {name!r} is now called {new!r}.")
            _check(name in known, f"a training run has no option {name!r}.{did_you_mean(name, known)}")
        return replace(self, **changes)  # type: ignore[arg-type]  # names are checked above

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TrainConfig:
        """Return the config that `to_dict` wrote. Raises: ConfigError: unknown field, or a value outside its range."""
        _check(
            isinstance(saved, Mapping), f"from_dict was given {kind_of(saved)}; give the dict that to_dict returned."
        )
        return cls().replace(**{shown(name) if not isinstance(name, str) else name: saved[name] for name in saved})

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Return the config in a JSON file. Raises: ConfigError: no such file, or no config in it."""
        raw, path = b"", as_path("TrainConfig.load", "path", path)
        try:
            raw = path.read_bytes()
            saved = json.loads(raw.decode())
            _check(isinstance(saved, dict), "it is no JSON object")
            return cls.from_dict(saved)
        except UnicodeDecodeError as error:
            why = f"line {raw[: error.start].count(10) + 1} is not UTF-8"
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise ConfigError(
            f"{path} holds no training configuration: {why}. Bring back a whole one, or remove it and write the options of the run beside --resume."
        )

    def differences(self, other: TrainConfig) -> dict[str, tuple[object, object]]:
        """Return the fields whose values would make a resumed run another run: name to (mine, other's)."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {n: (a, b) for n, (a, b) in pairs.items() if a != b and n not in MAY_DIFFER_ON_RESUME}


class RunFolder:
    """Where the files of a run lie.

    Attributes:
        config: the options, JSON.
        checkpoint: what `--resume` goes on from.
        best: the model with the best dev accuracy and its tokenizer, as the transformers library has them.
        metrics: a JSON object a line, for every update and evaluation.
        curves: the picture of loss, accuracy and scale.
        result: the `TrainResult`, JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.checkpoint, self.best = path / "config.json", path / "checkpoint.pt", path / "best"
        self.metrics, self.curves, self.result = path / "metrics.jsonl", path / "curves.png", path / "result.json"
        self._files = (self.config, self.checkpoint, self.metrics, self.curves, self.result)
        self._folders = (self.best, path / "best.partial")

    @property
    def replaced(self) -> list[str]:
        """The names of what lies in the folder that a training replaces."""
        return [path.name for path in (*self._files, *self._folders) if path.exists()]

    @property
    def misplaced(self) -> list[str]:
        """The names of folders where a training writes a file, and of files where it makes a folder."""
        files = [one for file in self._files for one in (file, file.with_name(f"{file.name}.partial"))]
        return [p.name for p in files if p.is_dir()] + [p.name for p in self._folders if p.is_file()]

    @property
    def is_run(self) -> bool | None:
        """Whether the options in it are those of a run: a model has a config.json too. None where none can be read."""
        try:
            saved = json.loads(self.config.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return {"data", "policy", "out"} <= saved.keys() if isinstance(saved, dict) else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, which exists, inside the block: a ConfigError while another process does. Not on Windows, nor where files cannot be locked. Writes: nothing."""
        if sys.platform == "win32":
            yield
            return
        import fcntl

        handle = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):  # of a file system without locks
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(
                        f"another process is training into {self.path}. Wait for its end, or write another --out."
                    ) from None
            yield
        finally:
            os.close(handle)


def demo_config(out: Path, *, amp: bool) -> TrainConfig:
    """Return the short `reviews` training that `mezzo demo` runs in fp32 and in mixed precision."""
    return TrainConfig(
        out=out, amp=amp, overwrite=True, lr=1e-3, schedule="linear", max_norm=1.0, vocab_size=8000, hidden=128, heads=2, dropout=0.3, token_dropout=0.4, max_length=160,
        batch_size=64, epochs=4, ema=0.995, eval_every=438,  # every second epoch: earlier ones differ by noise
    )  # fmt: skip

"""A training run from its options to its result."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from .. import Policy, keep_memory, prepare
from ..errors import CheckpointError, ConfigError, check_given, listed, shown
from ..extras import check_installed
from ..formats import is_count
from .checkpoint import check_same_run, check_whole, load_checkpoint, reading, write_json, writing
from .config import RunFolder, TrainConfig
from .data import Corpus, load_corpus
from .dist_context import DistContext, join
from .evaluate import Encoded, evaluate, report
from .metrics import progress_bar, save_curves
from .model import (
    build_model,
    check_length,
    encode,
    load_model,
    load_tokenizer,
    restore_tokenizer,
    tokenizer_text,
    train_tokenizer,
)
from .text_files import Row
from .train_step import Updater
from .trainer import Trainer, updates_per_epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a training run came to.

    Attributes:
        accuracy: of the best model on the test rows.
        dev_accuracy: of the best model on the dev rows; None without evaluation.
        best_step: update after which the best model was saved.
        seconds: of training with its evaluations, over all resumes.
        peak_memory_bytes: most memory held by this rank: allocated on CUDA, the process's resident set elsewhere.
        final_loss: mean training loss of the last epoch.
        applied_steps: updates that changed the weights.
        skipped_steps: updates left out because gradients held inf or NaN.
        policy: the text of the policy of the last update, with what "auto" became on the device.
        device: where it ran, or the first rank did.
        ranks: how many processes shared the work.
        rows: rows in train, dev and test, and dropped by cleaning.
        comm: what this rank handed to gradient all-reduces: how many by dtype, and bytes; empty on one rank.
        report: precision, recall, F1 and support by class, on the test rows.
        report_text: the same as a table.
    """

    accuracy: float
    dev_accuracy: float | None
    best_step: int
    seconds: float
    peak_memory_bytes: int
    final_loss: float
    applied_steps: int
    skipped_steps: int
    policy: str
    device: str
    ranks: int
    rows: dict[str, int]
    comm: dict[str, Any]
    report: dict[str, Any]
    report_text: str
    out: Path

    @property
    def folder(self) -> RunFolder:
        """The files of the run."""
        return RunFolder(path=self.out)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**asdict(self), "out": str(self.out)}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: allocated on CUDA, this process's resident set elsewhere. Syncs: no."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():  # unlike ru_maxrss, not inherited from the process that started this one
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _check_folder(config: TrainConfig, folder: RunFolder) -> None:
    taken = folder.replaced
    if taken and not folder.is_run and (folder.config.exists() or not config.resume):
        raise ConfigError(
            f"{config.out} holds no run that training could go on with or give up, and training would replace {listed(taken)} in it. Write --out with a new folder, or with that of a run."
        )
    if wrong := folder.misplaced:
        raise ConfigError(
            f"{config.out} holds {listed(wrong)}, a folder where training writes a file, or the other way round. Move it away, or write --out with a new folder."
        )
    given_up = {folder.path.resolve(), folder.best.resolve()} if config.overwrite else set()
    if config.model is not None and Path(config.model).resolve() in given_up:
        raise ConfigError(
            f"--overwrite would give up the model that it starts from: --model {config.model} is that of the run in --out {config.out}. Write another --out."
        )
    if folder.checkpoint.exists() and not config.resume and not config.overwrite:
        raise ConfigError(
            f"{config.out} holds a run already. Write --resume to go on with it, --overwrite to give it up, or another --out."
        )


def _check_writable(path: Path) -> None:
    """Refuse with a `CheckpointError`, before the data is read, a folder that nobody could make or write."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    with writing(path), TemporaryDirectory(dir=there):
        pass


def _saved_state(config: TrainConfig, folder: RunFolder, corpus: Corpus) -> dict[str, Any]:
    """Return the checkpoint of the run to go on with. Raises: CheckpointError: it is damaged, another run's, or without its best model."""
    state = load_checkpoint(folder.checkpoint)
    check_whole(folder.checkpoint, state)
    with reading(folder.checkpoint):
        check_same_run(state, config, corpus.labels, corpus.fingerprint)
        at, counts = state["position"], ("step", "skipped", "best_step", "epoch_applied")
        if not (all(is_count(at[n]) for n in counts) and all(isinstance(x, int | float) for x in at.values())):
            raise ValueError(f"its position is {shown(at)}")
        if (step := at["best_step"]) and not folder.best.is_dir():
            raise CheckpointError(
                f"the best model of the run, that of update {step}, is not in {folder.best}. Bring it back, or start again with --overwrite."
            )
    return state


def _as_trained(config: TrainConfig, folder: RunFolder, state: dict[str, Any] | None, updates: int) -> TrainConfig:
    """Return the config of a run with the policy that trained it, if no update is left for another."""
    with reading(folder.checkpoint):
        if state is None or state["position"]["step"] < updates:
            return config
        return config.replace(**{name: state["config"][name] for name in ("amp", "policy")})


def _open_folder(config: TrainConfig, folder: RunFolder, held: ExitStack) -> None:
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        held.enter_context(folder.held())
        if not config.resume:
            folder.checkpoint.unlink(missing_ok=True)
            folder.result.unlink(missing_ok=True)
            shutil.rmtree(folder.best, ignore_errors=True)
    write_json(folder.config, config.to_dict())


def _encoded(rows: Sequence[Row], corpus: Corpus, tokenizer: Any, max_length: int) -> Encoded:
    indices = {label: index for index, label in enumerate(corpus.labels)}
    return Encoded(
        tokens=encode(tokenizer, [row.text for row in rows], max_length),
        labels=[indices[row.label] for row in rows],
        pad_id=tokenizer.pad_token_id or 0,
        max_length=max_length,
    )


def _tokenizer(config: TrainConfig, corpus: Corpus, state: dict[str, Any] | None) -> Any:
    if config.model is not None:
        return load_tokenizer(config.model)
    if state is not None:
        with reading(RunFolder(path=config.out).checkpoint):
            return restore_tokenizer(state["tokenizer"], config.max_length)
    return train_tokenizer([row.text for row in corpus.train], config.vocab_size, config.max_length)


def _model(config: TrainConfig, corpus: Corpus, tokenizer: Any) -> nn.Module:
    if config.model is None:
        return build_model(config, corpus.labels, tokenizer)
    model = load_model(config.model, corpus.labels)
    check_length(model, config.max_length)
    return model


def _tested(trainer: Trainer, config: TrainConfig, policy: Policy, corpus: Corpus, test: Encoded) -> TrainResult:
    """Return what came of a run, with its best model on the test rows. Syncs: yes."""
    at, world, folder = trainer.position, trainer.world, trainer.folder
    best = prepare(load_model(folder.best).to(world.device), policy=policy).model
    found = evaluate(best, test, batch_size=config.batch_size, world=world)
    by_class, table = report(test.labels, found.predicted, corpus.labels)
    return TrainResult(
        accuracy=found.accuracy, dev_accuracy=at.best_accuracy if at.best_accuracy >= 0 else None, best_step=at.best_step,
        seconds=at.seconds, peak_memory_bytes=peak_memory_bytes(world.device), final_loss=at.final_loss,
        applied_steps=at.step - at.skipped, skipped_steps=at.skipped,
        policy=str(policy), device=str(world.device), ranks=world.size, comm=trainer.updater.comm,
        rows={"train": len(corpus.train), "dev": len(corpus.dev), "test": len(corpus.test), **corpus.dropped},
        report=by_class, report_text=table, out=folder.path,
    )  # fmt: skip


def _restarted(config: TrainConfig, folder: RunFolder, world: DistContext) -> TrainConfig:
    """Return a config that goes on with the run if the launcher, which started it before, has started it again."""
    is_there = world.is_first and world.restarts and folder.checkpoint.exists()
    saved = load_checkpoint(folder.checkpoint) if is_there else {}
    is_ours = bool(world.launch) and saved.get("launch") == world.launch
    return config.replace(resume=True, overwrite=False) if world.any(is_ours) else config


def run(config: TrainConfig) -> TrainResult:
    """Train a text classifier, or go on with one, and test the best model it found; the result is also in the run's folder.

    Under torchrun, or where torch.distributed is initialised, all ranks train it together: each runs its share of every batch
    and every evaluation, the first prints and writes. What a launcher restarts goes on from its last checkpoint.

    Raises:
        DataError: the data cannot be used.
        ConfigError: an option cannot be honoured, or another process is training into the folder.
        CheckpointError: a checkpoint cannot be read or written, or is another run's.
        PolicyError: the policy does not fit.
        NonFiniteStep, LossScaleExhausted: training broke down.
        DistributedError: a rank is lost.
        FailedOnOtherRank: the run failed, and the error of another rank says why.

    Writes: the run's folder, standard error, torch's global random state. Syncs: yes.
    """
    check_given("run", "config", config, TrainConfig, "a TrainConfig")
    with join(config.device) as world, keep_memory(), ExitStack() as held:
        folder = RunFolder(path=config.out)
        return _run(_restarted(config, folder, world), folder, world, held)


def _run(config: TrainConfig, folder: RunFolder, world: DistContext, held: ExitStack) -> TrainResult:
    asked = config.chosen_policy.resolve(world.device)
    config.num_micro_batches(world.size)
    whole = config.of_all_ranks(world.size)
    _check_folder(config, folder)
    if world.is_first:
        _check_writable(folder.path)
        if config.tracker != "none":
            check_installed(f"--tracker {config.tracker}", [config.tracker])
    corpus = load_corpus(config)
    state = _saved_state(config, folder, corpus) if config.resume else None
    updates = config.epochs * updates_per_epoch(len(corpus.train), whole.batch_size)
    config = _as_trained(config, folder, state, updates)
    policy = config.chosen_policy.resolve(world.device)
    torch.manual_seed(config.seed)
    tokenizer = _tokenizer(config, corpus, state)
    model = _model(config, corpus, tokenizer).to(world.device)
    parts = (corpus.train, corpus.dev, corpus.test)
    train, dev, test = (_encoded(rows, corpus, tokenizer, config.max_length) for rows in parts)
    updater = Updater(model, policy, config, updates=updates, world=world)
    identity = {
        "launch": world.launch, "config": config.to_dict(), "labels": list(corpus.labels), "fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer_text(tokenizer),
    }  # fmt: skip
    trainer = Trainer(whole, updater, tokenizer, train=train, dev=dev, folder=folder, identity=identity)
    world.wait()  # until all have read what the first is about to replace
    if world.is_first:
        _open_folder(config, folder, held)
    if state is not None:
        with reading(folder.checkpoint):
            trainer.load(state)
    done, total = trainer.position.step, trainer.total
    with progress_bar(done, total, every=config.log_every, is_shown=world.is_first) as progress:
        if world.restarts and state is not None:
            progress.note(f"restart {world.restarts}: going on from update {done}/{total}")
        if policy != asked:
            progress.note(
                f"update {done} was the last, which leaves none for the policy {asked}: the result is that of {policy}"
            )
        trainer.train(progress, f"{corpus.summary}; {policy} on {world.device}")
    world.wait()  # until the best model is written
    result = _tested(trainer, config, policy, corpus, test)
    if world.is_first:
        write_json(folder.result, result.to_dict())
        save_curves(folder.metrics, folder.curves)
    return result

"""The training of one model: the loop, its evaluations, and everything that a checkpoint must hold."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

from .checkpoint import save_checkpoint, save_model
from .config import RunFolder, TrainConfig
from .evaluate import Encoded, epoch_batches, evaluate, hide_tokens, logits_of, micro_batches, seed_dropout
from .metrics import MetricsLog, Outputs, Progress, tracking
from .train_step import Average, Updater


@dataclass(kw_only=True, slots=True)
class Position:
    """Where a run is.

    Attributes:
        step: updates done or skipped.
        best_accuracy: the best on the dev rows so far; -1 before the first evaluation.
        best_loss: on the dev rows then.
        best_step: when that was.
        epoch_loss: sum of the losses of this epoch's applied updates.
        epoch_applied: how many those are.
        final_loss: mean loss of the last whole epoch.
        seconds: spent on training and its evaluations.
    """

    step: int = 0
    skipped: int = 0
    best_accuracy: float = -1.0
    best_loss: float = math.inf
    best_step: int = 0
    epoch_loss: float = 0.0
    epoch_applied: int = 0
    final_loss: float = math.nan
    seconds: float = 0.0


def updates_per_epoch(rows: int, batch_size: int) -> int:
    """Return how many batches hold all rows, the last one perhaps not full."""
    return -(-rows // batch_size)


class Trainer:
    """Trains a model on encoded rows, evaluates it on others, and writes what came of it into a run's folder.

    The tokenizer is saved beside the model, and knows the marks; of the ranks that share each batch the first writes; `identity` is
    what a checkpoint says about its run besides its state.
    """

    def __init__(
        self,
        config: TrainConfig,
        updater: Updater,
        tokenizer: Any,
        *,
        train: Encoded,
        dev: Encoded,
        folder: RunFolder,
        identity: dict[str, Any],
    ) -> None:
        self.position = Position()
        self._config, self.updater, self._tokenizer = config, updater, tokenizer
        self._model = updater.amp.model
        self._average = Average(updater.amp, config.ema) if config.ema else None
        self._train, self._dev, self.folder, self._identity = train, dev, folder, identity
        self.world, self._num_micro_batches = updater.world, config.num_micro_batches(updater.world.size)
        self._per_epoch = updates_per_epoch(len(train.tokens), config.batch_size)
        self.total = config.epochs * self._per_epoch
        self._eval_every = config.eval_every or self._per_epoch

    def train(self, progress: Progress, opening: str = "") -> None:
        """Train from where the run is to its end, with an evaluation and a checkpoint every so often.

        `opening` is said once the first checkpoint is written, where it says something.

        Raises:
            CheckpointError: a file of the run could not be written.
            NonFiniteStep, LossScaleExhausted: too many updates in a row were skipped.

        Writes: model, files of the run, torch's global random state. Syncs: yes.
        """
        is_first = self.world.is_first
        log = MetricsLog(self.folder.metrics if is_first else None, self.position.step)
        with tracking(self._config.tracker if is_first else "none", self.folder.path) as track:
            self._train_rest(Outputs(log, track, progress), opening)

    def _train_rest(self, out: Outputs, opening: str) -> None:
        self._started = time.perf_counter() - self.position.seconds
        self._model.train()
        if self.position.step == 0:
            self._save(out)
        if opening:
            out.progress.note(opening)
        while self.position.step < self.total:
            epoch, done = divmod(self.position.step, self._per_epoch)
            batches = epoch_batches(self._train.lengths, self._config.batch_size, seed=self._config.seed, epoch=epoch)
            for rows in batches[done:]:
                self._update(rows, out)
                if self.position.step % self._eval_every == 0 or self.position.step == self.total:
                    self._evaluate_and_save(out)

    def _update(self, rows: list[int], out: Outputs) -> None:
        """Make one update of rows of the data. Writes: the model and its optimizer, the position, the log. Syncs: yes."""
        each = self._num_micro_batches // self.world.size
        mine = range(self.world.rank * each, (self.world.rank + 1) * each)
        update = self.updater.step(*(partial(self._loss, rows, index) for index in mine))
        at = self.position
        at.step += 1
        if update.applied:
            at.epoch_loss += update.loss
            at.epoch_applied += 1
        at.skipped += not update.applied
        if at.step % self._per_epoch == 0:
            at.final_loss = at.epoch_loss / max(at.epoch_applied, 1)
            at.epoch_loss, at.epoch_applied = 0.0, 0
        numbers = {"loss": update.loss, "grad_norm": update.grad_norm, "lr": update.lr, "scale": update.scale}
        out.log.add(kind="update", step=at.step, **numbers, applied=update.applied)
        out.track(at.step, {f"train/{name}": x for name, x in (numbers | {"skipped": float(at.skipped)}).items()})
        out.progress.update(at.step, loss=update.loss, lr=update.lr, scale=update.scale, skipped=at.skipped)

    def _loss(self, rows: list[int], index: int) -> Tensor:
        """Return what one micro-batch adds to the mean loss of its batch: shape (), fp32.

        What is hidden and dropped is a function of seed, update and micro-batch, whichever rank runs it.
        """
        marks, device = self._tokenizer, self.world.device
        own_rows = micro_batches(rows, self._num_micro_batches)[index]
        seed_dropout(device, self._config.seed, self.position.step, index)
        # A rank without rows runs one that does not count: averaging waits for the gradients of all.
        shown, share = self._train.batch(own_rows or rows[:1]), self._config.token_dropout
        batch = hide_tokens(shown, share, marks.mask_token_id, marks.all_special_ids).to(device)
        mean = F.cross_entropy(logits_of(self.updater.model, batch), cast(Tensor, batch.labels_B))
        return mean * (len(own_rows) / len(rows))

    def _evaluate_and_save(self, out: Outputs) -> None:
        at = self.position
        at.seconds = time.perf_counter() - self._started
        if self._config.evaluate:
            self._evaluate(out)
        elif at.step == self.total:
            at.best_step = at.step
            self._save_best()
        self._save(out)

    def _save_best(self) -> None:
        if self.world.is_first:
            weights = self.updater.amp.export_weights() if self._average is None else self._average.weights()
            save_model(self.folder.best, self._model, self._tokenizer, weights)

    def _evaluate(self, out: Outputs) -> None:
        size = self._config.batch_size
        with nullcontext() if self._average is None else self._average.swapped_in():
            found = evaluate(self._model, self._dev, batch_size=size, world=self.world)
        at = self.position
        at.seconds = time.perf_counter() - self._started
        numbers = {"loss": found.loss, "accuracy": found.accuracy}
        out.log.add(kind="evaluation", step=at.step, **numbers, seconds=round(at.seconds, 3))
        if (found.accuracy, -found.loss) > (at.best_accuracy, -at.best_loss):
            at.best_accuracy, at.best_loss, at.best_step = found.accuracy, found.loss, at.step
            self._save_best()
        out.track(at.step, {f"dev/{name}": number for name, number in numbers.items()})
        out.progress.note(
            f"update {at.step}/{self.total}: dev accuracy {found.accuracy:.4f}, dev loss {found.loss:.4f}, {at.skipped} skipped, {at.seconds:.0f} s"
        )

    def _save(self, out: Outputs) -> None:
        """Write the checkpoint, on the first rank. Raises: CheckpointError. Writes: metrics, checkpoint. Syncs: yes."""
        if not self.world.is_first:
            return
        out.log.flush()
        state = {
            **self._identity,
            "position": asdict(self.position),
            **self.updater.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
        }
        save_checkpoint(self.folder.checkpoint, state)

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint holds. Writes: model, optimizer, average. Syncs: yes."""
        self.position = Position(**state["position"])
        self.updater.load_state_dict(state)
        if self._average is not None:
            self._average.load_state_dict(state["average"])

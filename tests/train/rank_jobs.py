"""What the ranks of a test do; in a module of its own, so that they import little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.train.small import emotion_rows, tiny

from mezzo.train import TrainConfig, run
from mezzo.train.dist_context import join
from mezzo.train.evaluate import Encoded, evaluate, report
from mezzo.train.model import build_model, encode, train_tokenizer


def train(rank: int, world: int, config: TrainConfig) -> dict[str, Any]:
    """Return what a run came to, without what the clock and the number of ranks say."""
    result = run(config)
    return {**result.to_dict(), "seconds": 0.0, "peak_memory_bytes": 0, "out": "", "ranks": 0, "comm": {}}


def evaluate_texts(rank: int, world: int, batch_size: int, count: int) -> tuple[Any, Any, list[int]]:
    """Return what an evaluation found, its report, and the sizes of the batches that this rank ran."""
    torch.manual_seed(0)
    texts = [text for text, _ in emotion_rows(count)]
    tokenizer = train_tokenizer(texts, 300, 24)
    rows = Encoded(
        tokens=encode(tokenizer, texts, 24), labels=torch.randint(0, 3, (count,)).tolist(),
        pad_id=tokenizer.pad_token_id, max_length=24,
    )  # fmt: skip
    model = build_model(tiny(Path("x.tsv"), Path("out"), dropout=0.5), ("a", "b", "c"), tokenizer)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True)
    with join("cpu") as ranks:
        found = evaluate(model, rows, batch_size=batch_size, world=ranks)
    return found, report(rows.labels, found.predicted, ("a", "b", "c")), seen

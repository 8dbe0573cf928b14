"""Small data and small runs that the tests of training share."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from mezzo.train import TrainConfig, run

WORDS = {
    "anger": "furious rage hateful insult",
    "fear": "afraid terror panic dread",
    "joy": "happy delight cheerful smile",
    "love": "adore darling tender cherish",
    "sadness": "grief weep sorrow lonely",
    "surprise": "sudden amazed astonished unexpected",
}
FILLER = "the a this that was is of and to in on it my your day time thing way".split()


def emotion_rows(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return (text, label) rows of six classes, each told by one or two words among filler."""
    draw = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        label = sorted(WORDS)[len(rows) % len(WORDS)]
        words = draw.choices(FILLER, k=draw.randint(3, 12)) + draw.choices(WORDS[label].split(), k=2)
        draw.shuffle(words)
        rows[" ".join(words)] = label
    return list(rows.items())


def write_tsv(path: Path, rows: list[tuple[str, str]], header: str = "text\tlabel") -> Path:
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


def tiny(data: Path, out: Path, **changes: Any) -> TrainConfig:
    """Return a run that takes a second: a BERT 32 wide, two layers deep."""
    options: dict[str, Any] = dict(
        data=str(data), out=out, vocab_size=300, layers=2, hidden=32, heads=2, max_length=24, batch_size=16, epochs=2,
        token_dropout=0.1, policy="bf16", schedule="linear", max_norm=1.0,
    )  # fmt: skip
    return TrainConfig(**{**options, **changes})


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without what the clock says."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def words(config: TrainConfig) -> list[str]:
    """Return the command line that asks for a config."""
    changed = {name: value for name, value in config.to_dict().items() if value != TrainConfig().to_dict()[name]}
    return [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def trained_in(folder: Path) -> TrainConfig:
    """Train for one epoch in a folder, and return what was asked for."""
    config = tiny(write_tsv(folder / "rows.tsv", emotion_rows(90)), folder / "out", epochs=1)
    run(config)
    return config

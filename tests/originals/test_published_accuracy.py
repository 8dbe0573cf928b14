"""The published script's loop and `mezzo train --schedule constant --max-norm none` learn the same; the quick twin of benchmarks/originals.py."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from tests.bench.script import FOLDER, load_script

from mezzo.cli.train import parse
from mezzo.train import run


@pytest.fixture(scope="module")
def originals() -> ModuleType:
    return load_script("originals")


def _texts(labels: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """Rows two thirds of whose words are those of their label, the rest anybody's."""
    draw = random.Random(0)
    own = [draw.choice(labels) for _ in range(count)]
    words = (
        (draw.choice((label, label, draw.choice(labels))) + str(draw.randrange(5)) for _ in range(10)) for label in own
    )
    return [(label, " ".join(text)) for label, text in zip(own, words, strict=True)]


def test_both_ways_learn_the_same_on_one_rank(originals: ModuleType, tmp_path: Path) -> None:
    labels = originals.PACKAGES
    rows = _texts(labels, 800)
    parts = {"train": rows[:640], "dev": rows[640:672], "test": rows[672:]}
    for name, part in parts.items():
        lines = ["label\ttext", *(f"{label}\t{text}" for label, text in part)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = tmp_path / "bert"
    originals.write_model(model, [text for _, text in rows], labels, 0, hidden_size=32, num_hidden_layers=1)
    job = originals.Job(data=tmp_path, model=model, seed=0, ranks=1, batch_size=32, epochs=4, lr=5e-3, max_length=32)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wanted = originals.original(job)
    finally:
        dist.destroy_process_group()
    config, _ = parse(originals.train_words(job, tmp_path / "run")[1:])
    assert (config.schedule, config.max_norm) == ("constant", None)
    found = run(config)
    assert found.applied_steps == 4 * 640 // job.batch_size
    assert wanted > 0.9 and found.accuracy > 0.9


def test_the_words_of_a_package_do_not_hold_its_name(originals: ModuleType) -> None:
    found = originals.docstrings("networkx", 20)
    assert len(set(found)) == 20
    assert not any("networkx" in text.lower() for text in found)


def test_the_stored_means_are_within_a_hundredth_and_in_the_guide(originals: ModuleType) -> None:
    root = FOLDER.parent
    found = originals.stored(root / "benchmarks" / "results" / "originals.jsonl")
    for ranks in (1, 2):
        wanted, own = ([found[ranks, seed, way] for seed in range(5)] for way in originals.WAYS)
        assert sum(own) / 5 == pytest.approx(sum(wanted) / 5, abs=0.01)
    assert originals.table(found) in (root / "docs" / "train.md").read_text(encoding="utf-8")

"""The published training script beside `mezzo train`: the same model, rows, rate and number of updates, mean accuracy over seeds.

Run: `python benchmarks/originals.py STORE [--seeds 5] [--ranks 1 2]`; runs that STORE, a file of JSON lines, has already are not run
again. It prints the table of docs/train.md. Nothing is downloaded: the rows are the first words of the docstrings of six installed
packages, their package the class.

`original` is a loop of its own: DistributedDataParallel over gloo, a DistributedSampler, torch.autocast, AdamW at a constant rate
without clipping, an evaluation each epoch and the best weights kept. `mezzo` is `mezzo train --schedule constant --max-norm none`.
Both start from one folder with random weights, made for each seed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PACKAGES = ("matplotlib", "networkx", "sklearn", "sympy", "torch", "transformers")
ROWS_EACH = 1300
PARTS = {"train": 5120, "dev": 560, "test": 2100}
WAYS = ("original", "mezzo")
Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training.

    Attributes:
        data: folder with train.tsv, dev.tsv and test.tsv.
        model: folder of a transformers classifier with random weights, and its tokenizer.
        seed: of order and dropout.
        ranks: processes.
        batch_size: rows in one update, of all ranks together.
        epochs: passes over the rows.
        lr: constant rate.
        max_length: tokens kept of a row.
    """

    data: Path
    model: Path
    seed: int
    ranks: int
    batch_size: int = 64
    epochs: int = 6
    lr: float = 1e-3
    max_length: int = 48


def docstrings(package: str, count: int) -> list[str]:
    """Return the first words of docstrings of an installed package, its own name taken out, each once, in a fixed order."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    found: dict[str, None] = {}
    paths = sorted(Path(spec.origin).parent.rglob("*.py"))
    random.Random(0).shuffle(paths)
    for path in paths:
        if "tests" not in path.parts and len(found) < count:
            found |= dict.fromkeys(_first_words(path, package))
    return list(found)[:count]


def _first_words(path: Path, package: str) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    holders = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef))
    texts = (" ".join((ast.get_docstring(holder) or "").split()) for holder in holders)
    named = re.compile(rf"{package}|scikit-learn|pytorch|hugging ?face", re.IGNORECASE)
    return [named.sub("it", text)[:300] for text in texts if len(text) > 80]


def write_rows(folder: Path) -> None:
    """Write the rows of the three parts as .tsv files. Writes: the files."""
    rows = [(package, text) for package in PACKAGES for text in docstrings(package, ROWS_EACH)]
    random.Random(1).shuffle(rows)
    for name, size in PARTS.items():
        part, rows = rows[:size], rows[size:]
        assert len(part) == size, f"{len(part)} rows are left for {name}, and {size} were wanted"
        lines = ["label\ttext", *(f"{label}\t{text}" for label, text in part)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_model(folder: Path, texts: Sequence[str], labels: Sequence[str], seed: int, **sizes: int) -> None:
    """Write a small BERT with random weights and a tokenizer trained on texts. Writes: the folder, torch's random state."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = BertWordPieceTokenizer()
    words.train_from_iterator(texts, vocab_size=4000, min_frequency=2, show_progress=False)
    marks = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, **marks).save_pretrained(folder)
    torch.manual_seed(seed)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256, **sizes}
    config = BertConfig(vocab_size=words.get_vocab_size(), max_position_embeddings=64, **size)
    config.id2label = dict(enumerate(labels))
    BertForSequenceClassification(config).save_pretrained(folder)


def read_rows(path: Path) -> list[Row]:
    """Return label and text of each row."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [(label, text) for label, _, text in (line.partition("\t") for line in lines)]


class _Rows(Dataset[Row]):
    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def _loader(job: Job, part: str, tokenizer: Any, labels: Sequence[str], *, is_shuffled: bool) -> DataLoader[Any]:
    def collate(rows: list[Row]) -> dict[str, Tensor]:
        texts = [text for _, text in rows]
        batch = tokenizer(texts, max_length=job.max_length, padding="max_length", truncation=True, return_tensors="pt")
        return {**batch, "label": torch.tensor([labels.index(label) for label, _ in rows])}

    rows = _Rows(read_rows(job.data / f"{part}.tsv"))
    sampler: DistributedSampler[Row] = DistributedSampler(rows, shuffle=is_shuffled, seed=job.seed)
    return DataLoader(rows, batch_size=job.batch_size // job.ranks, sampler=sampler, collate_fn=collate)


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits.float()


@torch.no_grad()
def _accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    model.eval()
    counts = torch.zeros(2)
    for batch in loader:
        counts += torch.tensor([(_logits(model, batch).argmax(-1) == batch["label"]).sum(), len(batch["label"])])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def _optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    plain = [p for name, p in named if "bias" in name or "LayerNorm.weight" in name]
    decayed = [p for _, p in named if all(p is not q for q in plain)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def original(job: Job) -> float:
    """Return the accuracy on the test rows of the loop by hand, on one rank of a process group that is there."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(job.seed)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    bare = AutoModelForSequenceClassification.from_pretrained(job.model)
    labels = [bare.config.id2label[index] for index in range(bare.config.num_labels)]
    model = DistributedDataParallel(bare)
    optimizer, criterion = _optimizer(model, job.lr), nn.CrossEntropyLoss()
    train, dev, test = (_loader(job, part, tokenizer, labels, is_shuffled=part == "train") for part in PARTS)
    best, kept = -1.0, copy.deepcopy(model.state_dict())
    for epoch in range(job.epochs):
        train.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # a DistributedSampler
        model.train()
        for batch in train:
            optimizer.zero_grad()
            criterion(_logits(model, batch), batch["label"]).backward()
            optimizer.step()
        if (accuracy := _accuracy(model, dev)) > best:
            best, kept = accuracy, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return _accuracy(model, test)


def _on_rank(rank: int, job: Job, store: str, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.ranks)
    accuracy = original(job)
    if rank == 0:
        answer.put(accuracy)
    dist.destroy_process_group()


def run_original(job: Job) -> float:
    """Return the accuracy of `original` on ranks of its own."""
    import torch.multiprocessing as mp

    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, args=(job, f"{folder}/store", answer), nprocs=job.ranks)  # type: ignore[no-untyped-call]  # torch's own
    return float(answer.get())


def train_words(job: Job, out: Path) -> list[str]:
    """Return the words after `mezzo` that train as the script does."""
    return [
        "train", "--schedule", "constant", "--max-norm", "none", "--model", str(job.model), "--data", str(job.data / "train.tsv"),
        "--dev-data", str(job.data / "dev.tsv"), "--test-data", str(job.data / "test.tsv"), "--batch-size", str(job.batch_size),
        "--epochs", str(job.epochs), "--lr", str(job.lr), "--max-length", str(job.max_length), "--policy", "bf16",
        "--seed", str(job.seed), "--out", str(out),
    ]  # fmt: skip


def run_mezzo(job: Job) -> float:
    """Return the accuracy of `mezzo train` on as many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = ["--nproc", str(job.ranks)] if job.ranks > 1 else []
        command = [sys.executable, "-m", "mezzo", *train_words(job, Path(folder) / "run"), *ranks]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return float(json.loads((Path(folder) / "run" / "result.json").read_text(encoding="utf-8"))["accuracy"])


def stored(path: Path) -> dict[tuple[int, int, str], float]:
    """Return the accuracies of a store by ranks, seed and way."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(one["ranks"], one["seed"], one["way"]): one["accuracy"] for one in map(json.loads, lines)}


def table(found: dict[tuple[int, int, str], float]) -> str:
    """Return mean, smallest and largest accuracy of each way as Markdown, a line a number of ranks."""
    rows = ["| ranks | the script's loop | `mezzo train` |", "|---:|---:|---:|"]
    for ranks in sorted({ranks for ranks, _, _ in found}):
        each = [[a for (r, _, w), a in found.items() if (r, w) == (ranks, way)] for way in WAYS]
        cells = [f"{statistics.mean(one):.4f} ({min(one):.4f}-{max(one):.4f})" for one in each]
        rows.append(f"| {ranks} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Run what the store lacks, then print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    found = stored(asked.store)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_rows(data)
        texts = [text for _, text in read_rows(data / "train.tsv")]
        for ranks, seed in ((r, s) for r in asked.ranks for s in range(asked.seeds)):
            write_model(data / f"bert-{seed}", texts, PACKAGES, seed)
            job = Job(data=data, model=data / f"bert-{seed}", seed=seed, ranks=ranks)
            for way, run in zip(WAYS, (run_original, run_mezzo), strict=True):
                if (ranks, seed, way) not in found:
                    start = time.perf_counter()
                    found[ranks, seed, way] = run(job)
                    line = {"ranks": ranks, "seed": seed, "way": way, "accuracy": found[ranks, seed, way]}
                    with asked.store.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**line, "seconds": round(time.perf_counter() - start, 1)}) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()

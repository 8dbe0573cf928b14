from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, classification_report
from tests.messages import message_of
from tests.train.small import emotion_rows, metrics, tiny, write_tsv
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mezzo.bench import parse_device
from mezzo.errors import BenchError, CheckpointError, ConfigError
from mezzo.train import TrainConfig, TrainResult, run
from mezzo.train.checkpoint import load_checkpoint, save_model
from mezzo.train.data import load_corpus
from mezzo.train.dist_context import choose_device
from mezzo.train.predictor import Predictor


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tsv(tmp_path_factory.mktemp("data") / "emotions.tsv", emotion_rows(360))


@pytest.fixture(scope="module", params=["bf16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "fp16"))])
def learned(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainConfig, TrainResult]:
    config = tiny(
        data, tmp_path_factory.mktemp("run") / "out", policy=request.param, amp=request.param != "fp32", epochs=8,
        hidden=64, lr=3e-3, eval_every=40,
    )  # fmt: skip
    return config, run(config)


@pytest.fixture(scope="module")
def short(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, TrainResult]:
    """A run of one epoch, which tests that change it copy."""
    config = tiny(data, tmp_path_factory.mktemp("short") / "out", epochs=1)
    return config, run(config)


def copied(config: TrainConfig, out: Path) -> TrainConfig:
    shutil.copytree(config.out, out)
    return config.replace(out=out)


def test_six_emotions_are_learned_in_every_precision(learned: tuple[TrainConfig, TrainResult]) -> None:
    config, result = learned
    assert result.accuracy > 0.9
    assert result.report["accuracy"] == result.accuracy
    assert set(result.report) >= {"anger", "fear", "joy", "love", "sadness", "surprise"}
    assert result.policy.startswith(config.policy)
    assert result.applied_steps + result.skipped_steps == len([r for r in metrics(config.out) if r["kind"] == "update"])
    assert result.final_loss < 0.5
    assert result.seconds > 0
    assert result.peak_memory_bytes > 50 * 2**20  # torch alone is more


def test_the_files_of_a_run_say_what_the_result_says(learned: tuple[TrainConfig, TrainResult]) -> None:
    config, result = learned
    assert json.loads((config.out / "result.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    assert TrainConfig.load(config.out / "config.json") == config
    assert (config.out / "curves.png").stat().st_size > 10_000
    evaluations = [record for record in metrics(config.out) if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [40, 80, 120, 152]
    best = max(evaluations, key=lambda record: (record["accuracy"], -record["loss"]))
    assert (best["step"], best["accuracy"]) == (result.best_step, result.dev_accuracy)
    updates = [record for record in metrics(config.out) if record["kind"] == "update"]
    assert max(record["lr"] for record in updates) <= config.learning_rate
    assert {record["scale"] for record in updates} == ({65536.0} if config.policy == "fp16" else {1.0})


def test_transformers_reads_the_best_model_and_scores_the_same(learned: tuple[TrainConfig, TrainResult]) -> None:
    config, result = learned
    model = AutoModelForSequenceClassification.from_pretrained(config.out / "best")
    tokenizer = AutoTokenizer.from_pretrained(config.out / "best")
    rows = load_corpus(config).test
    batch = tokenizer(
        [row.text for row in rows], padding=True, truncation=True, max_length=config.max_length, return_tensors="pt"
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=config.policy == "bf16"):
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)
    names = [model.config.id2label[index] for index in found.tolist()]
    assert abs(accuracy_score([row.label for row in rows], names) - result.accuracy) <= (
        0 if config.policy != "fp16" else 1 / len(rows)
    )


def test_the_averaged_model_is_what_is_evaluated_and_saved(
    short: tuple[TrainConfig, TrainResult], tmp_path: Path
) -> None:
    last, averaged = short[0], short[0].replace(out=tmp_path / "averaged", ema=0.9)
    result = run(averaged)
    saved = [load_file(config.out / "best" / "model.safetensors") for config in (averaged, last)]
    state = load_checkpoint(averaged.out / "checkpoint.pt")
    assert all(torch.equal(saved[0][name], tensor) for name, tensor in state["average"].items())
    assert all(torch.equal(saved[1][name], state["step"]["model"][name]) for name in saved[1])  # trained the same way
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[1])
    assert result.dev_accuracy == metrics(averaged.out)[-1]["accuracy"]


def test_the_best_model_is_tested_and_not_the_last(tmp_path: Path) -> None:
    draw = random.Random(0)
    noise = [(text, draw.choice(["heads", "tails"])) for text, _ in emotion_rows(200)]
    config = tiny(
        write_tsv(tmp_path / "noise.tsv", noise), tmp_path / "out", epochs=12, lr=3e-3, eval_every=5, policy="fp32"
    )
    result = run(config)
    assert result.best_step < result.applied_steps
    rows = load_corpus(config).test
    best = AutoModelForSequenceClassification.from_pretrained(config.out / "best")
    last = copy.deepcopy(best)
    last.load_state_dict(load_checkpoint(config.out / "checkpoint.pt")["step"]["model"])
    reports = []
    for model in (best, last):
        save_model(tmp_path / "one", model, AutoTokenizer.from_pretrained(config.out / "best"))
        found = Predictor(str(tmp_path / "one"), policy="fp32")([row.text for row in rows])
        names = [one.label for one in found if one]
        reports.append(classification_report([row.label for row in rows], names, output_dict=True, zero_division=0.0))
    assert reports[0] != reports[1]  # else this test could not tell them apart
    assert result.report == reports[0]


def test_the_same_config_gives_the_same_run_bit_for_bit(short: tuple[TrainConfig, TrainResult], tmp_path: Path) -> None:
    first, result = short
    second, other = (first.replace(out=tmp_path / str(seed), seed=seed) for seed in (first.seed, first.seed + 1))
    results = [result, *(run(config) for config in (second, other))]
    assert metrics(first.out) == metrics(second.out) != metrics(other.out)
    weights = [(config.out / "best" / "model.safetensors").read_bytes() for config in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]
    assert results[0].accuracy == results[1].accuracy


def test_a_run_starts_from_the_model_of_another_with_other_labels(
    short: tuple[TrainConfig, TrainResult], tmp_path: Path
) -> None:
    base = short[0]
    halves = [
        (text, "dark" if label in ("anger", "fear", "sadness") else "bright") for text, label in emotion_rows(200)
    ]
    tuned = base.replace(
        data=str(write_tsv(tmp_path / "two.tsv", halves)), model=str(base.out / "best"), out=tmp_path / "tuned"
    )
    assert tuned.learning_rate == 3e-5
    result = run(tuned)
    assert set(result.report) >= {"bright", "dark"}
    before, after = (
        AutoModelForSequenceClassification.from_pretrained(config.out / "best") for config in (base, tuned)
    )
    moved = (after.bert.pooler.dense.weight - before.bert.pooler.dense.weight).detach().abs().max()
    assert 0 < float(moved) < 20 * 2 * 3e-5  # AdamW moves a weight by at most about lr an update


def test_a_run_is_not_overwritten_by_accident(short: tuple[TrainConfig, TrainResult], tmp_path: Path) -> None:
    config = copied(short[0], tmp_path / "out")
    before = {path: path.read_bytes() for path in sorted(config.out.rglob("*")) if path.is_file()}
    with pytest.raises(
        ConfigError, match=r"holds a run already\. Write --resume to go on with it, --overwrite to give it up"
    ):
        run(config)
    bad = config.replace(overwrite=True, model=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError):
        run(bad)  # a request that fails costs nothing either
    assert {path: path.read_bytes() for path in sorted(config.out.rglob("*")) if path.is_file()} == before
    run(config.replace(overwrite=True, seed=3))
    assert (config.out / "best" / "model.safetensors").read_bytes() != before[config.out / "best" / "model.safetensors"]


def test_a_finished_run_resumes_to_the_same_result(short: tuple[TrainConfig, TrainResult], tmp_path: Path) -> None:
    first = short[1]
    second = run(copied(short[0], tmp_path / "out").replace(resume=True))
    assert (second.accuracy, second.seconds, second.final_loss) == (first.accuracy, first.seconds, first.final_loss)


def test_resume_needs_a_checkpoint_and_the_same_labels(short: tuple[TrainConfig, TrainResult], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        run(short[0].replace(out=tmp_path / "none", resume=True))
    config = copied(short[0], tmp_path / "out")
    other = write_tsv(
        tmp_path / "other.tsv",
        [(f"{text} {i}", "yes" if i % 2 else "no") for i, (text, _) in enumerate(emotion_rows(60))],
    )
    before = (config.out / "checkpoint.pt").read_bytes()
    with pytest.raises(
        CheckpointError,
        match="was trained for the labels anger, fear, joy, love, sadness, surprise, and the data has no, yes",
    ):
        run(config.replace(resume=True, data=str(other)))
    assert (config.out / "checkpoint.pt").read_bytes() == before


def test_a_device_that_is_not_here_is_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"^device='gpu' cannot be used here: torch has no such device. Write cpu or auto.$"
    ):
        choose_device("gpu")
    missing = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"device='{missing}' cannot be used here.*Write cpu or auto"):
        choose_device(missing)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("meta", "nothing has values on it"),
        ("xla", "this torch has no such device"),
        ("hpu", "this torch has no such device"),
        ("opengl", "this torch has no such device"),
        ("xpu", "Torch not compiled with XPU enabled"),
    ],
)
def test_a_device_that_computes_nothing_here_is_told_at_every_door(name: str, why: str) -> None:
    if name == "xpu" and torch.xpu.is_available():
        return
    assert (
        message_of(ConfigError, choose_device, name)
        == f"device={name!r} cannot be used here: {why}. Write cpu or auto."
    )
    assert (
        message_of(BenchError, parse_device, name) == f"--device {name} cannot be used here: {why}; write cpu or cuda."
    )

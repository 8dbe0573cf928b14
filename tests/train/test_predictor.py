from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.small import tiny
from tests.train.test_tokens import texts
from transformers import pipeline

from mezzo.errors import ConfigError, DataError, PolicyError
from mezzo.train.checkpoint import save_checkpoint, save_model
from mezzo.train.model import build_model, train_tokenizer
from mezzo.train.predictor import Predictor


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(texts(), 600, 24)
    model = build_model(tiny(Path("x.tsv"), folder, hidden=64, heads=4), ("bad", "good", "mixed"), tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(8)  # random weights of the usual size give every text the same label
        logits = model(**tokenizer(texts(), padding=True, truncation=True, max_length=24, return_tensors="pt")).logits
        model.get_submodule("classifier").bias.sub_(logits.mean(0))  # and so do those of one label ahead of all
    save_model(folder / "best", model, tokenizer)
    return folder


def test_fp32_predictions_are_those_of_the_transformers_pipeline(run_folder: Path) -> None:
    wanted = pipeline(
        "text-classification", model=str(run_folder / "best"), device="cpu", max_length=24, truncation=True
    )(texts())
    found = Predictor(str(run_folder), policy="fp32")(texts())
    assert {prediction.label for prediction in found if prediction} >= {"good", "mixed"}
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert one.label == other["label"]
        assert one.probability == pytest.approx(other["score"], rel=1e-4)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_the_forward_pass_runs_in_the_policy(run_folder: Path, policy: str) -> None:
    predictor, seen = Predictor(str(run_folder), policy=policy), []
    predictor._model.classifier.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    predictor(texts()[:3])
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[policy]]


def test_empty_texts_keep_their_place(run_folder: Path) -> None:
    predictor = Predictor(str(run_folder), policy="fp32")
    first, nothing, blank, last = predictor([texts()[0], "", " \t", f"  {texts()[0]} "])
    assert nothing is None
    assert blank is None
    assert first is not None
    assert last is not None
    assert (first.label, first.probability) == (last.label, pytest.approx(last.probability, rel=1e-6))
    assert predictor([]) == []
    assert predictor([""]) == [None]


def test_a_model_folder_will_do_and_a_run_without_model_will_not(run_folder: Path, tmp_path: Path) -> None:
    assert Predictor(str(run_folder / "best"), policy="fp32")(["好"]) == Predictor(str(run_folder), policy="fp32")(
        ["好"]
    )
    save_checkpoint(tmp_path / "checkpoint.pt", {})
    with pytest.raises(ConfigError, match="has no model yet: none of its evaluations is done"):
        Predictor(str(tmp_path))


def test_what_cannot_be_honoured_is_refused(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_length=25 is more than the 24 positions"):
        Predictor(str(run_folder), max_length=25)
    with pytest.raises(PolicyError, match="Did you mean 'bf16'"):
        Predictor(str(run_folder), policy="bf61")

    for max_length in (-1, "x", 2.5, True, None):
        with pytest.raises(ConfigError, match=f"max_length={max_length!r} must be a whole number of 0 or more; 0 is"):
            Predictor(str(run_folder), max_length=max_length)  # type: ignore[arg-type]
    for model in (None, 3, b"x", "a\0"):
        with pytest.raises(ConfigError, match=r"Predictor was given .* for model[;,]"):
            Predictor(model)  # type: ignore[arg-type]
    for device in (None, 3, "zz"):
        with pytest.raises(ConfigError, match=f"device={device!r} cannot be used here"):
            Predictor(str(run_folder), device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("good 3", "predict was given str for texts; give a list of them: [text]."),
        (b"good", "predict was given bytes for texts"),
        (None, "predict was given NoneType for texts"),
        (3, "predict was given int for texts"),
        ({"good": "bad"}, "predict was given dict for texts"),
        ([3], "text 0 of 1 is int; each must be text that UTF-8 can write."),
        (["good", None], "text 1 of 2 is NoneType; each must be text"),
        (["", "\ud83d"], "text 1 of 2 holds half of a character, such as \\ud83d; each must be text"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(run_folder: Path, given: Any, said: str) -> None:
    with pytest.raises(DataError) as refusal:
        Predictor(str(run_folder), policy="fp32")(given)
    assert said in str(refusal.value)


def test_any_series_of_texts_will_do(run_folder: Path) -> None:
    predictor, given = Predictor(run_folder, policy="fp32"), texts()[:3]
    wanted = predictor(given)
    assert predictor(tuple(given)) == predictor(iter(given)) == predictor(np.array(given)) == wanted

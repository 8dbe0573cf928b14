"""Every tool on BERT and GPT-2 as transformers builds them from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.diagnose import Report

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

IDS = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 12, dtype=torch.long)
MASK[1, 8:] = 0


def bert() -> tuple[nn.Module, dict[str, Tensor], str]:
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=3,
    )  # fmt: skip
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([0, 1, 2, 0])}
    return transformers.BertForSequenceClassification(config), batch, "bert.encoder.layer.1.output.dense"


def gpt2() -> tuple[nn.Module, dict[str, Tensor], str]:
    config = transformers.GPT2Config(vocab_size=99, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    return transformers.GPT2LMHeadModel(config), batch, "transformer.h.1.mlp.c_proj"


def loss(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch).loss
    return found.float()


def overflow_(model: nn.Module, name: str) -> None:
    """Have a feed-forward block's second product overflow fp16, whose weights all fit. Writes: its weights."""
    before = {"output.dense": "intermediate.dense", "c_proj": "c_fc"}
    end = next(e for e in before if name.endswith(e))
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(1e5)
        model.get_submodule(name.removesuffix(end) + before[end]).weight.mul_(1e3)


def watched(run: Any, model: nn.Module, batch: dict[str, Tensor]) -> Report:
    with diagnose.watch(run, every=1) as w:
        if isinstance(run, mezzo.Stepper):
            run.backward(loss(model, batch))
            run.step()
        else:
            optimizer = torch.optim.AdamW(model.parameters())
            loss(model, batch).backward()
            optimizer.step()
    return w.report


def prepared_watch(model: nn.Module, batch: dict[str, Tensor]) -> Report:
    return watched(mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), "bf16"), model, batch)


def memory(model: nn.Module, batch: dict[str, Tensor]) -> Report:
    return diagnose.memory(model, torch.optim.AdamW(model.parameters()), "bf16", batch=batch)


TOOLS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Report]] = {
    "lint": lambda model, batch: diagnose.lint(model, batch, loss, "bf16"),
    "explain": lambda model, batch: diagnose.explain(model, batch, "bf16", loss_fn=loss, budget_s=0.01),
    "compare": lambda model, batch: diagnose.compare(model, batch, loss, "bf16", tries=1),
    "memory": memory,
    "watch": prepared_watch,
    "watch, not prepared": lambda model, batch: watched(model, model, batch),
}


@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("tool", TOOLS)
def test_each_tool_says_something(tool: str, make: Callable[[], tuple[nn.Module, dict[str, Tensor], str]]) -> None:
    model, batch, _ = make()
    report = TOOLS[tool](model, batch)
    document = report.document()
    assert document.title.endswith(type(model).__name__) or type(model).__name__ in document.title
    assert "inf" not in document.verdict and report.to_json() and str(report)


@pytest.mark.parametrize("make", [bert, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_a_stopped_run_names_the_block_and_the_edit_mends_it(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor], str]],
) -> None:
    model, batch, name = make()
    overflow_(model, name)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), "fp16, output=fp32, guard.patience=2")
    with pytest.raises(mezzo.errors.NonFiniteStep) as caught:
        for _ in range(3):
            amp.zero_grad()
            amp.backward(model(**batch).loss)
            amp.step()
    first = caught.value.report.faults[0]
    assert (first.verdict, first.module, first.fix.edit) == ("overflow", name, f"{name}=fp32")
    assert first.frame is not None and first.frame.file == __file__
    assert first.library is not None and "transformers" in first.library.file

    again, batch, _ = make()
    again.load_state_dict(state)
    demoting = mezzo.prepare(
        again, torch.optim.SGD(again.parameters(), lr=1e-3), "fp16, output=fp32, guard.on_overflow=demote"
    )
    taken = []
    for _ in range(20):
        demoting.zero_grad()
        demoting.backward(again(**batch).loss)
        taken.append(bool(demoting.step()))
    assert not taken[0] and taken[-1], taken
    assert demoting.counters().demoted[0] == f"{name}=fp32"

"""`lint` runs one step, says what loses numbers, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.errors import PolicyError


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(4096), nn.Dropout(0.2)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        positions = torch.arange(offset, offset + x.shape[1]).float()
        phases = positions[:, None] @ self.inv_freq[None]
        return self.drop(self.norm(self.body(x))) * phases.float().sin().repeat(1, 2)


def rules(report: diagnose.LintReport) -> list[str]:
    return [w.lint.rule for w in report.warnings]


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_policy_is_tried_on_a_copy(policy: str) -> None:
    model, x = Rotary(), torch.randn(1, 4096, 8)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model.body.weight.grad = kept = torch.ones(8, 8)
    state = torch.get_rng_state()
    report = diagnose.lint(model, x, policy=policy)
    assert rules(report) == ["integers-in-16-bit"] and not report.is_healthy
    assert type(model) is Rotary and model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.body.weight.grad is kept and model.body.bias.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_policy_the_callers_region_counts() -> None:
    model, x = Rotary(), torch.randn(1, 4096, 8)
    clean = diagnose.lint(model, x)
    assert clean.is_healthy and clean.ops > 1
    assert f"Clean: {clean.ops} ops of one forward and backward pass broke no lint rule." in str(clean)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = diagnose.lint(model, x)
    assert rules(report) == ["integers-in-16-bit"]


def test_the_rule_that_the_lint_proposes_makes_it_clean() -> None:
    assert diagnose.lint(Rotary(), torch.randn(1, 4096, 8), policy="bf16, module:Rotary=fp32").is_healthy


@pytest.mark.parametrize(
    "batch", [torch.randn(1, 4096, 8), (torch.randn(1, 4096, 8), 3), {"x": torch.randn(1, 4096, 8)}]
)
def test_batches_of_every_form(batch: object) -> None:
    assert rules(diagnose.lint(Rotary(), batch, policy="bf16")) == ["integers-in-16-bit"]


def test_a_loss_of_ones_own_is_used() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rules(diagnose.lint(model, x, lambda m, b: m(b).mean())) == ["loss-in-16-bit"]


def test_a_policy_that_fits_no_module_is_refused() -> None:
    with pytest.raises(PolicyError):
        diagnose.lint(nn.Linear(8, 8), torch.randn(4, 8), policy="bf16, *.nowhere=fp32")


def test_the_text_says_what_to_write_instead() -> None:
    text = " ".join(str(diagnose.lint(Rotary(), torch.randn(1, 4096, 8), policy="bf16")).split())
    assert "1 lint rule broken." in text
    assert "whole numbers up to 4095 are cast to bf16, which is exact up to 256" in text
    assert "phases = positions[:, None] @ self.inv_freq[None]" in text


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_library_models_are_clean(name: str, policy: str) -> None:
    transformers = pytest.importorskip("transformers")
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        model: nn.Module = transformers.BertForSequenceClassification(config)
        batch = {"input_ids": torch.randint(1, 30, (2, 8)), "labels": torch.tensor([0, 1])}
    else:
        config = transformers.GPT2Config(
            vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.randint(1, 30, (2, 8))
        batch = {"input_ids": ids, "labels": ids}
    report = diagnose.lint(model, batch, lambda m, b: m(**b).loss.float(), policy)
    assert rules(report) == [], report


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_the_scale_that_lint_multiplies_a_16_bit_loss_by_is_no_constant_of_the_program(factor: float) -> None:
    report = diagnose.lint(nn.Linear(8, 4), torch.ones(8, 8), lambda m, x: (m(x).sum() * factor).half(), "fp16")
    assert rules(report) == ["loss-in-16-bit"]
    assert ("Faulty: overflow in to, forward" in str(report)) == (factor > 1)


def test_a_broken_rule_does_not_hide_what_made_the_step_faulty() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(super().forward(x), dim=-1) * 3e4 * 4

    report = diagnose.lint(Net(8, 4), torch.randn(8, 8), policy="fp16, output=none")
    assert rules(report) == ["constant-lost"] and "Faulty: overflow in mul" in str(report).replace("\n", " ")

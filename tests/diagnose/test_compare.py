"""`compare` follows whatever a step does: dropout, views, checkpoints, recurrence, masks; and leaves the model as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.diagnose.test_agreement import TERMS, Net, agrees, length, ratio, square
from tests.diagnose.test_proposals import Cancel, Stack
from tests.tolerance import relative
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

import mezzo.diagnose as diagnose
from mezzo import Policy
from mezzo.diagnose.compare_report import Agreement
from mezzo.errors import ConfigError, PolicyError


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.AlphaDropout(0.5)])
def test_both_steps_draw_the_same_numbers(dropout: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(16, 64), dropout, nn.Linear(64, 4)).train()
    m = diagnose.compare(model, torch.randn(8, 16), square, "bf16", tries=0).measurement
    # with other masks, half of all elements would differ: 0 dB
    assert m.gradients is not None and length(m.gradients.total) < 64 * torch.finfo(torch.bfloat16).eps


def test_fused_dropout_keeps_its_mask() -> None:
    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.native_dropout(x.tanh(), 0.25, True)[0]

    model = nn.Sequential(nn.Linear(16, 64), Fused())
    m = diagnose.compare(model, torch.randn(8, 16), square, "bf16", tries=0).measurement
    [op] = [op for op in m.ops if op.kernel == "aten.native_dropout"]
    # x / 0.75 where it was kept: two roundings
    assert length(op.agreement.local) <= relative(torch.bfloat16, 2)
    assert m.unseen == ()


class Views(nn.Module):
    """Writes into slices, in place, through views, into memory made empty."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ torch.eye(16)
        out = torch.empty(2, *y.shape, dtype=y.dtype)
        out[0] = y
        out[1, :, ::2] = y[:, 1::2]
        out[1, :, 1::2] = y[:, ::2].exp_()
        z = out.transpose(0, 1).reshape(y.shape[0], -1)
        z[:, :4].mul_(3).relu_()
        return z.view(2, -1, 16).permute(2, 0, 1)[3:]


def test_in_place_ops_and_views_are_followed() -> None:
    x = torch.randn(8, 16)
    outputs = diagnose.compare(Views(), x, lambda m, b: m(b).float().sum(), "bf16", tries=0).measurement.outputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = Views()(x)
    exact = Views().double()
    with torch.no_grad():
        y = x.double()
        out = torch.empty(2, 8, 16, dtype=torch.float64)
        out[0], out[1, :, ::2], out[1, :, 1::2] = y, y[:, 1::2], y[:, ::2].exp()
        z = out.transpose(0, 1).reshape(8, -1)
        z[:, :4] = (z[:, :4] * 3).relu()
    del exact
    agrees(outputs.total, ratio(z.view(2, -1, 16).permute(2, 0, 1)[3:], low), 16)


def test_a_mask_at_the_edge_of_the_format_is_no_signal() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.t()
            mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
            return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)

    for policy in ("bf16", "fp16"):
        m = diagnose.compare(Attention(), torch.randn(8, 16), square, policy, tries=0).measurement
        [fill] = [op for op in m.ops if op.op == "masked_fill"]
        [product] = [op for op in m.ops if op.op == "mm" and op.phase == "forward"]
        if policy == "bf16":
            assert fill.agreement.total < product.agreement.total + 6
        assert length(m.outputs.total) < 64 * torch.finfo(torch.bfloat16).eps


def test_weights_that_the_policy_stores_in_16_bit_bring_their_error_with_them() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(8, 16)
    m = diagnose.compare(model, x, square, "bf16-master", tries=0).measurement
    [linear] = [e for e in m.modules if e.module == "0"]
    weight, bias = (p.detach().bfloat16().double() for p in model[0].parameters())
    given = F.linear(x.double(), weight, bias)
    exact = F.linear(x.double(), *(p.detach().double() for p in model[0].parameters()))
    assert linear.forward is not None
    agrees(linear.forward.inherited, ratio(exact, given), 17)
    assert linear.forward.local > 40


def test_checkpointed_parts_are_measured_too() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Net()
    again = Checkpointed()
    again.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    plain, recomputed = (diagnose.compare(m, x, square, "bf16", tries=0).measurement for m in (model, again))
    assert plain.gradients is not None and recomputed.gradients is not None
    agrees(recomputed.gradients.total, length(plain.gradients.total), TERMS)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_nets_are_taken_apart(kind: type[nn.RNNBase], policy: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    model, x = Recurrent(), torch.randn(2, 5, 8)
    m = diagnose.compare(model, x, square, policy, tries=0).measurement
    assert m.unseen == () and m.gradients is not None
    assert length(m.gradients.total) < 64 * torch.finfo(torch.bfloat16).eps
    assert m.reference_loss == pytest.approx(square(model, x).item(), rel=relative(torch.float32, 5 * 16))


def tiny(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(1, 30, (2, 8))
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}
        return transformers.BertForSequenceClassification(config), batch
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_library_models(name: str, policy: str) -> None:
    model, batch = tiny(name)
    report = diagnose.compare(model.eval(), batch, lambda m, b: m(**b).loss.float(), policy, tries=2)
    m = report.measurement
    assert m.unseen == () and report.is_healthy and len(report.tried) == 2
    unit = torch.finfo(torch.bfloat16).eps
    assert m.gradients is not None and length(m.gradients.total) < 16 * unit
    assert m.reference_loss == pytest.approx(model(**batch).loss.item(), rel=relative(torch.float32, 512))
    linears = {
        n for n, part in model.named_modules() if type(part).__name__ in ("Linear", "Conv1D") and "lm_head" not in n
    }
    seen = {e.module for e in m.modules if e.forward and math.isfinite(e.forward.local)}
    assert linears <= seen | {"bert.pooler"}
    assert all(Policy.parse(f"{policy}, {edit}") for edit in report.tried)
    text = str(report)
    assert "Modules by the error they add" in text and f"under {policy}" in text


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model[0].weight.grad = kept = torch.ones(16, 16)
    state, hooks = torch.get_rng_state(), len(module_hooks._global_forward_hooks)
    diagnose.compare(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), square, "bf16", tries=1)
    assert type(model[0]) is nn.Linear and model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model[0].weight.grad is kept and model[3].weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert len(module_hooks._global_forward_hooks) == hooks


def test_a_model_without_trainable_weights_is_judged_by_its_outputs() -> None:
    model = Net().requires_grad_(False)
    report = diagnose.compare(model, torch.randn(8, 16), square, "bf16", tries=1)
    assert report.measurement.gradients is None
    assert report.measurement.figure == report.measurement.outputs.total
    assert str(report).splitlines()[1].startswith("The outputs agree with fp32 to")
    assert (
        "dB is how far the error lies below the values of fp32: 20 dB are 10 % of them" in str(report).splitlines()[2]
    )


@pytest.mark.parametrize("policy", ["fp32", "fp32, *.norm=fp32"])
def test_fp32_has_nothing_to_be_compared_with(policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        diagnose.compare(Net(), torch.randn(8, 16), square, "fp32")
    assert str(caught.value) == (
        "compare(policy='fp32') was asked for, and on cpu that is fp32, which agrees with itself. "
        "Write policy='bf16' or 'fp16'."
    )


def test_a_policy_that_fits_no_module_is_refused() -> None:
    with pytest.raises(PolicyError):
        diagnose.compare(Net(), torch.randn(8, 16), square, "bf16, *.nowhere=fp32")


def test_the_three_forms(tmp_path: Path) -> None:
    report = diagnose.compare(Stack(nn.Tanh(), Cancel()), torch.randn(8, 16), square, "bf16", tries=2)
    data = json.loads(report.to_json())
    assert data["report"] == "CompareReport" and data["proposals"][0]["edit"] == report.proposals[0].edit
    assert len(data["measurement"]["modules"]) == len(report.measurement.modules)
    page = report.to_html(tmp_path / "compare.html").read_text(encoding="utf-8")
    assert page.count("<svg ") == 2 and "layers.1.inner" in page and report.proposals[0].edit in page
    assert isinstance(report.measurement.outputs, Agreement)


def test_gradients_that_fit_without_a_loss_scale_alone_are_compared_so() -> None:
    x = torch.ones(4000, 8) / 2  # the gradient of the bias is 60000
    found = diagnose.compare(nn.Linear(8, 4), x, lambda m, x: (m(x) * 15).sum(), "fp16", tries=0)
    assert found.measurement.scale == 1 and found.measurement.gradients.total > 40


def test_sparse_gradients_are_compared_too() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randint(0, 50, (8, 2)), torch.randint(0, 3, (8,))
    found = diagnose.compare(model, x, lambda m, x: nn.functional.cross_entropy(m(x), y), "bf16", tries=0)
    dense = nn.Sequential(nn.Embedding(50, 8, _weight=model[0].weight.detach()), *model[1:])
    same = diagnose.compare(dense, x, lambda m, x: nn.functional.cross_entropy(m(x), y), "bf16", tries=0)
    assert [p.name for p in found.measurement.parameters] == [p.name for p in same.measurement.parameters]
    assert found.measurement.gradients.total == pytest.approx(same.measurement.gradients.total, abs=1)


def test_a_model_at_the_minimum_of_its_loss_tells_nothing() -> None:
    model, x = nn.Linear(8, 1), torch.randn(16, 8)
    y = model(x).detach()
    found = diagnose.compare(model, x, lambda m, x: (m(x) - y).square().mean(), "bf16", tries=0)
    assert found.document().verdict.startswith("Not enough seen: every gradient is 0 in fp32"), found

"""`explain` counts ops, casts, bytes and operations exactly, and its verdict follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo import Policy
from mezzo.diagnose.explain import Explanation, ModuleRow

B, I, O = 32, 64, 100  # noqa: E741  # batch, inside, out


def row_of(found: Explanation, module: str) -> ModuleRow:
    return next(r for r in found.rows if r.module == module)


def test_a_linear_layer_by_hand() -> None:
    model = nn.Sequential(nn.Linear(I, O)).eval()
    row = row_of(diagnose.explain(model, torch.randn(B, I), "bf16", budget_s=0), "0")
    assert row.ops == (("bf16", 1),)
    assert row.flops == (("bf16", 2 * B * I * O),)
    assert (row.weight_casts, row.up_casts, row.down_casts, row.ping_pong) == (2, 0, 1, 0)
    assert row.cast_bytes == (4 + 2) * (I * O + O + B * I)
    assert row.unaligned == (((B, I, O), 1),)


def test_a_training_step_has_three_products_a_layer() -> None:
    model = nn.Sequential(nn.Linear(I, I), nn.Linear(I, O))
    found = diagnose.explain(model, torch.randn(B, I), "bf16", budget_s=0)
    assert row_of(found, "1").flops == (("bf16", 3 * 2 * B * I * O),)
    # the first layer needs no gradient of its input
    assert row_of(found, "0").flops == (("bf16", 2 * 2 * B * I * I),)
    assert found.low_share == 1.0 and found.has_backward


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_weights_that_are_stored_right_are_not_cast(policy: str) -> None:
    model = nn.Sequential(nn.Linear(I, O)).eval()
    assert row_of(diagnose.explain(model, torch.randn(B, I), policy, budget_s=0), "0").weight_casts == 0


def test_a_weight_used_five_times_is_cast_once_or_five_times() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(I, I, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.body(x)
            return x

    model, x = Reused().eval(), torch.randn(B, I)
    assert row_of(diagnose.explain(model, x, "bf16", budget_s=0), "body").weight_casts == 5
    # an op rule takes the function mode, which keeps a region's casts of weights
    assert row_of(diagnose.explain(model, x, "bf16, op:cumsum=low", budget_s=0), "body").weight_casts <= 1


def test_ping_pong_is_seen() -> None:
    class Bounce(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(I, I), nn.Linear(I, I)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).float().tanh().to(torch.bfloat16))

    found = diagnose.explain(Bounce().eval(), torch.randn(B, I), "bf16", budget_s=0)
    assert row_of(found, "").ping_pong == 1
    assert any("go up to fp32 and down again 1 time," in text for text in found.advice())


def test_alignment_counts_in_16_bit_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 7, 3)).eval()
    x = torch.randn(1, 3, 8, 8)
    assert row_of(diagnose.explain(model, x, "bf16", budget_s=0), "0").unaligned == (((7, 3), 1),)
    assert row_of(diagnose.explain(model, x, "fp32", budget_s=0), "0").unaligned == ()
    assert (
        row_of(
            diagnose.explain(nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(32, 64), "bf16", budget_s=0), "0"
        ).unaligned
        == ()
    )


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(I, O), nn.BatchNorm1d(O))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    diagnose.explain(model, torch.randn(B, I), "bf16", budget_s=0.01)
    assert all(torch.equal(t, before[n]) and t.dtype is before[n].dtype for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and type(model) is nn.Sequential


@pytest.fixture
def timed() -> Explanation:
    model = nn.Sequential(nn.Linear(I, O)).eval()
    found = diagnose.explain(model, torch.randn(B, I), "bf16", budget_s=0)
    return replace(found, native=True, native_reason="units")


def test_verdicts_follow_from_the_numbers(timed: Explanation) -> None:
    assert timed.verdict().startswith("Expect no gain (not measured)")
    assert (
        replace(timed, fp32_s=3.0, policy_s=1.0).verdict()
        == "It pays: 3.00x, measured; 100% of the operations run in 16 bit."
    )
    slow = replace(timed, fp32_s=1.0, policy_s=2.0)
    assert (
        slow.verdict().startswith("Expect a slower step (0.50x, measured)")
        and "bound by launching ops" in slow.verdict()
    )
    assert "amp.capture" not in slow.verdict() and "amp.capture" in replace(slow, device="cuda:0").verdict()
    assert "no units for the format (none)" in replace(slow, native=False, native_reason="none").verdict()
    fp32 = replace(timed, rows=tuple(replace(r, flops=(("fp32", 1),)) for r in timed.rows))
    assert fp32.verdict() == "Nothing runs in 16 bit: the policy changes no product of this model."


def test_a_step_is_timed_on_request() -> None:
    found = diagnose.explain(nn.Linear(I, O), torch.randn(B, I), "bf16", budget_s=0.01)
    assert found.fp32_s > 0 and found.policy_s > 0 and "measured" in str(found)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_library_models_are_explained_module_by_module(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    batch = {"input_ids": torch.randint(1, 30, (2, 8))}
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        model, dense = transformers.BertModel(config), "encoder.layer.1.intermediate.dense"
    else:
        config = transformers.GPT2Config(
            vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        model, dense = transformers.GPT2Model(config), "h.1.mlp.c_fc"
    found = diagnose.explain(
        model.eval(), batch, "bf16", loss_fn=lambda m, b: m(**b).last_hidden_state.float().mean(), budget_s=0
    )
    inner = 32 if name == "bert" else 64
    assert row_of(found, dense).flops == (("bf16", 2 * 2 * 8 * 16 * inner),)
    assert found.low_share == 1.0


def test_slow_units_are_not_called_launch_bound() -> None:
    row = ModuleRow(
        module="", cls="Linear", ops=(("fp16", 1),), flops=(("fp16", 10**9),), weight_casts=0, up_casts=0, down_casts=0,
        grad_casts=0, ping_pong=0, cast_bytes=0, unaligned=(),
    )  # fmt: skip
    found = Explanation(
        model="Linear", policy="fp16", device="cpu", native=False, native_reason="no units", rows=(row,), fp32_s=0.076,
        policy_s=0.754, has_backward=True,
    )  # fmt: skip
    assert "launching" not in found.verdict() and "no units" in found.verdict()


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_weights_are_stored_in_the_dtype_they_are_cast_to(policy: str) -> None:
    model, x = nn.Sequential(nn.Linear(I, O)), torch.randn(B, I)
    (advice,) = [text for text in diagnose.explain(model, x, policy, budget_s=0).advice() if "are cast" in text]
    edit = advice.partition(": ")[2].removesuffix(" stores them so.")
    found = diagnose.explain(model, x, f"{policy}, {edit}", budget_s=0)
    assert row_of(found, "0").weight_casts == 0 and Policy.parse(f"{policy}, {edit}") == Policy.parse(
        f"{policy}-master"
    )

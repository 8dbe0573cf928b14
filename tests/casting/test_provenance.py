"""A dtype mismatch is re-raised with op, module, arguments and the rule that fixes it (SPEC A11)."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import mezzo
from mezzo import Policy, Rule
from mezzo.casting import autocast
from mezzo.casting.provenance import mismatch_message
from mezzo.errors import CastError
from mezzo.policy import OpRules

BF16 = torch.bfloat16


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.proj(x)
        return torch.heaviside(low[0], x[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Mixing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


TORCHS = Policy(compute=BF16, ops=OpRules(edits=(("erf", Rule.FP32),)))


def test_the_function_mode_names_op_module_and_arguments() -> None:
    with autocast("cpu", policy=TORCHS), pytest.raises(CastError) as caught:
        Net()(torch.randn(2, 4))
    assert str(caught.value) == (
        "heaviside got bf16[4] cpu, fp32[4] cpu in module blocks.1 (Mixing); it has no rule, so its inputs came as they were. "
        "torch says: heaviside is not yet implemented for tensors with different dtypes.\n"
        "  Write op:heaviside=promote (or =low, =fp32) in the policy so that its inputs agree."
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("policy", ["bf16", "bf16, ops=mezzo", "bf16-master"])
def test_inputs_of_fp64_are_to_be_cast_by_hand(policy: str) -> None:
    """As of numpy; no rule casts them, and the advice is followed."""
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.randn(2, 4).double()
    mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    with pytest.raises(CastError, match=r"Cast what is fp64 to fp32, x\.float\(\): no rule casts fp64"):
        model(x)
    assert model(x.float()).dtype is torch.float32


@pytest.mark.parametrize("low", [torch.float16, BF16])
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Conv1d(2, 2, 1), nn.Bilinear(4, 4, 4), nn.MultiheadAttention(4, 2)]
)
def test_16_bit_inputs_where_nothing_casts_are_to_be_cast_by_hand(layer: nn.Module, low: torch.dtype) -> None:
    """No rule of an op acts under fp32."""
    model = copy.deepcopy(layer)
    mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "fp32")
    x = [torch.randn(2, 4)] * {nn.Bilinear: 2, nn.MultiheadAttention: 3}.get(type(layer), 1)
    with pytest.raises(CastError, match=r"Cast its inputs to one dtype, x\.to\(other\.dtype\)\.$"):
        model(*[t.to(low) for t in x])
    model(*x)


def test_a_layer_where_the_model_switched_casts_off_is_not_told_of_a_missing_kernel() -> None:
    class Off(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Off(4, 4))
    with (
        pytest.raises(CastError, match=r"A region casts linear always, so none was on .*x\.to\(weight\.dtype\)"),
        autocast("cpu", dtype=BF16),
    ):
        model(torch.randn(2, 4))


def test_fp64_that_a_kernel_would_have_taken_is_no_matter_of_fp64() -> None:
    text = "Expected both inputs to be Half, Float or Double tensors but got BFloat16 and BFloat16"
    assert "op:complex=fp32" in str(mismatch_message(RuntimeError(text), "complex", None, ()))


def test_the_dispatcher_engine_reads_them_from_the_traceback() -> None:
    with pytest.raises(CastError) as caught, autocast("cpu", dtype=BF16):
        Net()(torch.randn(2, 4))
    message = str(caught.value)
    assert message.startswith("`return torch.heaviside(low[0], x[0])` (")
    assert "in module blocks.1 (Mixing) got low bf16[2,4] cpu, x fp32[2,4] cpu." in message
    assert ("op:heaviside=promote" if sys.version_info >= (3, 11) else "x.to(other.dtype)") in message


@pytest.mark.parametrize("ops", ["", ", ops=mezzo"])
def test_a_number_that_fp16_cannot_hold_names_what_to_write(ops: str) -> None:
    class Scores(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).masked_fill(x > 0, -9e15)

    with (
        pytest.raises(CastError, match=r"torch\.finfo\(x\.dtype\)\.min") as caught,
        autocast("cpu", policy="fp16" + ops),
    ):
        Scores(4, 4)(torch.randn(2, 4))
    assert "masked_fill" in str(caught.value) and "65504" in str(caught.value)


@pytest.mark.parametrize("ops", ["", ", ops=mezzo"])
def test_the_least_number_of_fp32_is_none_of_bf16(ops: str) -> None:
    """Masks take the dtype of a query that was scaled in fp32, and fill scores that a product made, as in DeBERTa."""
    scores, q = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    with (
        pytest.raises(CastError, match=r"bf16 3\.39e38, a little less than fp32.*torch\.finfo\(x\.dtype\)\.min"),
        autocast("cpu", policy="bf16" + ops),
    ):
        scores(q).masked_fill(q == 0, torch.finfo(q.dtype).min)


def test_the_suggested_rule_mends_it() -> None:
    mended = Policy(compute=BF16, ops=OpRules(edits=(("heaviside", Rule.PROMOTE),)))
    with autocast("cpu", policy=mended):
        assert Net()(torch.randn(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("region", [{"dtype": BF16}, {"policy": TORCHS}])
def test_other_errors_pass_untouched(region: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as caught, autocast("cpu", **region):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(caught.value, CastError)
    with pytest.raises(ValueError, match="mine"), autocast("cpu", **region):
        raise ValueError("mine")


def test_user_code_may_catch_it_inside() -> None:
    with autocast("cpu", dtype=BF16):
        try:
            Net()(torch.randn(2, 4))
        except RuntimeError as error:
            assert not isinstance(error, CastError)


def test_a_missing_kernel_asks_for_fp32() -> None:
    x = torch.full((4,), 0.5, dtype=BF16)
    with autocast("cpu", policy=TORCHS), pytest.raises(CastError, match=r"Write op:special_ndtri=fp32 in the policy"):
        torch.special.ndtri(x)
    with autocast("cpu", policy="bf16, op:special_ndtri=fp32"):
        assert torch.special.ndtri(x).dtype is torch.float32


class Latents(nn.Module):
    """A discrete latent, as world models have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = torch.distributions.OneHotCategorical(logits=x)
        return draw.sample()


@pytest.mark.parametrize("region", [{"dtype": torch.float16}, {"policy": "fp16, ops=mezzo"}])
def test_probabilities_rounded_too_far_for_a_distribution_ask_for_fp32(
    region: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.compile turns the checks of distributions off, for the whole process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    logits = torch.randn(64, 4).half()
    with pytest.raises(CastError) as caught, autocast("cpu", **region):
        Latents()(logits)
    text = str(caught.value)
    assert "draw = torch.distributions.OneHotCategorical(logits=x)" in text and "in module the root (Latents)" in text
    assert "Simplex()" in text and "hand it logits=x.float(), inside of `with torch.autocast" in text
    with autocast("cpu", **region), torch.autocast(logits.device.type, enabled=False):
        assert Latents()(logits.float()).sum() == 64
    for wrong in (torch.full((2, 4), torch.nan).half(), torch.full((2, 4), torch.nan)):  # no rounding did that
        with pytest.raises(ValueError, match="Simplex"), autocast("cpu", **region):
            torch.distributions.OneHotCategorical(probs=wrong)


class ThroughNumpy(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.read(h.detach())
        return h


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "bf16, ops=mezzo"])
@pytest.mark.parametrize("read", [torch.Tensor.numpy, np.asarray], ids=["numpy", "asarray"])
def test_numpy_that_has_no_bf16_asks_for_fp32(read: Callable[[torch.Tensor], object], policy: str) -> None:
    model = ThroughNumpy(read)
    mezzo.prepare(model, torch.optim.SGD(model.parameters()), policy)
    with pytest.raises(
        CastError, match=r"self\.read\(h\.detach\(\)\).* in module the root \(ThroughNumpy\).*\n.*x\.float\(\)\.numpy"
    ):
        model(torch.ones(2, 4))
    model.read = lambda h: read(h.float())
    model(torch.ones(2, 4))


TAKES_ONE_DTYPE = {
    "prelu": nn.PReLU(), "layer norm": nn.LayerNorm(4), "batch norm": nn.BatchNorm1d(4), "group norm": nn.GroupNorm(2, 4),
    "instance norm": nn.InstanceNorm1d(4, affine=True), "convolution": nn.Conv1d(4, 4, 1),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16, ops=mezzo", "bf16-master"])
@pytest.mark.parametrize("name", TAKES_ONE_DTYPE)
def test_modules_that_torch_refuses_fp64_with_no_word_of_it(name: str, policy: str) -> None:
    """Under torch.autocast they raise too."""
    model, x = copy.deepcopy(TAKES_ONE_DTYPE[name]), torch.randn(3, 4, 4)
    with pytest.raises(RuntimeError), torch.autocast("cpu", BF16):
        model(x.double())
    mezzo.prepare(model, None, policy)
    with pytest.raises(CastError, match=r"Cast what is fp64 to fp32, x\.float\(\): no rule casts fp64"):
        model(x.double())
    assert model(x).dtype is torch.float32


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp16, ops=mezzo", "bf16, ops=mezzo"])
@pytest.mark.parametrize("op", [torch.cat, torch.hstack, nn.utils.rnn.pack_sequence, nn.utils.rnn.pad_sequence])
@pytest.mark.filterwarnings("ignore")
def test_the_other_16_bit_dtype_in_an_op_that_torch_promotes(
    op: Callable[[list[torch.Tensor]], object], policy: str
) -> None:
    other = torch.float16 if policy.startswith("bf16") else BF16
    parts = [torch.ones(2, 2, dtype=other), torch.ones(2, 2, dtype=other)]
    try:
        with autocast("cpu", policy=policy):
            op(parts)
    except CastError as refused:  # mezzo's own table promotes, and pad_sequence is no op that torch promotes
        assert "x.to(torch.get_autocast_dtype(x.device.type))" in str(refused)
    with autocast("cpu", policy=policy):
        op([x.to(torch.get_autocast_dtype(x.device.type)) for x in parts])

"""What modules meet that torch would run past the policy, or not at all: fused layers, and kernels that are missing."""

from __future__ import annotations

import copy
import logging
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.binding import module_rules
from mezzo.binding.forward import bound_of
from mezzo.errors import CastError


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def evaluate(model: nn.Module, padding: Tensor | None) -> Tensor:
    torch.manual_seed(1)
    model.eval()
    with torch.no_grad():
        return model(torch.randn(2, 5, 16), src_key_padding_mask=padding)[:, :4]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16"])
def test_a_transformer_in_evaluation(policy: str, is_padded: bool) -> None:
    padding = (torch.arange(5) == 4).expand(2, 5) if is_padded else None
    model = encoder()
    wanted = evaluate(copy.deepcopy(model), padding)
    mezzo.prepare(model, None, policy)
    found = evaluate(model, padding)
    dtype = mezzo.Policy.parse(policy).compute
    torch.testing.assert_close(found, wanted, rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert torch.equal(evaluate(copy.deepcopy(model), padding), found)
    assert not torch.is_autocast_enabled("cuda")


def test_evaluation_obeys_the_rules_of_modules_inside() -> None:
    """torch's fused kernel never calls them."""
    model = encoder()
    mezzo.prepare(model, None, "bf16, *.linear1=fp32")
    seen = []
    model.layers[0].linear1.register_forward_hook(lambda *_: None)
    for layer in model.layers:
        layer.dropout.register_forward_hook(lambda module, args, out: seen.append(args[0].dtype))
    evaluate(model, None)
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling.init_scale=16"])
def test_modules_whose_ops_take_no_mixed_dtypes_run_in_fp32(policy: str) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.pair, self.words = (
                nn.Embedding(9, 4),
                nn.Bilinear(4, 4, 4),
                nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3]),
            )

        def forward(self, ids: Tensor) -> Tensor:
            h = self.table(ids)
            return self.words(self.pair(h, h), ids).loss

    model = Both()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    amp.backward(model(torch.arange(9)))
    assert amp.step() and {"Bilinear", "AdaptiveLogSoftmaxWithLoss"} <= {rule.pattern for rule in amp.policy.modules}


def test_a_rule_for_an_lstm_without_a_kernel(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.LSTM(3, 4, num_layers=2, bidirectional=True))
    with mock.patch.object(module_rules, "has_lstm_kernel", lambda dtype: False), caplog.at_level(logging.INFO):
        amp = mezzo.prepare(model, torch.optim.Adam(model.parameters()), "fp16, scaling.init_scale=16")
    assert "LSTM=fp32_low_out" in str(amp.policy) and "no fp16 kernel for nn.LSTM" in caplog.text
    amp.backward(model(torch.randn(5, 2, 3))[0].square().mean())
    assert amp.step()


@pytest.mark.parametrize("policy", ["fp16", "fp16-master", "bf16", "bf16-master"])
def test_an_lstm_trains_in_every_dtype_on_this_machine(policy: str) -> None:
    model = nn.LSTM(3, 4)
    amp = mezzo.prepare(model, torch.optim.Adam(model.parameters()), policy)
    found, state = model(torch.randn(5, 2, 3), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))
    assert found.dtype is torch.float32
    amp.backward(found.square().mean() + state[0].mean())
    amp.step()


def test_no_rule_is_added_without_need() -> None:
    lstm, linear = nn.LSTM(3, 4), nn.Linear(3, 4)
    with mock.patch.object(module_rules, "has_lstm_kernel", lambda dtype: False):
        for model, text in ((linear, "fp16"), (lstm, "fp32"), (lstm, "fp16, ops=mezzo")):
            policy = mezzo.Policy.parse(text)
            assert module_rules.with_missing_kernels(policy, model, "cpu") is policy
        own = mezzo.Policy.parse("fp16, LSTM=fp16")
        added = module_rules.with_missing_kernels(own, lstm, "cpu")
    assert added.module_rule("", ("LSTM",)) == own.module_rule("", ("LSTM",))


def test_a_rule_for_a_missing_kernel_fuses_nothing() -> None:
    """`modules=none` is torch's autocast to the bit, beside an LSTM that has no kernel too."""
    model = nn.Sequential(nn.LSTM(3, 4), nn.Bilinear(4, 4, 4))
    with mock.patch.object(module_rules, "has_lstm_kernel", lambda dtype: False):
        for policy, fuses in (("fp16, modules=none", False), ("fp16", True), ("fp16, modules=none, LSTM=bf16", True)):
            amp = mezzo.prepare(copy.deepcopy(model), None, policy)
            binding = bound_of(amp.model).binding
            assert len(amp.policy.modules) >= 2 and binding.fuses is fuses


class Encoding(UserDict):
    """What tokenizers return, and models of embeddings hand on."""


def test_a_namespace_comes_out_as_output_says() -> None:
    class Names(nn.Linear):
        def forward(self, x):
            self.made = SimpleNamespace(logits=super().forward(x), name="row")
            return self.made

    model = Names(4, 2)
    mezzo.prepare(model, None, "bf16")
    found = model(torch.ones(3, 4))
    assert (found.logits.dtype, found.name) == (torch.float32, "row")
    assert model.made.logits.dtype is torch.bfloat16, "the model's own stays as it made it"


D = torch.distributions


class Policy(nn.Linear):
    """Returns a distribution, as networks of agents do."""

    def __init__(self, make: Callable[[Tensor], D.Distribution]) -> None:
        super().__init__(8, 4)
        self.make = make

    def forward(self, x: Tensor) -> D.Distribution:
        return self.make(super().forward(x))


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16", "fp16-master"])
@pytest.mark.parametrize(
    "make",
    [
        lambda z: D.Categorical(logits=z),
        lambda z: D.Bernoulli(logits=z),
        lambda z: D.Independent(D.Normal(z, z.exp()), 1),
        lambda z: D.MixtureSameFamily(D.Categorical(logits=z), D.Normal(z, z.exp())),
        lambda z: D.TransformedDistribution(D.Normal(z, z.exp()), [D.ExpTransform(cache_size=1)]),
    ],
)
def test_the_loss_of_a_distribution_is_fp32(make: Callable[[Tensor], D.Distribution], policy: str) -> None:
    torch.manual_seed(0)
    model, x = Policy(make), torch.randn(16, 8)
    wanted = model(x)
    value = wanted.sample()
    loss = -wanted.log_prob(value).mean()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    for _ in range(2):
        amp.zero_grad()
        made = model(x)
        found = -made.log_prob(value).mean()
        amp.backward(-made.log_prob(made.sample()).mean())
        amp.step()
    assert type(made) is type(wanted)
    torch.testing.assert_close(found, loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", [dict, UserDict, Encoding])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16"])
def test_what_a_root_adds_to_a_mapping_comes_out_as_output_says(kind: type, policy: str) -> None:
    class Adds(nn.Linear):
        def forward(self, features):
            features["embedding"] = super().forward(features["x"])
            return features

    model = Adds(4, 2)
    mezzo.prepare(model, None, policy)
    given = kind(x=torch.ones(3, 4), name="row")
    found = model(given)
    assert type(found) is kind and found["name"] == "row"
    assert found["embedding"].dtype is torch.float32
    assert given["embedding"].dtype is mezzo.Policy.parse(policy).compute, (
        "what was handed in stays as the model left it"
    )


@pytest.mark.parametrize("depth", [0, 5000])
def test_outputs_that_hold_themselves_are_refused_in_a_sentence(depth: int) -> None:
    class Nest(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nest: list[object] = [super().forward(x)]
            for _ in range(depth):
                nest = [nest]
            return nest if depth else (nest.append(nest) or nest)  # type: ignore[return-value, func-returns-value]

    model = mezzo.prepare(Nest(4, 4), None, "bf16").model
    with pytest.raises(CastError, match=r"the output of Nest is to be fp32, and is .*list.* that holds itself"):
        model(torch.ones(2, 4))
    assert (
        not torch.is_autocast_enabled("cpu")
        and mezzo.prepare(nn.Linear(4, 4), None, "bf16").model(torch.ones(2, 4)).dtype is torch.float32
    )

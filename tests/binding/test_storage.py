"""What weights are stored in: a table of modules, and who is left as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import mezzo
from mezzo import Policy
from mezzo.binding import convert_
from mezzo.binding.bind import bind
from mezzo.binding.storage import storage_targets, store_
from mezzo.casting import products
from mezzo.errors import PolicyError

MASTER = "bf16-master"


def tied() -> nn.Module:
    model = nn.ModuleDict({"table": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["table"].weight  # type: ignore[union-attr]  # modules of torch
    return model


MODULES: dict[str, tuple[Callable[[], nn.Module], str, set[str]]] = {
    "linear": (lambda: nn.Linear(2, 2), MASTER, {"weight", "bias"}),
    "convolution": (lambda: nn.Conv1d(2, 2, 1), MASTER, {"weight", "bias"}),
    "embedding": (lambda: nn.Embedding(2, 2), MASTER, {"weight"}),
    "embedding with sparse gradients": (lambda: nn.Embedding(2, 2, sparse=True), MASTER, set()),
    "LSTM of a CPU": (lambda: nn.LSTM(2, 2, bias=False), MASTER, {"weight_ih_l0", "weight_hh_l0"}),
    "LSTM elsewhere": (lambda: nn.LSTM(2, 2, device="meta"), MASTER, set()),
    "LSTM with projections": (lambda: nn.LSTM(2, 2, proj_size=1), MASTER, set()),
    "LSTM under an fp32 rule": (lambda: nn.LSTM(2, 2), f"{MASTER}, module:LSTM=fp32", set()),
    "GRU, which torch runs in fp32 on a CPU": (lambda: nn.GRU(2, 2), MASTER, set()),
    "norm": (lambda: nn.LayerNorm(2), MASTER, set()),
    "fp32 rule": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), f"{MASTER}, module:1=fp32", {"0.weight", "0.bias"}),
    "tied to a module under an fp32 rule": (tied, f"{MASTER}, module:head=fp32", set()),
    "tied": (tied, MASTER, {"table.weight"}),
    "spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(2, 2)), MASTER, set()),
    "a policy that stores fp32": (lambda: nn.Linear(2, 2), "bf16", set()),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODULES)
def test_what_goes_to_16_bit(kind: str) -> None:
    make, text, expected = MODULES[kind]
    model, policy = make(), Policy.parse(text)
    bind(model, policy)
    targets = storage_targets(model, policy, [])
    assert {name for name, p in model.named_parameters() if targets.get(p) is torch.bfloat16} == expected
    assert set(convert_(model, [], policy)) == expected
    assert {name for name, p in model.named_parameters() if p.dtype is torch.bfloat16} == expected


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}], ids=str)
def test_a_stored_lstm_has_the_bits_of_one_that_is_cast(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "is_emulated", lambda dtype: False)
    lstm = nn.LSTM(8, 16, **options)  # type: ignore[arg-type]  # flags and sizes
    stored, x = copy.deepcopy(lstm), torch.randn(5, 3, 8)
    policy = Policy.parse(MASTER)
    bind(stored, policy)
    assert len(convert_(stored, [], policy)) == len(list(lstm.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = lstm(x)
    found = stored(x)
    assert all(torch.equal(a, b) for a, b in zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True))
    grads = [
        torch.autograd.grad(out.float().sum(), list(m.parameters()))
        for m, (out, _) in ((stored, found), (lstm, wanted))
    ]
    assert all(torch.equal(a.float(), b) for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        assert torch.equal(stored.eval()(x)[0], found[0])


def test_frozen_weights_stay_where_there_is_an_optimizer() -> None:
    model, policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Policy.parse(MASTER)
    model[0].requires_grad_(False)
    bind(model, policy)
    targets = storage_targets(model, policy, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert {name for name, p in model.named_parameters() if p in targets} == {"1.weight", "1.bias"}


def test_16_bit_weights_under_an_fp32_rule_become_fp32() -> None:
    model, policy = nn.Linear(2, 2).bfloat16(), Policy.parse("bf16, Linear=fp32")
    bind(model, policy)
    assert convert_(model, [], policy) == ["weight", "bias"] and model.weight.dtype is torch.float32


def test_weights_beyond_fp16_are_refused_with_a_rule_that_keeps_them() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(1, 2)
    nn.init.constant_(model[1].weight, -7e4)
    kept = model[1].weight.clone()
    with pytest.raises(PolicyError, match=r"1\.weight \(70000\) would be inf there\. Write 'module:1=fp32'"):
        mezzo.prepare(model, None, "fp16-master")
    assert torch.equal(model[1].weight, kept) and model[0].weight.dtype is torch.float32
    mezzo.prepare(model, None, "fp16-master, module:1=fp32")
    assert model(x).isfinite().all() and torch.equal(model[1].weight, kept) and model[0].weight.dtype is torch.float16


def test_stored_values_are_another_tensors_in_the_same_parameter() -> None:
    model = nn.Linear(2, 2)
    weight, value = model.weight, torch.full((2, 2), 3.0, dtype=torch.bfloat16)
    store_(model, {weight: value})
    assert model.weight is weight and torch.equal(weight.data, value) and weight.dtype is torch.bfloat16


@pytest.mark.parametrize("text", ["bf16-master", "fp16-master, scaling=16"])
def test_weights_that_processes_share_are_not_taken_from_them(text: str) -> None:
    model = nn.Linear(2, 2).share_memory()
    optimizer, policy = torch.optim.SGD(model.parameters(), lr=0.1), Policy.parse(text)
    with pytest.raises(
        PolicyError,
        match=r"2 parameters \(weight, bias\) lie in memory that processes share.*Write model\.share_memory\(\) after",
    ):
        mezzo.prepare(model, optimizer, policy)
    assert model.weight.is_shared() and model.weight.dtype is torch.float32
    mezzo.prepare(model, optimizer, "bf16").release()
    mezzo.prepare(model, None, policy)  # an answer is this process's own
    own = nn.Linear(2, 2)
    amp = mezzo.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), policy)
    shown = own.share_memory().weight.data
    for _ in range(2):
        amp.zero_grad()
        amp.backward(own(torch.ones(3, 2)).sum())
        before = shown.clone()
        assert amp.step() and own.weight.is_shared() and not torch.equal(shown, before)


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_a_model_in_fp16_trains_under_split_masters_as_its_fp32_copy(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    """As loaders hand it out: norms and other weights that feed no low op have no bf16 half to split."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
            self.temperature = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.temperature

    half = Scaled().half()
    wide, found, steppers = copy.deepcopy(half).float(), [], []
    for model in (half, wide):
        amp = mezzo.prepare(model, make(model.parameters(), lr=0.1), "bf16-master")
        for _ in range(3):
            amp.backward(model(torch.arange(5)).square().mean())
            amp.step()
            amp.zero_grad()
        found.append(amp.export_weights())
        steppers.append(amp)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert half.temperature.dtype is half.net[2].weight.dtype is torch.float32
    for model, amp in zip((half, wide), steppers, strict=True):
        amp.release()
        assert all(torch.equal(value, found[1][name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bit_trains_with_a_module_under_an_fp32_rule(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master, module:2=fp32")
    amp.backward(model(torch.ones(2, 4)).square().sum())
    assert amp.step().applied and model[2].weight.dtype is torch.float32
    assert amp.report(strict=True)


@pytest.mark.parametrize(
    ("masters", "policy"), [("bf16-master", "bf16"), ("fp16-master", "bf16"), ("bf16-master", "fp16")]
)
@pytest.mark.parametrize("is_own", [True, False], ids=["made with masters", "of a stepper that is gone"])
def test_masters_under_a_policy_without_16_bit_weights_are_refused_before_a_step(
    is_own: bool, masters: str, policy: str
) -> None:
    declared, model = Policy.parse(masters), nn.Linear(4, 2)
    if is_own:
        model = model.to(declared.params)
        optimizer: torch.optim.Optimizer = mezzo.optim.AdamW(model.parameters(), master=declared.master)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        mezzo.prepare(model, optimizer, masters)  # and let go of at once
    text = rf"2 of 2 .* \(weight, bias\) are 16 bit, with master={declared.master}, and policy={policy} .* policy=.{masters}.*release\(\)"
    with pytest.raises(PolicyError, match=text):
        mezzo.prepare(model, optimizer, policy)
    amp = mezzo.prepare(model, optimizer, masters + ", scaling=none")
    amp.backward(model(torch.ones(3, 4)).square().mean())
    assert amp.step().applied


@pytest.mark.parametrize(
    ("make", "after"), [(torch.optim.AdamW, ""), (torch.optim.AdamW, "fp32"), (torch.optim.RMSprop, "")]
)
@pytest.mark.parametrize("policy", ["bf16-master", "bf16-master, master=fp32", "fp16-master, scaling=none"])
def test_masters_of_a_stepper_that_is_gone_are_gone_on_from(
    policy: str, make: Callable[..., torch.optim.Optimizer], after: str
) -> None:
    model = nn.Linear(4, 2)
    optimizer, found = make(model.parameters(), lr=1e-5), []
    for text in (policy, after or policy):
        amp = mezzo.prepare(model, optimizer, text)
        found.append(amp.export_weights())
        for _ in range(3):
            amp.backward(model(torch.ones(3, 4)).square().mean())
            assert amp.step().applied
            amp.zero_grad()
        found.append({name: value.clone() for name, value in amp.export_weights().items()})
        del amp
    assert all(torch.equal(value, found[2][name]) for name, value in found[1].items())
    assert not torch.equal(found[2]["weight"], found[3]["weight"])

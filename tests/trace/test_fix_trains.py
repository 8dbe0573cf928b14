"""What is printed against an underflow, applied as it is printed, trains as fp32 does: programs in plain torch style."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose

Loss = Callable[[Tensor], Tensor]
STEPS = 8
TARGET = torch.arange(12) % 4
INPUT = torch.sin(torch.arange(96.0).reshape(12, 8))
INPUT[0] = 0  # a padded row


class Program(nn.Module):
    """A layer and a loss written by hand."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 4, bias=False), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x))


def written_norm(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-12)


FLOAT = {"fp16": torch.float16, "bf16": torch.bfloat16}
EPS: dict[str, tuple[Loss, str]] = {
    "log of a softmax": (
        lambda h: -torch.log((24 * h).softmax(-1) + 1e-9)[torch.arange(12), TARGET].mean() / 48,
        "fp16",
    ),
    "cosine of rows": (
        lambda h: 1 - (h / (h.norm(dim=-1, keepdim=True) + 1e-9))[torch.arange(12), TARGET].mean(),
        "fp16",
    ),
    "a norm by hand": (lambda h: F.cross_entropy(written_norm(h).float(), TARGET), "fp16"),
    "log of a certainty": (
        lambda h: (h - 1).square().mean() - 0.1 * torch.log(1 - torch.sigmoid(h + 7)).mean(),
        "bf16",
    ),
    "density under tanh": (lambda h: (h.square() - 0.1 * torch.log(1 - torch.tanh(h + 5).square())).mean(), "bf16"),
}


def plain(model: nn.Module, region: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[float]:
    """Train in plain torch; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with region():
            loss = model(INPUT)
        loss.float().backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(model: nn.Module, policy: str) -> list[float]:
    """Train under a policy; return the losses."""
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    losses = []
    for _ in range(5 * STEPS):  # the loss scale looks for its level
        amp.zero_grad()
        loss = model(INPUT)
        amp.backward(loss)
        losses += [loss.item()] * amp.step().applied
    return losses[:STEPS]


def falls_alike(losses: list[float], want: list[float]) -> None:
    """See that a loss falls as that of fp32 does, but for the rounding of bf16."""
    assert want[-1] < 0.95 * want[0], "the program learns nothing in fp32"
    assert losses == pytest.approx(want, rel=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("name", EPS)
def test_the_edit_against_a_lost_constant(name: str) -> None:
    loss, preset = EPS[name]
    torch.manual_seed(0)
    models = [Program(loss) for _ in range(4)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    want = plain(models[0])
    low = lambda: torch.autocast("cpu", FLOAT[preset])  # noqa: E731
    with diagnose.trace(models[1]) as t:
        with low():
            bad = models[1](INPUT)
        bad.float().backward()
    assert not all(map(math.isfinite, plain(models[2], low))), "nothing is lost"
    finding = t.report.findings[0]
    assert finding.verdict == "underflow" and finding.fix.edit, finding
    falls_alike(prepared(models[3], f"{preset}, {finding.fix.edit}"), want)


# --- gradients that fp16 flushes --------------------------------------------------------------------------------------


def regression(model: nn.Module, x: Tensor) -> Tensor:
    return 1e-7 * F.mse_loss(model(x).float(), x)


def summed_over_a_corpus(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), x.argmax(-1), reduction="sum") / 2e8


def weighted_classes(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), x.argmax(-1), reduction="none").mul(2e-8).mean()


def distillation(model: nn.Module, x: Tensor) -> Tensor:
    return F.kl_div(model(x).float().log_softmax(-1), (4 * x).softmax(-1), reduction="batchmean") / 1e8


def policy_gradient(model: nn.Module, x: Tensor) -> Tensor:
    chosen = model(x).float().log_softmax(-1).gather(1, x.argmax(-1, keepdim=True))
    return -(chosen.squeeze(1) * (1e-8 + 1e-9 * x[:, 0])).mean()


FLUSHED = [regression, summed_over_a_corpus, weighted_classes, distillation, policy_gradient]


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def trained(
    loss_of: Callable[[nn.Module, Tensor], Tensor], dtype: torch.dtype | None, scale: float = 1.0
) -> list[float]:
    """Train as the published recipe does, with a loss scale where one is given; return the losses."""
    model = deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-20)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = loss_of(model, INPUT)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("loss_of", FLUSHED, ids=lambda loss_of: loss_of.__name__)
def test_what_is_printed_against_flushed_gradients(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    want = trained(loss_of, None)
    assert trained(loss_of, torch.float16)[-1] > want[0] * 0.99, "nothing is flushed"
    model = deep()
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, INPUT)
        loss.backward()
    finding = t.report.findings[0]
    assert finding.verdict == "underflow"
    printed = re.match(
        r"scale the loss: a loss scale of (\S+) keeps them, and (.*) find it; or use bf16", finding.fix.advice
    )
    assert printed, finding.fix.advice
    for losses in (
        trained(loss_of, torch.float16, float(printed[1])),  # this scale
        trained(loss_of, torch.float16, 65536.0),  # the scaler's own
        trained(loss_of, torch.bfloat16),
    ):
        fall = (losses[0] - losses[-1]) / (want[0] - want[-1])
        assert 0.98 < fall < 1.02, (losses, want)


def shrunk(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
    return layer


class Deep(nn.Module):
    """Equal layers in a row, with the advice followed or not."""

    def __init__(self, activation: Callable[[], nn.Module], gain: float, *, is_mended: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(shrunk(nn.Linear(16, 16), gain) for _ in range(24))
        self.activations = nn.ModuleList(activation() for _ in self.layers)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in self.layers)
        self.head, self.is_mended = nn.Linear(16, 4), is_mended

    def forward(self, x: Tensor) -> Tensor:
        for layer, activation, norm in zip(self.layers, self.activations, self.norms, strict=True):
            x = x + activation(layer(norm(x))) if self.is_mended else activation(layer(x))
        return F.cross_entropy(self.head(x).float(), TARGET)


DEEP: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "tanh of small weights": (nn.Tanh, 0.1),
    "sigmoids": (nn.Sigmoid, 1.0),
    "relu of small weights": (nn.ReLU, 0.3),
    "gelu of small weights": (nn.GELU, 0.2),
    "no activation, large weights": (nn.Identity, 3.0),
}


SHOWN = ("relu of small weights", "no activation, large weights")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SHOWN)) for name in DEEP])
def test_what_is_printed_against_depth(name: str) -> None:
    """Normalise between layers, add residual paths: then it is healthy, and the first layer learns."""
    activation, gain = DEEP[name]
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))

    def traced(model: nn.Module) -> diagnose.TraceReport:
        with diagnose.trace(model) as t, torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).backward()
        return t.report

    found = traced(Deep(activation, gain, is_mended=False)).findings[0]
    assert found.verdict == ("exploding" if gain > 1 else "vanishing")
    assert found.module.startswith(("layers.*", "activations.*"))
    assert found.fix.advice.startswith("normalise between layers, add residual paths") and not found.fix.edit
    model = Deep(activation, gain, is_mended=True)
    assert traced(model).is_healthy
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "bf16")
    first = model.layers[0].weight.detach().clone()
    losses = []
    for _ in range(20):
        amp.zero_grad()
        loss = model(x)
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and (model.layers[0].weight - first).abs().max() > 1e-2

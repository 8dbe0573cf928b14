"""The plainest loops: prepare, backward and step are all that changes, whatever the model returns and the loss is."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from tests.loops.swap import Fp32
from tests.step import plain_sequence_loops  # noqa: F401  # adds its loops
from tests.step.plain_loops import LOOPS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import mezzo

STEPS = 24
POLICIES = ("bf16", "bf16-master", "fp16", "fp16-master")


def losses(name: str, seed: int, policy: str | None) -> list[float]:
    torch.manual_seed(seed)
    take = Fp32 if policy is None else lambda model, optimizer: mezzo.prepare(model, optimizer, policy)
    return list(LOOPS[name](take, STEPS))


@pytest.mark.parametrize("name", LOOPS)
def test_it_trains_as_in_fp32(name: str) -> None:
    """The mean of the last losses is as near to the fp32 run's as other seeds of it are."""
    plain = [_end(losses(name, seed, None)) for seed in range(3)]
    spread = max(plain) - min(plain)
    for policy in POLICIES[:2]:
        found = losses(name, 0, policy)
        assert abs(_end(found) - plain[0]) <= max(spread, 8 * torch.finfo(torch.bfloat16).eps * abs(found[0])), policy


def _end(curve: list[float]) -> float:
    assert all(math.isfinite(loss) for loss in curve)
    return sum(curve[-4:]) / 4


@pytest.mark.parametrize("policy", ["auto", *POLICIES, torch.bfloat16])
def test_what_leaves_the_model_is_fp32(policy: str) -> None:
    model = nn.Linear(4, 2)
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    x = torch.randn(3, 4)
    assert model(x).dtype is torch.float32
    assert model(x).detach().numpy().dtype == "float32"
    amp.backward(F.cross_entropy(model(x), torch.tensor([0, 1, 0])))
    assert amp.step()


def test_none_keeps_the_compute_dtype() -> None:
    model = nn.Linear(4, 2)
    mezzo.prepare(model, None, "bf16, output=none")
    assert model(torch.randn(3, 4)).dtype is torch.bfloat16


Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Tensor
    note: str = "kept"
    count: int = dataclasses.field(default=0, init=False)


class Dressed(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Boxes(tuple):  # type: ignore[type-arg]
    """A tuple whose making takes its parts one by one, with an attribute of its own."""

    def __new__(cls, first: Tensor, scores: Tensor) -> Boxes:
        made = super().__new__(cls, (first, scores))
        made.shape = first.shape
        return made

    shape: torch.Size


WRAPPED: dict[str, Callable[[Tensor], object]] = {
    "tuple": lambda x: (x, 1),
    "nested": lambda x: {"a": [x, (x, None)], "b": "text"},
    "namedtuple": lambda x: Pair(x, 2.0),
    "ordered": lambda x: collections.OrderedDict(a=x),
    "defaultdict": lambda x: collections.defaultdict(list, a=x),
    "dataclass": lambda x: Frozen(x),
    "packed": lambda x: pack_sequence([x, x]),
    "tuple subclass": lambda x: Dressed((x, x)),
    "tuple of its own making": lambda x: Boxes(x, x),
    "a shape beside it": lambda x: (x, x.shape),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_outputs_of_every_shape(kind: str) -> None:
    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> object:
            return WRAPPED[kind](self.inner(x))

    model = Wrap()
    mezzo.prepare(model, None, "bf16")
    found = model(torch.randn(3, 4))
    assert type(found) is type(WRAPPED[kind](torch.randn(3, 2)))
    assert not isinstance(found, Boxes) or found.shape == (3, 2)
    assert kind != "a shape beside it" or type(found[1]) is torch.Size
    tensors = [t for t in _tensors(found) if t.is_floating_point()]
    assert tensors and all(t.dtype is torch.float32 for t in tensors)


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _ctc(out: Tensor) -> Tensor:
    return F.ctc_loss(out.log_softmax(-1).unsqueeze(1), torch.tensor([[1, 2]]), (len(out),), (2,))


ONES, TARGETS = torch.ones(6), torch.tensor([0, 1, 2, 0, 1, 2])
HALF = torch.full((6, 3), 0.5)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "binary_cross_entropy": lambda out: F.binary_cross_entropy(out.sigmoid(), HALF),
    "binary_cross_entropy_with_logits": lambda out: F.binary_cross_entropy_with_logits(out, HALF),
    "cosine_embedding_loss": lambda out: F.cosine_embedding_loss(out, out.roll(1, 0), ONES),
    "cross_entropy": lambda out: F.cross_entropy(out, TARGETS, label_smoothing=0.1),
    "ctc_loss": _ctc,
    "gaussian_nll_loss": lambda out: F.gaussian_nll_loss(out, HALF, out.square()),
    "hinge_embedding_loss": lambda out: F.hinge_embedding_loss(out, torch.ones(6, 3)),
    "huber_loss": lambda out: F.huber_loss(out, HALF),
    "kl_div": lambda out: F.kl_div(out.log_softmax(1), HALF, reduction="batchmean"),
    "l1_loss": lambda out: F.l1_loss(out, HALF),
    "margin_ranking_loss": lambda out: F.margin_ranking_loss(out[:, 0], out[:, 1], ONES, margin=1.0),
    "mse_loss": lambda out: F.mse_loss(out, HALF),
    "multi_margin_loss": lambda out: F.multi_margin_loss(out, TARGETS),
    "multilabel_margin_loss": lambda out: F.multilabel_margin_loss(out, torch.tensor([[0, 1, -1]] * 6)),
    "multilabel_soft_margin_loss": lambda out: F.multilabel_soft_margin_loss(out, HALF),
    "nll_loss": lambda out: F.nll_loss(out.log_softmax(1), TARGETS),
    "poisson_nll_loss": lambda out: F.poisson_nll_loss(out, HALF),
    "smooth_l1_loss": lambda out: F.smooth_l1_loss(out, HALF),
    "soft_margin_loss": lambda out: F.soft_margin_loss(out, torch.ones(6, 3)),
    "triplet_margin_loss": lambda out: F.triplet_margin_loss(out, out.roll(1, 0), HALF, margin=10.0),
    "triplet_margin_with_distance_loss": lambda out: F.triplet_margin_with_distance_loss(
        out, out.roll(1, 0), HALF, margin=10.0
    ),
}


def test_every_loss_of_torch_is_here() -> None:
    names = {name for name in vars(F) if name.endswith("_loss") or name in ("cross_entropy", "kl_div")}
    names |= {name for name in vars(F) if name.startswith(("binary_cross_entropy", "triplet_"))}
    assert names - set(LOSSES) <= {"linear_cross_entropy"}


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=16", "bf16-master"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_outside_the_model(name: str, policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    twin = nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    x = torch.randn(6, 4)
    loss, want = LOSSES[name](model(x)), LOSSES[name](twin(x))
    eps = torch.finfo(amp.policy.compute).eps
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, want, rtol=16 * eps, atol=16 * eps)
    amp.backward(loss)
    assert amp.step()


def test_a_linear_cross_entropy() -> None:
    """Fused losses take the weight itself; the model's region does not reach them."""
    fused = getattr(F, "linear_cross_entropy", None)
    if fused is None:
        pytest.skip(f"torch {torch.__version__} has no F.linear_cross_entropy")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(fused(model[0](torch.randn(6, 4)), model[1].weight, TARGETS))
    assert amp.step()


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling.init_scale=256"])
def test_a_linear_cross_entropy_in_chunks_takes_the_fp32_input_that_it_takes_under_autocast(policy: str) -> None:
    """It multiplies into buffers of its input's dtype (`out=`), past every cast."""
    kind = getattr(nn, "LinearCrossEntropyLoss", None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no nn.LinearCrossEntropyLoss")
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "loss": kind(4, 3, options=options)})
    x = torch.randn(6, 4)
    want = F.cross_entropy(model["loss"].linear(x), TARGETS)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    loss = model["loss"](x, TARGETS)
    torch.testing.assert_close(loss, want)
    amp.backward(loss + model["body"](x).square().mean())
    assert amp.step()

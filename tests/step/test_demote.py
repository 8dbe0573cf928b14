"""on_overflow="demote": what overflows fp16 gets an fp32 rule and training goes on; anything else is left as it was."""

from __future__ import annotations

import pytest
import torch
from tests.saved import through_a_file
from tests.step.replay_models import FeedForward, LogOfZero, fail
from tests.step.step_models import batch, mse, prepared, twin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.errors import LossScaleExhausted, NonFiniteStep, PolicyError

DEMOTE = "fp16, output=fp32, scaling.init_scale=256, guard.on_overflow=demote"


class Plain(FeedForward):
    """Without dropout, so that an fp32 model draws nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


class Scores(nn.Module):
    """Overflows in an op of the root's own forward, which no module rule can name."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return ((h * 100) @ (h * 100).mT / 1e6).softmax(-1) @ h[:, :1]


class Steep(nn.Module):
    """Small in forward; in backward a product overflows fp16 at any loss scale before it is made small again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64, 64), 2.0**12))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 2.0**-20, self.weight)


def train(amp: mezzo.Stepper, batches: list[tuple[Tensor, Tensor]]) -> list[bool]:
    taken = []
    for x, y in batches:
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        taken.append(bool(amp.step()))
    return taken


@pytest.mark.parametrize("name", ["sgd", "fused-adamw", "mezzo-sgd"])
def test_training_goes_on_as_in_fp32(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Plain()
    oracle = twin(model)
    batches = [batch() for _ in range(12)]
    _, amp = prepared(f"{DEMOTE}, guard.check_every=0", name, model)
    taken = train(amp, batches)
    _, reference = prepared("fp32", name, oracle)
    train(reference, [b for b, is_taken in zip(batches, taken, strict=True) if is_taken])
    amp.counters()
    assert not taken[0] and sum(taken) >= 10
    assert "module:down=fp32" in str(amp.policy)
    assert "'module:down=fp32' added to the policy" in caplog.text
    assert "overflow in addmm, forward, module down" in caplog.text
    assert amp.counters().demoted == ("module:down=fp32",)
    eps = torch.finfo(torch.float16).eps
    for (key, got), want in zip(model.state_dict().items(), oracle.state_dict().values(), strict=True):
        if got.is_floating_point():
            scale = float(want.abs().max())
            torch.testing.assert_close(got, want, rtol=0, atol=16 * eps * scale, msg=lambda m, k=key: f"{k}: {m}")


def test_an_op_that_no_module_owns_gets_an_op_rule() -> None:
    model, amp = prepared(DEMOTE.replace("256", "2"), "sgd", Scores())
    x = torch.randn(6, 4) * 30
    with torch.no_grad():
        assert not model(x).isfinite().all()
    assert train(amp, [(x, torch.ones(6, 1))] * 2) == [False, True]
    assert amp.counters().demoted and all(edit.startswith("op:") for edit in amp.counters().demoted)


def test_a_chain_is_demoted_in_one_skipped_step() -> None:
    """What overflows is handed on: the layer after it would overflow when its input is cast."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].weight.mul_(1e3)
        model[1].weight.mul_(1e3)
    _, amp = prepared(DEMOTE, "mezzo-adamw", model)
    assert train(amp, [batch() for _ in range(3)]) == [False, True, True]
    assert amp.counters().demoted == ("module:1=fp32", "module:2=fp32")


def steps_taken(amp: mezzo.Stepper, num: int) -> list[bool]:
    taken = []
    for _ in range(num):
        amp.zero_grad()
        amp.backward((amp.model(torch.randn(4, 4)) * 1e3).sum())
        taken.append(bool(amp.step()))
    return taken


def test_a_gradient_that_no_scale_mends() -> None:
    model = nn.Sequential(nn.Linear(4, 64), Steep())
    _, amp = prepared("fp16, output=fp32, scaling.init_scale=4, guard.on_overflow=demote", "sgd", model)
    assert steps_taken(amp, 5) == [False, False, False, True, True]
    assert amp.counters().demoted == ("module:1=fp32",)
    assert amp.scale == 4.0, "the scale fell for an overflow that is mended now"


def test_a_demotion_begins_patience_anew() -> None:
    """The first scale is tried again, and falls again, where it was too high for the rule as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), Steep())
    _, amp = prepared("fp16, output=fp32, guard.on_overflow=demote", "sgd", model)
    taken = steps_taken(amp, 40)
    assert amp.counters().demoted == ("module:1=fp32",)
    assert not any(taken[:17]) and taken[-1]


def test_a_bad_batch_demotes_nothing() -> None:
    _, amp = prepared(DEMOTE, "sgd", Plain())
    x, y = batch()
    policy = str(amp.policy)
    x[0, 0] = float("nan")
    assert train(amp, [(x, y)]) == [False]
    assert str(amp.policy) == policy and amp.counters().demoted == ()


def test_log_of_zero_demotes_nothing_and_raises() -> None:
    _, amp = prepared(f"{DEMOTE}, guard.patience=3", "sgd", LogOfZero())
    error = fail(amp, batch()[0], torch.ones(16, 4))
    assert isinstance(error, NonFiniteStep)
    assert (error.report.faults[0].verdict, amp.counters().demoted) == ("singularity", ())


def test_a_scale_that_is_too_high_demotes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    _, amp = prepared("fp16, output=fp32, scaling.init_scale=1073741824, guard.on_overflow=demote", "sgd", model)
    taken = train(amp, [batch() for _ in range(30)])
    assert not taken[0] and taken[-1]
    assert amp.counters().demoted == ()


def test_an_overflow_beyond_fp32_demotes_nothing() -> None:
    class Beyond(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.lin(x) * 0 + 100).float().exp()

    _, amp = prepared(f"{DEMOTE}, guard.patience=2", "sgd", Beyond())
    error = fail(amp, *batch())
    assert isinstance(error, (NonFiniteStep, LossScaleExhausted)) and amp.counters().demoted == ()


@pytest.mark.parametrize("again", ["demote", "skip"])
def test_what_was_demoted_is_saved_with_the_run(again: str) -> None:
    _, amp = prepared(DEMOTE, "sgd", Plain())
    train(amp, [batch() for _ in range(3)])
    saved = through_a_file(amp.state_dict())
    _, resumed = prepared(DEMOTE.replace("demote", again), "sgd", Plain())
    said = resumed.load_state_dict(saved)
    assert (str(resumed.policy) == str(amp.policy)) is (again == "demote")
    assert (said == ()) is (again == "demote")
    if again == "demote":
        assert resumed.counters() == amp.counters()
        assert train(resumed, [batch()]) == [True]
        resumed.load_state_dict(amp.state_dict())
        assert str(resumed.policy) == str(amp.policy)
    else:
        assert "module:down=fp32" in said[0] and resumed.counters().demoted == ()


def test_the_binding_stays_the_steppers() -> None:
    model, amp = prepared(DEMOTE, "sgd", Plain())
    train(amp, [batch()])
    x, y = batch()
    amp.zero_grad()
    amp.backward(mse(model(x), y))
    before = model.calls.clone()
    amp.step()
    assert model.calls == before
    with torch.no_grad():
        assert model.down(torch.randn(2, 32)).dtype is torch.float32


@pytest.mark.parametrize(
    ("policy", "name", "words"),
    [
        ("fp16-master, guard.on_overflow=demote", "mezzo-adamw", "a module that gets an fp32 rule needs fp32 weights"),
        ("fp16, guard.on_overflow=demote, guard.enabled=false", "sgd", "without the guard nobody sees an overflow"),
    ],
)
def test_where_it_cannot_be_kept_it_is_refused(policy: str, name: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        if name == "mezzo-adamw":
            model = Plain()
            mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), master="fp32"), policy)
        else:
            prepared(policy, name, Plain())


@pytest.mark.usefixtures("one_rank")
def test_several_ranks_are_refused() -> None:
    words = "each would demote what overflowed on its own batch"
    with pytest.raises(PolicyError, match=words):
        prepared(DEMOTE, "sgd", DistributedDataParallel(Plain()))
    model, amp = prepared(DEMOTE, "sgd", Plain())
    with pytest.raises(PolicyError, match=words):
        amp.consensus = mezzo.distributed.RankConsensus()
    with pytest.raises(PolicyError, match=words):
        DistributedDataParallel(model)(batch()[0])
    assert amp.consensus is None


def test_a_closure_is_demoted_too() -> None:
    _, amp = prepared(DEMOTE, "sgd", Plain())
    x, y = batch()

    def closure() -> Tensor:
        amp.zero_grad()
        loss = F.mse_loss(amp.model(x), y)
        amp.backward(loss)
        return loss

    taken = [bool(amp.step(closure)) for _ in range(3)]
    assert taken == [False, True, True]
    assert amp.counters().demoted == ("module:down=fp32",)

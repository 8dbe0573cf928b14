"""One object to save: resume goes on bit for bit, another policy converts and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.messages import message_of
from tests.saved import through_a_file
from tests.step.step_models import OPTIMIZERS, Net, assert_same, batch, everything, mse, twin
from torch import Tensor, nn

import mezzo
from mezzo.errors import CheckpointError

adamw, sgd, wrapped = mezzo.optim.AdamW, mezzo.optim.SGD, mezzo.optim.MasterWeights

RUNS: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "fp32": ("fp32", OPTIMIZERS["adamw"]),
    "bf16": ("bf16", OPTIMIZERS["fused-adamw"]),
    "fp16": ("fp16, scaling.init_scale=512, scaling.growth_interval=2", OPTIMIZERS["momentum"]),
    "bf16-split": ("bf16-master", lambda p: adamw(p, lr=0.01, master="split")),
    "bf16-split-bf16-state": (
        "bf16-master, state=bf16",
        lambda p: adamw(p, 0.01, master="split", state_dtype=torch.bfloat16),
    ),
    "bf16-fp32": ("bf16-master, master=fp32", lambda p: adamw(p, lr=0.01, master="fp32")),
    "bf16-sgd": ("bf16-master, master=fp32", lambda p: sgd(p, 0.05, momentum=0.9, master="fp32")),
    "bf16-kahan": ("bf16-master, master=kahan", lambda p: adamw(p, lr=0.01, master="kahan")),
    "bf16-stochastic": (
        "bf16-master, master=stochastic",
        lambda p: adamw(p, 0.01, master="stochastic", rounding_seed=7),
    ),
    "fp16-fp32": ("fp16-master, scaling.init_scale=512", lambda p: adamw(p, lr=0.01, master="fp32")),
    "fp16-kahan": ("fp16-master, master=kahan, scaling.init_scale=512", lambda p: sgd(p, lr=0.05, master="kahan")),
    "wrapped-fp32": ("bf16-master, master=fp32", lambda p: wrapped(torch.optim.AdamW(p, lr=0.01))),
    "wrapped-rmsprop": ("bf16-master, master=fp32", lambda p: wrapped(torch.optim.RMSprop(p, lr=0.01))),
    "wrapped-kahan": ("bf16-master, master=kahan", lambda p: wrapped(torch.optim.AdamW(p, lr=0.01), "kahan")),
    "wrapped-stochastic": (
        "bf16-master, master=stochastic",
        lambda p: wrapped(torch.optim.AdamW(p, lr=0.01), "stochastic", rounding_seed=3),
    ),
}


def start(run: str, model: nn.Module | None = None, more: str = "") -> mezzo.Stepper:
    policy, make = RUNS[run]
    model = Net() if model is None else model
    return mezzo.prepare(model, make(model.parameters()), policy + more)


def train(amp: mezzo.Stepper, batches: list[tuple[Tensor, Tensor]], bad: tuple[int, ...] = ()) -> None:
    for index, (x, y) in enumerate(batches):
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y) * (float("inf") if index in bad else 1.0))
        amp.step(max_norm=1.0)


@pytest.mark.parametrize("run", RUNS)
def test_resume_is_bit_identical(run: str) -> None:
    batches = [batch() for _ in range(9)]
    straight = start(run)
    weights = twin(straight.model).state_dict()
    train(straight, batches[:5], bad=(1, 4))
    saved = through_a_file(straight.state_dict())
    train(straight, batches[5:], bad=(2,))

    resumed = start(run)
    train(resumed, batches[:2])  # what is there before loading must not matter
    assert resumed.load_state_dict(saved) == ()
    train(resumed, batches[5:], bad=(2,))
    assert_same(everything(resumed), everything(straight))
    assert resumed.counters() == straight.counters() and resumed.scale == straight.scale
    assert any(not torch.equal(weights[name], value) for name, value in straight.model.state_dict().items())


def test_one_that_does_not_resume_is_seen() -> None:
    """The comparison above can fail: it does if only the weights are loaded."""
    batches = [batch() for _ in range(6)]
    straight, resumed = start("bf16-split"), start("bf16-split")
    train(straight, batches[:3])
    resumed.model.load_state_dict(twin(straight.model).state_dict())
    train(straight, batches[3:])
    train(resumed, batches[3:])
    with pytest.raises(AssertionError):
        assert_same(everything(resumed), everything(straight))


MATRIX = [run for run in RUNS if not run.startswith("fp16") and run not in ("bf16-sgd", "wrapped-rmsprop")]
"""Runs with AdamW in one or another form."""
PAIRS = [
    pytest.param(one, other, marks=[] if (j - i) % len(MATRIX) in (0, 1, 3) else pytest.mark.slow)
    for i, one in enumerate(MATRIX)
    for j, other in enumerate(MATRIX)
]
"""Each run into each other one; in the quick suite each is left three times, and entered three times."""
EXACT = ("fp32", "bf16-split", "bf16-fp32", "wrapped-fp32")


class TestAnotherPolicy:
    @pytest.mark.parametrize(("out_of", "into"), PAIRS)
    def test_masters_are_carried_over(self, out_of: str, into: str) -> None:
        before = start(out_of)
        train(before, [batch() for _ in range(3)])
        saved, want = through_a_file(before.state_dict()), before.export_weights()
        after = start(into)
        sentences = after.load_state_dict(saved)
        got = after.export_weights()
        assert got.keys() == want.keys()
        is_exact = out_of not in ("fp16",) and (into in EXACT or into == "bf16" or out_of == into or "split" in into)
        for name, value in want.items():
            if not value.is_floating_point() or is_exact:
                assert torch.equal(got[name], value), name
            else:
                rounding = 2.0**-8 if "stochastic" in into else 2.0**-16
                torch.testing.assert_close(got[name], value, rtol=rounding, atol=0)
        assert (sentences == ()) is (RUNS[out_of][0] == RUNS[into][0])
        assert any("another policy" in sentence for sentence in sentences) or sentences == ()
        train(after, [batch()])

    def test_what_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        before = start("bf16-split")
        train(before, [batch()])
        model = Net()
        after = mezzo.prepare(model, OPTIMIZERS["adamw"](model.parameters()), RUNS["fp16"][0])
        sentences = after.load_state_dict(before.state_dict())
        assert sentences[0].startswith(
            "the checkpoint was made under another policy (left: saved, right: this run's):\n"
        )
        assert sentences[1:] == (
            "4 parameters were stored in bf16 and are now in fp32",
            "4 split masters became the fp32 weights",
            "no loss scale was saved: it starts at 512",
        )
        assert all(any(sentence in message for message in caplog.messages) for sentence in sentences)

    def test_the_scale_goes_where_there_is_none(self) -> None:
        before = start("fp16")
        train(before, [batch()])
        model = Net()
        after = mezzo.prepare(model, OPTIMIZERS["momentum"](model.parameters()), "fp32")
        assert after.load_state_dict(before.state_dict())[1:] == (
            "the saved loss scale 512 is dropped: this policy does not scale",
        )

    def test_from_a_run_without_mezzo_and_back(self) -> None:
        plain = Net()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        mse(plain(batch()[0]), batch()[1]).backward()
        optimizer.step()
        saved = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        amp = start("bf16-split")
        assert amp.load_state_dict(saved) == (
            "the checkpoint names no policy: it was made without mezzo",
            "4 parameters were stored in fp32 and are now in bf16",
        )
        for name, value in amp.export_weights().items():
            assert torch.equal(value, plain.state_dict()[name])
        other = Net()
        other.load_state_dict(amp.export_weights())
        assert torch.equal(other.inner.weight, plain.inner.weight)

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
    def test_from_a_run_whose_wrappers_name_the_weights_their_own_way(self, prefix: str) -> None:
        plain = Net()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        weights = {f"{prefix}{name}": value for name, value in plain.state_dict().items()}
        amp = start("bf16-split")
        amp.load_state_dict({"model": weights, "optimizer": optimizer.state_dict()})
        for name, value in amp.export_weights().items():
            assert torch.equal(value, plain.state_dict()[name])

    def test_from_a_model_with_compiled_parts_and_into_one(self) -> None:
        runs = [start("bf16-split") for _ in range(3)]
        for amp in runs[1:]:
            amp.model.inner = torch.compile(amp.model.inner, backend="eager")
        train(runs[0], [batch()])
        for before, after in ((runs[0], runs[1]), (runs[1], runs[2]), (runs[2], start("bf16-split"))):
            assert after.load_state_dict(before.state_dict()) == ()
            assert all(map(torch.equal, after.model.parameters(), runs[0].model.parameters()))

    def test_masters_start_from_fp32_weights_that_were_never_stepped(self) -> None:
        before, after = start("fp32"), start("bf16-split")
        after.load_state_dict(before.state_dict())
        for name, value in after.export_weights().items():
            assert torch.equal(value, before.model.state_dict()[name])


class TestExport:
    def test_weights_come_from_masters_and_are_plain(self) -> None:
        amp = start("bf16-split")
        train(amp, [batch() for _ in range(3)])
        exported = amp.export_weights()
        assert list(exported) == list(amp.model.state_dict())
        assert {v.dtype for v in exported.values()} == {torch.float32, torch.int64}
        for name, p in amp.model.named_parameters():
            assert torch.equal(exported[name], amp.optimizers[0].master(p))
            assert exported[name].data_ptr() != p.data_ptr() and not exported[name].requires_grad
        low = amp.export_weights(torch.float16)
        assert low["inner.weight"].dtype is torch.float16 and low["stats.running_mean"].dtype is torch.float32
        assert torch.equal(low["inner.weight"], exported["inner.weight"].half())

    def test_weights_that_a_dtype_has_no_number_for_are_refused(self) -> None:
        amp = start("bf16-split")
        with torch.no_grad():
            amp.model.inner.weight[0, 0] = 1e5
        for dtype, largest in ((torch.float16, "fp16 is 65504"), (torch.float8_e4m3fn, "fp8 is 448")):
            with pytest.raises(mezzo.errors.StepError, match=rf"would lose inner\.weight \(\d+\).*{largest}"):
                amp.export_weights(dtype)
        assert amp.export_weights(torch.bfloat16)["inner.weight"][0, 0] == 99840

    def test_a_dtype_by_name_as_elsewhere(self) -> None:
        amp = start("bf16")
        assert amp.export_weights("fp16")["inner.weight"].dtype is torch.float16
        with pytest.raises(mezzo.errors.FormatError, match=r"unknown dtype 'fp61'\. Did you mean 'fp64'"):
            amp.export_weights("fp61")
        with pytest.raises(
            mezzo.errors.StepError, match=r"export_weights\(int8\) would cut weights to whole numbers. Write a floating"
        ):
            amp.export_weights(torch.int8)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("state", "sentence"),
        [
            (
                {"weights": 1},
                (
                    "load_state_dict was given ['weights'], and a checkpoint has the keys format, policy, declared, model, "
                    "optimizers, outside, scaling, counters. For weights alone write model.load_state_dict(weights)."
                ),
            ),
            (
                [],
                (
                    "load_state_dict was given list, and a checkpoint has the keys format, policy, declared, model, "
                    "optimizers, outside, scaling, counters. For weights alone write model.load_state_dict(weights)."
                ),
            ),
            (
                {"model": {}, "format": 2},
                "the checkpoint has format 2, and this version reads up to 1. Update mezzo to read it.",
            ),
            *(
                (
                    {"model": {}, "format": wrong},
                    f"the checkpoint has format {wrong}, and no version of mezzo writes it: it is damaged. Load another one.",
                )
                for wrong in (-1, 0, True, None)
            ),
            (
                {"model": {}, "format": 1, "optimizer_s": []},
                "the checkpoint has an unknown key 'optimizer_s'. Did you mean 'optimizers'?",
            ),
            (
                {"model": {}, "optimizers": [1, 2]},
                (
                    "the checkpoint has the state of 2 optimizers, and this run has 1. Prepare the model with the optimizers "
                    "it was saved with."
                ),
            ),
        ],
    )
    def test_sentence(self, state: Any, sentence: str) -> None:
        assert message_of(CheckpointError, start("fp32").load_state_dict, state) == sentence

    def test_gradients_are_dropped_by_loading(self) -> None:
        amp = start("fp16")
        saved = amp.state_dict()
        amp.backward(mse(amp.model(batch()[0]), batch()[1]))
        amp.load_state_dict(saved)
        with pytest.raises(mezzo.errors.StepError, match="before backward"):
            amp.step()

    def test_what_is_read_is_what_was_meant(self) -> None:
        state = start("fp16").state_dict()
        assert state["declared"]["inner.weight"] == "fp32" and state["scaling"]["scale"] == 512.0
        assert mezzo.Policy.from_dict(state["policy"]) == mezzo.Policy.parse(RUNS["fp16"][0])


class CountsAll(torch.optim.Optimizer):
    """Keeps state beside that of its parameters, under keys of its own, as torch allows."""

    def step(self, closure: Any = None) -> Any:
        seen = self.state.get("global", {"step": 0, "seen": torch.zeros(2)})  # type: ignore[call-overload]
        result = super().step(closure)
        self.state["global"] = {"step": seen["step"] + 1, "seen": seen["seen"] + 1}  # type: ignore[index]
        self.state["name"] = "all"  # type: ignore[index]
        return result


class CountsAdagrad(CountsAll, torch.optim.Adagrad):
    pass


class CountsAdamW(CountsAll, adamw):
    pass


def own_keys(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


@pytest.mark.parametrize("make", [CountsAdagrad, CountsAdamW])
@pytest.mark.parametrize(
    "policy", ["fp32", "bf16", "bf16-master", "bf16-master, master=stochastic", "fp16, scaling.init_scale=16"]
)
def test_state_under_keys_of_its_own_is_saved_and_resumed_as_torch_does(policy: str, make: Any) -> None:
    first = Net()
    plain, amp, later = (
        mezzo.prepare(m, make(m.parameters(), lr=0.01), p)
        for m, p in ((twin(first), "fp32"), (twin(first), policy), (first, policy))
    )
    batches = [batch() for _ in range(4)]
    train(amp, batches[:2])
    later.load_state_dict(through_a_file(amp.state_dict()))
    later.optimizers[0].load_state_dict(through_a_file(later.optimizers[0].state_dict()))
    for one, rest in ((amp, batches[2:]), (later, batches[2:]), (plain, batches)):
        train(one, rest)
    assert_same(everything(later), everything(amp))
    assert str(own_keys(later.optimizers[0])) == str(own_keys(amp.optimizers[0])) == str(own_keys(plain.optimizers[0]))
    alone = make(Net().parameters())
    torch.optim.Optimizer.load_state_dict(alone, plain.optimizers[0].state_dict())
    assert str(own_keys(alone)) == str(own_keys(plain.optimizers[0]))


def test_state_of_a_group_that_was_removed_is_named_when_it_is_saved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    amp = mezzo.prepare(model, torch.optim.AdamW([{"params": part.parameters()} for part in model]), "bf16")
    train(amp, [batch()])
    group = amp.optimizers[0].param_groups.pop(0)
    assert message_of(CheckpointError, amp.state_dict) == (
        "amp.state_dict() was asked of a AdamW that has state of 2 parameters which are in none of its groups any more. "
        "Delete it, as in del optimizer.state[parameter], and save again."
    )
    for p in group["params"]:
        del amp.optimizers[0].state[p]
    assert len(amp.state_dict()["optimizers"][0]["state"]) == 2


@pytest.mark.parametrize(("policy", "scale"), [("fp16", 256.0), ("fp16-master", 256.0), ("bf16", 1.0)])
def test_the_loss_scale_of_a_checkpoint_of_torchs_scaler(policy: str, scale: float) -> None:
    """The three states that a loop of torch.amp saves: a scale that was found is not looked for again."""
    plain = nn.Linear(4, 2)
    optimizer, scaler = torch.optim.AdamW(plain.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(plain(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    saved = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    model = nn.Linear(4, 2)
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    sentences = amp.load_state_dict(saved)
    assert amp.scale == scale and not any("no loss scale was saved" in s for s in sentences)
    assert any("the saved loss scale 256 is dropped" in s for s in sentences) is (policy == "bf16")

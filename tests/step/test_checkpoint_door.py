"""Loading: a checkpoint is read completely before a bit is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.step_models import Net, assert_same, batch, everything, mse
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mezzo
from mezzo.errors import CheckpointError

NAN = float("nan")


def make(policy: str = "fp16-master, scaling.init_scale=256", lr: float = 0.01) -> mezzo.Stepper:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), policy)
    for _ in range(2):
        x, y = batch()
        amp.zero_grad()
        amp.backward(mse(model(x), y))
        amp.step()
    return amp


State = dict[str, Any]


def _entry(state: Any, path: str) -> tuple[Any, Any]:
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in way:
        state = state[key]
    return state, last


def _set(path: str, value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        holder, last = _entry(state, path)
        holder[last] = value

    return change


def _widen(path: str) -> Callable[[State], None]:
    """As a run that kept weights in fp32 saved them."""

    def change(state: State) -> None:
        state[path]["inner.weight"] = torch.full_like(state[path]["inner.weight"], 1e5, dtype=torch.float32)

    return change


def _drop(path: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        holder, last = _entry(state, path)
        del holder[last]

    return change


def _freed() -> Tensor:
    tensor = torch.ones(1, 8)
    tensor.untyped_storage().resize_(0)
    return tensor


FAULTS: dict[str, tuple[Callable[[State], None], str]] = {
    "scale NaN": (_set("scaling/scale", NAN), "scale.*nan"),
    "scale zero": (_set("scaling/scale", 0.0), "scale.*0"),
    "scale negative": (_set("scaling/scale", -5.0), "scale.*-5"),
    "scale infinite": (_set("scaling/scale", float("inf")), "scale.*inf"),
    "scale text": (_set("scaling/scale", "big"), "scale.*'big'"),
    "scale missing": (_drop("scaling/scale"), "scale"),
    "scaling unknown": (_set("scaling/speed", 1.0), "speed"),
    "scaling list": (_set("scaling", [1.0]), "scaling"),
    "growth negative": (_set("scaling/growth_tracker", -1), "growth_tracker.*-1"),
    "weight missing": (_drop("model/inner.weight"), r"inner\.weight.*missing|missing.*inner\.weight"),
    "weight unknown": (_set("model/other", torch.ones(1)), "other"),
    "weight misshapen": (_set("model/outer.weight", torch.ones(2, 2)), r"outer\.weight.*\[2, 2\].*\[1, 8\]"),
    "weight freed": (_set("model/outer.weight", _freed()), r"outer\.weight.*ends beyond its storage of 0 bytes"),
    "weight no tensor": (_set("model/outer.weight", [1.0]), r"outer\.weight"),
    "weight of a number": (lambda state: state["model"].update({3: torch.ones(1)}), "unknown 1 .3."),
    "model no mapping": (_set("model", 3), "model"),
    "counter unknown": (_set("counters/seeen", 1), "seeen"),
    "counter negative": (_set("counters/seen", -1), "seen.*-1"),
    "counter text": (_set("counters/seen", "many"), "seen.*'many'"),
    "counters list": (_set("counters", [1]), "counters"),
    "policy text": (_set("policy", 5), "policy"),
    "policy version": (lambda state: state["policy"].update(version=torch.ones(2)), "policy of version"),
    "policy unknown": (_set("policy", {"computer": "bf16"}), "computer"),
    "optimizer no mapping": (_set("optimizers/0", 5), "optimizer"),
    "optimizer empty": (_set("optimizers/0", {}), "param_groups"),
    "groups fewer": (_set("optimizers/0/param_groups", []), "group"),
    "group sizes": (_set("optimizers/0/param_groups/0/params", [0, 1]), "param"),
    "moment misshapen": (_set("optimizers/0/state/0/exp_avg", torch.ones(3)), r"exp_avg.*\[3\]"),
    "moment text": (_set("optimizers/0/state/1/exp_avg", "x"), "exp_avg"),
    "moment NaN": (lambda state: state["optimizers"][0]["state"][0]["exp_avg"].view(-1)[:1].fill_(NAN), "exp_avg.*NaN"),
    "square NaN": (
        lambda state: state["optimizers"][0]["state"][1]["exp_avg_sq"].view(-1)[:1].fill_(NAN),
        "exp_avg_sq.*NaN",
    ),
    "square negative": (_set("optimizers/0/state/0/exp_avg_sq", -torch.ones(8, 4)), "exp_avg_sq.*below 0"),
    "master misshapen": (_set("optimizers/0/state/0/master", torch.ones(3)), r"master.*\[3\]"),
    "rate text": (_set("optimizers/0/param_groups/0/lr", "fast"), "lr.*'fast', and must be a number"),
    "state of nobody": (_set("optimizers/0/state/99", {}), "99"),
    "a weight beyond fp16": (_widen("model"), r"largest number is 65504, and inner\.weight \(100000\) would be inf"),
    "state no mapping": (_set("optimizers/0/state/0", 3), "state"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_changed(fault: str) -> None:
    change, match = FAULTS[fault]
    saved = copy.deepcopy(make(lr=0.1).state_dict())
    change(saved)
    amp = make()
    before, counters, scale = everything(amp), amp.counters(), amp.scale
    groups = [{k: v for k, v in g.items() if k != "params"} for g in amp.optimizers[0].param_groups]
    with pytest.raises(CheckpointError, match=match):
        amp.load_state_dict(saved)
    assert_same(everything(amp), before)
    assert (amp.counters(), amp.scale) == (counters, scale)
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in amp.optimizers[0].param_groups]
    x, y = batch()
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y))
    assert amp.step()


def test_an_optimizer_that_refuses_leaves_the_weights() -> None:
    """The load of any optimizer may raise; weights and the other optimizers are then as they were."""

    class Refusing(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            raise RuntimeError("planted")

    def make_two(last: type[torch.optim.SGD]) -> mezzo.Stepper:
        model = Net()
        first, second = list(model.parameters())[:4], list(model.parameters())[4:]
        both = [torch.optim.Adam(first, lr=0.1), last(second, lr=0.1, momentum=0.9)]
        amp = mezzo.prepare(model, both, "bf16")
        x, y = batch()
        amp.backward(mse(model(x), y))
        amp.step()
        return amp

    saved = make_two(torch.optim.SGD).state_dict()
    amp = make_two(Refusing)
    before = everything(amp)
    with pytest.raises(CheckpointError, match="planted"):
        amp.load_state_dict(saved)
    assert_same(everything(amp), before)


def test_weights_beyond_fp16_are_refused_before_they_are_loaded_into_the_model() -> None:
    amp = make()
    before = everything(amp)
    saved = {**amp.export_weights(), "inner.weight": torch.full_like(amp.export_weights()["inner.weight"], -1e5)}
    with pytest.raises(CheckpointError, match=r"inner\.weight \(100000\) would be inf there\. Load them before"):
        amp.model.load_state_dict(saved)
    part = amp.model.get_submodule("inner")
    with pytest.raises(CheckpointError, match=r"and weight \(100000\) would be inf there\. Load them before"):
        part.load_state_dict({name: saved[f"inner.{name}"] for name in part.state_dict()})
    assert_same(everything(amp), before)


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling.init_scale=16"])
def test_weights_loaded_into_the_model_are_the_masters(policy: str) -> None:
    """model.load_state_dict(best): export and the next step start there, not at best plus an old remainder."""
    amp = make(policy)
    best = {name: torch.randn_like(p, dtype=torch.float32) for name, p in amp.model.named_parameters()}
    amp.model.load_state_dict(best, strict=False)
    exported = amp.export_weights()
    assert all(torch.equal(exported[name], value) for name, value in best.items())
    wrapper = nn.ModuleDict({"module": amp.model})
    again = {name: value * 2 for name, value in best.items()}
    wrapper.load_state_dict({f"module.{name}": value for name, value in again.items()}, strict=False)
    exported = amp.export_weights()
    assert all(torch.equal(exported[name], value) for name, value in again.items())


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling.init_scale=16"])
def test_weights_loaded_into_a_part_of_the_model_are_its_masters(policy: str) -> None:
    """model.encoder.load_state_dict(pretrained), also after a load that failed."""
    amp = make(policy)
    before = amp.export_weights()
    with pytest.raises(RuntimeError, match="size mismatch"):
        amp.model.load_state_dict({"inner.weight": torch.ones(1, 1)}, strict=False)
    part = amp.model.get_submodule("inner")
    best = {name: torch.randn_like(p, dtype=torch.float32) for name, p in part.named_parameters()}
    part.load_state_dict(best)
    after = {f"inner.{name}": value for name, value in best.items()}
    assert_same(amp.export_weights(), {**before, **after})


@pytest.mark.parametrize(
    "policy", ["bf16-master", "fp16-master, scaling.init_scale=16", "bf16, params=bf16, master=kahan"]
)
def test_masters_loaded_before_their_weights_stay(policy: str) -> None:
    """torch's own functions load the optimizer's state first, then the 16-bit weights beside it."""
    amp, other = make(policy), make(policy)
    weights, state = copy.deepcopy(get_state_dict(other.model, other.optimizers[0]))
    masters = {name: value.clone() for name, value in other.export_weights().items()}
    set_state_dict(amp.model, amp.optimizers[0], model_state_dict=weights, optim_state_dict=state)
    assert all(torch.equal(value, masters[name]) for name, value in amp.export_weights().items())
    x, y = batch()
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y))
    amp.step()
    amp.model.load_state_dict(weights)
    assert all(torch.equal(value, weights[name].float()) for name, value in amp.export_weights().items())


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "bf16, params=bf16, master=split"])
def test_weights_and_squares_that_are_not_finite_are_named_when_they_are_loaded(policy: str) -> None:
    """A run may go on beside them: a row that nothing reads, a square beyond fp16."""
    amp, saved = make(policy), copy.deepcopy(make(policy).state_dict())
    saved["model"]["inner.weight"][0, 0] = NAN
    saved["optimizers"][0]["state"][1]["exp_avg_sq"][0] = float("inf")
    told = amp.load_state_dict(saved)
    assert any("inf or NaN" in one and "inner.weight" in one and "exp_avg_sq of inner.bias" in one for one in told)
    assert amp.load_state_dict(make(policy).state_dict()) == ()


def test_expanded_moments_are_stepped() -> None:
    """Nobody can write one that lies in a single number, as torch says in its own words."""
    for kind in (torch.optim.AdamW, torch.optim.SGD, mezzo.optim.AdamW):
        model = Net()
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        amp = mezzo.prepare(model, kind(model.parameters(), lr=0.1, **more), "bf16")
        x, y = batch()
        for _ in range(2):
            amp.zero_grad()
            amp.backward(mse(model(x), y))
            assert amp.step()
            saved = amp.state_dict()
            name = "momentum_buffer" if more else "exp_avg"
            saved["optimizers"][0]["state"][0][name] = torch.zeros(1, 1).expand(8, 4)
            amp.load_state_dict(saved)


@pytest.mark.parametrize("policy", ["bf16-master", "bf16-master, master=fp32"])
def test_masters_of_a_part_that_was_added_follow_its_own_load(policy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy)
    model.append(part := nn.Linear(4, 2).bfloat16())
    amp.optimizers[0].add_param_group({"params": [*part.parameters()]})
    amp.backward(model(torch.ones(1, 4)).sum())
    assert amp.step()
    part.load_state_dict({"weight": torch.full((2, 4), 3.001), "bias": torch.zeros(2)})
    assert amp.optimizers[0].master(part.weight)[0, 0] == pytest.approx(3.001)
    amp.release()
    assert not part._load_state_dict_pre_hooks and not part._load_state_dict_post_hooks


def test_the_state_of_a_scaler_alone_is_told_where_it_goes() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "fp16")
    saved = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
    with pytest.raises(
        CheckpointError, match=r"Write a GradScaler's beside weights: \{'model': .*'scaler': scaler_state\}"
    ):
        amp.load_state_dict(saved)
    plain = {"model": model.state_dict(), "optimizer": amp.optimizers[0].state_dict(), "scaler": saved}
    amp.load_state_dict(plain)
    assert amp.scale == 1024

"""What is given to a public call in place of what it takes: a sentence of mezzo's, or it is taken; never an error from inside."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.messages import message_of
from torch import nn

import mezzo
import mezzo.train
from mezzo.errors import ConfigError, MezzoError, PolicyError, as_flag, check_given
from mezzo.formats import native_support, parse_dtype, ulp
from mezzo.loss_scale import LossScale, next_state
from mezzo.policy import ModuleRule
from mezzo.train import parameter_groups


class Rude:
    """Raises whatever it is asked."""

    def _raises(self, *_: object) -> Any:
        raise KeyError("mine")

    __repr__ = __str__ = __bool__ = __eq__ = _raises
    __hash__ = object.__hash__


class Plain:
    def __init__(self, *_: object) -> None: ...


class Word(enum.Enum):
    BF16 = "bf16"


def wrong() -> dict[str, Any]:
    """Values of every kind, new each time: a call may use one up, or write into it."""
    return {
        "None": None, "text": "nonsense", "empty": "", "int": 7, "True": True, "-1": -1, "0": 0, "nan": float("nan"), "inf": float("inf"),
        "huge": 10**400, "list": [None], "no list": [], "dict": {"a": 1}, "set": {1}, "array": np.array([1.0, 2.0]), "array 0-d": np.array(3.0),
        "no tensor": torch.zeros(0), "tensor of 1": torch.tensor(2.0), "tensor": torch.ones(3, 2), "whole tensor": torch.ones(2).long(),
        "meta": torch.ones(2, device="meta"), "complex tensor": torch.ones((), dtype=torch.complex64), "complex": 1j, "object": object(),
        "class": Plain, "generator": (i for i in [1, 2]), "bytes": b"ab", "path": Path("nowhere"), "enum": Word.BF16, "rude": Rude(),
        "dtype": torch.int64, "function": lambda *_: None, "NUL": "a\0b", "half a character": "\udc80",
    }  # fmt: skip


def rules() -> mezzo.Policy:
    return mezzo.Policy.parse("bf16, *.norm*=fp32")


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights())


def prepared() -> mezzo.Stepper:
    model = nn.Linear(2, 1)
    return mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master")


def backward(inputs: Any) -> None:
    amp = prepared()
    amp.backward(amp.model(torch.ones(1, 2)).sum(), inputs=inputs)


def master_weights() -> mezzo.optim.MasterWeights:
    return mezzo.optim.MasterWeights(torch.optim.RMSprop([nn.Parameter(torch.ones(2).bfloat16())]))


def with_flag(name: str, value: Any) -> None:
    mezzo.optim.AdamW(weights(), **{name: value})


def with_flag_set(name: str, value: Any) -> None:
    stepped = mezzo.optim.AdamW(weights())
    stepped.param_groups[0].update({name: value})
    stepped.param_groups[0]["params"][0].grad = torch.ones(2)
    stepped.step()


def report() -> mezzo.diagnose.Report:
    return mezzo.diagnose.lint(nn.Linear(2, 1), torch.ones(1, 2))


TEXTS = {"text", "empty", "NUL", "half a character"}
TENSORS = {"no tensor", "tensor of 1", "tensor", "whole tensor", "meta", "complex tensor"}
FLAGS = {*wrong()} - {
    "array",
    "no tensor",
    "tensor",
    "whole tensor",
    "meta",
    "rude",
    "class",
    "function",
    "bytes",
    *TEXTS,
}
UNSET = {"None", "0"}
CONFIG, STATE = mezzo.ScalingConfig(), LossScale(scale=2.0)
NUMBERS = {"int", "True", "-1", "0", "nan", "inf"}

DOORS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "ModuleRule(precision)": (lambda v: ModuleRule(pattern="a", precision=v), set()),
    "ModuleRule.matches(fqn)": (lambda v: rules().modules[0].matches(v), TEXTS),
    "ModuleRule.matches(class_names)": (lambda v: rules().modules[0].matches("a", v), {*TEXTS, "no list", "no tensor", "dict"}),
    "Policy(modules)": (lambda v: mezzo.Policy(modules=v), set()),
    "Policy(ops)": (lambda v: mezzo.Policy(ops=v), set()),
    "Policy(guard)": (lambda v: mezzo.Policy(guard=v), set()),
    "Policy.module_rule(fqn)": (lambda v: rules().module_rule(v), TEXTS),
    "Policy.module_rule(class_names)": (lambda v: rules().module_rule("a", v), {*TEXTS, "no list", "no tensor", "dict"}),
    "Policy.check_modules": (lambda v: rules().check_modules(v), set()),
    "Policy.check_modules, one": (lambda v: rules().check_modules([v]), set()),
    "Policy.check_modules, its name": (lambda v: mezzo.Policy().check_modules([(v, ())]), TEXTS),
    "Policy.why(op)": (lambda v: rules().why("a", v), {"None"}),
    "Policy.why(class_name)": (lambda v: rules().why("a", class_name=v), {*TEXTS, "no list", "no tensor", "dict"}),
    "autocast(enabled)": (lambda v: mezzo.autocast("cpu", enabled=v), FLAGS),
    "autocast(cache_enabled)": (lambda v: mezzo.autocast("cpu", cache_enabled=v), FLAGS),
    "autocast(strict)": (lambda v: mezzo.autocast("cpu", strict=v), FLAGS),
    "autocast(cache)": (lambda v: mezzo.autocast("cpu", cache=v), set()),
    "autocast.current(enabled)": (lambda v: mezzo.autocast.current(enabled=v), FLAGS),
    "custom_fwd": (lambda v: mezzo.custom_fwd(v), {"None", "function"}),
    "custom_fwd(device_type)": (lambda v: mezzo.custom_fwd(device_type=v), {"None"}),
    "custom_fwd(cast_inputs)": (lambda v: mezzo.custom_fwd(cast_inputs=v), {"None"}),
    "custom_bwd": (lambda v: mezzo.custom_bwd(v), {"None", "function"}),
    "custom_bwd(device_type)": (lambda v: mezzo.custom_bwd(device_type=v), {"None"}),
    "GradScaler(enabled)": (lambda v: mezzo.GradScaler("cpu", enabled=v), FLAGS),
    "GradScaler(min_scale)": (lambda v: mezzo.GradScaler("cpu", min_scale=v), {"int", "0"}),
    "GradScaler.mark_scaled": (lambda v: mezzo.GradScaler("cpu").mark_scaled(v), set()),
    "next_state(state)": (lambda v: next_state(v, True, CONFIG), set()),
    "next_state(config)": (lambda v: next_state(STATE, True, v), set()),
    "next_state(state.scale)": (lambda v: next_state(LossScale(scale=v), 0, CONFIG).scale is None, {*NUMBERS, "tensor of 1"} - {"True"}),
    "LossScale.start": (lambda v: LossScale.start(v), set()),
    # A number is a device of the accelerator that torch was built for, here or not.
    "LossScale.to": (lambda v: STATE.to("no device" if isinstance(v, int) else v), set()),
    "parse_dtype": (parse_dtype, set()),
    "ulp": (ulp, {"no tensor", "tensor of 1", "tensor", "meta"}),
    "native_support(dtype)": (lambda v: native_support("cpu", v), set()),
    "AdamW(params)": (lambda v: mezzo.optim.AdamW(v), set()),
    "AdamW, a parameter": (lambda v: mezzo.optim.AdamW([*weights(), v]), TENSORS),
    "AdamW, a parameter of a group": (lambda v: mezzo.optim.AdamW([{"params": [v]}]), TENSORS),
    "AdamW.add_param_group": (lambda v: mezzo.optim.AdamW(weights()).add_param_group(v), set()),
    "AdamW(differentiable)": (lambda v: mezzo.optim.AdamW(weights(), differentiable=v), UNSET),
    **{f"AdamW({name})": (partial(with_flag, name), UNSET | {"True"}) for name in ("amsgrad", "maximize", "foreach", "capturable", "fused")},
    **{f"AdamW, {name} of a group": (partial(with_flag_set, name), UNSET | {"True"}) for name in ("amsgrad", "maximize", "decoupled_weight_decay")},
    "AdamW, differentiable of a group": (partial(with_flag_set, "differentiable"), UNSET),
    "AdamW(betas)": (lambda v: mezzo.optim.AdamW(weights(), betas=v), set()),
    "AdamW.step": (lambda v: mezzo.optim.AdamW(weights()).step(v), {"None", "class", "function"}),
    "AdamW.master": (lambda v: mezzo.optim.AdamW(weights()).master(v), set()),
    "SGD(nesterov)": (lambda v: mezzo.optim.SGD(weights(), momentum=0.9, nesterov=v), UNSET | {"True"}),
    "SGD(differentiable)": (lambda v: mezzo.optim.SGD(weights(), differentiable=v), UNSET),
    "Trace.assume_scale": (lambda v: mezzo.diagnose.trace(nn.Linear(2, 1)).assume_scale(v), {"int", "True", "array 0-d", "tensor of 1"}),
    "MasterWeights.add_param_group": (lambda v: master_weights().add_param_group(v), set()),
    "MasterWeights.step": (lambda v: master_weights().step(v), {"None", "class", "function"}),
    "adopt(policy)": (lambda v: mezzo.optim.adopt(optimizer(), v), set()),
    "prepare(optimizer)": (lambda v: mezzo.prepare(nn.Linear(2, 1), v, "bf16"), {"None", "empty", "no list"}),
    "amp.step": (lambda v: prepared().step(v), set()),
    "amp.zero_grad": (lambda v: prepared().zero_grad(v), FLAGS),
    "amp.state_dict": (lambda v: prepared().state_dict(weights=v), FLAGS),
    "amp.report": (lambda v: prepared().report(v), FLAGS),
    "amp.backward(inputs)": (lambda v: backward(inputs=v), {"None"}),
    "amp.grad": (lambda v: prepared().grad(torch.ones(1, requires_grad=True).sum(), v), set()),
    "GradScaler(device)": (lambda v: mezzo.GradScaler("no device" if isinstance(v, int) else v), {"None"}),
    "fully_shard": (lambda v: mezzo.distributed.fully_shard(v, "bf16"), set()),
    "plan_shards(units)": (lambda v: mezzo.distributed.plan_shards(nn.Linear(2, 1), mezzo.Policy(), [v]), set()),
    "parameter_groups": (lambda v: parameter_groups(v, 0.1), set()),
    "train.run": (mezzo.train.run, set()),
    "record(twice_every)": (lambda v: mezzo.record(prepared(), "r", twice_every=v), {"0"}),
    "watch(every)": (lambda v: mezzo.diagnose.watch(prepared(), every=v), {"int"}),
    "named_function": (mezzo.diagnose.named_function, set()),
    "check_up": (lambda v: mezzo.diagnose.check_up(v), set()),
    "segment_of": (lambda v: mezzo.diagnose.segment_of(v, 1), set()),
    "trace_script": (lambda v: mezzo.diagnose.trace_script(v), set()),
    "trace_script(arguments)": (lambda v: mezzo.diagnose.trace_script("s.py", v), {"no list", "list"}),
    "trace_script(steps)": (lambda v: mezzo.diagnose.trace_script("s.py", steps=v), {"None", "int"}),
    "Report.to_text": (lambda v: report().to_text(full=v), FLAGS),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text("x = 1\n")
    yield


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_such_value_is_refused_in_a_sentence(door: str) -> None:
    call, takes = DOORS[door]
    taken, kinds = set(), wrong()
    for name in kinds:
        try:
            call(wrong()[name])
            taken.add(name)
        except MezzoError as refusal:
            assert len(str(refusal)) > 20, name
        except Exception as inside:
            pytest.fail(f"{door} of {name}: {type(inside).__name__}: {inside}")
    assert taken == takes


def test_the_sentence_names_call_argument_what_came_and_what_to_give() -> None:
    assert (
        message_of(PolicyError, check_given, "next_state", "state", nn.Linear, LossScale, "a LossScale", PolicyError)
        == "next_state was given the class Linear for state; give a LossScale."
    )
    assert (
        message_of(ConfigError, as_flag, "to_text", "full", torch.ones(2))
        == "to_text was given Tensor for full; give True or False."
    )


def test_a_policy_file_without_an_end_is_refused() -> None:
    with Path("p.toml").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(PolicyError, match=r"'p\.toml' has more than 67,108,864 characters, and no policy has so many"):
        mezzo.Policy.load("p.toml")


def test_adopt_takes_a_policy_as_prepare_does() -> None:
    mine = optimizer()
    assert type(mezzo.optim.adopt(mine, "bf16-master")).__mro__[1] is mezzo.optim.AdamW


def test_the_class_of_a_module_is_one_name() -> None:
    policy = mezzo.Policy.parse("bf16, LayerNorm=fp32")
    assert (
        policy.module_rule("a", "LayerNorm")
        is policy.module_rule("a", (name for name in ["LayerNorm"]))
        is policy.modules[-1]
    )

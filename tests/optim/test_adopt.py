"""Optimizers that torch made are stepped by mezzo's kernels, stay torch's to everybody else, and are given back."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.optim.streams import equal, feed, gradients, parameters, snapshot
from tests.saved import through_a_file
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

import mezzo
from mezzo.errors import ConfigError, MasterError
from mezzo.optim import MasterWeights, adopt, release, wrapped_optimizer
from mezzo.optim.base import MasterOptimizer
from mezzo.policy import Policy

KINDS: list[tuple[Any, Any, dict[str, Any]]] = [
    (torch.optim.AdamW, mezzo.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, mezzo.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True, "fused": True}),
    (torch.optim.Adam, mezzo.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}),
    (torch.optim.Adam, mezzo.optim.Adam, {"lr": 0.01, "foreach": True}),
    (torch.optim.SGD, mezzo.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, mezzo.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, mezzo.optim.SGD, {"lr": 0.1}),
]
POLICIES = ["bf16-master", "bf16-master, master=kahan", "bf16-master, master=stochastic, state=bf16", "fp16-master"]


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def store(optimizer: Any, policy: Policy) -> None:
    """Store weights in 16 bit, as `prepare` does."""
    for p in params_of(optimizer):
        value = p.detach()
        p.data = value.to(policy.params)
        optimizer.set_masters_({p: value})


def adopted(kind: Any, options: dict[str, Any], policy: Policy, params: Any = None) -> Any:
    optimizer = adopt(kind(params or parameters(torch.float32), **options), policy)
    store(optimizer, policy)
    return optimizer


def own(kind: Any, options: dict[str, Any], policy: Policy) -> Any:
    optimizer = kind(parameters(torch.float32), master=policy.master, state_dtype=policy.state, **options)
    store(optimizer, policy)
    return optimizer


def run(optimizers: list[Any], policy: Policy, steps: int, seed: int = 2) -> None:
    for grads in gradients(params_of(optimizers[0]), steps, policy.params, seed):
        for optimizer in optimizers:
            feed(optimizer, grads)


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize(("torchs", "ours", "options"), KINDS)
def test_the_trajectory_is_that_of_mezzos_optimizer(torchs: Any, ours: Any, options: dict[str, Any], text: str) -> None:
    policy = Policy.parse(text)
    given = torchs(parameters(torch.float32), **options)
    got = adopt(given, policy)
    assert got is given
    assert isinstance(got, torchs)
    assert isinstance(got, MasterOptimizer)
    store(got, policy)
    want = own(ours, options, policy)
    run([got, want], policy, 6)
    assert equal(snapshot(got), snapshot(want))


@pytest.mark.parametrize(("torchs", "ours", "options"), KINDS)
def test_the_masters_go_the_way_of_torch_on_fp32_weights(torchs: Any, ours: Any, options: dict[str, Any]) -> None:
    policy = Policy.parse("bf16-master")
    alone = {name: value for name, value in options.items() if name not in ("fused", "foreach")} | {"foreach": False}
    got, want = adopted(torchs, options, policy), torchs(parameters(torch.float32), **alone)
    for group in got.param_groups:
        group["backend"] = "reference"
    for grads in gradients(params_of(got), 8, torch.bfloat16):
        feed(got, grads)
        feed(want, grads)
    for p, q in zip(params_of(got), params_of(want), strict=True):
        assert torch.equal(got.master(p), q)


@pytest.mark.parametrize(("torchs", "ours", "options"), KINDS)
def test_steps_taken_before_count(torchs: Any, ours: Any, options: dict[str, Any]) -> None:
    """fp32 steps of torch, then steps on 16-bit weights: the state is taken over bit for bit."""
    policy = Policy.parse("bf16-master")
    plain, same = (torchs(parameters(torch.float32), **options) for _ in range(2))
    run([plain, same], Policy.parse("fp32"), 3)
    got = adopt(plain, policy)
    want = ours(params_of(same), master="split", **options)
    want.load_state_dict(same.state_dict())
    for optimizer in (got, want):
        store(optimizer, policy)
    run([got, want], policy, 3, seed=7)
    assert equal(snapshot(got), snapshot(want))


@pytest.mark.parametrize(("torchs", "ours", "options"), KINDS)
def test_the_state_dict_is_torchs_and_moves_both_ways(torchs: Any, ours: Any, options: dict[str, Any]) -> None:
    policy = Policy.parse("bf16-master")
    got = adopted(torchs, options, policy)
    run([got], policy, 3)
    saved = through_a_file(got.state_dict())
    plain = torchs([torch.nn.Parameter(got.master(p).clone()) for p in params_of(got)], **options)
    assert [group.keys() for group in saved["param_groups"]] == [g.keys() for g in plain.state_dict()["param_groups"]]
    plain.load_state_dict(copy.deepcopy(saved))
    wide = torchs(copy.deepcopy(params_of(plain)), **options)
    wide.load_state_dict(copy.deepcopy(plain.state_dict()))
    run([plain], Policy.parse("fp32"), 2)
    other = adopted(torchs, options, policy)
    with torch.no_grad():
        for new, old in zip(params_of(other), params_of(got), strict=True):
            new.copy_(old)
    other.load_state_dict(saved)
    run([got, other], policy, 3, seed=5)
    for p, q in zip(params_of(got), params_of(other), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(held, other.state[q][name]) for name, held in got.state[p].items())


def test_schedulers_hooks_and_groups_go_on_whenever_they_were_made() -> None:
    policy, seen = Policy.parse("bf16-master"), []
    optimizer = torch.optim.AdamW(parameters(torch.float32), lr=0.8)
    before = StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    adopt(optimizer, policy)
    store(optimizer, policy)
    after = StepLR(optimizer, 1, gamma=0.5)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], "lr": 0.4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for grads in gradients(params_of(optimizer), 2, torch.bfloat16):
            feed(optimizer, grads)
            before.step()
            after.step()
    assert seen == ["pre", "post"] * 2
    assert isinstance(optimizer, MasterOptimizer)
    assert optimizer.aux_state(params_of(optimizer)[-1])[0] == "split"
    assert optimizer.state[params_of(optimizer)[-1]]["step"] == 2
    assert optimizer.param_groups[0]["lr"] == 0.8 / 16
    with pytest.raises(MasterError, match="fp16"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.float16))]})
    assert len(optimizer.param_groups) == 2


def test_copies_and_pickles_go_on_alike() -> None:
    policy = Policy.parse("bf16-master")
    one = adopted(torch.optim.Adam, {"lr": 0.1}, policy)
    run([one], policy, 2)
    others = [copy.deepcopy(one), pickle.loads(pickle.dumps(one))]
    run([one, *others], policy, 2)
    assert all(equal(snapshot(one), snapshot(other)) for other in others)


@pytest.mark.parametrize("text", ["bf16-master", "bf16-master, state=bf16"])
@pytest.mark.parametrize(("torchs", "ours", "options"), KINDS)
def test_what_is_given_back_is_plain_and_goes_on(torchs: Any, ours: Any, options: dict[str, Any], text: str) -> None:
    policy = Policy.parse(text)
    optimizer = torchs(parameters(torch.float32), **options)
    scheduler = StepLR(optimizer, 1, gamma=1.0)
    keys = [set(options) for options in (optimizer.defaults, *optimizer.param_groups)]
    adopt(optimizer, policy)
    store(optimizer, policy)
    run([optimizer], policy, 3)
    twin = torchs([torch.nn.Parameter(optimizer.master(p).clone()) for p in params_of(optimizer)], **options)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in params_of(optimizer):
        p.data = optimizer.master(p)
    assert release(optimizer) is optimizer
    assert type(optimizer) is torchs
    assert [set(options) for options in (optimizer.defaults, *optimizer.param_groups)] == keys
    assert not any(name in entry for entry in optimizer.state.values() for name in ("remainder", "master"))
    run([optimizer, twin], Policy.parse("fp32"), 3, seed=4)
    scheduler.step()
    assert all(torch.equal(p, q) for p, q in zip(params_of(optimizer), params_of(twin), strict=True))


def test_an_optimizer_of_mezzo_takes_the_masters_of_the_policy() -> None:
    policy = Policy.parse("bf16-master, master=kahan")
    chosen = [torch.nn.Parameter(torch.ones(2))]
    optimizer = mezzo.optim.SGD([{"params": parameters(torch.float32)}, {"params": chosen, "master": "fp32"}], lr=0.1)
    assert adopt(optimizer, policy) is optimizer and type(optimizer) is mezzo.optim.SGD
    assert [group["master"] for group in optimizer.param_groups] == ["kahan", "fp32"]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    release(optimizer)
    assert [group["master"] for group in optimizer.param_groups][:2] == [None, "fp32"]
    with pytest.raises(MasterError, match="master='none' keeps nothing"):
        mezzo.optim.SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])


class Mine(torch.optim.AdamW):
    """Somebody's subclass, whose step may be another."""


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Muon, Mine])
@pytest.mark.parametrize("text", POLICIES[:2])
def test_any_other_optimizer_gets_masters_around_it(kind: Any, text: str) -> None:
    policy = Policy.parse(text)
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))]
    inner = kind(params, lr=0.01)
    got = adopt(inner, policy)
    assert isinstance(got, MasterWeights)
    assert (got.inner, got.masters.mode) == (inner, policy.master)
    store(got, policy)
    want = kind([torch.nn.Parameter(params[0].detach().float())], lr=0.01)
    got.set_masters_({params[0]: params_of(want)[0].detach()})
    run([got, want], policy, 4)
    assert torch.allclose(got.master(params[0]), params_of(want)[0], atol=2.0**-14, rtol=2.0**-14)
    params[0].data = got.master(params[0])
    assert release(got) is inner
    assert set(inner.state[params[0]]) == set(want.state[params_of(want)[0]])
    feed(inner, [torch.ones(3, 4)])


def test_a_step_that_somebody_replaced_is_kept() -> None:
    optimizer = torch.optim.AdamW(parameters(torch.float32))
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    assert isinstance(adopt(optimizer, Policy.parse("bf16-master")), MasterWeights)


@pytest.mark.parametrize("text", ["fp32", "bf16", "fp16"])
def test_without_16_bit_weights_nothing_is_done(text: str) -> None:
    optimizer = torch.optim.AdamW(parameters(torch.float32))
    assert adopt(optimizer, Policy.parse(text)) is optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert release(optimizer) is optimizer


def test_16_bit_gradients_of_fp32_weights_are_stepped() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(5))], lr=0.5, fused=True)
    adopt(optimizer, Policy.parse("bf16, grads=bf16"))
    (p,) = params_of(optimizer)
    p.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]  # torch 2.9 and later
    p.grad = torch.ones(5, dtype=torch.bfloat16)
    optimizer.step()
    assert float(p.detach()[0]) == pytest.approx(0.495)


def test_what_cannot_be_taken_over_is_left_as_it_was() -> None:
    optimizer = torch.optim.AdamW(parameters(torch.float32), differentiable=True)
    keys = set(optimizer.param_groups[0])
    with pytest.raises(ConfigError, match="differentiable=True"):
        adopt(optimizer, Policy.parse("bf16-master"))
    assert type(optimizer) is torch.optim.AdamW
    assert set(optimizer.param_groups[0]) == keys


def test_state_of_an_adopted_optimizer_is_its_own() -> None:
    optimizer = adopted(torch.optim.AdamW, {"lr": 0.1}, Policy.parse("bf16-master"))
    run([optimizer], Policy.parse("bf16-master"), 2)
    state: dict[Tensor, Any] = optimizer.state
    assert all({"step", "exp_avg", "exp_avg_sq", "remainder"} == set(entry) for entry in state.values())


def test_the_optimizer_that_computes_is_the_one_inside_masters_and_any_other_itself() -> None:
    plain = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(2))])
    assert wrapped_optimizer(plain) is plain
    assert wrapped_optimizer(MasterWeights(plain, "fp32")) is plain


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_errors_say_the_class_that_the_user_wrote_and_pickle_finds_ours(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    adopt(optimizer, Policy.parse("bf16-master"))
    assert type(optimizer) is not kind and repr(optimizer).startswith(f"{kind.__name__} (")
    assert type(pickle.loads(pickle.dumps(optimizer))) is type(optimizer)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ConfigError, match=f"a group of {kind.__name__} has lr=nan"):
        optimizer.step()

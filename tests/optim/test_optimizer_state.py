"""State goes into a checkpoint and out of it, into the same mode bit for bit and into others as exactly as they allow."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.optim.streams import equal, feed, gradients, parameters, snapshot
from tests.saved import through_a_file
from tests.step.test_interrupted import interrupted
from torch import Tensor

from mezzo.errors import ConfigError
from mezzo.formats import format_of
from mezzo.optim import SGD, AdamW, MasterWeights

MODES = [
    ("split", torch.bfloat16), ("fp32", torch.bfloat16), ("fp32", torch.float16), ("kahan", torch.float16),
    ("stochastic", torch.bfloat16), ("none", torch.float32),
]  # fmt: skip
OPTIMIZERS = [(AdamW, {"lr": 0.01, "amsgrad": True}), (SGD, {"lr": 0.03, "momentum": 0.9, "dampening": 0.1})]


def trained(optimizer: Any, options: dict[str, Any], dtype: torch.dtype, steps: int = 3) -> Any:
    got = optimizer(parameters(dtype), **options)
    for grads in gradients(parameters(dtype), steps, torch.bfloat16):
        feed(got, grads)
    return got


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def go_on(optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for grads in gradients(parameters(torch.float32), steps, torch.bfloat16, seed=9):
        feed(optimizer, grads)


def moved(source: Any, target: Any) -> Any:
    """Load weights, then state, as a resuming program does."""
    with torch.no_grad():
        for new, old in zip(params_of(target), params_of(source), strict=True):
            new.copy_(old)
    target.load_state_dict(through_a_file(source.state_dict()))
    return target


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("master", "dtype"), MODES)
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_resume_is_bit_identical(
    optimizer: Any, options: dict[str, Any], master: str, dtype: torch.dtype, state_dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options = {**options, "master": master, "state_dtype": state_dtype}
    one = trained(optimizer, {**options, "rounding_seed": 5}, dtype)
    other = moved(one, optimizer(parameters(dtype, seed=8), **options))
    assert caplog.records == []
    assert equal(snapshot(one), snapshot(other))
    go_on(one)
    go_on(other)
    assert equal(snapshot(one), snapshot(other))
    assert all(one.master(a).equal(other.master(b)) for a, b in zip(params_of(one), params_of(other), strict=True))


@pytest.mark.parametrize(("master", "dtype"), MODES)
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_their_own_way(
    way: Any, optimizer: Any, options: dict[str, Any], master: str, dtype: torch.dtype
) -> None:
    one = trained(optimizer, {**options, "master": master}, dtype)
    before = snapshot(one)
    other = way(one)
    assert equal(snapshot(other), before)
    go_on(other)
    assert equal(snapshot(one), before)
    go_on(one)
    assert equal(snapshot(one), snapshot(other))


@pytest.mark.parametrize("master", ["split", "fp32", "kahan"])
def test_a_master_read_before_the_first_step_leaves_no_state(master: str) -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params, master=master)  # type: ignore[arg-type]
    assert all(torch.equal(optimizer.master(p), p.detach().float()) for p in params_of(optimizer))
    assert not optimizer.state and not optimizer.state_dict()["state"]


def test_loading_does_not_share_memory_with_the_state_dict() -> None:
    one = trained(AdamW, {"master": "split"}, torch.bfloat16)
    state = one.state_dict()
    assert {entry["remainder"].dtype for entry in state["state"].values()} == {
        torch.int16
    }  # 2 bytes a parameter on disk too
    other = AdamW(parameters(torch.bfloat16), master="split")
    other.load_state_dict(state)
    before = snapshot(one)
    go_on(other)
    assert equal(snapshot(one), before)


CONVERSIONS = [
    ("split", "fp32", 0.0), ("fp32", "split", 0.0), ("split", "kahan", 2.0**-16), ("fp32", "kahan", 2.0**-16),
    ("kahan", "split", 0.0), ("kahan", "fp32", 0.0), ("split", "stochastic", 2.0**-8), ("fp32", "stochastic", 2.0**-8),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "error"), CONVERSIONS)
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_conversion_keeps_what_the_mode_can_hold_and_says_so(
    optimizer: Any, options: dict[str, Any], source: str, target: str, error: float, caplog: pytest.LogCaptureFixture
) -> None:
    one = trained(optimizer, {**options, "master": source}, torch.bfloat16)
    other = moved(one, optimizer(parameters(torch.bfloat16), **options, master=target))
    assert [f"converted from {source} masters to {target}" in record.message for record in caplog.records] == [True]
    assert f"of {len(params_of(one))} parameters" in caplog.text
    for a, b in zip(params_of(one), params_of(other), strict=True):
        master = one.master(a)
        assert bool(((other.master(b) - master).abs() <= master.abs() * error + (error > 0) * 1e-40).all())
        assert ((b.float() - master).abs() <= (a.float() - master).abs()).all()
    assert other.param_groups[0]["master"] == target
    go_on(other)


@pytest.mark.parametrize("source", ["split", "fp32", "kahan"])
def test_16_bit_state_resumes_with_fp32_weights(source: str, caplog: pytest.LogCaptureFixture) -> None:
    one = trained(AdamW, {"master": source}, torch.bfloat16)
    other = moved(one, AdamW(parameters(torch.float32)))
    assert all(one.master(a).equal(b) for a, b in zip(params_of(one), params_of(other), strict=True))
    assert f"converted from {source} masters to fp32 weights, exactly" in caplog.text


@pytest.mark.parametrize("target", ["split", "fp32", "kahan"])
def test_a_checkpoint_without_masters_starts_from_its_weights(target: str, caplog: pytest.LogCaptureFixture) -> None:
    one = trained(AdamW, {}, torch.float32)
    other = moved(one, AdamW(parameters(torch.bfloat16), master=target))
    assert all(
        other.master(b).equal(a.bfloat16().float()) for a, b in zip(params_of(one), params_of(other), strict=True)
    )
    assert f"converted from no masters to {target}: they start from the 16-bit weights" in caplog.text
    other.state.clear()
    other.set_masters_(dict(zip(params_of(other), params_of(one), strict=True)))
    for a, b in zip(params_of(one), params_of(other), strict=True):
        bound = a.abs() * (0.0 if target != "kahan" else 2.0**-16)
        assert bool(((other.master(b) - a).abs() <= bound).all())


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [(AdamW, torch.optim.AdamW, {"lr": 0.01}), (SGD, torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "dampening": 0.1})],
)
@pytest.mark.parametrize("fused", [False, True])
def test_torchs_checkpoints_load_here_and_ours_there(
    ours: Any, torchs: Any, options: dict[str, Any], fused: bool
) -> None:
    theirs = trained(torchs, {**options, "fused": fused}, torch.float32)
    here = moved(theirs, ours(parameters(torch.float32, seed=3), **options, backend="reference"))
    there = moved(here, torchs(parameters(torch.float32, seed=4), **options))
    there.param_groups[0].update(fused=None, foreach=False)
    go_on(here)
    go_on(there)
    assert all(torch.equal(a, b) for a, b in zip(params_of(here), params_of(there), strict=True))


def test_each_parameter_counts_the_steps_it_took() -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(4)]
    twins = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    got, want = AdamW(params, lr=0.1, master="split"), torch.optim.AdamW(twins, lr=0.1, foreach=False)
    shown = [{0, 1}, {0, 1}, {0, 2}, {1, 3}, {0, 1, 2, 3}, {2}, {0, 1, 2, 3}]
    for present in shown:
        for place, (p, twin) in enumerate(zip(params, twins, strict=True)):
            p.grad = torch.ones(3, dtype=torch.bfloat16) if place in present else None
            twin.grad = torch.ones(3) if place in present else None
        got.step()
        want.step()
        got.load_state_dict(copy.deepcopy(got.state_dict()))
    assert [int(got.state[p]["step"]) for p in params] == [sum(i in s for s in shown) for i in range(4)]
    assert all(torch.equal(got.master(p), twin) for p, twin in zip(params, twins, strict=True))
    assert len({state["step"].data_ptr() for state in got.state.values()}) == 4


def test_a_state_of_another_shape_is_refused() -> None:
    one = trained(AdamW, {"master": "split"}, torch.bfloat16)
    with pytest.raises(ValueError, match="parameter group"):
        AdamW(parameters(torch.bfloat16)[:3], master="split").load_state_dict(one.state_dict())


def test_hooks_on_state_and_loading_see_plain_tensors(caplog: pytest.LogCaptureFixture) -> None:
    one = trained(AdamW, {"master": "split"}, torch.bfloat16)
    seen = []

    def before(_: Any, state: dict[str, Any]) -> None:
        seen.append(type(state["state"][0]["remainder"]))

    other = AdamW(parameters(torch.bfloat16), master="split")
    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params_of(o)[0]]["remainder"].dtype))
    moved(one, other)
    assert seen == [Tensor, torch.int16]
    assert logging.getLogger("mezzo.optim").name == "mezzo.optim"


def test_masters_survive_a_model_that_was_trained_in_fp32() -> None:
    exact = [p.detach() + 1e-4 * torch.randn(p.shape) for p in parameters(torch.float32)]
    for master, dtype in MODES[:4]:
        params = parameters(dtype)
        got = AdamW(params, master=master)
        got.set_masters_(dict(zip(params, exact, strict=True)))
        unit = format_of(dtype).eps / 2
        bound = 2 * unit * unit if master == "kahan" else 0.0
        for p, want in zip(params, exact, strict=True):
            assert bool(((got.master(p) - want).abs() <= bound * want.abs() + (bound > 0) * 2.0**-25).all())
        go_on(got, steps=1)
        assert int(got.state[params[0]]["step"]) == 1


class Counted(list[Tensor]):
    """Parameters of a group that counts how often it is walked."""

    walks = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.walks += 1
        return super().__iter__()


def test_a_parameter_is_found_in_its_group_without_a_walk_over_all_and_wherever_it_was_moved() -> None:
    params = [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(8)]
    optimizer = AdamW([{"params": params[:4], "master": "split"}, {"params": params[4:], "master": "kahan"}])
    first, second = optimizer.param_groups
    first["params"] = counted = Counted(first["params"])
    assert [optimizer.aux_state(p)[0] for p in params] == ["split"] * 4 + ["kahan"] * 4
    assert counted.walks == 1
    second["params"].append(counted.pop(0))
    assert [optimizer.aux_state(p)[0] for p in params] == ["kahan", *["split"] * 3, *["kahan"] * 4]
    gone = second["params"].pop(1)
    with pytest.raises(ConfigError, match="is not a parameter of this AdamW"):
        optimizer.aux_state(gone)
    optimizer.param_groups[1] = {**second, "master": "fp32"}
    assert optimizer.aux_state(params[7])[0] == "fp32"


@pytest.mark.parametrize("mode", ["split", "fp32", "kahan", "stochastic"])
def test_a_load_into_masters_that_ctrl_c_ends_leaves_them_as_they_were_or_takes_all(mode: Any) -> None:
    """Its own load_state_dict, which nothing around takes back: the optimizer goes on as if it had not been called, or had ended."""

    def made(steps: int) -> tuple[MasterWeights, list[torch.nn.Parameter]]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3).bfloat16()), torch.nn.Parameter(torch.randn(3))]
        optimizer = MasterWeights(torch.optim.RMSprop(params, lr=0.1), mode)
        for _ in range(steps):
            take(optimizer, params)
        return optimizer, params

    def take(optimizer: MasterWeights, params: list[torch.nn.Parameter]) -> None:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()

    saved, (twin, theirs), (loaded, others), at = made(1)[0].state_dict(), made(4), made(3), 0
    loaded.load_state_dict(saved)
    take(loaded, others)
    ends = [
        (str(one.state_dict()), str([one.master(p) for p in params]))
        for one, params in ((twin, theirs), (loaded, others))
    ]
    while True:
        optimizer, params = made(3)
        if not interrupted(lambda: optimizer.load_state_dict(saved), at):  # noqa: B023  # called at once
            break
        take(optimizer, params)
        assert (str(optimizer.state_dict()), str([optimizer.master(p) for p in params])) in ends, at
        at += 3
    assert at > 100

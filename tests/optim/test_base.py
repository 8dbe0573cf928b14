"""What every torch optimizer does: groups, schedulers, hooks, closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim.streams import equal, feed, gradients, parameters, snapshot

from mezzo.errors import ConfigError, MasterError, OperandError
from mezzo.optim import SGD, AdamW

BOTH = [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)]


def low(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize(("ours", "torchs"), BOTH)
def test_groups_with_their_own_options_and_schedulers(ours: Any, torchs: Any) -> None:
    def build(kind: Any, dtype: torch.dtype, **extra: Any) -> Any:
        params = parameters(dtype)
        groups = [{"params": params[:3], "lr": 0.02}, {"params": params[3:7], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=0.01, weight_decay=0.1, **extra)
        optimizer.add_param_group({"params": params[7:], "lr": 0.5, "maximize": True})
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
        return optimizer, torch.optim.lr_scheduler.ChainedScheduler(
            [warmup, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        )

    got, got_rate = build(ours, torch.bfloat16, master="split", backend="reference")
    want, want_rate = build(torchs, torch.float32, foreach=False)
    for grads in gradients(parameters(torch.float32), 8, torch.bfloat16):
        for optimizer, rate in ((got, got_rate), (want, want_rate)):
            feed(optimizer, grads)
            rate.step()
    for mine, theirs in zip(got.param_groups, want.param_groups, strict=True):
        assert mine["lr"] == theirs["lr"]
        assert all(torch.equal(got.master(p), q) for p, q in zip(mine["params"], theirs["params"], strict=True))


@pytest.mark.parametrize(("ours", "torchs"), BOTH)
def test_one_cycle_moves_momentum_too(ours: Any, torchs: Any) -> None:
    momentum = {"momentum": 0.9} if ours is SGD else {}
    masters = []
    for kind, dtype, extra in (
        (ours, torch.bfloat16, {"master": "split", "backend": "reference"}),
        (torchs, torch.float32, {"foreach": False}),
    ):
        optimizer = kind(parameters(dtype), lr=0.01, **momentum, **extra)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
        for grads in gradients(parameters(dtype), 10, torch.bfloat16):
            feed(optimizer, grads)
            cycle.step()
        params = optimizer.param_groups[0]["params"]
        masters.append([optimizer.master(p) if kind is ours else p for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))


def test_each_group_may_keep_its_masters_in_its_own_way() -> None:
    params = [low(5) for _ in range(3)]
    modes = ("split", "fp32", "stochastic")
    optimizer = AdamW([{"params": [p], "master": mode} for p, mode in zip(params, modes, strict=True)], lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [sorted(set(optimizer.state[p]) - {"step", "exp_avg", "exp_avg_sq"}) for p in params] == [
        ["remainder"],
        ["master"],
        [],
    ]
    assert torch.equal(optimizer.master(params[0]), optimizer.master(params[1]))


def test_16_bit_and_fp32_parameters_and_frozen_ones_live_together() -> None:
    frozen, wide, half = low(4).requires_grad_(False), torch.nn.Parameter(torch.ones(4)), low(4)
    optimizer = AdamW([frozen, wide, half], lr=0.1, master="split")
    before = frozen.clone()
    for p in (wide, half):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(frozen, before)
    assert frozen not in optimizer.state
    assert torch.equal(optimizer.master(half), wide)
    assert optimizer.master(wide).data_ptr() == wide.data_ptr()
    assert len(optimizer.why()) == 2


def test_a_frozen_16_bit_base_needs_no_masters() -> None:
    base, adapter = low(8, 8).requires_grad_(False), torch.nn.Parameter(torch.zeros(8, 2))
    AdamW([base, adapter])
    late = AdamW([base, adapter])
    base.requires_grad_(True)
    base.grad = torch.ones_like(base)
    with pytest.raises(MasterError, match="1 of 2 trainable parameters are 16 bit"):
        late.step()


@pytest.mark.parametrize("optimizer", [AdamW, SGD])
def test_fp32_gradients_of_16_bit_parameters_are_read_as_they_are(optimizer: Any) -> None:
    p, q = low(3), torch.nn.Parameter(torch.ones(3))
    p.grad_dtype = torch.float32
    got, want = optimizer([p], lr=0.1, master="split"), optimizer([q], lr=0.1)
    for _ in range(301):
        p.sum().backward()
    assert p.grad.dtype is torch.float32
    q.grad = p.grad.clone()
    assert not torch.equal(q.grad, q.grad.bfloat16().float())
    got.step()
    want.step()
    assert torch.equal(got.master(p), q)


def test_closure_hooks_and_zero_grad() -> None:
    p = low(3)
    optimizer = AdamW([p], lr=0.1, master="split")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.float().square().sum()
        loss.backward()
        calls.append("closure")
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure=closure)
    assert calls == ["before", "closure", "after"] * 2
    assert second.item() < first.item() == 3.0
    optimizer.zero_grad()
    assert p.grad is None
    before = snapshot(optimizer)
    optimizer.step()
    assert equal(snapshot(optimizer), before)


def test_a_written_weight_is_where_the_next_step_starts() -> None:
    for master in ("split", "fp32", "kahan"):
        p = torch.nn.Parameter(torch.randn(64).bfloat16())
        optimizer = SGD([p], lr=0.01, master=master)
        feed(optimizer, [torch.randn(64)])
        p.data.mul_(torch.arange(64) % 2)  # pruning, past the version counter
        feed(optimizer, [torch.zeros(64)])
        pruned = optimizer.master(p)[::2]
        assert bool((pruned.abs() < 1e-40).all()), master
        assert bool((p[::2] == 0).all())


CHANGES: dict[str, Any] = {
    "a rate": lambda group: group.update(lr=0.5),
    "a rate in its tensor": lambda group: group["lr"].fill_(0.5),
    "betas in their list": lambda group: group["betas"].__setitem__(0, 0.1),
    "a decay in its tensor": lambda group: group["weight_decay"].fill_(0.5),
    "an option replaced": lambda group: group.update(eps=0.25),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_option_set_between_two_steps_counts_from_the_next(change: str) -> None:
    params, found = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)], []
    for p, kind in zip(params, (AdamW, torch.optim.AdamW), strict=True):
        optimizer = kind([p], lr=torch.tensor(0.1))
        group = optimizer.param_groups[0]
        group["betas"] = list(group["betas"])
        group["weight_decay"] = torch.tensor(0.1, dtype=torch.float64) if "decay" in change else 0.1
        for step in range(3):
            if step == 2:
                CHANGES[change](group)
            p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found)


def test_an_option_that_becomes_useless_after_steps_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ConfigError, match="lr=nan"):
        optimizer.step()


@pytest.mark.parametrize(("ours", "torchs"), BOTH)
def test_neighbouring_groups_whose_options_agree_are_stepped_together(
    ours: Any, torchs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(kind: Any, dtype: torch.dtype, **extra: Any) -> Any:
        p = parameters(dtype)
        return kind([{"params": p[:3]}, {"params": p[3:5]}, {"params": p[5:], "lr": 0.5}], lr=0.01, **extra)

    calls: list[int] = []
    update = ours._update
    monkeypatch.setattr(ours, "_update", lambda *args: (calls.append(len(args[2].weights.values)), update(*args)))
    got = build(ours, torch.bfloat16, master="split", backend="reference")
    want = build(torchs, torch.float32, foreach=False)
    rest = len(got.param_groups[2]["params"])
    for number, grads in enumerate(gradients(parameters(torch.float32), 6, torch.bfloat16)):
        calls.clear()
        for optimizer in (got, want):
            optimizer.param_groups[1]["lr"] = (0.01, 0.01, 0.5, 0.5, 0.2, 0.01)[number]
            feed(optimizer, grads)
        together = {0.01: [5, rest], 0.5: [3, 2 + rest], 0.2: [3, 2, rest]}
        assert calls == together[got.param_groups[1]["lr"]]
    for mine, theirs in zip(got.param_groups, want.param_groups, strict=True):
        assert all(torch.equal(got.master(p), q) for p, q in zip(mine["params"], theirs["params"], strict=True))


def test_an_error_names_the_parameter_of_a_group_that_is_stepped_with_another() -> None:
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AdamW([{"params": [("first", p)]}, {"params": [("second", q)]}])
    feed(optimizer, [torch.ones(3)] * 2)
    optimizer.state[q]["exp_avg"] = torch.zeros(2)
    with pytest.raises(OperandError, match="second"):
        feed(optimizer, [torch.ones(3)] * 2)

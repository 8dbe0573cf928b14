"""MasterWeights around torch's optimizers: the masters go their way, the weights follow."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.messages import message_of
from tests.optim.streams import bits, equal, feed, gradients, parameters, snapshot
from tests.saved import through_a_file

from mezzo.errors import ConfigError, StepError
from mezzo.optim import SGD, AdamW, MasterWeights

LOW = [torch.float16, torch.bfloat16]


class Together(torch.optim.Optimizer):
    """An optimizer that steps a list of others."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inside = [torch.optim.SGD(params_of(self)[::2], lr), torch.optim.Adam(params_of(self)[1::2], lr)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inside:
            one.step()


class Lookahead(torch.optim.Optimizer):
    """An optimizer that holds another one, which holds it too, and steps it itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base, self.slow, self.count = torch.optim.Adam(params_of(self), lr), [], 0
        self.base.holder = self  # type: ignore[attr-defined]  # as some do, to step the one around them

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.slow = self.slow or [p.detach().clone() for p in params_of(self)]
        self.base.step()
        self.count += 1
        for p, slow in zip(params_of(self), self.slow, strict=True):
            if self.count % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))


INNERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.03}),
    (torch.optim.Adagrad, {"lr": 0.03}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (Lookahead, {"lr": 0.01}),
    (Together, {"lr": 0.01}),
]
MODES = ["fp32", "split", "kahan", "stochastic"]


def inner_id(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else str(value) if isinstance(value, dict) else None


def wrapped(kind: Any, options: dict[str, Any], dtype: torch.dtype, mode: str, seed: int = 1) -> MasterWeights:
    return MasterWeights(kind(parameters(dtype, seed=seed), **options), mode)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("kind", "options"), INNERS, ids=inner_id)
def test_fp32_masters_equal_the_same_optimizer_on_fp32_weights(
    kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    # in rows for torch alone: its fused kernels go wrong where a gradient lies otherwise in memory than its weight
    rows = [torch.nn.Parameter(p.detach().contiguous()) for p in parameters(torch.float32)]
    got, want = wrapped(kind, options, dtype, "fp32"), kind(rows, **options)
    for grads in gradients(params_of(got), 12, dtype):
        feed(got, grads)
        feed(want, grads)
    for p, q in zip(params_of(got), params_of(want), strict=True):
        assert p.dtype is dtype
        assert torch.equal(got.master(p), q)
        assert torch.equal(p, q.to(dtype))
        assert all(not item.is_floating_point() or item.dtype is torch.float32 for item in got.state[p].values())


@pytest.mark.parametrize(("kind", "options"), INNERS, ids=inner_id)
def test_split_masters_equal_fp32_masters(kind: Any, options: dict[str, Any]) -> None:
    got, want = (wrapped(kind, options, torch.bfloat16, mode) for mode in ("split", "fp32"))
    for grads in gradients(params_of(got), 8, torch.bfloat16):
        feed(got, grads)
        feed(want, grads)
    for p, q in zip(params_of(got), params_of(want), strict=True):
        assert torch.equal(got.master(p), want.master(q))


@pytest.mark.parametrize("dtype", LOW)
def test_kahan_masters_stray_by_one_rounding_a_step(dtype: torch.dtype) -> None:
    steps, options = 30, {"lr": 1e-3, "foreach": False}
    got, want = (
        wrapped(torch.optim.AdamW, options, dtype, "kahan"),
        torch.optim.AdamW(parameters(torch.float32), **options),
    )
    for grads in gradients(params_of(got), steps, dtype):
        feed(got, grads)
        feed(want, grads)
    unit, floor = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny * torch.finfo(dtype).eps / 2
    for p, q in zip(params_of(got), params_of(want), strict=True):
        allowed = 2 * steps * (q.abs() * 2 * unit * unit + floor + q.abs() * torch.finfo(torch.float32).eps)
        assert bool(((got.master(p) - q).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", LOW)
def test_stochastic_weights_are_right_on_average_and_repeatable(dtype: torch.dtype) -> None:
    count, steps = 40_000, 30
    runs = []
    for seed in (0, 0, 1):
        many = torch.nn.Parameter(torch.full((count,), 1.0, dtype=dtype))
        got = MasterWeights(torch.optim.AdamW([many], lr=1e-4), "stochastic", rounding_seed=seed)
        for _ in range(steps):
            feed(got, [torch.ones(count)])
        runs.append(many)
    one = torch.nn.Parameter(torch.ones(1))
    want = torch.optim.AdamW([one], lr=1e-4)
    for _ in range(steps):
        feed(want, [torch.ones(1)])
    spread = torch.finfo(dtype).eps / 2 * (steps / count) ** 0.5
    assert abs(runs[0].double().mean().item() - one.item()) <= 4 * spread
    assert 1 - one.item() > 20 * spread
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("mode", ["kahan", "split", "stochastic"])
def test_masters_take_no_memory_between_steps(mode: str) -> None:
    got = wrapped(torch.optim.AdamW, {}, torch.bfloat16, mode)
    for grads in gradients(params_of(got), 2, torch.bfloat16):
        feed(got, grads)
        assert all(m.numel() == 0 and m.grad is None for m in got.masters.fp32_params.values())
    names = {"kahan": "compensation", "split": "remainder"}
    aux = sum(entry[names[mode]].nbytes for entry in got.state.values() if mode in names)
    assert aux == (2 * sum(p.numel() for p in params_of(got)) if mode in names else 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "options"), INNERS[:4], ids=inner_id)
def test_200_blocked_steps_leave_every_bit(kind: Any, options: dict[str, Any], mode: str) -> None:
    got, want = wrapped(kind, options, torch.bfloat16, mode), wrapped(kind, options, torch.bfloat16, mode)
    for step, grads in enumerate(gradients(params_of(got), 3, torch.bfloat16)):
        before = snapshot(got)
        got.found_inf, got.grad_scale = torch.ones(1), torch.tensor(4.0)
        for i in range(200 if step == 1 else 2):
            feed(got, [torch.full_like(grad, (torch.inf, torch.nan)[i % 2]) for grad in grads])
        assert not step or equal(snapshot(got), before)
        got.found_inf = torch.zeros(1)
        feed(got, grads, scale=4.0)
        feed(want, grads)
        assert equal(snapshot(got), snapshot(want))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "options"), [INNERS[0], INNERS[2], INNERS[3], INNERS[6]], ids=inner_id)
def test_resume_is_bit_identical(
    kind: Any, options: dict[str, Any], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = wrapped(kind, options, torch.bfloat16, mode), wrapped(kind, options, torch.bfloat16, mode, seed=5)
    stream = list(gradients(params_of(one), 6, torch.bfloat16))
    for grads in stream[:3]:
        feed(one, grads)
    saved = through_a_file(one.state_dict())
    with torch.no_grad():
        for new, old in zip(params_of(other), params_of(one), strict=True):
            new.copy_(old)
    other.load_state_dict(saved)
    copied, pickled = copy.deepcopy(one), pickle.loads(pickle.dumps(one))
    for optimizer in (one, other, copied, pickled):
        for grads in stream[3:]:
            feed(optimizer, grads)
        assert equal(snapshot(optimizer), snapshot(one))
    assert caplog.records == []
    for optimizer in (copied, pickled):
        with pytest.raises(StepError):
            optimizer.inner.step()
        optimizer.register_state_dict_post_hook(lambda _, state: state.update(seen=True))
        assert optimizer.state_dict()["seen"]


@pytest.mark.parametrize(
    ("source", "target"), [("fp32", "kahan"), ("kahan", "fp32"), ("fp32", "stochastic"), ("stochastic", "fp32")]
)
def test_conversion_says_so(source: str, target: str, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (wrapped(torch.optim.AdamW, {}, torch.bfloat16, mode) for mode in (source, target))
    for grads in gradients(params_of(one), 3, torch.bfloat16):
        feed(one, grads)
    with torch.no_grad():
        for new, old in zip(params_of(other), params_of(one), strict=True):
            new.copy_(old)
    other.load_state_dict(one.state_dict())
    assert f"converted from {'no' if source == 'stochastic' else source} masters to {target}" in caplog.text
    exact = target == "fp32"
    for p, q in zip(params_of(one), params_of(other), strict=True):
        bound = one.master(p).abs() * (0.0 if exact else 2.0**-16 if target == "kahan" else 2.0**-8)
        assert bool(((other.master(q) - one.master(p)).abs() <= bound).all())


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [(AdamW, torch.optim.AdamW, {"lr": 0.01}), (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
)
def test_state_moves_between_the_wrapper_and_mezzos_optimizers(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    one = ours(parameters(torch.bfloat16), master="split", backend="reference", **options)
    stream = list(gradients(params_of(one), 6, torch.bfloat16))
    for grads in stream[:3]:
        feed(one, grads)
    two = MasterWeights(torchs(copy.deepcopy(params_of(one)), foreach=False, **options))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    three = ours(copy.deepcopy(params_of(two)), master="fp32", backend="reference", **options)
    three.load_state_dict(copy.deepcopy(two.state_dict()))
    for optimizer in (one, two, three):
        for grads in stream[3:]:
            feed(optimizer, grads)
    for p, q, r in zip(*(params_of(optimizer) for optimizer in (one, two, three)), strict=True):
        assert torch.equal(one.master(p), two.master(q))
        assert torch.equal(two.master(q), three.master(r))


def test_schedulers_clipping_and_groups_work_on_the_wrapper_and_on_the_inner() -> None:
    rates = []
    for on_inner in (False, True):
        params = parameters(torch.bfloat16)
        inner = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:], "lr": 0.3}], lr=0.1)
        got = MasterWeights(inner)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner if on_inner else got, 0.5)
        got.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], "lr": 0.7, "initial_lr": 0.7}
        )
        for grads in gradients(params_of(got), 2, torch.bfloat16):
            feed(got, grads)
            scheduler.step()
        assert [p.dtype for p in params_of(got)] == [torch.bfloat16] * (len(params) + 1)
        rates.append([group["lr"] for group in got.param_groups])
    assert rates[0] == rates[1]
    assert rates[0][:2] == [0.025, 0.075]


def test_lbfgs_sees_masters_through_its_closure() -> None:
    target = torch.linspace(-1, 1, 8)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        p = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
        inner = torch.optim.LBFGS([p], lr=0.5, max_iter=4)
        optimizer = MasterWeights(inner) if dtype is torch.bfloat16 else inner

        def closure(p: torch.nn.Parameter = p, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (p.float() - target).pow(4).sum() + (p.float() - target).square().sum()
            loss.backward()
            return loss.detach()

        losses = [float(optimizer.step(closure)) for _ in range(4)]
        results.append((losses, optimizer.master(p) if dtype is torch.bfloat16 else p))
    (low, master), (wide, exact) = results
    assert low[0] == wide[0]
    assert low[-1] < 1e-3 * low[0]
    assert bool(((master - exact).abs() <= 8 * torch.finfo(torch.bfloat16).eps).all())


def test_fp32_parameters_pass_through_and_their_gradients_come_back() -> None:
    wide, half = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    got = MasterWeights(torch.optim.SGD([wide, half], lr=0.5))
    got.grad_scale, got.clip_coef = torch.tensor(8.0), torch.tensor(0.5)
    wide.grad, half.grad = torch.full((3,), 8.0), torch.full((3,), 8.0, dtype=torch.bfloat16)
    aux = wide.grad
    got.step()
    assert wide.tolist() == half.tolist() == [0.75] * 3
    assert wide.grad is aux
    assert aux.tolist() == [8.0] * 3
    assert list(got.masters.fp32_params) == [half]
    assert got.master(wide).data_ptr() == wide.data_ptr()


def test_a_frozen_parameter_is_left_alone_until_it_thaws() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    q = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    got = MasterWeights(torch.optim.AdamW([p, q], lr=0.1))
    q.grad = torch.ones_like(q)
    got.step()
    assert list(got.masters.fp32_params) == [q]
    p.requires_grad_(True)
    p.grad = torch.ones_like(p)
    got.step()
    assert got.master(p)[0].item() == pytest.approx(0.899, rel=torch.finfo(torch.float32).eps)


def test_sparse_gradients_reach_an_optimizer_that_takes_them() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True, dtype=torch.bfloat16)
    twin = torch.nn.Embedding(5, 2, sparse=True, _weight=table.weight.detach().float())
    got = MasterWeights(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    want = torch.optim.SparseAdam(twin.parameters(), lr=0.1)
    for _ in range(3):
        for module, optimizer in ((table, got), (twin, want)):
            optimizer.zero_grad()
            module(torch.tensor([1, 1, 3])).sum().backward()
            optimizer.step()
    assert torch.equal(got.master(table.weight), twin.weight)


def test_state_that_exists_already_is_taken_over() -> None:
    params = parameters(torch.bfloat16)
    inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    feed(inner, next(gradients(params, 1, torch.bfloat16)))
    buffer = inner.state[params[6]]["momentum_buffer"]
    got = MasterWeights(inner)
    taken = got.state[params[6]]["momentum_buffer"]
    assert taken.dtype is torch.float32
    assert torch.equal(taken, buffer.float())


def test_a_step_that_raises_gives_the_model_its_parameters_back() -> None:
    params = parameters(torch.bfloat16)

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("broken")

    got = MasterWeights(Broken(params, lr=0.1))
    before = [bits(p) for p in params]
    with pytest.raises(RuntimeError, match="broken"):
        feed(got, next(gradients(params, 1, torch.bfloat16)))
    assert all(p is q for p, q in zip(params, params_of(got), strict=True))
    assert all(torch.equal(a, bits(p)) for a, p in zip(before, params, strict=True))
    assert "broken" not in message_of(StepError, got.inner.step)


def test_refusals() -> None:
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    inner = torch.optim.SGD([p], lr=0.1)
    for mode, message in (
        ("none", "unknown master mode 'none'. Valid: fp32, kahan, split, stochastic."),
        ("khan", "unknown master mode 'khan'. Did you mean 'kahan'?"),
    ):
        assert message_of(ConfigError, MasterWeights, inner, mode) == message
    assert (
        message_of(ConfigError, MasterWeights, SGD([p], master="split"))
        == "MasterWeights was given a SGD, which keeps masters itself; use it alone."
    )
    got = MasterWeights(inner)
    assert message_of(ConfigError, got.master, torch.ones(3)) == "fp32[3] cpu is not a parameter of this SGD."
    assert message_of(StepError, inner.step) == (
        "step() was called on the SGD inside MasterWeights: it would step the 16-bit weights and not their masters. "
        "Call step() of the MasterWeights."
    )
    got.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        got.load_state_dict({**got.state_dict(), "param_groups": got.state_dict()["param_groups"] * 2})


def test_an_optimizer_without_hooks_of_torch_is_refused_and_stays_as_it_was() -> None:
    class Hookless(torch.optim.SGD):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
            self._optimizer_step_pre_hooks = OrderedDict()  # as timm's Lookahead has it, for schedulers
            self._optimizer_step_post_hooks = OrderedDict()

    inner = Hookless(torch.optim.SGD(parameters(torch.bfloat16), lr=0.1))
    before = set(vars(inner))
    with pytest.raises(ConfigError, match=r"Hookless, .* Add that call, .* or keep weights in fp32"):
        MasterWeights(inner)
    assert set(vars(inner)) == before and not inner._optimizer_step_pre_hooks


@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_groups_may_hold_their_parameters_in_a_tuple(mode: Any) -> None:
    start, found = torch.randn(8, 8).bfloat16(), []
    for kind in (list, tuple):
        weight = torch.nn.Parameter(start.clone())
        optimizer = MasterWeights(torch.optim.Adagrad([weight]), mode=mode)
        optimizer.param_groups[0]["params"] = kind([weight])
        for step in range(3):
            weight.grad = start * (step + 1)
            optimizer.step()
        found.append((weight, *optimizer.state[weight].values()))
    assert all(map(torch.equal, *found))

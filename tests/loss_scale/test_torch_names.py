"""torch's protected names: what frameworks read, set and override does here what it does there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from mezzo.errors import PolicyError, ScalerError
from mezzo.loss_scale import GradScaler

Scaler = torch.amp.GradScaler
BOTH = pytest.mark.parametrize("kind", [Scaler, GradScaler], ids=["torch", "mezzo"])


def step(scaler: Scaler, factor: float = 1.0, **arguments: Any) -> list[float]:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5, **arguments)
    scaler.scale((param * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return param.tolist()


@BOTH
class TestState:
    def test_nothing_is_there_before_the_first_loss(self, kind: type[Scaler]) -> None:
        scaler = kind("cpu")
        assert (scaler._scale, scaler._growth_tracker, scaler._init_scale, scaler._init_growth_tracker) == (
            None, None, 65536.0, 0,
        )  # fmt: skip

    def test_lazy_init(self, kind: type[Scaler]) -> None:
        """What Accelerate calls when it resumes a sharded run."""
        scaler = kind("cpu", init_scale=8.0)
        scaler._init_growth_tracker = 3
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert scaler._scale.tolist() == 8.0 and scaler._scale.dtype is torch.float32
        assert scaler._growth_tracker.tolist() == 3 and scaler._growth_tracker.dtype is torch.int32
        assert scaler._check_scale_growth_tracker("step") == (scaler._scale, scaler._growth_tracker)

    def test_the_first_scale_can_be_set_before_it_is_used(self, kind: type[Scaler]) -> None:
        scaler = kind("cpu")
        scaler._init_scale = 8.0
        assert (scaler.get_scale(), float(scaler.scale(torch.ones(())))) == (8.0, 8.0)
        scaler._init_scale = 2.0
        assert scaler.get_scale() == 8.0

    @pytest.mark.parametrize("start", [False, True])
    def test_the_scale_can_be_assigned(self, kind: type[Scaler], start: bool) -> None:
        scaler = kind("cpu", growth_interval=1)
        if start:
            step(scaler)
        mine = torch.tensor(4.0)
        scaler._scale = mine
        if not start:
            scaler._growth_tracker = torch.tensor(0, dtype=torch.int32)
        assert scaler._scale is mine and scaler.get_scale() == 4.0
        mine.fill_(16.0)  # it is that tensor, not a copy
        assert scaler.get_scale() == 16.0
        assert step(scaler) == [0.5, 0.5] and scaler.get_scale() == 32.0

    def test_the_tracker_can_be_assigned(self, kind: type[Scaler]) -> None:
        scaler = kind("cpu", init_scale=4.0, growth_interval=3)
        step(scaler)
        scaler._growth_tracker = torch.tensor(2, dtype=torch.int32)
        step(scaler)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)

    def test_the_scale_can_be_taken_off_its_device(self, kind: type[Scaler]) -> None:
        scaler = kind("cpu", init_scale=8.0)
        step(scaler, math.inf)
        scaler._scale, scaler._growth_tracker = None, None
        assert scaler.get_scale() == 8.0

    def test_a_checkpoint_sets_what_a_fresh_scaler_starts_from(self, kind: type[Scaler]) -> None:
        scaler = kind("cpu")
        scaler.load_state_dict({**Scaler("cpu").state_dict(), "scale": 2.0, "_growth_tracker": 5})
        assert (scaler._init_scale, scaler._init_growth_tracker, scaler.get_scale()) == (2.0, 5, 2.0)


@BOTH
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
class TestSubclasses:
    def test_hooks_are_called(self, kind: type[Scaler], fused: bool) -> None:
        calls = []

        class Mine(kind):  # type: ignore[misc, valid-type]
            def unscale_(self, optimizer: Any) -> None:
                calls.append("unscale_")
                super().unscale_(optimizer)

            def _unscale_grads_(self, *args: Any) -> Any:
                calls.append("unscale")
                return super()._unscale_grads_(*args)

            def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
                calls.append("step")
                return super()._maybe_opt_step(*args, **kwargs)

        assert step(Mine("cpu"), fused=fused) == [0.5, 0.5]
        assert calls == (["unscale"] if fused else ["unscale_", "unscale", "step"])

    def test_a_finding_of_ones_own_skips_the_step(self, kind: type[Scaler], fused: bool) -> None:
        """A sharded scaler reduces findings over ranks in this place."""

        class Wary(kind):  # type: ignore[misc, valid-type]
            def _unscale_grads_(self, *args: Any) -> Any:
                return {device: torch.ones_like(flag) for device, flag in super()._unscale_grads_(*args).items()}

        scaler = Wary("cpu")
        assert step(scaler, fused=fused) == [1.0, 1.0] and scaler.get_scale() == 32768.0

    @pytest.mark.parametrize("early", [False, True])
    def test_an_unscale_of_ones_own_takes_the_place_of_torchs(
        self, kind: type[Scaler], fused: bool, early: bool
    ) -> None:
        """As fully sharded training writes it: a division, and the findings where torch keeps them."""

        class Sharded(kind):  # type: ignore[misc, valid-type]
            def unscale_(self, optimizer: Any) -> None:
                scale, _ = self._check_scale_growth_tracker("unscale_")
                state = self._per_optimizer_states[id(optimizer)]
                state["found_inf_per_device"] = self._unscale_grads_(optimizer, 1 / scale, torch.zeros(1), True)
                state["stage"] = OptState.UNSCALED

        param, scaler, trace = nn.Parameter(torch.ones(2)), Sharded("cpu", init_scale=8.0, growth_interval=2), []
        optimizer = torch.optim.SGD([param], lr=0.5, fused=fused)
        for factor in (1.0, math.inf, 2.0, 1.0):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale((param * factor).sum()).backward()
            if early:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([param], 1.0)
            scaler.step(optimizer)
            scaler.update()
            trace.append((param.tolist(), scaler.get_scale()))
        down, up = (0.5**1.5 if early else 0.5), 1.0
        assert [scale for _, scale in trace] == [8.0, 4.0, 4.0, 8.0]
        assert trace[0][0] == trace[1][0] == pytest.approx([1 - down] * 2, rel=1e-4)
        assert trace[3][0] == pytest.approx([1 - (3 * down if early else 2 * down + up)] * 2, rel=1e-4)

    def test_half_gradients_may_be_allowed(self, kind: type[Scaler], fused: bool) -> None:
        class Half(kind):  # type: ignore[misc, valid-type]
            def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
                return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

        param = nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer, scaler = torch.optim.SGD([param], lr=0.5, fused=fused), Half("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        assert param.tolist() == [0.5, 0.5]


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks are implicitly disabled"
)  # torch 2.12, whichever test is first
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_rows_that_overflow_as_an_fp16_sum_are_a_finding_where_fp16_is_allowed(kind: type[Scaler]) -> None:
    param = nn.Parameter(torch.zeros(3, 1, dtype=torch.float16))
    rows, values = torch.tensor([[0, 2, 0]]), torch.tensor([[6e4], [32.0], [6e4]], dtype=torch.float16)
    param.grad = torch.sparse_coo_tensor(rows, values, (3, 1), check_invariants=True)
    flags = kind("cpu")._unscale_grads_(torch.optim.SGD([param]), torch.tensor(0.25), torch.zeros(()), True)
    assert [float(flag) for flag in flags.values()] == [1.0]


@pytest.mark.parametrize("name", ["_get_scale_async", "_check_scale_growth_tracker", "_found_inf_per_device"])
def test_overriding_what_is_never_called_is_refused_when_the_class_is_made(name: str) -> None:
    with pytest.raises(ScalerError, match=f"Mine overrides GradScaler.{name}, which mezzo's scaler never calls"):
        type("Mine", (GradScaler,), {name: lambda self, *_: None})


def made_wrong(scaler: Scaler) -> object:
    return type(scaler)("cpu", growth_factor=0.5)


def one() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    param = nn.Parameter(torch.ones(2))
    return param, torch.optim.SGD([param], lr=0.5)


def unscaled_twice(scaler: Scaler) -> None:
    param, optimizer = one()
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def without_gradients(scaler: Scaler) -> None:
    param, optimizer = one()
    scaler.scale(param.sum())
    scaler.step(optimizer)


MISUSE: dict[str, Callable[[Scaler], object]] = {
    "factor": made_wrong,
    "update first": lambda scaler: scaler.update(),
    "unscale first": lambda scaler: scaler.unscale_(one()[1]),
    "no gradients": without_gradients,
    "twice": unscaled_twice,
    "no loss": lambda scaler: scaler.scale(3),
    "empty checkpoint": lambda scaler: scaler.load_state_dict({}),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_errors_are_also_what_torch_raises(misuse: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError)) as theirs:
        MISUSE[misuse](Scaler("cpu"))
    with pytest.raises(type(theirs.value)):
        MISUSE[misuse](GradScaler("cpu"))
    assert issubclass(ScalerError, RuntimeError) and issubclass(PolicyError, ValueError)


class TestSmallScales:
    """Below 1 the default floor gives way: the numbers are torch's, and patience alone stops a run."""

    @pytest.mark.parametrize("way", ["init", "update", "tensor", "checkpoint", "assigned"])
    @pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
    def test_the_numbers_are_torchs(self, way: str, fused: bool) -> None:
        traces = []
        for kind in (Scaler, GradScaler):
            scaler = kind("cpu", init_scale=0.5 if way == "init" else 8.0, growth_interval=2)
            step(scaler) if way in ("update", "tensor", "assigned") else None
            if way == "update":
                scaler.update(0.5)
            elif way == "tensor":
                scaler.update(torch.tensor(0.5))
            elif way == "checkpoint":
                scaler.load_state_dict(Scaler("cpu", init_scale=0.5, growth_interval=2).state_dict())
            elif way == "assigned":
                scaler._scale = torch.tensor(0.5)
            trace = [
                (step(scaler, factor, fused=fused), scaler.get_scale()) for factor in (1, math.inf, math.inf, 1, 1)
            ]
            traces.append(trace)
        assert traces[0] == traces[1]

    def test_a_floor_that_was_asked_for_holds(self) -> None:
        with pytest.raises(PolicyError, match="must lie in"):
            GradScaler("cpu", init_scale=0.5, min_scale=0.75)

    def test_a_factor_of_one_freezes_the_scale(self) -> None:
        scaler = GradScaler("cpu", growth_interval=1)
        scaler.set_growth_factor(1.0)
        step(scaler)
        assert scaler.get_scale() == 65536.0 and scaler.get_growth_factor() == 1.0


def test_growth_that_would_leave_fp32_leaves_the_scale_as_torch_does() -> None:
    arguments = {"init_scale": 2.0**122, "growth_factor": 8.0, "growth_interval": 1}
    scales = []
    for kind in (Scaler, GradScaler):
        scaler = kind("cpu", **arguments)
        scales.append([(step(scaler, 0.0), scaler.get_scale())[1] for _ in range(3)])
    assert scales[0] == scales[1] == [2.0**125] * 3

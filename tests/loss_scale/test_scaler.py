"""GradScaler in the place of torch.amp.GradScaler: the same calls give the same training."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.loss_scale.scalers import OPTIMIZERS, batches, network, weights
from torch import Tensor, nn

from mezzo.errors import PolicyError
from mezzo.loss_scale import GradScaler

OVERFLOWS = (2, 5, 6)


def train(scaler: torch.amp.GradScaler | None, optimizer: str, clip: bool = False, micro: int = 1) -> Tensor:
    """Train with some overflowing steps; without a scaler, in plain fp32 that leaves those steps out."""
    model = network()
    steps = OPTIMIZERS[optimizer](model.parameters())
    for number, batch in enumerate(batches()):
        if scaler is None and number in OVERFLOWS:
            continue
        steps.zero_grad()
        for part in batch.chunk(micro):
            loss = model(part).pow(2).mean() / micro
            if number in OVERFLOWS:
                loss = loss * torch.tensor(math.inf)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clip:
            if scaler is not None:
                scaler.unscale_(steps)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if scaler is None:
            steps.step()
        else:
            scaler.step(steps)
            scaler.update()
    return weights(model)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_torchs_bit_for_bit(optimizer: str, micro: int, clip: bool) -> None:
    """B3, B4, B7: skipped steps, clipping, accumulation; with every optimizer that divides, and that is divided for."""
    ours, theirs = GradScaler("cpu", growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    got, want = train(ours, optimizer, clip, micro), train(theirs, optimizer, clip, micro)
    assert torch.equal(got, want)
    assert ours.get_scale() == theirs.get_scale() != 65536.0
    assert ours._get_growth_tracker() == theirs._get_growth_tracker()


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if "fused" not in name])
def test_training_is_that_of_fp32_without_the_skipped_steps(optimizer: str) -> None:
    """Powers of two change no bit of a gradient, and a skipped step changes nothing at all."""
    assert torch.equal(train(GradScaler("cpu"), optimizer, clip=True), train(None, optimizer, clip=True))


def test_the_arguments_are_torchs_and_ours_stand_behind_a_star() -> None:
    """B1."""
    ours, theirs = inspect.signature(GradScaler).parameters, inspect.signature(torch.amp.GradScaler).parameters
    shared = {name: (p.default, p.kind) for name, p in ours.items() if p.kind is not p.KEYWORD_ONLY}
    assert shared == {name: (p.default, p.kind) for name, p in theirs.items()}
    assert [name for name in ours if name not in theirs] == [
        "min_scale", "max_scale", "hysteresis", "patience", "dynamic",
    ]  # fmt: skip


def test_whoever_asks_for_torchs_scaler_takes_ours() -> None:
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    public = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")}
    assert public < {name for name in dir(GradScaler) if not name.startswith("_")}


def test_getters_and_setters() -> None:
    """B2."""
    scaler = GradScaler("cpu", 4.0, 3.0, 0.25, 7)
    numbers = (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    assert numbers == (4.0, 3.0, 0.25, 7) and scaler.is_enabled()
    scaler.set_growth_factor(5.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(1)
    run_once(scaler)
    assert scaler.get_scale() == 20.0
    run_once(scaler, math.nan)
    assert scaler.get_scale() == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"growth_factor": 0.9}, "growth_factor=0.9 must be finite and >= 1.0."),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 must be in (0, 1)."),
        ({"growth_interval": 0}, "growth_interval=0 must be > 0."),
        ({"init_scale": 2.0, "min_scale": 4.0}, "init_scale=2.0 must lie in [min_scale=4.0, max_scale=None]."),
        ({"patience": 0}, "patience=0 must be > 0, or None."),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        GradScaler("cpu", **change)
    assert str(refusal.value) == message


def test_setters_refuse_what_the_constructor_refuses() -> None:
    with pytest.raises(PolicyError, match="growth_factor"):
        GradScaler("cpu").set_growth_factor(0.5)


def run_once(scaler: torch.amp.GradScaler, factor: float = 1.0) -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler.scale((param * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


# scale


Pair = namedtuple("Pair", "loss aux")


def test_scales_any_structure_and_keeps_its_type() -> None:
    """B2: named tuples and dicts too, which torch's scaler cannot return."""
    scaler, one = GradScaler("cpu", init_scale=8.0), torch.ones(())
    outputs = [one, (one, [one]), Pair(one, {"a": one}), OrderedDict(b=one)]
    scaled = scaler.scale(outputs)
    assert torch.utils._pytree.tree_structure(scaled) == torch.utils._pytree.tree_structure(outputs)
    assert {leaf.item() for leaf in torch.utils._pytree.tree_leaves(scaled)} == {8.0}
    assert isinstance(scaled[2], Pair)
    assert [leaf.item() for leaf in scaler.scale(one for _ in range(2))] == [8.0, 8.0]  # type: ignore[attr-defined]
    assert one.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_dtypes_of_scaled_losses_are_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    loss = torch.ones(shape, dtype=dtype)
    ours, theirs = GradScaler("cpu", 4.0).scale(loss), torch.amp.GradScaler("cpu", 4.0).scale(loss)
    assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


# step


class Recorder(torch.optim.SGD):
    """Takes what a training framework may pass on, and returns something."""

    def step(self, closure: Any = None, *, note: str = "") -> str:  # type: ignore[override]
        super().step(closure)
        return f"stepped {note}"


def test_step_passes_arguments_on_and_returns_what_the_optimizer_returns() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer, scaler = Recorder([param], lr=0.5), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer, None, note="well") == "stepped well"
    assert param.tolist() == [0.5, 0.5]
    scaler.update()
    param.grad = None
    scaler.scale((param * math.inf).sum()).backward()
    assert scaler.step(optimizer, closure=None) is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_shows(fused: bool) -> None:
    """S12: and runs no hook of the optimizer, fused or not."""
    param = nn.Parameter(torch.ones(2))
    optimizer, scaler, calls = torch.optim.AdamW([param], lr=0.1, fused=fused), GradScaler("cpu"), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert not scaler.last_step.applied
    seen = []
    for factor in (1.0, math.inf, math.nan, 1.0):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        step = scaler.last_step
        scaler.update()
        seen.append((step.applied, step.scale, scaler.skipped_in_a_row))
    assert seen == [(True, 65536.0, 0), (False, 65536.0, 1), (False, 32768.0, 2), (True, 16384.0, 0)]
    assert len(calls) == 2
    assert repr(step) == "LastStep(applied=True, scale=16384)"


class Asynchronous(torch.optim.Optimizer):
    """Divides and skips on the device, as torch's fused optimizers do, on any device and with any tensor."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.given: list[tuple[Tensor | None, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.given.append((self.grad_scale, self.found_inf))
        for param in self.param_groups[0]["params"]:
            param -= torch.where(
                self.found_inf != 0, 0.0, param.grad / (1 if self.grad_scale is None else self.grad_scale)
            )


def test_a_healthy_step_reads_nothing_from_the_device() -> None:
    """P22: on `meta` there are no values, so that any read raises."""
    param = nn.Parameter(torch.ones(2, device="meta"))
    optimizer, scaler = Asynchronous([param]), GradScaler("meta")
    for number in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(param.sum()).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([param], 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert [scale is None for scale, _ in optimizer.given] == [False, True] * 3
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    with pytest.raises(RuntimeError, match="meta"):
        assert scaler.last_step.applied  # told when asked, and only then


def test_a_scale_the_caller_put_on_the_optimizer_multiplies_ours() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0, fused=True), GradScaler("cpu")
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    scaler.scale(param.sum() * 4.0).backward()
    scaler.step(optimizer)
    assert param.tolist() == [0.0, 0.0]


class OlderProtocol(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        found = grad_scaler._check_inf_per_device(self)
        if not any(flag.item() for flag in found.values()):
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad.div_(grad_scaler._get_scale_async())
            super().step()


def test_optimizers_that_take_the_scaler_itself_get_it() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer, scaler = OlderProtocol([param], lr=0.5), GradScaler("cpu")
    for factor in (1.0, math.inf):
        param.grad = None
        scaler.scale((param * factor).sum()).backward()
        with nullcontext() if factor == math.inf else pytest.warns(FutureWarning, match="torch's older protocol"):
            scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [0.5, 0.5] and scaler.get_scale() == 32768.0


def test_an_error_in_the_optimizer_leaves_nothing_behind() -> None:
    class Broken(Asynchronous):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise KeyError("broken")

    param = nn.Parameter(torch.ones(2))
    optimizer, scaler = Broken([param]), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    with pytest.raises(KeyError, match="broken"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not scaler._tracker.is_stepping


# update


@pytest.mark.parametrize(
    "new_scale", [512, 512.0, torch.tensor(512.0), torch.tensor([512.0]), torch.tensor(512.0, dtype=torch.float64)]
)
def test_update_takes_a_new_scale(new_scale: Any) -> None:
    """B2: a tensor is copied; what is written to it later has no effect."""
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(new_scale)
    assert scaler.get_scale() == 512.0
    if isinstance(new_scale, Tensor):
        new_scale.fill_(3.0)
    assert scaler.get_scale() == scaler.scale(torch.ones(())).item() == 512.0


def test_the_scale_stays_at_its_address() -> None:
    """Captured CUDA graphs read it there."""
    scaler = GradScaler("cpu", growth_interval=1)
    scaler.scale(torch.ones(()))
    assert scaler._scale is not None
    address = scaler._scale.data_ptr()
    run_once(scaler)
    scaler.update(4.0)
    assert scaler._scale.data_ptr() == address and scaler.get_scale() == 4.0


def test_a_first_scale_in_inference_mode_does_no_harm() -> None:
    scaler = GradScaler("cpu", growth_interval=1)
    with torch.inference_mode():
        scaler.scale(torch.ones(()))
    run_once(scaler)
    assert scaler.get_scale() == 131072.0


# switched off


@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused"])
def test_disabled_passes_everything_through(optimizer: str) -> None:
    """B5: by identity, with unscale_ and clipping in place; one switch turns AMP on and off."""
    scaler = GradScaler("cpu", enabled=False)
    for outputs in (torch.ones(()), [torch.ones(())], Pair(1, 2), (x for x in "ab"), "no tensor"):
        assert scaler.scale(outputs) is outputs
    model = network()
    steps = OPTIMIZERS[optimizer](model.parameters())
    want = copy.deepcopy(model)
    plain = OPTIMIZERS[optimizer](want.parameters())
    for batch in batches(3):
        for net, opt in ((model, steps), (want, plain)):
            opt.zero_grad()
            scaler.scale(net(batch).pow(2).mean()).backward()
        scaler.unscale_(steps)
        scaler.step(steps)
        scaler.update()
        plain.step()
    assert torch.equal(weights(model), weights(want))
    assert scaler.last_step.applied and scaler.last_step.scale == 1.0
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict(), scaler.skipped_in_a_row) == (
        1.0,
        False,
        {},
        0,
    )
    assert scaler._get_growth_tracker() == 0
    scaler.load_state_dict({"scale": 4.0})
    scaler.mark_scaled(steps)
    assert scaler.step(Recorder(model.parameters(), lr=0.0), None, note="off") == "stepped off"


def test_disabled_runs_closures() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), GradScaler("cpu", enabled=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = scaler.scale(param.sum())
        loss.backward()
        return loss

    assert scaler.step(optimizer, closure).item() == 2.0
    assert param.tolist() == [0.5, 0.5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_without_cuda_warns_and_disables_as_torch_does() -> None:
    message = (
        'GradScaler("cuda") found no CUDA device and is disabled: losses and gradients pass through unscaled. '
        'Write GradScaler("cpu") to scale losses on the CPU.'
    )
    with pytest.warns(UserWarning) as caught:
        scaler = GradScaler()
    assert [str(warning.message) for warning in caught] == [message] and caught[0].filename == __file__
    assert not scaler.is_enabled()
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not torch.amp.GradScaler().is_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GradScaler(None).is_enabled() and not GradScaler(enabled=False).is_enabled()

"""A step run twice: a bit that turns in a gradient is noticed in its step, and a healthy run is the same to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose.test_flight import POLICY, Batch, batches, build, loss_fn
from torch import Tensor, nn

import mezzo
from mezzo.diagnose.second_run import same_bits
from mezzo.errors import ConfigError, InvariantError


class Flip:
    """Turns one bit of a gradient or a buffer, once, in the backward that is counted down to."""

    def __init__(self, parameter: Tensor, at: int, target: Tensor | None = None) -> None:
        self.left, self.target, self.was_done = at, target, False
        parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        self.left -= 1
        if self.left == -1:
            values = parameter.grad if self.target is None else self.target
            assert values is not None
            values.data.view(torch.int32).reshape(-1)[3] ^= 1 << 20  # as hardware does: no version moves
            self.was_done = True


def trained(
    folder: Path, *, twice_every: int, accumulate: int = 1, flip: Any = None, policy: str = POLICY
) -> dict[str, Any]:
    """Train eight steps; a step that is found wrong is taken after all, from the run that was confirmed."""
    torch.manual_seed(7)
    model, optimizer, _ = build()
    amp = mezzo.prepare(model, optimizer, policy=policy)
    if flip is not None:
        flip(model)
    twice: dict[str, Any] = {"twice_every": twice_every, "loss_fn": loss_fn} if twice_every else {}
    said = []
    with mezzo.record(amp, folder, every=4, **twice) as recorder:
        for i, batch in enumerate(recorder.batches(batches(8 * accumulate))):
            amp.backward(loss_fn(model, batch))
            if (i + 1) % accumulate:
                continue
            try:
                amp.step(max_norm=1.0)
            except InvariantError as error:
                said.append(str(error))
                amp.step(max_norm=1.0)
            amp.zero_grad()
    return {"state": amp.state_dict(), "random": torch.get_rng_state(), "said": said}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for k in value for x in leaves(value[k])]
    return [x for v in value for x in leaves(v)] if isinstance(value, (list, tuple)) else [value]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = (leaves((run["state"], run["random"])) for run in (one, other))
    assert len(a) == len(b)
    assert all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", [POLICY, "bf16-master", "fp32"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_healthy_run_is_the_same_with_and_without(tmp_path: Path, accumulate: int, policy: str) -> None:
    plain = trained(tmp_path / "once", twice_every=0, accumulate=accumulate, policy=policy)
    twice = trained(tmp_path / "twice", twice_every=3, accumulate=accumulate, policy=policy)
    assert twice["said"] == []
    assert_same(plain, twice)


@pytest.mark.parametrize(("at", "which"), [(3, "first"), (4, "second")])
def test_a_turned_bit_is_noticed_in_its_step_and_undone(tmp_path: Path, at: int, which: str) -> None:
    """Step 0 takes two backward passes, steps 1 and 2 one each: those of step 3 are numbers 4 and 5."""
    flips: list[Flip] = []
    found = trained(
        tmp_path / "run", twice_every=3, flip=lambda m: flips.append(Flip(m[4].weight, at + 1)), policy="fp32"
    )
    assert flips[0].was_done
    (said,) = found["said"]
    assert said.startswith("step 3 was run twice") and "the gradient of 4.weight." in said
    assert f"hardware computed something wrong in the {which}" in said
    assert_same(trained(tmp_path / "plain", twice_every=0, policy="fp32"), found)


def test_a_turned_bit_of_a_running_statistic_is_noticed(tmp_path: Path) -> None:
    found = trained(
        tmp_path / "run", twice_every=8, policy="fp32", flip=lambda m: Flip(m[4].weight, 0, m[1].running_var)
    )
    assert "buffer 1.running_var." in found["said"][0]


def test_a_bit_in_a_step_that_is_run_once_is_not_claimed(tmp_path: Path) -> None:
    found = trained(tmp_path / "run", twice_every=5, flip=lambda m: Flip(m[4].weight, 3), policy="fp32")
    assert found["said"] == []


def stepped(folder: Path, loss: Any, edit: Any = None, note: bool = True) -> None:
    torch.manual_seed(0)
    model, optimizer, _ = build()
    amp = mezzo.prepare(model, optimizer, policy="fp32")
    with mezzo.record(amp, folder, twice_every=1, loss_fn=loss) as recorder:
        for batch in recorder.batches(batches(1)) if note else batches(1):
            amp.backward(loss(model, batch))
            if edit is not None:
                edit(model)
            amp.step()


def test_what_is_not_deterministic_is_refused_in_the_first_step(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return loss_fn(model, batch) * random.random()

    with pytest.raises(ConfigError, match="three runs of it gave three results; loss 0, the gradient of "):
        stepped(tmp_path / "run", loss)


def test_edited_gradients_and_steps_without_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradients were edited after backward"):
        stepped(tmp_path / "edited", loss_fn, edit=lambda model: model[0].weight.grad.mul_(0.5))
    with pytest.raises(ConfigError, match="no batch of it was noted"):
        stepped(tmp_path / "unnoted", loss_fn, note=False)
    amp = mezzo.prepare(*build()[:2], policy="fp32")
    with pytest.raises(ConfigError, match="twice_every=2 without loss_fn"):
        mezzo.record(amp, tmp_path / "half", twice_every=2)


def test_bits_are_compared_whatever_a_tensor_is_a_view_of() -> None:
    whole = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    assert same_bits(whole.imag[:1], -torch.ones(1))  # a stride of 2, and negated late
    assert same_bits(whole, whole.resolve_conj()) and not same_bits(whole, whole.conj())

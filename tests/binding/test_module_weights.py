"""A forward that casts a buffer of its own to what it computes in does not narrow what is stored."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo

POLICIES = ["bf16, output=fp32", "bf16-master, output=fp32", "fp16-master, output=fp32, scaling.init_scale=16"]


class Casts(nn.Module):
    """Casts a buffer and a plain attribute to the dtype it computes in, as CTRL and Wav2Vec2-Conformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("average", torch.rand(4))
        self.pe = torch.rand(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        self.scale = self.scale.to(h.dtype)
        self.pe = self.pe.to(h.device, h.dtype)
        self.seen = h.dtype, self.scale.dtype
        return h * self.scale + self.pe


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Casts()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def stored(model: nn.Module) -> list[Tensor]:
    inner = model.inner if isinstance(model, Checkpointed) else model
    return [inner.scale, inner.average, inner.pe]


def assert_as_stored(model: nn.Module, before: list[Tensor]) -> None:
    for now, was in zip(stored(model), before, strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Casts, Checkpointed])
def test_training_leaves_what_a_forward_casts_as_wide_as_it_was(kind: type[nn.Module], policy: str) -> None:
    model = kind()
    before = [t.clone() for t in stored(model)]
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    for _ in range(3):
        amp.zero_grad()
        amp.backward(model(torch.randn(2, 4)).square().mean())
        assert amp.step()
        assert_as_stored(model, before)
    inner = getattr(model, "inner", model)
    assert inner.seen == (amp.policy.compute,) * 2  # inside the forward it has what it asked for
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    saved = amp.state_dict()
    twin = kind()
    other = mezzo.prepare(twin, torch.optim.SGD(twin.parameters(), lr=0.1), policy)
    other.load_state_dict(saved)
    twin.load_state_dict(model.state_dict())
    assert_as_stored(twin, [*before[:2], stored(twin)[2].clone()])


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_does_too_and_training_goes_on_after_it(policy: str, how: type[torch.no_grad]) -> None:
    model = Casts()
    before = [t.clone() for t in stored(model)]
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    with how():
        model(torch.randn(2, 4))
    assert_as_stored(model, before)
    amp.backward(model(torch.randn(2, 4)).square().mean())
    assert amp.step()
    twin = copy.deepcopy(model)
    twin(torch.randn(2, 4))
    assert_as_stored(twin, before)


def test_a_forward_that_raises_narrows_nothing_for_good() -> None:
    model = Casts()
    before = [t.clone() for t in stored(model)]
    mezzo.prepare(model, None, "bf16")
    with pytest.raises(RuntimeError), torch.no_grad():
        model(torch.randn(2, 4)).view(3)
    handle = model.body.register_forward_hook(lambda *_: setattr(model, "scale", model.scale.bfloat16()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 4))
    handle.remove()
    model(torch.randn(2, 4))
    assert_as_stored(model, before)


def test_what_a_forward_computes_anew_is_kept() -> None:
    """The elements that it wrote are what it wrote, those that it only rounded are what they were."""

    class Updates(Casts):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            self.average = torch.cat([self.average[:2], torch.full((2,), 3.0)]).to(torch.bfloat16)
            return h

    model = Updates()
    before = model.average.clone()
    mezzo.prepare(model, None, "bf16")
    model(torch.randn(2, 4))
    torch.testing.assert_close(model.average, torch.cat([before[:2], torch.full((2,), 3.0)]), rtol=0, atol=0)


def test_what_a_caller_narrows_between_forwards_stays_narrow() -> None:
    model = Casts()
    mezzo.prepare(model, None, "bf16")
    model(torch.randn(2, 4))
    model.scale = model.scale.bfloat16()
    model(torch.randn(2, 4))
    assert model.scale.dtype is torch.bfloat16 and model.average.dtype is torch.float32


def test_a_state_that_leads_to_gradients_is_left_alone() -> None:
    class Carries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.h = nn.Linear(4, 4), torch.zeros(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.h = self.body(x + self.h)
            return self.h

    model = Carries()
    mezzo.prepare(model, None, "bf16")
    model(model(torch.randn(2, 4))).float().sum().backward()
    assert model.h.grad_fn is not None and model.h.dtype is torch.bfloat16


def test_a_model_without_such_tensors_is_not_asked_again() -> None:
    from mezzo.binding import bound_of

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mezzo.prepare(model, None, "bf16")
    model(torch.randn(2, 4))
    assert bound_of(model).wide is False  # type: ignore[union-attr]  # it is bound


def test_threads_that_run_one_model_at_once_leave_it_as_wide_as_it_was() -> None:
    model = Casts()
    before = [t.clone() for t in stored(model)]
    mezzo.prepare(model, None, "bf16")

    def run(_: int) -> None:
        with torch.no_grad():
            for _ in range(200):
                model(torch.randn(2, 4))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert_as_stored(model, before)

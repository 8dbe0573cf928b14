"""What a bound module keeps from call to call: its region, which every thread and every nesting enters again."""

from __future__ import annotations

import copy
import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import mezzo
from mezzo.binding import bound_of, forward
from mezzo.binding.forward import Binding, Bound


def prepared(policy: str = "bf16, output=none") -> nn.Module:
    return mezzo.prepare(nn.Sequential(nn.Linear(4, 4)), None, policy).model


@pytest.mark.parametrize("policy", ["bf16", "bf16, ops=mezzo"])
def test_the_region_is_made_once(policy: str) -> None:
    binding = bound_of(prepared(policy)).binding  # type: ignore[union-attr]  # it is bound
    assert binding.region(None, traced=False) is binding.region(None, traced=False)
    assert binding.region(None, traced=True) is not binding.region(None, traced=False)


def test_a_copy_makes_its_own_region() -> None:
    model = prepared()
    model(torch.ones(1, 4))
    one, other = (bound_of(m).binding for m in (model, copy.deepcopy(model)))  # type: ignore[union-attr]
    assert one.region(None, traced=False) is not other.region(None, traced=False)


def test_two_threads_are_inside_the_one_region_at_once() -> None:
    model, meet, found = prepared(), threading.Barrier(2), []

    def wait(*_: object) -> None:
        meet.wait(10)

    def run() -> None:
        found.append((model(torch.ones(1, 4)).dtype, torch.is_autocast_enabled("cpu")))

    model[0].register_forward_hook(wait)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [(torch.bfloat16, False)] * 2


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(2, 2, bias=False)),
        nn.ReLU(),
    ],
    ids=["own", "nested", "without bias", "none"],
)
def test_the_first_parameter_is_that_of_torch(model: nn.Module) -> None:
    bound = Bound(binding=Binding(policy=mezzo.Policy(), device_type="cpu"))
    for _ in range(2):
        assert bound.first_parameter(model) is next(model.parameters(), None)


def test_a_first_parameter_that_was_replaced_or_taken_away_is_seen() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 3))
    bound = Bound(binding=Binding(policy=mezzo.Policy(), device_type="cpu"))
    assert bound.first_parameter(model) is model[1].weight
    model[1].weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    assert bound.first_parameter(model) is model[1].weight
    del model[1].weight
    assert bound.first_parameter(model) is model[1].bias
    assert copy.deepcopy(bound).first is None


def test_a_registry_of_subclasses_is_told_of_none_of_ours() -> None:
    class Registered(nn.Module):
        names: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, name: str) -> None:
            super().__init_subclass__()
            assert name not in cls.names
            cls.names.append(name)

    class Head(Registered, name="head"):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = Head()
    amp = mezzo.prepare(model, None, "bf16, output=none")
    assert Registered.names == ["head"] and isinstance(model, Head)
    assert (
        model(torch.ones(1, 4)).dtype is torch.bfloat16
        and copy.deepcopy(model)(torch.ones(1, 4)).dtype is torch.bfloat16
    )
    amp.release()
    assert type(model) is Head


class Router(nn.Module):
    """Casts a layer of its own at each call, as routers of mixtures of experts do, and maybe moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.device = nn.Linear(4, 4), "cpu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(self.device, torch.float32)
        return self.classifier(x.float()).softmax(-1, dtype=torch.float32)


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling.init_scale=16"])
def test_a_forward_that_casts_its_own_layer_runs_as_under_autocast(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Router())
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    low, plain, x = model[0].weight.dtype, copy.deepcopy(model).float(), torch.randn(8, 4)
    with torch.autocast("cpu", low):
        expected = plain(x)
    torch.testing.assert_close(model(x), expected)
    for _ in range(2):
        amp.zero_grad()
        amp.backward(model(x)[:, 0].square().mean())
        assert amp.step()
    assert {p.dtype for p in model.parameters()} == {low}
    said = [record for record in caplog.records if "1.classifier=fp32" in record.message]
    assert len(said) == 1
    with pytest.raises(mezzo.errors.StepError, match=r"Call amp\.release\(\) first"):
        model[1].classifier.to(torch.float32)  # outside of a forward
    model[1].device = "meta"
    with pytest.raises(mezzo.errors.StepError, match=r"Call amp\.release\(\) first"):
        model(x)


def test_the_rule_that_the_log_names_keeps_the_layer_in_fp32(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Router())
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master, 1.classifier=fp32")
    amp.backward(model(torch.randn(8, 4))[:, 0].square().mean())
    assert amp.step() and model[1].classifier.weight.dtype is torch.float32 and not caplog.records


class PlainRouter(Router):
    """A router in a plain region that is off, as third-party code has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def test_a_cast_that_is_left_out_where_autocast_is_off_says_what_fits_and_the_rule(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), PlainRouter())
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master")
    with pytest.raises(mezzo.errors.CastError, match=r"(?s)in module 1\.classifier .* module:1\.classifier=fp32"):
        model(torch.randn(8, 4))
    (said,) = [record.message for record in caplog.records if "1.classifier=fp32" in record.message]
    assert "autocast is off here, where only inputs of that dtype fit them" in said and "as the policy says" not in said
    amp.release()
    caplog.clear()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master, 1.classifier=fp32")
    amp.backward(model(torch.randn(8, 4))[:, 0].square().mean())
    assert amp.step() and not caplog.records


class Recomputes(torch.autograd.Function):
    """A reversible layer (Gomez et al. 2017), as Reformer has them: its backward runs the layer again in place of what was kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.layer = layer
        out = y + layer(x)
        ctx.save_for_backward(x, out)
        return x.clone(), out

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(grad_out)
        return grad_x + x.grad, grad_out, None


class Reversible(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers, self.recomputes = (
            nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)),
            recomputes,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            x, y = y, x
            x, y = Recomputes.apply(x, y, layer) if self.recomputes else (x, y + layer(x))
        return x + y


def test_layers_that_a_function_recomputes_in_backward_run_as_they_did_in_forward() -> None:
    """The gradients are those of plain autograd on the forward that ran, bit for bit. Under torch.autocast the recompute is fp32."""
    torch.manual_seed(0)
    model, x = Reversible(recomputes=True), torch.randn(16, 8)
    plain, autocast = Reversible(recomputes=False), copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    for twin in (plain, autocast):
        with torch.autocast("cpu", torch.bfloat16):
            out = twin(x.clone().requires_grad_())
        out.float().square().sum().backward()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters()), "bf16, modules=none, output=none")
    amp.backward(model(x.clone().requires_grad_()).float().square().sum())
    same = [torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    assert all(same)
    assert not any(torch.equal(p.grad, q.grad) for p, q in zip(autocast.parameters(), plain.parameters(), strict=True))


def test_ctrl_c_as_a_forward_enters_its_region_leaves_the_next_one_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the call returns that says which region a thread is in: a forward that took itself to be inside would cast nothing."""
    model = nn.Linear(4, 4)
    mezzo.prepare(model, None, "bf16, output=none")
    x, enter, calls = torch.ones(2, 4), forward._set_thread_state, list[object]()

    def interrupted(*state: Any) -> None:
        enter(*state)
        calls.append(state)
        if len(calls) == 1:
            raise KeyboardInterrupt

    want = model(x)
    monkeypatch.setattr(forward, "_set_thread_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert model(x).dtype is want.dtype is torch.bfloat16 and torch.equal(model(x), want)

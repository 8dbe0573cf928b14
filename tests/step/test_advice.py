"""What a refusal says to write instead is written instead, and trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo
from mezzo.errors import (
    CastError,
    CheckpointError,
    ConfigError,
    InvariantError,
    MasterError,
    MezzoError,
    PolicyError,
    StepAttributeError,
    StepError,
    StepTypeError,
)

POLICIES = pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=16", "bf16-master"])
X = torch.linspace(-1, 1, 64).reshape(8, 8)


def net(**kind: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, **kind), nn.Tanh(), nn.Linear(16, 8, **kind))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(amp: mezzo.Stepper, x: Tensor = X, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Take steps on one batch, and look at the loss."""
    losses = []
    for _ in range(3):
        amp.zero_grad()
        loss = F.mse_loss(amp.model(x), X.flip(1))
        amp.backward(loss)
        assert amp.step(optimizer=optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses


def refused(run: Callable[[], object], kind: type[MezzoError], *words: str) -> None:
    with pytest.raises(kind) as error:
        run()
    assert all(part in str(error.value) for part in words), str(error.value)


def test_a_policy_may_be_a_dtype_or_a_dict_and_what_is_none_says_what_is() -> None:
    losses = []
    for policy in ("bf16", torch.bfloat16, {"preset": "bf16"}, mezzo.Policy.parse("bf16").to_dict()):
        model = net()
        losses.append(train(mezzo.prepare(model, adamw(model), policy)))
    assert all(one == losses[0] for one in losses)
    model = net()
    refused(lambda: mezzo.prepare(model, adamw(model), {"preset": "bf61"}), PolicyError, "bf16")
    refused(lambda: mezzo.prepare(model, adamw(model), 16), PolicyError, "a text such as 'bf16, output=fp32'")  # type: ignore[arg-type]
    train(mezzo.prepare(model, adamw(model), "bf16, output=fp32"))


def test_weights_in_fp64() -> None:
    model = net(dtype=torch.float64)
    refused(
        lambda: mezzo.prepare(model, adamw(model), "bf16"),
        PolicyError,
        "Write model.float() before prepare, or policy='fp32'",
    )
    train(mezzo.prepare(model.float(), adamw(model), "bf16"))


def test_weights_in_16_bit_that_were_refused_may_be_widened() -> None:
    model = net(dtype=torch.bfloat16)
    refused(lambda: mezzo.prepare(model, adamw(model), "bf16"), MasterError, "model.float() before prepare")
    train(mezzo.prepare(model.float(), adamw(model), "bf16"))


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_gradients_follow_a_released_model_to_another_dtype(policy: str) -> None:
    model = net()
    mezzo.prepare(model, adamw(model), policy).release()
    model.double()(X.double()).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in model.parameters())


@POLICIES
def test_what_stands_where_something_else_belongs(policy: str) -> None:
    model = net()
    optimizer = adamw(model)
    refused(lambda: mezzo.prepare(model, optimizer, policy, skip="apart"), StepError, "skip='apart'", "together")  # type: ignore[arg-type]
    refused(lambda: mezzo.prepare(model, optimizer, policy, cache="persist"), StepError, "Did you mean 'persistent'")  # type: ignore[arg-type]
    amp = mezzo.prepare(model, optimizer, policy)
    amp.backward(F.mse_loss(model(X), X))
    refused(lambda: amp.step(optimizer), StepError, "amp.step(optimizer=...)")  # type: ignore[arg-type, call-overload]
    refused(lambda: amp.step(max_norm=torch.ones(2)), StepError, "to a positive number that fp32 holds; write one")  # type: ignore[arg-type, call-overload]
    assert amp.step(optimizer=optimizer)
    train(amp)


@POLICIES
def test_backward_where_gradients_are_off(policy: str) -> None:
    model = net()
    amp = mezzo.prepare(model, adamw(model), policy)
    loss = F.mse_loss(model(X), X)
    with torch.no_grad():
        amp.backward(loss)
        assert amp.step()


def written(amp: mezzo.Stepper, path: Path, optimizer: torch.optim.Optimizer, batches: int = 2) -> mezzo.StepResult:
    """Take a step as the sentences below say it is written, and save and load."""
    for _ in range(batches):
        amp.backward(F.mse_loss(amp.model(X), X) / batches)
    with amp.unscaled_grads() as grads:
        assert all(grad.isfinite().all() for grad in grads.values())
    result = amp.step(max_norm=1.0)
    torch.save(amp.state_dict(), path)
    amp.load_state_dict(torch.load(path))
    amp.model.train().zero_grad()
    assert amp.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] and amp.scale > 0
    return result


WORDS = {
    "unscale_": "Clip with amp.step(max_norm=...)", "clip_grad_norm_": "Clip with amp.step(max_norm=...)",
    "clip_gradients": "edit gradients inside `with amp.unscaled_grads():`", "update": "amp.step() moves the loss scale too",
    "get_scale": "Read amp.scale", "autocast": "leave the block out", "accumulate": "amp.backward(loss / n)",
    "save_state": "torch.save(amp.state_dict(), path)", "optimizer_step_was_skipped": "result.applied",
    "train": "Write amp.model.train", "zzz": "Valid: backward, capture", "param_groups": "Write amp.optimizers[0].param_groups",
    "bakward": "Did you mean 'backward'?", "loss_scale": "Read amp.scale", "scheduler": "amp.on_applied(scheduler.step)", "skipped": "result.applied",
    "global_step": "amp.counters().applied", "masters": "amp.export_weights()", "dtype": "amp.policy.compute", "enabled": "amp.policy.is_low",
    "manual_backward": "Write amp.backward(loss)", "no_sync": "with ddp.no_sync()", "unwrap_model": "read amp.model", "prepare": "loaders too", "setup": "amp.optimizers",
    "gather_for_metrics": "mezzo.integrations.accelerate.Accelerator", "is_main_process": "torch.distributed", "toggle_optimizer": "amp.step(optimizer=...)",
}  # fmt: skip


@POLICIES
def test_words_of_other_libraries(policy: str, tmp_path: Path) -> None:
    model = net()
    amp = mezzo.prepare(model, optimizer := adamw(model), policy)
    for word, advice in WORDS.items():
        refused(lambda word=word: getattr(amp, word), StepAttributeError, f"a stepper has no '{word}'", advice)  # type: ignore[misc]
        assert not hasattr(amp, word)
    refused(lambda: amp(X), StepTypeError, "write model(x)")
    refused(lambda: list(amp), StepTypeError, "Write amp = mezzo.prepare(model, optimizer, policy)")
    assert written(amp, tmp_path / "run.pt", optimizer).applied
    train(amp)


class ModelEma(nn.Module):
    """As timm keeps one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()


def test_an_average_of_16_bit_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    amp = mezzo.prepare(model, adamw(model), "bf16-master")
    for make in (AveragedModel, ModelEma):
        caplog.clear()
        make(model)
        assert caplog.text.count(f"{make.__name__} copies weights in bf16 without their masters") == 1
    caplog.clear()
    plain = copy.deepcopy(model).float()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # type: ignore[no-untyped-call]
    expected = {}
    for _ in range(8):
        amp.zero_grad()
        amp.backward(F.mse_loss(model(X), X.flip(1)))
        amp.step()
        plain.load_state_dict(amp.export_weights())
        average.update_parameters(plain)
        masters = {name: weight.double() for name, weight in amp.export_weights().items()}
        expected = {name: torch.lerp(expected.get(name, new), new, 0.001) for name, new in masters.items()}
    for name, weight in average.module.state_dict().items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=8 * 2**-24, atol=1e-7)
    assert "copies weights" not in caplog.text


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_an_average_of_fp32_weights_needs_no_word(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    mezzo.prepare(model, adamw(model), policy)
    AveragedModel(model)
    assert caplog.text == ""


class Shows(nn.Module):
    """A weight, and a tensor in its memory."""

    def __init__(self, show: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        shown = show(self.first.weight.detach())
        (self.register_parameter if isinstance(shown, nn.Parameter) else self.register_buffer)("shown", shown)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + self.shown.sum())


@pytest.mark.parametrize("show", [lambda w: w[2:4], lambda w: w[3, 3], lambda w: nn.Parameter(w.view(-1)[:8]), torch.t])
def test_a_weight_whose_memory_something_else_shows(show: Callable[[Tensor], Tensor]) -> None:
    """Stored anew, the weight would go on alone."""
    model = Shows(show)
    before = model.first.weight.data_ptr()
    refused(
        lambda: mezzo.prepare(model, adamw(model), "bf16-master"), PolicyError, "lies in the memory of", "anew in bf16", "Write .clone()"
    )  # fmt: skip
    assert model.first.weight.data_ptr() == before and type(model) is Shows
    train(mezzo.prepare(model, adamw(model), "bf16"))
    cloned = Shows(lambda w: show(w).clone())
    train(mezzo.prepare(cloned, adamw(cloned), "bf16-master"))


def test_a_weight_whose_elements_share_memory() -> None:
    """As torch trains them, those of one diagonal stay equal."""
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.randn(7).as_strided((4, 4), (1, 1)))
    told = "weight lies in the memory of its own other elements"
    refused(lambda: mezzo.prepare(model, adamw(model), "bf16-master"), PolicyError, told, "keep weights in fp32")
    mezzo.prepare(model, None, "bf16-master")
    assert model.weight.dtype is torch.bfloat16


def test_losses_in_something_else() -> None:
    model = net()
    amp = mezzo.prepare(model, adamw(model), "bf16")
    loss = F.mse_loss(model(X), X)
    for given, advice in (
        ({"loss": loss}, "not dict. Hand over the loss in it, as in output['loss']"),
        (SimpleNamespace(loss=loss), "not SimpleNamespace. Hand over output.loss."),
        ((loss, X), "not tuple. Hand over the loss among them, as in output[0]"),
    ):
        refused(lambda given=given: amp.backward(given), StepError, advice)  # type: ignore[misc]
    refused(lambda: amp.step(loss), StepError, "step(fp32[]", "Write amp.backward(loss), then amp.step().")
    train(amp)


def test_one_optimizer_twice() -> None:
    model = net()
    optimizer = adamw(model)
    refused(
        lambda: mezzo.prepare(model, [optimizer, optimizer], "bf16"), StepError, "the same AdamW twice", "Leave one out"
    )
    train(mezzo.prepare(model, [optimizer], "bf16"))


def test_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        model = net()
    advice = ("4 of 4 trainable parameters", "Make the model and prepare it outside of that block")
    refused(lambda: mezzo.prepare(model, adamw(model), "bf16"), PolicyError, *advice)
    model = net()
    optimizer = adamw(model)
    with torch.inference_mode():
        refused(lambda: mezzo.prepare(model, optimizer, "bf16-master"), PolicyError, *advice)
        assert mezzo.prepare(copy.deepcopy(model), None, "bf16-master").model(X).isfinite().all()
    train(mezzo.prepare(model, optimizer, "bf16-master"))


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    refused(
        lambda: mezzo.prepare(model, adamw(model), "bf16"),
        PolicyError,
        "on the meta device",
        "model.to_empty(device=...)",
    )
    model.to_empty(device="cpu").load_state_dict(net().state_dict())
    train(mezzo.prepare(model, adamw(model), "bf16"))


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_the_state_of_another_kind_of_optimizer(policy: str) -> None:
    amp, other = (
        mezzo.prepare(model, make(model.parameters(), lr=0.01), policy)
        for make, model in ((torch.optim.AdamW, net()), (partial(torch.optim.SGD, momentum=0.9), net()))
    )
    for one in (amp, other):
        train(one)
    saved, before = other.state_dict(), copy.deepcopy(amp.export_weights())
    refused(
        lambda: amp.load_state_dict(saved),
        CheckpointError,
        "of another kind of optimizer: it has momentum, dampening",
        "has betas",
    )
    assert all(torch.equal(weight, before[name]) for name, weight in amp.export_weights().items())
    train(amp)


def test_options_and_state_that_are_gone() -> None:
    model = net()
    optimizer = adamw(model)
    amp = mezzo.prepare(model, optimizer, "bf16-master")
    train(amp)
    group = optimizer.param_groups[0]
    for name, value, advice in (
        ("lr", None, "lr=None: write a finite number"),
        ("betas", (1.5, 2), "write two finite numbers in [0, 1)"),
    ):
        was, group[name] = group[name], value
        refused(lambda: train(amp), ConfigError, advice)
        group[name] = was
        amp.zero_grad()
    was = group.pop("eps")
    refused(lambda: train(amp), ConfigError, "has no eps any more: set it")
    group["eps"] = was
    amp.zero_grad()
    state = next(iter(optimizer.state.values()))
    moment = state.pop("exp_avg_sq")
    refused(lambda: train(amp), ConfigError, "counts steps and has no exp_avg_sq", "Delete optimizer.state[parameter]")
    state["exp_avg_sq"] = moment
    amp.zero_grad()
    train(amp)


def test_a_learning_rate_that_ruined_the_weights_is_named() -> None:
    """One that lies in a tensor, into which the host does not look before a step."""
    model = net()
    amp = mezzo.prepare(model, adamw(model), "bf16")
    saved = copy.deepcopy(amp.state_dict())
    amp.optimizers[0].param_groups[0]["lr"] = torch.tensor(float("nan"))
    amp.backward(F.mse_loss(model(X), X))
    refused(amp.step, InvariantError, "has lr=nan. Write a finite number, and load the last good checkpoint")
    amp.load_state_dict(saved)
    train(amp)


CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to("cpu", torch.float16),
    "double": lambda model: model.double(),
    "a part": lambda model: nn.ModuleList([model]).to(dtype=torch.float16),
}


@POLICIES
def test_a_prepared_model_that_would_be_cast(policy: str) -> None:
    model = net()
    amp = mezzo.prepare(model, adamw(model), policy)
    for cast in CASTS.values():
        dtypes = [p.dtype for p in model.parameters()]
        refused(lambda: cast(model), StepError, "4 parameters", "Call amp.release() first", "nothing was changed")  # noqa: B023
        assert [p.dtype for p in model.parameters()] == dtypes
    assert model.to("cpu") is model
    adapted = nn.Sequential(net().requires_grad_(False), net())
    mezzo.prepare(adapted, adamw(adapted), policy)
    assert {p.dtype for p in adapted[0].half().parameters()} == {torch.float16}  # frozen: no optimizer needs them
    train(amp)
    for free in (copy.deepcopy(model), mezzo.prepare(net(), None, policy).model):  # no optimizer knows them
        assert {p.dtype for p in free.half().parameters()} == {torch.float16}
    amp.release()
    assert {p.dtype for p in model.half().parameters()} == {torch.float16}
    train(mezzo.prepare(model.float(), adamw(model), policy))


@POLICIES
def test_inputs_in_fp64(policy: str) -> None:
    model = net()
    amp = mezzo.prepare(model, adamw(model), policy)
    refused(lambda: model(X.double()), CastError, "Cast what is fp64 to fp32, x.float()")
    train(amp, X.double().float())


def test_an_optimizer_that_was_not_prepared() -> None:
    model = net()
    policy = "fp16, scaling.init_scale=16"
    amp = mezzo.prepare(model[0], adamw(model[0]), policy)
    amp.backward(amp.model(X).square().mean())
    stranger = torch.optim.SGD(model[0].parameters(), lr=0.1)
    before = model[0].weight.clone()
    refused(stranger.step, StepError, "mezzo.prepare(model, [...])", "amp.step(optimizer=...)")
    assert torch.equal(model[0].weight, before)
    amp.release()
    train(mezzo.prepare(model, [adamw(model), stranger], policy), optimizer=stranger)


def test_true_gradients_may_be_stepped_by_anybody() -> None:
    model = net()
    amp = mezzo.prepare(model, adamw(model), "bf16")
    amp.backward(F.mse_loss(model(X), X))
    torch.optim.SGD(model.parameters(), lr=0.1).step()

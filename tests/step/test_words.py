"""What steppers say of themselves, and advice that works when it is followed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy
import pytest
import torch
from tests.step.step_models import Net, batch, mse
from torch import nn

import mezzo
from mezzo.errors import ConfigError, FormatError, PolicyError, StepError, StepTypeError


def test_a_released_stepper_says_so() -> None:
    amp = mezzo.prepare(nn.Linear(1, 1), None, "bf16")
    amp.release()
    assert repr(amp) == "Stepper(released)" and "released" in amp._repr_html_()


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=256", "fp32"])
@pytest.mark.parametrize("kind", [mezzo.GradScaler, torch.amp.GradScaler])
class TestAScalerLeftBeside:
    """One sentence, and following it trains."""

    WORDS = r"prepare there is no GradScaler.*amp\.backward\(loss\).*amp\.step\(\)"

    def test_scaled_loss(self, kind: type[torch.amp.GradScaler], policy: str) -> None:
        model = Net()
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)
        scaler = kind("cpu", init_scale=1024.0)
        x, y = batch()
        with pytest.raises(StepError, match=self.WORDS):
            amp.backward(scaler.scale(mse(model(x), y)))
        amp.backward(mse(model(x), y))
        assert amp.step()

    def test_scaler_step(self, kind: type[torch.amp.GradScaler], policy: str) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        amp = mezzo.prepare(model, optimizer, policy)
        scaler = kind("cpu", init_scale=1024.0)
        x, y = batch()
        with pytest.raises(StepError, match=self.WORDS):
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(optimizer)
        amp.zero_grad()
        amp.backward(mse(model(x), y))
        assert amp.step()


def test_a_weighted_loss_is_no_scaled_loss() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "bf16")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for factor in (torch.tensor(65536.0), 65536.0, torch.tensor(0.5)):
        amp.zero_grad()
        x, y = batch()
        amp.backward(mse(model(x), y) * factor)
        assert amp.step()


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (
            None,
            None,
            r"nn.Module as its model, and got NoneType\. Write .*ParameterList\(\[\.\.\.\]\) for weights that are in none",
        ),
        ([nn.Linear(1, 1)], None, r"got list\. Write nn\.ModuleList\(\[\.\.\.\]\) for several models"),
        (nn.Linear, None, "nn.Module as its model, and got the class Linear"),
        (torch.optim.SGD([torch.ones(1)]), nn.Linear(1, 1), "got SGD. The model comes first"),
        (nn.Linear(1, 1), torch.optim.SGD, "optimizer that was made, or a list of them, and got the class SGD"),
        (nn.Linear(1, 1), {"a": 1}, "optimizer that was made, or a list of them, and got dict"),
        (nn.Linear(1, 1), "AdamW", "optimizer that was made, or a list of them, and got str"),
    ],
)
def test_what_is_no_model_and_no_optimizer(model: object, optimizer: object, words: str) -> None:
    with pytest.raises(StepError, match=words):
        mezzo.prepare(model, optimizer, "bf16")


def test_bounds_that_are_no_numbers() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16")
    x, y = batch()
    amp.backward(mse(model(x), y))
    with pytest.raises(StepError, match=r"step\(1.0\): what comes first is a closure. Write step\(max_norm="):
        amp.step(1.0)
    with pytest.raises(StepError, match=r"step\(max_norm='1'\)"):
        amp.step(max_norm="1")
    assert amp.step(max_norm=torch.tensor(1.0))


@pytest.mark.parametrize("policy", ["fp32", "fp16, scaling=16", "bf16-master"])
@pytest.mark.parametrize("name", ["max_norm", "clip_value"])
@pytest.mark.parametrize(
    "bound", [torch.tensor([0.01]), numpy.array([[0.01]]), numpy.float32(0.01), torch.tensor(0.01).double()]
)
def test_a_bound_in_whatever_holds_one_number(policy: str, name: str, bound: Any) -> None:
    def trained(bound: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), policy)
        x, y = batch()
        amp.backward(mse(model(x), y))
        assert amp.step(**{name: bound})
        return list(model.parameters())

    assert all(map(torch.equal, trained(bound), trained(0.01)))


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and torch traces a batch norm with a warning
@pytest.mark.parametrize("compute", ["bf16", "fp16, scaling.init_scale=16"])
def test_a_model_with_scripted_parts_trains(compute: str) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).relu()

    model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(Norm(), torch.randn(3, 4)), nn.Linear(4, 1))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), compute)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    amp.backward(model(torch.full((3, 4), float("nan"))).square().mean())
    assert not amp.step()
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    amp.zero_grad()
    amp.backward(model(torch.randn(3, 4)).square().mean())
    assert amp.step()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def trains(amp: mezzo.Stepper, model: nn.Module) -> bool:
    x, y = batch()
    amp.backward(mse(model(x), y))
    return bool(amp.step())


@pytest.mark.parametrize("name", ["precision", "mixed_precision", "dtype", "amp_dtype"])
@pytest.mark.parametrize("value", ["bf16-mixed", "bf16", torch.bfloat16], ids=str)
def test_a_precision_by_another_name_is_called_policy(name: str, value: object) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(StepError, match=rf"has no argument '{name}'.* policy={value!r}") as caught:
        mezzo.prepare(model, optimizer, **{name: value})
    assert isinstance(caught.value, TypeError)
    assert trains(mezzo.prepare(model, optimizer, policy=value), model)


@pytest.mark.parametrize(
    ("more", "given", "words"),
    [
        ((), {"precision": 16}, r"'precision'.* policy='bf16-master'"),
        ((), {"opt_level": "O2"}, r"'opt_level'.* policy='O2'"),
        ((), {"chache": "region"}, r"'chache'\. Did you mean 'cache'\?"),
        ((), {"models": 1}, r"'models'\. Did you mean 'model'\?"),
        (
            ("bf16", "loader", "scheduler"),
            {},
            r"prepare\(\) takes model, optimizer, policy, skip=\.\.\., cache=\.\.\.\. Loaders .*on_applied",
        ),
        ((), {"scheduler": 1}, r"'scheduler': write amp\.on_applied\(scheduler\.step\)\."),
        ((), {"loss_scale": "dynamic"}, r"'loss_scale': write it in the policy, .* policy='fp16, scaling=1024'"),
        ((), {"max_grad_norm": 1.0}, r"'max_grad_norm': write amp\.step\(max_norm=\.\.\.\)"),
        ((), {"enabled": False}, r"'enabled': write policy='fp32'"),
        ((), {"bf16": True}, r"'bf16': write policy='fp16-master' or policy='bf16-master'"),
        ((), {"optimizer": None}, r"prepare\(\) takes model, optimizer, policy, "),
    ],
)
def test_a_call_that_fits_no_argument_is_answered(
    more: tuple[object, ...], given: dict[str, object], words: str
) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(StepError, match=words):
        mezzo.prepare(model, optimizer, *more, **given)
    assert trains(mezzo.prepare(model, optimizer, "bf16"), model)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda amp: amp.step(max_grad_norm=1.0), r"amp\.step\(\) has no argument 'max_grad_norm': write amp\.step\(max_norm=\.\.\.\)"),
        (lambda amp: amp.step(None, None), r"amp\.step\(\) takes closure, max_norm=\.\.\., clip_value"),
        (lambda amp: amp.backward(torch.ones(()), retain_grad=True), r"'retain_grad'\. Did you mean 'retain_graph'\?"),
        (lambda amp: amp.backward(torch.ones(()), gradient=1), r"'gradient': write amp\.backward\(\(outputs \* gradient\)\.sum\(\)\)"),
        (lambda amp: amp.backward(), r"amp\.backward\(\) takes loss, retain_graph=\.\.\., create_graph"),
        (lambda amp: amp.backward(torch.ones(2), torch.ones(2)), r"For loss\.backward\(gradient\) write amp\.backward\(\(loss \* gradient\)\.sum\(\)\)\."),
        (lambda amp: amp.load_state_dict({}, strict=False), r"'strict': .*amp\.model\.load_state_dict\(weights, strict=False\)"),
        (lambda amp: amp.zero_grad(True, True), r"amp\.zero_grad\(\) takes set_to_none\."),
    ],
)  # fmt: skip
def test_a_call_that_fits_no_argument_of_a_method_is_answered(call: Any, words: str) -> None:
    model, optimizer = model_and_optimizer()
    amp = mezzo.prepare(model, optimizer, "bf16")
    with pytest.raises(StepTypeError, match=words):
        call(amp)
    assert trains(amp, model)


def test_a_type_error_from_inside_stays_what_it_is() -> None:
    model, optimizer = model_and_optimizer()
    amp = mezzo.prepare(model, optimizer, "bf16")
    with pytest.raises(TypeError, match="unsupported operand"):
        amp.step(lambda: 1 + None)  # type: ignore[operator]  # the mistake


def test_what_prepare_returns_is_one_stepper() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(StepError, match=r"model and optimizer stay .*amp = mezzo\.prepare\("):
        model, optimizer = mezzo.prepare(model, optimizer, "bf16")
    amp = mezzo.prepare(model, optimizer, "bf16")
    with pytest.raises(TypeError):
        iter(amp)
    assert trains(amp, model)


def test_a_loader_in_the_place_of_the_policy_is_named() -> None:
    model, optimizer = model_and_optimizer()
    loader = torch.utils.data.DataLoader([1])
    with pytest.raises(mezzo.errors.PolicyError, match=r"a policy is .*DataLoader"):
        mezzo.prepare(model, optimizer, loader)
    assert trains(mezzo.prepare(model, optimizer, "bf16"), model)


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=256"])
def test_the_scale_is_a_number_and_no_method(policy: str) -> None:
    """A habit from GradScaler; what is written instead is what the sentence says."""
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)
    x, y = batch()
    with pytest.raises(StepTypeError, match=r"amp\.scale.*number.*Write amp\.backward\(loss\)"):
        amp.scale(mse(model(x), y)).backward()  # type: ignore[operator]  # the mistake
    assert type(amp.scale) is float and f"{amp.scale:g}" == ("256" if "fp16" in policy else "1")
    assert amp.scale.is_integer() and [amp.scale for _ in range(2)] == [amp.scale] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda amp: amp.on_applied(torch.optim.lr_scheduler.StepLR(amp.optimizers[0], 1)), r"got StepLR. Write .*scheduler\.step"),
        (lambda amp: amp.on_applied(None), "takes a function, and got NoneType"),
        (
            lambda amp: amp.on_applied(torch.optim.lr_scheduler.ReduceLROnPlateau(amp.optimizers[0]).step),
            r"without arguments, and ReduceLROnPlateau.step needs some. Write amp.on_applied\(lambda: ",
        ),
        (lambda amp: amp.observe(print), r"got builtin_function_or_method. Write amp\.on_applied"),
        (lambda amp: setattr(amp, "consensus", "ddp"), "RankConsensus.* given str"),
    ],
)  # fmt: skip
def test_what_is_called_later_is_looked_at_now(call: Any, words: str) -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16")
    with pytest.raises(StepTypeError, match=words):
        call(amp)
    x, y = batch()
    amp.backward(mse(model(x), y))
    assert amp.step()


def test_a_loss_that_went_backward_by_itself_is_told_where_to_go() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16")
    x, y = batch()
    mse(model(x), y).backward()
    with pytest.raises(StepError, match=r"write amp\.backward\(loss\) for loss\.backward\(\)"):
        amp.step()


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16, scaling=16", "fp16-master, scaling=16"])
def test_one_loss_through_two_prepared_models_is_told_to_prepare_them_as_one(policy: str) -> None:
    def parts() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
        encoder, decoder = Net(), nn.Linear(1, 1)
        return encoder, decoder, [torch.optim.SGD(part.parameters(), lr=0.01) for part in (encoder, decoder)]

    x, y = batch()
    encoder, decoder, optimizers = parts()
    amp, other = mezzo.prepare(encoder, optimizers[0], policy), mezzo.prepare(decoder, optimizers[1], policy)
    amp.backward(mse(decoder(encoder(x)), y))
    assert amp.step()
    with pytest.raises(
        StepError, match=r"models that share a loss .* mezzo\.prepare\(nn\.ModuleList\(\[a, b\]\), \[optimizer_a"
    ):
        other.step()
    encoder, decoder, optimizers = parts()
    amp = mezzo.prepare(nn.ModuleList([encoder, decoder]), optimizers, policy)
    amp.backward(mse(decoder(encoder(x)), y))
    assert amp.step()


def soft(target: nn.Module, model: nn.Module) -> None:
    for mine, other in zip(target.parameters(), model.parameters(), strict=True):
        mine.lerp_(other, 0.001)


def soft_copy(target: nn.Module, model: nn.Module) -> None:
    for mine, other in zip(target.parameters(), model.parameters(), strict=True):
        mine.copy_(0.999 * mine + 0.001 * other)


def hard(target: nn.Module, model: nn.Module) -> None:
    target.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("update", "policy", "is_said"),
    [
        (soft, "bf16-master", True),
        (soft_copy, "bf16-master", True),
        (hard, "bf16-master", False),
        (soft, "bf16", False),
    ],
)
def test_a_target_network_by_hand(update: Any, policy: str, is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It says once that it moves in 16 bit, or not at all; a target that is given the weights does not."""
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)
    target = copy.deepcopy(model).requires_grad_(False)
    plain = copy.deepcopy(model).float()
    for _ in range(5):
        x, y = batch()
        amp.zero_grad()
        amp.backward(mse(model(x), y) + mse(target(x), y) + mse(plain(x), y))
        amp.step()
        with torch.no_grad():
            update(target, model)
            plain.load_state_dict(amp.export_weights())
    assert caplog.text.count("is averaged by hand in bf16") == int(is_said)
    assert pickle.loads(pickle.dumps(target))(x).isfinite().all()


@pytest.mark.parametrize("call", ["step", "grad_norm", "on_applied"])
@pytest.mark.parametrize("other", [False, [], "adam", torch.ones(2), torch.optim.SGD([torch.ones(1)])])
def test_what_is_not_stepped_here_is_refused_as_an_optimizer(call: str, other: Any) -> None:
    model = torch.nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(model(torch.ones(2, 4)).square().mean())
    given = [lambda: None] if call == "on_applied" else []
    with pytest.raises(
        StepError, match=rf"{call}\(optimizer=...\) was given .* Write one of amp.optimizers: \[0\] SGD"
    ):
        getattr(amp, call)(*given, optimizer=other)
    assert amp.step(clip_value=1e308).applied


class Hostile:
    """Answers nothing that it is asked."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("hostile")

    __eq__ = __bool__ = __repr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [numpy.ones(2), torch.ones(2, 2), torch.ones((), device="meta"), Hostile()])
@pytest.mark.parametrize(
    ("error", "call"),
    [
        (StepError, lambda amp, value: mezzo.prepare(Net(), None, "bf16", skip=value)),
        (StepError, lambda amp, value: mezzo.prepare(Net(), None, "bf16", cache=value)),
        (StepError, lambda amp, value: amp.step(norm_type=value)),
        (StepError, lambda amp, value: amp.step(max_norm=value)),
        (StepError, lambda amp, value: amp.grad(amp.model(batch()[0]).sum(), value if isinstance(value, Hostile) else [])),
        (PolicyError, lambda amp, value: mezzo.Policy(compute=value)),
        (PolicyError, lambda amp, value: mezzo.Policy(master=value)),
        (PolicyError, lambda amp, value: mezzo.policy.GuardConfig(on_overflow=value)),
        (ConfigError, lambda amp, value: mezzo.optim.AdamW(amp.model.parameters(), backend=value)),
        (ConfigError, lambda amp, value: mezzo.optim.AdamW(amp.model.parameters(), state_dtype=value)),
        (ConfigError, lambda amp, value: mezzo.optim.MasterWeights(amp.optimizers[0], value)),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_compared_or_printed_is_refused(
    error: type[Exception], call: Any, value: object
) -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    amp.backward(mse(model(batch()[0]), batch()[1]))
    with pytest.raises(error):
        call(amp, value)
    assert amp.step(clip_value=numpy.array(1.0))


def test_a_tensor_in_the_place_of_an_optimizer_and_a_device_of_no_number() -> None:
    with pytest.raises(StepError, match="takes an optimizer that was made"):
        mezzo.prepare(Net(), torch.ones(()), "bf16")  # type: ignore[arg-type]  # none
    with pytest.raises(FormatError, match="no device"):
        mezzo.Policy.parse("auto").resolve(2**70)  # type: ignore[arg-type]  # none

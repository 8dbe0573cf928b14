"""prepare that raises leaves everything as it was; release gives it all back; nothing is prepared twice."""

from __future__ import annotations

import copy
import importlib
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.step.step_models import Net, batch, mse
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import mezzo
from mezzo.errors import MezzoError, PolicyError, StepError

prepare_module = importlib.import_module("mezzo.step.prepare")  # the package has the function under this name


def facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything of a model and its optimizer that prepare may write, and what shows that it did."""
    found: dict[str, Any] = {"optimizer class": type(optimizer), "options": copy.deepcopy(_options(optimizer))}
    for name, module in model.named_modules():
        found[f"{name} class"] = type(module)
        found[f"{name} keys"] = sorted(module.__dict__)
        found[f"{name} hooks"] = [len(hooks) for key, hooks in sorted(vars(module).items()) if key.endswith("hooks")]
    for name, p in model.named_parameters():
        found |= {name: p, f"{name} dtype": p.dtype, f"{name} grad_dtype": p.grad_dtype, f"{name} grad": p.grad}
        found |= {f"{name} bits": p.detach().clone(), f"{name} memory": p.data_ptr()}
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        found[name] = len(getattr(optimizer, name, ()))
    found["state"] = {id(p): sorted(entry) for p, entry in getattr(optimizer, "state", {}).items()}
    return found


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def assert_unchanged(model: nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, Any]) -> None:
    now = facts(model, optimizer)
    assert now.keys() == before.keys()
    for key, was in before.items():
        same = torch.equal(now[key], was) if isinstance(was, Tensor) else now[key] == was
        assert same, f"{key}: {was} became {now[key]}"
    x, _ = batch()
    assert model(x).dtype is torch.float32


class Wrapper(torch.optim.Optimizer):
    """An optimizer as Accelerate wraps it: groups and state are the inner one's, and the base class was never set up."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Bare(torch.optim.Optimizer):
    """An optimizer that skips super().__init__() and has nothing inside."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class TestAPrepareThatRaises:
    @pytest.mark.parametrize("policy", ["bf16", "fp16, grads=fp32", "bf16-master", "fp16-master", "fp32"])
    @pytest.mark.parametrize("name", ["set_grad_dtype_", "convert_", "bind", "Stepper"])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_at_any_point(self, name: str, policy: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = getattr(prepare_module, name)

        def faulty(*args: Any, **kwargs: Any) -> None:
            if when == "after":
                honest(*args, **kwargs)
            raise MemoryError("planted")

        monkeypatch.setattr(prepare_module, name, faulty)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = facts(model, optimizer)
        with pytest.raises(MemoryError, match="planted"):
            mezzo.prepare(model, optimizer, policy)
        assert_unchanged(model, optimizer, before)

    @pytest.mark.parametrize("policy", ["bf16-master", "fp16-master", "bf16-master, master=kahan"])
    def test_in_the_middle_of_the_weights(self, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Net()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
        if policy.startswith("bf16"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = facts(model, optimizer)
        honest, count = Tensor.to, [0]

        def faulty(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args and args[0] in (torch.bfloat16, torch.float16) and isinstance(self, Tensor) and self.dim() > 0:
                count[0] += 1
                if count[0] == 3:
                    raise MemoryError("planted")
            return honest(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, "to", faulty)
        with pytest.raises(MemoryError, match="planted"):
            mezzo.prepare(model, optimizer, policy)
        monkeypatch.undo()
        assert count[0] == 3
        assert_unchanged(model, optimizer, before)

    def test_an_optimizer_without_hooks_is_refused_by_name(self) -> None:
        model = Net()
        optimizer = Bare(model.parameters())
        before = facts(model, optimizer)
        with pytest.raises(StepError, match=r"Bare .*super\(\).__init__"):
            mezzo.prepare(model, optimizer, "bf16")
        assert_unchanged(model, optimizer, before)

    @pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
    def test_a_wrapped_optimizer_is_looked_through(self, policy: str) -> None:
        model = Net()
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        amp = mezzo.prepare(model, Wrapper(inner), policy)
        assert isinstance(amp.optimizers[0], torch.optim.AdamW)
        x, y = batch()
        amp.backward(mse(model(x), y))
        assert amp.step()
        with pytest.raises(StepError, match=r"Write amp.step\(\)"):
            inner.step()

    def test_a_forward_of_its_own_comes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = nn.Linear(4, 2)
        own = model.forward
        model.forward = own
        monkeypatch.setattr(prepare_module, "Stepper", lambda *a, **k: (_ for _ in ()).throw(ValueError("planted")))
        with pytest.raises(ValueError, match="planted"):
            mezzo.prepare(model, None, "bf16")
        assert model.__dict__["forward"] is own and type(model) is nn.Linear


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.strided])
@pytest.mark.parametrize("is_fit", [True, False])
def test_a_model_with_a_weight_of_another_layout(
    layout: torch.layout, is_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse one has no address: what was stored anew could not be told, and nothing was put back."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2))
    weight = nn.Parameter(model[0].weight.detach().to_sparse() if layout is torch.sparse_coo else model[0].weight)
    model[0].weight = weight
    wanted = [weight.detach().to_dense().clone(), model[1].weight.detach().clone()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_fit:
        amp = mezzo.prepare(model, optimizer, "bf16-master")
        assert weight.dtype is (torch.float32 if layout is torch.sparse_coo else torch.bfloat16)
        amp.release()
    else:
        monkeypatch.setattr(prepare_module, "Stepper", lambda *a, **k: (_ for _ in ()).throw(ValueError("planted")))
        with pytest.raises(ValueError, match="planted"):
            mezzo.prepare(model, optimizer, "bf16-master")
    assert model[0].weight is weight and weight.layout is layout
    assert all(torch.equal(m.weight.detach().to_dense(), w) for m, w in zip(model, wanted, strict=True))
    assert all(type(m) is nn.Linear for m in model)


class TestPreparedTwice:
    @pytest.mark.parametrize("second", ["whole", "part", "optimizer"])
    def test_it_is_refused(self, second: str) -> None:
        model = nn.Sequential(Net(), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = mezzo.prepare(model, optimizer, "bf16")
        with pytest.raises(StepError, match=r"prepared already.*amp.release\(\)"):
            if second == "optimizer":
                mezzo.prepare(nn.Linear(1, 1), optimizer, "fp32")
            else:
                mezzo.prepare(model if second == "whole" else model[0], None, "fp32")
        assert str(amp.policy) == "bf16"
        assert model(torch.randn(3, 4)).dtype is torch.float32
        x, y = batch()
        amp.backward(mse(model(x), y))
        assert amp.step()

    def test_two_models_that_share_a_part_are_told_to_be_prepared_as_one(self) -> None:
        """An actor and its critic, each with an optimizer of its own; what is said is followed."""
        body = nn.Linear(4, 4)
        actor, critic = nn.Sequential(body, nn.Linear(4, 2)), nn.Sequential(body, nn.Linear(4, 1))
        of_actor = torch.optim.SGD(actor.parameters(), lr=0.1)
        of_critic = torch.optim.SGD(critic[1].parameters(), lr=0.1)
        amp = mezzo.prepare(actor, of_actor, "bf16")
        words = r"0 is prepared already.* For two models that share parts write mezzo\.prepare\(nn\.ModuleList\(\[a, b\]\), \[optimizer_a, optimizer_b\], policy\)"
        with pytest.raises(StepError, match=words):
            mezzo.prepare(critic, of_critic, "bf16")
        amp.release()
        both = mezzo.prepare(nn.ModuleList([actor, critic]), [of_actor, of_critic], "bf16")
        for model, optimizer in ((actor, of_actor), (critic, of_critic)):
            optimizer.zero_grad()
            both.backward(model(torch.randn(3, 4)).square().mean())
            assert both.step(optimizer=optimizer)

    def test_once_the_stepper_is_gone_it_may_be_prepared_again(self) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mezzo.prepare(model, optimizer, "bf16")
        assert mezzo.prepare(model, optimizer, "fp32").policy.compute is torch.float32

    def test_a_copy_is_another_model(self) -> None:
        model = Net()
        amp = mezzo.prepare(model, None, "bf16")
        twin = copy.deepcopy(model)
        other = mezzo.prepare(twin, torch.optim.SGD(twin.parameters(), lr=0.1), "fp32")
        assert amp.policy != other.policy


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "mezzo": lambda p: mezzo.optim.AdamW(p, lr=0.01),
    "wrapped": lambda p: mezzo.optim.MasterWeights(torch.optim.AdamW(p, lr=0.01), mode="fp32"),
}


def aux_states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.dtype is not torch.float32):
        yield optimizer.aux_state(p)[1]


class TestRelease:
    @pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master", "fp16, grads=fp32"])
    @pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop", "mezzo"])
    def test_a_plain_model_and_optimizer(self, policy: str, name: str) -> None:
        """It goes on in torch from the fp32 weights that the run had."""
        if name == "rmsprop" and policy == "bf16-master":
            policy = "bf16-master, master=fp32"
        model = Net()
        optimizer = OPTIMIZERS[name](model.parameters())
        classes, optimizer_class = [type(m) for m in model.modules()], type(optimizer)
        attributes = set(vars(optimizer))
        amp = mezzo.prepare(model, optimizer, policy)
        for _ in range(3):
            x, y = batch()
            amp.zero_grad()
            amp.backward(mse(model(x), y))
            amp.step()
        want = amp.export_weights()
        beside = [weakref.ref(aux) for one in amp.optimizers for aux in aux_states(one)]
        assert amp.release() is model
        assert [type(m) for m in model.modules()] == classes and type(optimizer) is optimizer_class
        assert set(vars(optimizer)) == attributes
        assert (policy in ("bf16", "fp16, grads=fp32")) is not bool(beside) and not any(
            aux() is not None for aux in beside
        )
        assert all(p.dtype is torch.float32 and p.grad_dtype in (None, torch.float32) for p in model.parameters())
        assert all(torch.equal(want[key], value) for key, value in model.state_dict().items())
        assert not any("mezzo" in key for m in model.modules() for key in m.__dict__)
        twin = Net()
        twin.load_state_dict(model.state_dict())
        other = OPTIMIZERS[name](twin.parameters())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        x, y = batch()
        for one, its in ((model, optimizer), (twin, other)):
            its.zero_grad()
            mse(one(x), y).backward()
            its.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))

    @pytest.mark.parametrize("policy", ["bf16-master", "fp16-master", "bf16-master, grads=fp32"])
    def test_gradients_have_the_policys_dtype_the_second_time_too(self, policy: str) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dtypes = []
        for _ in range(2):
            amp = mezzo.prepare(model, optimizer, policy)
            x, y = batch()
            amp.backward(mse(model(x), y))
            dtypes.append([p.grad.dtype for p in model.parameters()])
            amp.release()
        assert dtypes[0] == dtypes[1]

    def test_the_stepper_says_that_it_was_released(self) -> None:
        model = Net()
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
        amp.release()
        for call in (amp.step, amp.zero_grad, amp.release, lambda: amp.policy):
            with pytest.raises(StepError, match=r"released.*mezzo.prepare"):
                call()
        assert mezzo.prepare(model, amp.optimizers[0], "fp32")

    def test_inference(self) -> None:
        model = Net()
        before = copy.deepcopy(model.state_dict())
        amp = mezzo.prepare(model, None, "bf16-master")
        assert model.inner.weight.dtype is torch.bfloat16
        amp.release()
        for key, value in model.state_dict().items():
            assert value.dtype is before[key].dtype
            torch.testing.assert_close(value, before[key], rtol=2**-8, atol=0)

    @pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore:.torch.jit.script. is deprecated:FutureWarning",
        "ignore:torch.quantize:UserWarning",
    )
    def test_what_needs_plain_classes_works_again(self) -> None:
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
        amp.backward(model(torch.randn(3, 4)).square().mean())
        amp.step()
        amp.release()
        parametrize.remove_parametrizations(model[0], "weight")
        assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
        x = torch.randn(3, 4)
        assert torch.equal(torch.jit.script(model)(x), model(x))
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        assert type(quantized[2]) is not nn.Linear


class TestOutsideToolsOnAPreparedModel:
    def test_remove_parametrizations(self) -> None:
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 2))
        mezzo.prepare(model, None, "bf16, output=none")
        x = torch.randn(3, 4)
        want = model(x)
        parametrize.remove_parametrizations(model[0], "weight")
        assert isinstance(model[0], nn.Linear) and model[0](x).dtype is torch.bfloat16
        torch.testing.assert_close(model(x), want, rtol=2**-6, atol=2**-6)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit.script. is deprecated:FutureWarning")
    def test_script_and_quantize_say_what_to_do(self) -> None:
        model = nn.Sequential(nn.Linear(4, 2))
        amp = mezzo.prepare(model, None, "bf16")
        with pytest.raises(StepError, match=r"torch.jit.script.*amp.release\(\)"):
            torch.jit.script(model)
        with pytest.raises(StepError, match=r"quantiz.*amp.release\(\)"):
            torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        assert amp.policy.compute is torch.bfloat16

    def test_a_stepper_is_not_pickled(self) -> None:
        amp = mezzo.prepare(nn.Linear(4, 2), None, "bf16")
        for copying in (pickle.dumps, copy.deepcopy):
            with pytest.raises(StepError, match=r"amp.state_dict\(\)"):
                copying(amp)


def test_every_refusal_is_one_of_mezzo() -> None:
    assert issubclass(PolicyError, MezzoError)


class _Noise(nn.Module):
    """Whoever has it may give it another size at any time."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size


def _around(act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), act, act, nn.Linear(8, 1))


def _stepper(model: nn.Module, policy: str) -> mezzo.Stepper:
    return mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_models_that_share_an_activation_go_each_its_own_way() -> None:
    act, x = nn.GELU(), torch.randn(4, 8)  # as a default argument is one object in all models
    models = [_around(act), _around(act)]
    alone = [copy.deepcopy(model) for model in models]
    steppers = [_stepper(model, policy) for kind in (models, alone) for model, policy in zip(kind, ("bf16", "fp32"), strict=True)]  # fmt: skip
    for amp in 2 * steppers:
        amp.zero_grad()
        amp.backward(amp.model(x).square().mean())
        assert amp.step()
    for model, own in zip(models, alone, strict=True):
        assert all(map(torch.equal, model.parameters(), own.parameters()))


@pytest.mark.parametrize(("kind", "policy", "error"), [(nn.GELU, "bf16, module:none=fp32", PolicyError), (_Noise, "bf16", StepError)])  # fmt: skip
def test_a_second_prepare_that_is_refused_leaves_what_both_have(kind: Any, policy: str, error: type[Exception]) -> None:
    act = kind()
    act.size = 0.1
    first, second = _stepper(_around(act), "bf16"), _around(act)
    with pytest.raises(error):
        _stepper(second, policy)
    assert second[1] is second[2] is act
    first.backward(first.model(torch.randn(4, 8)).square().mean())
    assert first.step()

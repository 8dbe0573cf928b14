"""A bound policy holds however the model's modules are called, and leaves the model what it was."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.saved import through_a_file
from tests.step.step_models import Dtypes, Net, twin
from tests.torch_versions import traces_regions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import mezzo
from mezzo.casting import cast_plan as plan
from mezzo.errors import CastError, PolicyError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def bound(policy: str, model: nn.Module | None = None) -> nn.Module:
    return mezzo.prepare(Net(has_batch_norm=False) if model is None else model, None, policy).model


def dtypes(call: Callable[[], Any]) -> list[torch.dtype]:
    with Dtypes() as seen:
        call()
    return seen.of("addmm", "mm")


POLICIES = {
    "fp32": [FP32, FP32],
    "bf16": [BF16, BF16],
    "fp16": [FP16, FP16],
    "bf16, module:outer=fp32": [BF16, FP32],
    "bf16, module:inner=fp16": [FP16, BF16],
    "bf16, ops=mezzo": [BF16, BF16],
    "fp32, module:Linear=fp32": [FP32, FP32],
}


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryWayOfCalling:
    """Matrix products run in the declared dtype and the result is that of a plain call."""

    @pytest.fixture
    def case(self, policy: str) -> tuple[nn.Module, Tensor, Tensor, list[torch.dtype]]:
        model, x = bound(policy), torch.randn(3, 4)
        return model, x, model(x), POLICIES[policy]

    def test_plain(self, case: Any) -> None:
        model, x, _, want = case
        assert dtypes(lambda: model(x)) == want
        assert not torch.is_autocast_enabled("cpu")

    def test_submodule_called_directly(self, case: Any) -> None:
        model, x, _, want = case
        assert dtypes(lambda: model.inner(x)) == want[:1]
        assert dtypes(lambda: model.outer(torch.randn(3, 8))) == want[1:]

    def test_thread(self, case: Any) -> None:
        model, x, out, _ = case
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], out)

    @pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies(self, case: Any, copier: Callable[[nn.Module], nn.Module]) -> None:
        model, x, out, want = case
        other = copier(model)
        assert dtypes(lambda: other(x)) == want
        assert torch.equal(other(x), out)
        assert type(other) is type(model)

    def test_torch_save(self, case: Any) -> None:
        model, x, out, _ = case
        assert torch.equal(through_a_file(model, weights_only=False)(x), out)

    def test_functional_call(self, case: Any) -> None:
        model, x, out, _ = case
        values = {name: value.clone() for name, value in model.state_dict().items()}
        assert torch.equal(torch.func.functional_call(model, values, (x,)), out)

    def test_vmap(self, case: Any) -> None:
        model, x, out, want = case
        assert dtypes(lambda: torch.vmap(model)(x.expand(2, 3, 4))) == want
        # vmap splits addmm into mm and add, so one more rounding in the narrowest dtype.
        eps = max(torch.finfo(dtype).eps for dtype in want)
        torch.testing.assert_close(torch.vmap(model)(x.expand(2, 3, 4))[1], out, rtol=4 * eps, atol=4 * eps)

    def test_vmap_inside_the_model(self, policy: str, case: Any) -> None:
        class Mapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.outer(torch.vmap(self.inner)(x))

        model, want = bound(policy, Mapped()), case[3]
        assert dtypes(lambda: model(torch.randn(3, 2, 4))) == want

    def test_func_grad(self, case: Any) -> None:
        model, x, _, _ = case
        values = {name: p.detach() for name, p in model.named_parameters()}
        found = torch.func.grad(lambda v: torch.func.functional_call(model, v, (x,)).sum())(values)
        model(x).sum().backward()
        for name, p in model.named_parameters():
            # The order in which a layer norm's kernel sums the gradients of its weight differs.
            torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-6)

    @traces_regions
    def test_compiled_whole(self, case: Any) -> None:
        model, x, out, _ = case
        torch.compiler.reset()  # a class is compiled so many times, and no more
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), out)
        compiled(x).sum().backward()
        got = [p.grad for p in model.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        for grad, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("prepares", [True, pytest.param(False, marks=pytest.mark.slow)])
    @traces_regions
    def test_compiled_in_a_thread_where_no_model_ran_before(self, policy: str, case: Any, prepares: bool) -> None:
        """Compiled whole, and once, where the model was prepared; elsewhere it works too."""
        model, x, out, _ = case
        found: list[Any] = []

        def run() -> None:
            torch.compiler.reset()
            try:
                own = bound(policy, copy.deepcopy(model)) if prepares else model
                compiled = torch.compile(own, fullgraph=prepares, backend="aot_eager")
                found.append(compiled(x))
                with torch.compiler.set_stance("fail_on_recompile" if prepares else "default"):
                    found.append(compiled(x))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(found) == 2 and all(torch.equal(result, out) for result in found), found

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_recompute(self, policy: str, case: Any, use_reentrant: bool) -> None:
        class Saved(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(lambda x: self.outer(self.inner(x).relu()), x, use_reentrant=use_reentrant)

        want = case[3]
        plain = Saved()
        plain.forward = lambda x: plain.outer(plain.inner(x).relu())
        plain.load_state_dict(model_weights := Saved().state_dict())
        model = bound(policy, Saved())
        model.load_state_dict(model_weights)
        reference = bound(policy, plain)
        x = torch.randn(3, 4, requires_grad=True)
        with set_checkpoint_early_stop(False), Dtypes() as seen:
            out = model(x)
        assert seen.of("addmm") == want
        with Dtypes() as seen:
            out.sum().backward()
        assert seen.of("addmm") == want
        reference(x.detach().requires_grad_()).sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


class Nested(nn.Module):
    """Model code that switches autocasting off around one of its modules, as third parties do."""

    def __init__(self, saves: bool = False) -> None:
        super().__init__()
        self.low, self.high, self.saves = nn.Linear(4, 4), nn.Linear(4, 4), saves

    def part(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.high(x.float())

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(x)
        return checkpoint(self.part, x, use_reentrant=False) if self.saves else self.part(x)


@pytest.mark.parametrize("policy", ["bf16", "bf16, ops=mezzo"])
@pytest.mark.parametrize("saves", [False, True])
def test_a_nested_switch_is_obeyed_in_forward_and_recompute(policy: str, saves: bool) -> None:
    model = bound(policy, Nested(saves))
    with set_checkpoint_early_stop(False), Dtypes() as seen:
        out = model(torch.randn(2, 4))
    assert seen.of("addmm") == [BF16, FP32]
    with Dtypes() as seen:
        out.sum().backward()
    assert seen.of("addmm") == ([FP32] if saves else [])


def test_binding_wins_over_a_region_around_the_model() -> None:
    model = bound("bf16")
    with torch.autocast("cpu", dtype=FP16):
        assert dtypes(lambda: model(torch.randn(2, 4))) == [BF16, BF16]
        assert torch.get_autocast_dtype("cpu") is FP16


def test_two_bound_models_call_each_other() -> None:
    inner = bound("fp16", nn.Linear(4, 4))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(inner(self.own(x)))

    model = bound("bf16", Outer())
    assert dtypes(lambda: model(torch.randn(2, 4))) == [BF16, FP16, BF16]


class TestTheModelStaysWhatItWas:
    def test_names_repr_signature_and_types(self) -> None:
        plain = Net()
        model = bound("bf16", twin(plain))
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert repr(model) == repr(plain)
        assert isinstance(model, Net) and isinstance(model.inner, nn.Linear)
        assert type(model).__name__ == "Net" and type(model.inner).__module__ == nn.Linear.__module__
        import inspect

        assert inspect.signature(model.forward).parameters.keys() == inspect.signature(plain.forward).parameters.keys()

    def test_a_slice_of_a_sequential(self) -> None:
        model = bound("bf16", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
        assert dtypes(lambda: model[:2](torch.randn(2, 4))) == [BF16]

    def test_class_patched_afterwards(self) -> None:
        class Patched(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

        model = bound("bf16", Patched())
        Patched.forward = lambda self, x: x + 1  # type: ignore[method-assign]
        assert model(torch.zeros(1)).item() == 1

    def test_a_forward_of_its_own(self) -> None:
        model = nn.Linear(4, 4)
        model.forward = lambda x: nn.functional.linear(x, model.weight) + 1
        want = model.forward(torch.ones(2, 4)).detach()
        bound("bf16", model)
        assert dtypes(lambda: model(torch.ones(2, 4))) == [BF16]
        torch.testing.assert_close(
            model(torch.ones(2, 4)).float(), want, rtol=4 * torch.finfo(BF16).eps, atol=4 * torch.finfo(BF16).eps
        )

    def test_hooks_and_parametrizations(self) -> None:
        model = bound("bf16", nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
        calls = []
        model.register_forward_hook(lambda *a: calls.append(1))
        assert dtypes(lambda: model(torch.ones(2, 4))) == [BF16]
        assert calls == [1]

    @pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16-master, scaling=16"])
    @pytest.mark.parametrize("is_later", [False, True])
    def test_a_parametrized_weight_has_the_dtype_that_is_stored(self, policy: str, is_later: bool) -> None:
        """So that torch can put what a parametrization computes in its place, and training goes on from there."""

        class Turned(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return weight @ torch.eye(4, dtype=weight.dtype).flip(0)

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        register = partial(nn.utils.parametrize.register_parametrization, model[0], "weight", Turned())
        if not is_later:
            register()
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), policy)
        if is_later:
            register()
        model(torch.ones(2, 4))  # which takes what came into the policy
        stored = model[0].parametrizations.weight.original
        want = stored.detach().flip(1)
        assert model[0].weight.dtype is stored.dtype
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
        assert torch.equal(model[0].weight, want.to(amp.policy.compute).to(stored.dtype))
        amp.backward(model(torch.ones(2, 4)).square().mean())
        assert amp.step() and not torch.equal(model[0].weight, want)

    def test_prepared_again(self) -> None:
        model = bound("bf16")
        bound("fp16", model)
        assert dtypes(lambda: model(torch.randn(2, 4))) == [FP16, FP16]
        assert type(model).__mro__[1] is Net

    def test_an_exception_restores_the_state(self) -> None:
        class Fails(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise KeyError("no")

        model = bound("bf16", nn.Sequential(nn.Linear(4, 4), Fails()))
        with pytest.raises(KeyError):
            model(torch.ones(1, 4))
        assert not torch.is_autocast_enabled("cpu")
        assert dtypes(lambda: model[0](torch.ones(1, 4))) == [BF16]


@traces_regions
def test_compiled_whole_before_any_region_was_made() -> None:
    """The regions of root and norm are made while the compiler traces."""
    norm = nn.LayerNorm(8)
    model = bound("bf16, output=none", nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2)))
    x = torch.randn(3, 4)
    torch.compiler.reset()
    plan._make_plan.cache_clear()
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, model(x), rtol=2 * torch.finfo(BF16).eps, atol=1e-2)
    assert out.dtype is BF16


class TestModuleRules:
    def test_a_rule_reaches_everything_below(self) -> None:
        model = bound(
            "bf16, module:1=fp32", nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        )
        with Dtypes() as seen:
            out = model(torch.randn(2, 4))
        assert seen.of("addmm") == [BF16, FP32]
        assert seen.of("native_layer_norm") == [FP32] and out.dtype is FP32

    def test_a_rule_reaches_a_module_below_that_is_called_alone(self) -> None:
        model = bound("bf16, module:0=fp32", nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)))
        assert dtypes(lambda: model[0][0](torch.randn(2, 4, dtype=BF16))) == [FP32]

    def test_output_dtype(self) -> None:
        class Several(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.proj = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> dict[str, Any]:
                y = self.proj(x)
                return {"one": y, "more": (y, [y, None, 3]), "ids": torch.arange(3)}

        out = bound("bf16, output=fp32", Several())(torch.randn(2, 4))
        assert out["one"].dtype is FP32 and out["more"][0].dtype is FP32 and out["more"][1][0].dtype is FP32
        assert out["more"][1][1:] == [None, 3] and out["ids"].dtype is torch.int64

    def test_a_class_rule_names_the_class_it_had(self) -> None:
        model = bound("bf16", Net(has_batch_norm=False))
        bound("bf16, module:Linear=fp32", model)
        assert dtypes(lambda: model(torch.randn(2, 4))) == [FP32, FP32]

    def test_low_weights_under_an_fp32_rule_are_stored_in_fp32(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(BF16).requires_grad_(False)
        bound("bf16, module:1=fp32", model)
        assert dtypes(lambda: model(torch.randn(2, 4))) == [BF16, FP32]
        assert model[0].weight.dtype is BF16 and model[1].weight.dtype is FP32

    def test_a_module_in_two_places_with_two_rules(self) -> None:
        shared = nn.Linear(4, 4)
        with pytest.raises(PolicyError) as error:
            bound("bf16, module:0=fp32", nn.Sequential(shared, shared))
        assert str(error.value) == (
            "'0' and '1' are one Linear in two places, and the policy gives it fp32 in one and the compute dtype in the "
            "other. Give both places the same rule."
        )

    def test_a_pattern_that_matches_nothing(self) -> None:
        with pytest.raises(PolicyError, match="no module of the model"):
            bound("bf16, *.nrom*=fp32")

    def test_a_script_module(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates scripting
            scripted = torch.jit.script(nn.Linear(4, 4))
        with pytest.raises(PolicyError, match="cannot be bound to a ScriptModule"):
            bound("bf16", scripted)

    def test_dtype_mismatch_names_the_op(self) -> None:
        class Mixed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.mm(x, torch.ones(4, 4, dtype=BF16))

        with pytest.raises(CastError, match="mm"):
            bound("bf16, module:Mixed=fp32", Mixed())(torch.zeros(4, 4))

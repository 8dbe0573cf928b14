"""Models that change after prepare: groups added, layers unfrozen or replaced, lazy modules, odd gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.step_models import Net, batch, mse
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import mezzo
from mezzo.errors import PolicyError, StepError

EVERY = ", guard.check_every=1"


def take(amp: mezzo.Stepper, **options: Any) -> mezzo.StepResult:
    x, y = batch()
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y))
    return amp.step(**options)


def half(model: nn.Module) -> list[Tensor]:
    return list(model.inner.parameters())


class TestGroups:
    @pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master"])
    def test_existing_parameters(self, policy: str) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(half(model), lr=0.01)
        amp = mezzo.prepare(model, optimizer, policy + EVERY)
        take(amp)
        before = model.outer.weight.detach().float().clone()
        optimizer.add_param_group({"params": list(model.outer.parameters())})
        for _ in range(4):
            assert take(amp)
        assert not torch.equal(model.outer.weight.float(), before)
        assert "outer.weight" in amp.export_weights() and str(amp.report())
        assert amp.report(strict=True)

    @pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16-master, scaling.init_scale=16"])
    def test_a_new_module(self, policy: str) -> None:
        class Growing(Net):
            def forward(self, x: Tensor) -> Tensor:
                out = super().forward(x)
                return out + self.extra(x).float() if hasattr(self, "extra") else out

        model = Growing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        amp = mezzo.prepare(model, optimizer, policy + EVERY)
        take(amp)
        model.extra = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        optimizer.add_param_group({"params": model.extra.parameters()})
        was = copy.deepcopy(model.extra.state_dict())
        for _ in range(4):
            assert take(amp)
        assert model.extra[0].weight.dtype is (amp.policy.params if "master" in policy else torch.float32)
        assert not torch.equal(model.extra[0].weight.float(), was["0.weight"])
        assert amp.report(strict=True)

    @pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling.init_scale=16"])
    @pytest.mark.parametrize("make", [torch.optim.AdamW, mezzo.optim.AdamW])
    def test_a_group_that_is_removed(self, make: Any, policy: str) -> None:
        runs = []
        for removes in (lambda o: o.param_groups.pop(0), lambda o: o.param_groups[0]["params"].clear()):
            torch.manual_seed(0)
            model = Net()
            options = (
                {}
                if make is torch.optim.AdamW or "master" not in policy
                else {"master": mezzo.Policy.parse(policy).master}
            )
            optimizer = make([{"params": model.outer.parameters()}, {"params": half(model)}], lr=0.01, **options)
            amp = mezzo.prepare(model, optimizer, policy + EVERY)
            take(amp)
            removes(optimizer)
            model.outer.requires_grad_(False)
            for _ in range(3):
                assert take(amp)
            runs.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *runs))

    def test_a_parameter_of_no_module(self) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        amp = mezzo.prepare(model, optimizer, "bf16" + EVERY)
        extra = nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [extra]})
        x, y = batch()
        amp.backward(mse(model(x) * extra, y))
        assert amp.step() and extra.item() != 1
        assert amp.report(strict=True)


class TestUnfreezing:
    @pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling.init_scale=16"])
    @pytest.mark.parametrize("added", [False, True])
    def test_a_layer(self, policy: str, added: bool) -> None:
        """It trains from the fp32 values it had, in the policy's storage, as if it had been trainable from the start."""
        model = Net()
        model.inner.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad] if added else list(model.parameters())
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        amp = mezzo.prepare(model, optimizer, policy + EVERY)
        for _ in range(2):
            assert take(amp)
        before = model.inner.weight.detach().float().clone()
        model.inner.requires_grad_(True)
        if added:
            optimizer.add_param_group({"params": model.inner.parameters()})
        for _ in range(3):
            assert take(amp)
        moved = amp.export_weights()["inner.weight"] - before
        assert 0 < moved.abs().max() <= 3 * 1.1e-3  # Adam moves by the rate, from where the weight was
        assert amp.report(strict=True)


class TestReplacedModules:
    def test_a_head_obeys_the_rules(self) -> None:
        model = Net()
        amp = mezzo.prepare(model, None, "bf16, module:outer=fp32, output=none")
        seen = []
        model.outer = nn.Linear(8, 1)
        model.outer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        model(torch.randn(2, 4))
        assert seen == [torch.float32]
        assert amp.policy

    @pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
    def test_it_trains(self, policy: str) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        amp = mezzo.prepare(model, optimizer, policy + EVERY)
        take(amp)
        model.outer = nn.Linear(8, 1)
        optimizer.add_param_group({"params": model.outer.parameters()})
        was = model.outer.weight.detach().clone()
        for _ in range(4):
            assert take(amp)
        assert not torch.equal(model.outer.weight.float(), was)
        assert amp.report(strict=True)


class TestReplacedParameters:
    @pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16-master, scaling.init_scale=16"])
    @pytest.mark.parametrize("steps", [0, 2, 5])
    @pytest.mark.parametrize("of_a_module", [False, True])
    def test_one_that_no_optimizer_has_is_told_of(self, policy: str, steps: int, of_a_module: bool) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        amp = mezzo.prepare(model, optimizer, policy)
        for _ in range(steps):
            take(amp)
        if of_a_module:
            model.outer = nn.Linear(8, 1)
        else:
            model.outer.weight = nn.Parameter(torch.randn(1, 8, dtype=model.outer.weight.dtype))
        before = [p.detach().clone() for p in model.inner.parameters()]
        with pytest.raises(StepError, match=r"outer\.weight.* not what the optimizer was given.*add_param_group"):
            take(amp)
        assert all(map(torch.equal, before, model.inner.parameters()))
        was = model.outer.weight.detach().clone()
        optimizer.add_param_group({"params": model.outer.parameters() if of_a_module else [model.outer.weight]})
        for _ in range(3):
            assert take(amp)
        assert not torch.equal(model.outer.weight.float(), was.float())

    @pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master"])
    def test_one_that_takes_the_old_ones_place_in_the_group_is_trained(self, policy: str) -> None:
        model, values = Net(), torch.randn(1, 8)
        twin = copy.deepcopy(model)
        ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin))
        amp = mezzo.prepare(model, ours, policy + EVERY)
        for step in range(4):
            for one, optimizer in ((model, ours), (twin, theirs)) if step == 2 else ():
                held, old = optimizer.param_groups[0]["params"], one.outer.weight
                one.outer.weight = nn.Parameter(values.clone())
                held[[id(p) for p in held].index(id(old))] = one.outer.weight
                optimizer.state.pop(old)
            with torch.random.fork_rng():
                assert take(amp)
            x, y = batch()
            theirs.zero_grad()
            mse(twin(x), y).backward()
            theirs.step()
        weights = amp.export_weights()
        assert not torch.equal(weights["outer.weight"], values) and amp.report(strict=True) and amp.state_dict()
        for name, p in twin.named_parameters() if policy == "fp32" else ():
            torch.testing.assert_close(weights[name], p.detach(), rtol=0, atol=1e-6)

    def test_weights_that_are_assigned_are_told_what_writes_them(self) -> None:
        model = Net()
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16")
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        with pytest.raises(
            StepError, match=r"copy_\(\) under torch\.no_grad\(\), as load_state_dict does without assign=True"
        ):
            take(amp)

    def test_one_that_is_frozen_or_in_no_module_is_nobodys_business(self) -> None:
        """The optimizer has a parameter of no module, without a gradient, and the model one that nobody steps, with one."""
        model = Net()
        optimizer = torch.optim.SGD([*model.outer.parameters(), nn.Parameter(torch.ones(1))], lr=0.01)
        amp = mezzo.prepare(model, optimizer, "bf16")
        assert take(amp)
        model.outer.bias = nn.Parameter(torch.zeros(1), requires_grad=False)
        assert take(amp)


class TestLazyModules:
    @pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(3), nn.LazyBatchNorm1d])
    @pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp32"])
    def test_it_is_said_before_anything_is_changed(self, layer: Callable[[], nn.Module], policy: str) -> None:
        model = nn.Sequential(nn.Linear(4, 8), layer())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(PolicyError, match=r"lazy modules have no shape yet \(1\..*one forward.*before"):
            mezzo.prepare(model, optimizer, policy)
        assert type(model[0]) is nn.Linear
        model(torch.randn(2, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = mezzo.prepare(model, optimizer, policy)
        amp.backward(model(torch.randn(2, 4)).square().mean())
        assert amp.step()


class TestOddGradients:
    @pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling.init_scale=16"])
    @pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"clip_value": 0.1}])
    def test_sparse(self, policy: str, options: dict[str, float]) -> None:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
        twin = copy.deepcopy(model)
        amp = mezzo.prepare(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), policy + EVERY)
        plain = torch.optim.SparseAdam(twin.parameters(), lr=0.1)
        for seed in range(4):
            tokens = torch.tensor([seed, 3, 9])
            amp.zero_grad()
            plain.zero_grad()
            amp.backward(model(tokens).square().mean())
            twin(tokens).square().mean().backward()
            assert amp.step(**options)
            plain.step()
        assert str(amp.report(strict=True))
        if not options:
            torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-2, atol=1e-3)

    @pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling.init_scale=16"])
    @pytest.mark.parametrize("kinds", [(torch.optim.SGD,), (torch.optim.SGD, torch.optim.AdamW)])
    def test_sparse_beside_dense_ones(self, policy: str, kinds: tuple[Any, ...]) -> None:
        """Sparse weights stay fp32, and torch's SGD takes their gradients, added up from two looks into the table."""

        def losses(policy: str) -> list[float]:
            torch.manual_seed(0)
            table, head = nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1)
            model = nn.ModuleList([table, head])
            params = [model.parameters()] if len(kinds) == 1 else [table.parameters(), head.parameters()]
            amp = mezzo.prepare(model, [kind(p, lr=0.1) for kind, p in zip(kinds, params, strict=True)], policy)
            assert table.weight.dtype is torch.float32
            found = []
            for _ in range(6):
                amp.zero_grad()
                both = table(torch.tensor([[1, 3], [1, 9]])) * table(torch.tensor([[3], [4]]))
                loss = (head(both) - 1).square().mean()
                amp.backward(loss)
                assert amp.step()
                found.append(loss.item())
            return found

        torch.testing.assert_close(losses(policy), losses("fp32"), rtol=2e-2, atol=0)

    @pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"clip_value": 0.1}])
    def test_complex(self, options: dict[str, float]) -> None:
        class Spectral(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
                self.linear = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return torch.fft.ifft(torch.fft.fft(self.linear(x).float()) * self.weight).abs()

        model = Spectral()
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16" + EVERY)
        for _ in range(4):
            amp.zero_grad()
            amp.backward(model(torch.randn(3, 4)).square().mean())
            before = model.weight.detach().clone()
            if "clip_value" in options:
                with pytest.raises(StepError, match=r"clip_value.*complex.*max_norm"):
                    amp.step(**options)
                assert torch.equal(model.weight, before)
                continue
            result = amp.step(**options)
            assert result.applied
            moved = (model.weight.detach() - before).norm()
            assert moved <= 0.1 * min(result.grad_norm, options.get("max_norm", float("inf"))) * 1.001
        assert str(amp.report())


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16"])
def test_a_model_that_was_moved_to_meta_says_so(policy: str) -> None:
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    model.to("meta")
    with pytest.raises(StepError, match="meta device, where nothing has values"):
        amp.backward(model(torch.randn(3, 4, device="meta")).square().mean())


def test_a_parametrization_that_brings_buffers_between_steps() -> None:
    model = nn.Linear(4, 8)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    for turn in range(3):
        if turn == 1:
            nn.utils.parametrizations.orthogonal(model)
        amp.zero_grad()
        amp.backward(model(torch.ones(2, 4)).square().mean())
        assert amp.step().applied


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


LATER: dict[str, Callable[[nn.Module], object]] = {
    "parametrization": lambda m: parametrize.register_parametrization(m, "weight", Halved()),
    "spectral norm": lambda m: nn.utils.parametrizations.spectral_norm(m, n_power_iterations=20),
    "former spectral norm": lambda m: nn.utils.spectral_norm(m, n_power_iterations=20),
    "pruning": lambda m: prune.random_unstructured(m, "weight", 2),
}


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling=16", "bf16-master, master=kahan"])
@pytest.mark.parametrize("name", LATER)
def test_a_weight_that_is_computed_since_is_trained_on(name: str, policy: str) -> None:
    """It stays as the policy stored it, with its master, though no rule names the place where it stands now."""

    def trained(policy: str) -> tuple[Tensor, set[torch.dtype]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy + EVERY)
        for turn in range(5):
            if turn == 2:
                torch.manual_seed(1)
                LATER[name](model[0])
            amp.zero_grad()
            amp.backward((model(torch.ones(3, 4)) - 1).square().mean())
            assert amp.step()
        assert not amp.report(strict=True).differing
        out = model(torch.ones(3, 4)).detach()
        amp.release()
        return out, {p.dtype for p in model.parameters()}

    (got, dtypes), (want, _) = trained(policy), trained("fp32")
    eps = torch.finfo(torch.bfloat16 if "bf16" in policy else torch.float16).eps
    torch.testing.assert_close(got, want, rtol=0, atol=16 * eps)
    assert dtypes == {torch.float32}


def _to_meta_and_back(model: nn.Module) -> None:
    model.to("meta")
    model.to_empty(device="cpu")


REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "to": _to_meta_and_back,
    "meta": lambda m: m.to("meta"),
    "assign": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    "copy": lambda m: setattr(m, "1", copy.deepcopy(m[1])),
    "parameter": lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.detach().clone())),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", REPLACED)
def test_weights_that_are_replaced_between_backward_and_step_are_not_stepped(name: str, set_to_none: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    old = [*model.parameters()]
    amp = mezzo.prepare(model, torch.optim.AdamW(old, lr=0.1), "bf16")
    for turn in range(3):
        amp.zero_grad(set_to_none)
        amp.backward(model(torch.ones(3, 4)).square().mean())
        if turn == 2:
            REPLACED[name](model)
            before = [p.detach().clone() for p in old]
            with pytest.raises(StepError, match=r"1\.weight.* not what the optimizer was given.*gradients"):
                amp.step()
            assert all(torch.equal(p, was) for p, was in zip(old, before, strict=True))
        else:
            amp.step()
    amp.zero_grad(set_to_none)
    if name != "meta":
        amp.backward(model(torch.ones(3, 4)).square().mean())
        with pytest.raises(StepError, match=r"not what the optimizer was given.*gradients"):
            amp.step()

"""LSTMs and GRUs inside prepared models on the CPU: by mezzo's kernel, torch's own where that must not be seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.test_recurrent import needs_kernel
from tests.step.step_models import Dtypes
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.kernels.ops.recurrent import cpu

BF16 = torch.bfloat16
Kind = type[nn.LSTM] | type[nn.GRU]
pytestmark = needs_kernel


@pytest.fixture(params=[nn.LSTM, nn.GRU])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


class Model(nn.Module):
    """Recurrent layers in front of a linear layer."""

    def __init__(self, kind: Kind, **options: Any) -> None:
        super().__init__()
        self.layers, self.out = kind(12, 20, **options), nn.Linear(20 * (1 + options.get("bidirectional", False)), 3)

    def run(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)[0]
        return y

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.run(x))
        return out


class First(nn.Module):
    def forward(self, results: tuple[Tensor, Any]) -> Tensor:
        return results[0]


class Checkpointed(Model):
    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        return checkpoint(super().run, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


class Calls:
    """Counts how often the kernel goes forward and back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = {"forward": 0, "backward": 0}
        for name in self.counts:
            monkeypatch.setattr(cpu, name, self.counted(name, getattr(cpu, name)))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.counts[name] += 1
            return function(*args)

        return call

    def __eq__(self, other: object) -> bool:
        return tuple(self.counts.values()) == other

    __hash__ = None  # type: ignore[assignment]  # counts change


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("mezzo.kernels.ops.recurrent.SMALLEST", 0)
    return Calls(monkeypatch)


def prepared(model: nn.Module, policy: str = "bf16") -> nn.Module:
    return mezzo.prepare(model, None, policy).model


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Result and gradients of one backward pass."""
    out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_alike(found: list[Tensor], wanted: list[Tensor], tolerance: float = 0.02) -> None:
    for own, their in zip(found, wanted, strict=True):
        assert own.dtype is their.dtype and own.shape == their.shape
        assert float((own.float() - their.float()).norm()) <= tolerance * float(their.float().norm())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "batch first": {"batch_first": True}, "two layers, both directions": {"num_layers": 2, "bidirectional": True},
}  # fmt: skip


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_prepared_model_is_trained_by_it_as_torch_autocast_trains(
    kind: Kind, name: str, policy: str, calls: Calls
) -> None:
    model, x = Model(kind, **OPTIONS[name]), torch.randn(6, 8, 12)
    with torch.autocast("cpu", BF16):
        wanted = trained(copy.deepcopy(model), x)
    assert calls == (0, 0)
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
    found = trained(amp.model, x)
    assert_alike([found[0].to(BF16), *(one.float() for one in found[1:])], wanted)
    count = model.layers.num_layers * (1 + model.layers.bidirectional)
    assert calls == (count, count)


def test_results_lie_and_are_stored_as_torchs(kind: Kind, calls: Calls) -> None:
    model, x, seen = Model(kind, num_layers=2, batch_first=True), torch.randn(8, 6, 12), []
    model.layers.register_forward_hook(lambda module, given, out: seen.append((out[0], *out[1])))
    with torch.autocast("cpu", BF16):
        model(x)
    prepared(model)(x)
    for their, own in zip(*seen, strict=True):
        assert (own.shape, own.dtype, own.stride()) == (their.shape, their.dtype, their.stride())
    seen[1][0].mul_(2)  # as torch's it may be written
    assert calls.counts["forward"] == 2


def test_what_is_given_without_a_batch_is_taken_too(kind: Kind, calls: Calls) -> None:
    model, x = Model(kind), torch.randn(6, 12)
    with torch.autocast("cpu", BF16):
        wanted = trained(copy.deepcopy(model), x)
    assert_alike([one.float() for one in trained(prepared(model), x)], [one.float() for one in wanted])
    assert calls == (1, 1)


@pytest.mark.parametrize("how", [Checkpointed, Reentrant])
def test_a_checkpoint_computes_the_same_again(kind: Kind, how: type[Checkpointed], calls: Calls) -> None:
    plain, x = Model(kind), torch.randn(6, 8, 12, requires_grad=True)
    model = how(kind)
    model.load_state_dict(plain.state_dict())
    wanted = trained(prepared(plain), x)
    assert calls == (1, 1)
    found = trained(prepared(model), x)
    assert all(map(torch.equal, found, wanted))
    assert calls == (3, 2)


def test_gradients_of_two_passes_add_up(kind: Kind, calls: Calls) -> None:
    model, x = prepared(Model(kind)), torch.randn(6, 8, 12)
    once, twice = trained(model, x), trained(model, x)
    for one, two in zip(once[1:], twice[1:], strict=True):
        torch.testing.assert_close(two, 2 * one)
    assert calls == (2, 2)


def test_a_copy_is_trained_by_it_too(kind: Kind, calls: Calls) -> None:
    model, x = prepared(Model(kind)), torch.randn(6, 8, 12)
    assert all(map(torch.equal, trained(copy.deepcopy(model), x), trained(model, x)))
    assert calls == (2, 2)


def test_frozen_weights_have_no_gradient(kind: Kind, calls: Calls) -> None:
    model, x = Model(kind), torch.randn(6, 8, 12, requires_grad=True)
    model.layers.weight_hh_l0.requires_grad_(False)
    model.layers.bias_ih_l0.requires_grad_(False)
    trained(prepared(model), x)
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == ["layers.weight_hh_l0", "layers.bias_ih_l0"] and x.grad is not None
    assert calls == (1, 1)


def test_what_it_is_not_for_is_torchs(kind: Kind, calls: Calls) -> None:
    x = torch.randn(6, 8, 12)
    for policy in (
        "fp16",
        "bf16, modules=none",
        "fp32",
        "bf16, ops=mezzo",
        f"bf16, module:{kind.__name__}=fp32",
        "bf16, module:Model=fp32",
    ):
        trained(prepared(Model(kind), policy), x)
    packed = pack_padded_sequence(x, torch.tensor([6, 5, 5, 4, 3, 2, 1, 1]))
    out = prepared(kind(12, 20))(packed)[0]
    assert isinstance(out, PackedSequence)
    if kind is nn.LSTM:
        with pytest.warns(UserWarning, match="projections"):
            prepared(nn.LSTM(12, 20, proj_size=7))(x)
    prepared(nn.RNN(12, 20))(x)
    assert calls == (0, 0)


@pytest.mark.parametrize("is_trained", [False, True])
def test_without_gradients_an_lstm_is_torchs_and_a_gru_what_it_is_in_training(
    kind: Kind, is_trained: bool, calls: Calls
) -> None:
    model, x = prepared(Model(kind)).train(is_trained), torch.randn(6, 8, 12)
    wanted = model(x).detach()
    with torch.no_grad():
        found = model(x)
    is_taken = kind is nn.GRU or is_trained
    assert calls == (1 + is_taken, 0)
    assert not is_taken or torch.equal(found, wanted)


SMALL = [(nn.LSTM, (2, 15), False), (nn.LSTM, (2, 40), True), (nn.GRU, (4, 40), False), (nn.GRU, (5, 2), True)]


@pytest.mark.parametrize(("kind", "shape", "is_taken"), SMALL, ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_small_ones_are_torchs(
    kind: Kind, shape: tuple[int, int], is_taken: bool, batch_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    x = torch.randn(*shape, 128).transpose(0, 1) if batch_first else torch.randn(*shape, 128)
    trained(prepared(nn.Sequential(kind(128, 128, batch_first=batch_first), First())), x)
    assert calls == (is_taken, is_taken)


class Kernels(Dtypes):
    OPS = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "sigmoid_", "sigmoid_backward")


def test_who_watches_ops_sees_torchs(kind: Kind, calls: Calls) -> None:
    model, x = prepared(Model(kind)), torch.randn(6, 8, 12)
    with Kernels() as kernels:
        trained(model, x)
    assert {name for name, _ in kernels.seen} == set(Kernels.OPS[:2] if kind is nn.LSTM else Kernels.OPS[2:])
    with mezzo.diagnose.trace(model):
        trained(model, x)
    assert calls == (0, 0)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_who_watches_functions_sees_torchs(kind: Kind, calls: Calls) -> None:
    model, x = prepared(Model(kind)), torch.randn(6, 8, 12)
    with Functions() as functions:
        trained(model, x)
    assert (torch.lstm if kind is nn.LSTM else torch.gru) in functions.seen
    assert calls == (0, 0)


def test_one_inside_an_attention_is_taken(kind: Kind, calls: Calls) -> None:
    class RecurrentAttention(Model):
        pass

    trained(prepared(RecurrentAttention(kind)), torch.randn(60, 8, 12))
    assert calls == (1, 1)


def test_functional_gradients_are_torchs(kind: Kind, calls: Calls) -> None:
    model, x = prepared(Model(kind)), torch.randn(6, 8, 12)

    def loss(params: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(model, params, (x,))
        return out.float().square().sum()

    params = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(loss)(params)
    assert calls == (0, 0)
    wanted = trained(model, x)[1:]
    assert_alike(list(found.values()), wanted, 0.05)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # at every break of a graph
def test_a_compiled_model_gives_the_same_and_runs_the_kernel_between_its_graphs(kind: Kind, calls: Calls) -> None:
    plain, x = Model(kind), torch.randn(6, 8, 12)
    wanted = trained(prepared(copy.deepcopy(plain)), x)
    assert calls == (1, 1)
    model = prepared(plain)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).float().square().sum().backward()
    assert calls == (2, 2)
    assert_alike([p.grad for p in model.parameters() if p.grad is not None], wanted[1:], 0.05)

"""Short attention on the CPU: computed in fp32 inside a prepared model, 16 bit outside, torch's own where that is better."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step.step_models import Dtypes
from tests.tolerance import assert_within_ulps, relative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.binding import forward
from mezzo.casting import attention
from mezzo.kernels import is_emulated

BF16, FP32 = torch.bfloat16, torch.float32


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.inputs, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.options: dict[str, Any] = options or {"is_causal": True}

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)

    def forward(self, x: Tensor) -> Tensor:
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.inputs(x).chunk(3, -1)]
        out: Tensor = self.out(self.attend(*split).transpose(1, 2).flatten(2))
        return out


class Checkpointed(CausalSelfAttention):
    reentrant = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(super().attend, q, k, v, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


@pytest.fixture(autouse=True)
def _without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_amx", lambda: False)
    monkeypatch.setattr(attention, "takes_attention", lambda *_: False)


def prepared(model: nn.Module, policy: str = "bf16") -> nn.Module:
    return mezzo.prepare(model, None, policy).model


class Kernels(Dtypes):
    OPS = ("_scaled_dot_product_flash_attention_for_cpu",)


def kernels(model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.dtype]:
    """Return the dtypes in which attention runs in one forward."""
    with Kernels() as seen:
        model(*args, **kwargs)
    return [dtype for _, dtype in seen.seen]


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return model(x).float()  # type: ignore[no-any-return]


def gradients(out: Tensor, model: nn.Module) -> list[Tensor]:
    out.square().sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_short_attention_is_computed_in_fp32_and_handed_on_in_16_bit() -> None:
    model, x = CausalSelfAttention(), torch.randn(16, 5, 32)
    seen: list[Tensor] = []
    model.out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert kernels(prepared(model), x) == [FP32]
    assert seen[0].dtype is BF16


def test_the_result_is_rounded_once() -> None:
    inputs = torch.randn(3, 16, 4, 5, 8).bfloat16()
    want = F.scaled_dot_product_attention(*inputs.double())
    with attention.AttentionMode(), torch.autocast("cpu", BF16):
        got = F.scaled_dot_product_attention(*inputs)
    assert_within_ulps(got, want, 0.5 + relative(FP32, 5 * 8 * 8) / relative(BF16))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "fp32", "bf16", "shared heads"])
def test_gradients_are_nearer_to_fp64_than_those_of_the_16_bit_kernel(mask: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 24, 16).bfloat16().requires_grad_()
    options: dict[str, Any] = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.ones(24, 24, dtype=torch.bool).tril()},
        "fp32": {"attn_mask": torch.randn(24, 24)},
        "bf16": {"attn_mask": torch.randn(24, 24).bfloat16()},
        "shared heads": {"enable_gqa": True},
    }[mask]
    if mask == "shared heads":
        k, v = k[:, :2], v[:, :2]
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = {**options}
    if mask in ("fp32", "bf16"):
        exact["attn_mask"] = options["attn_mask"].double()
    want = torch.autograd.grad(F.scaled_dot_product_attention(*wide, **exact).sin().sum(), wide)
    with torch.autocast("cpu", BF16):
        theirs = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, **options).sin().sum(), inputs)
        with attention.AttentionMode():
            ours = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, **options).sin().sum(), inputs)
    for own, their, true in zip(ours, theirs, want, strict=True):
        assert own.dtype is BF16
        assert float((own - true).norm()) <= float((their - true).norm())


@pytest.mark.parametrize(
    ("shape", "options", "policy"),
    [
        ((1, attention.LONGEST + 1), {}, "bf16"),
        ((1, 5), {}, "bf16"),
        ((16, 5), {"dropout_p": 0.5}, "bf16"),
        ((16, 5), {}, "bf16, modules=none"),
        ((16, 5), {}, "bf16, module:CausalSelfAttention=bf16"),
    ],
    ids=["long", "tiny", "dropout", "no module rules", "a rule of its own"],
)
def test_the_rest_is_torchs_own_to_the_bit(shape: tuple[int, int], options: dict[str, Any], policy: str) -> None:
    model, x = CausalSelfAttention(**options), torch.randn(*shape, 32)
    if is_emulated(BF16) and ("none" not in policy) and not options and x.numel() >= attention.SMALLEST:
        pytest.skip("the processor emulates bf16: fp32 is the faster kernel for these too")
    torch.manual_seed(1)
    want = autocast(model, x)
    torch.manual_seed(1)
    assert torch.equal(prepared(model, policy)(x), want)


@pytest.mark.parametrize("args", [(), (0.3,), (0.3, False), (0.3, True, True)])
def test_dropout_has_the_defaults_of_torch(args: tuple[Any, ...]) -> None:
    given, found = torch.randn(1 << 13), []
    for around in (contextlib.nullcontext(), attention.AttentionMode()):
        torch.manual_seed(0)
        x = given.clone()
        with around:
            found.append((F.dropout(x, *args), x))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("policy", ["fp32", "bf16, module:CausalSelfAttention=fp32"])
def test_a_policy_that_says_fp32_meets_fp32_alone(policy: str) -> None:
    model, x = CausalSelfAttention(), torch.randn(16, 5, 32)
    want = model(x)
    assert torch.equal(prepared(model, policy)(x), want)


def test_a_nested_region_that_is_off_is_obeyed() -> None:
    q = torch.randn(16, 4, 5, 8).bfloat16()
    want = F.scaled_dot_product_attention(q, q, q)
    with attention.AttentionMode(), torch.autocast("cpu", enabled=False):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)


@pytest.mark.parametrize(("tokens", "trains", "dtype"), [(160, True, FP32), (161, True, BF16), (160, False, BF16)])
def test_a_machine_with_tiles_widens_where_it_trains_on_short_sequences(
    tokens: int, trains: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_amx", lambda: True)
    monkeypatch.setattr(attention, "is_emulated", lambda dtype: False)
    model, x = prepared(CausalSelfAttention(64, 1)).train(trains), torch.randn(1, tokens, 64)
    with torch.no_grad():  # as a reentrant checkpoint's first run
        assert kernels(model, x) == [dtype]
    with torch.set_grad_enabled(trains):
        assert kernels(model, x) == [dtype]


def check_gives_the_same(part: CausalSelfAttention, x: Tensor) -> None:
    """Hold a model of the same weights, without a checkpoint, to the same bits."""
    plain = CausalSelfAttention()
    plain.load_state_dict(part.state_dict())
    plain, part = prepared(plain), prepared(part)
    want, got = plain(x), part(x)
    assert torch.equal(got, want)
    for one, other in zip(gradients(got, part), gradients(want, plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_a_checkpoint_inside_recomputes_the_same(kind: type[Checkpointed]) -> None:
    torch.manual_seed(0)
    check_gives_the_same(kind(), torch.randn(16, 5, 32))


def test_torchs_own_attention_module_is_opened() -> None:
    model, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(16, 5, 32)
    want = model(x, x, x, need_weights=False)[0].detach()
    with torch.autocast("cpu", BF16):
        theirs = model(x, x, x, need_weights=False)[0].detach()
    model = prepared(model)
    assert kernels(model, x, x, x, need_weights=False) == [FP32]
    ours = model(x, x, x, need_weights=False)[0].detach()
    assert float((ours - want).norm()) <= 1.1 * float((theirs - want).norm())  # the projections' rounding is in both


def test_an_error_leaves_torchs_state_as_it_was() -> None:
    q = torch.randn(16, 4, 5, 8)
    with torch.autocast("cpu", BF16), attention.AttentionMode():
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, q[..., :7], q)
        assert torch.is_autocast_enabled("cpu")


def test_only_the_innermost_attention_is_watched() -> None:
    class BlockAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CausalSelfAttention()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    model = prepared(BlockAttention())
    held = {type(m).__name__: m.__dict__["_mezzo_bound"].attends for m in model.modules()}
    assert held == {"BlockAttention": False, "CausalSelfAttention": True, "Linear": False}


def test_a_module_whose_code_names_torchs_op_is_one_of_attention() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.inputs(x).chunk(3, -1)]
            out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return out

    class Mapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = map(lambda q: F.scaled_dot_product_attention(q, q, q), [x.unflatten(-1, (4, -1)).transpose(1, 2)])
            return next(iter(found)).transpose(1, 2).flatten(2)

    class Other(nn.Sequential):
        pass

    assert [attention.is_attention(kind) for kind in (Block, Mapped, Other, nn.Linear)] == [True, True, False, False]
    assert kernels(prepared(nn.Sequential(Block(), Other(nn.ReLU()), Mapped())), torch.randn(16, 4, 32)) == [FP32, FP32]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What modules of attention call, as far as they are watched."""
    seen: list[Any] = []
    watch = attention.AttentionMode.__torch_function__
    monkeypatch.setattr(forward, "is_emulated", lambda dtype: False)

    def noted(self: attention.AttentionMode, func: Any, *rest: Any) -> Any:
        seen.append(func)
        return watch(self, func, *rest)

    monkeypatch.setattr(attention.AttentionMode, "__torch_function__", noted)
    return seen


@pytest.mark.parametrize(("tokens", "is_watched"), [(8, False), (64, True)])
def test_ops_of_a_tiny_attention_are_not_watched(tokens: int, is_watched: bool, watched: list[Any]) -> None:
    prepared(CausalSelfAttention())(torch.randn(1, tokens, 32))
    assert bool(watched) is is_watched


class FormulaAttention(CausalSelfAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("model", "draws", "modes"),
    [
        (CausalSelfAttention(), False, [True, True]),
        (FormulaAttention(), True, [False, False]),
        (CausalSelfAttention(dropout_p=0.1), False, [False, False]),
        (CausalSelfAttention(dropout_p=0.1), True, [True, True]),
        (nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True), False, [False, True]),
    ],
    ids=["torchs", "formula", "dropout", "dropout that mezzo draws", "dropout in training"],
)
def test_a_module_that_never_calls_torchs_op_is_not_watched_for_long(
    model: nn.Module, draws: bool, modes: list[bool], watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that calls it with dropout alone, where mezzo does not draw the numbers."""
    monkeypatch.setattr(attention, "draws_faster", lambda: draws)
    model, x = prepared(model), torch.randn(1, 64, 32)
    for training, is_watched in zip([True, False], modes, strict=True):
        model.train(training)
        for _ in range(4):
            watched.clear()
            model(x, x, x, need_weights=False) if isinstance(model, nn.MultiheadAttention) else model(x)
        assert bool(watched) is is_watched


def saved_bytes(model: nn.Module, x: Tensor) -> dict[torch.dtype, int]:
    found: dict[torch.dtype, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return found


def test_query_key_and_value_wait_for_backward_in_16_bit() -> None:
    x = torch.randn(2, 64, 32)
    model = prepared(CausalSelfAttention(), "bf16, output=bf16")
    element = x.numel()
    saved = saved_bytes(model, x)
    assert saved[FP32] == element * 4 + 2 * 4 * 64 * 4  # the result, and a number for each row of scores
    assert saved[BF16] >= 3 * element * 2


@pytest.mark.parametrize("around", [False, True])
def test_what_waits_in_16_bit_gives_the_same_gradients(around: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 64, 32)
    model = prepared(CausalSelfAttention())

    def run() -> list[Tensor]:
        if not around:
            return gradients(model(x), model)
        with torch.autograd.graph.save_on_cpu():
            return gradients(model(x), model)

    found = run()
    monkeypatch.setattr(attention, "saved_as_given", lambda *inputs: contextlib.nullcontext())
    assert all(map(torch.equal, found, run()))


def test_an_input_that_is_written_before_backward_is_an_error_as_in_torch() -> None:
    class Writes(CausalSelfAttention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = super().attend(q, k, v)
            with torch.no_grad():
                k.mul_(2)
            return out

    model = prepared(Writes())
    loss = model(torch.randn(2, 64, 32)).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: query, key or value of an attention"):
        loss.backward()

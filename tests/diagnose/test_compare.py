"""`compare` tells an error that a module adds from one that came in, in numbers that fp64 confirms."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tolerance import relative
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

import mezzo
import mezzo.diagnose as diagnose
from mezzo import Policy
from mezzo.diagnose.compare.agreement import Agreement, Proposal
from mezzo.diagnose.compare.proposals import DB_FOR_ALL_WORK, ranked
from mezzo.errors import ConfigError, PolicyError


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def ratio(reference: Tensor | list[Tensor], actual: Tensor | list[Tensor]) -> float:
    """Return error over signal, as lengths, computed in fp64."""
    want = reference if isinstance(reference, list) else [reference]
    got = actual if isinstance(actual, list) else [actual]
    noise = sum(float((g.double() - w.double()).square().sum()) for w, g in zip(want, got, strict=True))
    return math.sqrt(noise / sum(float(w.double().square().sum()) for w in want))


def length(decibels: float) -> float:
    return 10.0 ** (-decibels / 20)


def agrees(decibels: float, true: float, terms: int) -> None:
    """The reference is fp32 where the oracle is fp64: error vectors may differ by what fp32 rounds off."""
    slack = 2 * relative(torch.float32, terms)
    assert abs(length(decibels) - true) <= slack, f"{length(decibels):.3e}, fp64 says {true:.3e}, slack {slack:.1e}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.norm, self.down = nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.act(self.up(x))))


TERMS = 8 * 32 * 32
"""More than the products summed on any path through `Net` and back."""


class Observed:
    """What went into and came out of each module in one real step under a policy, by hooks of torch's own."""

    def __init__(self, model: nn.Module, x: Tensor, policy: str, scale: float) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.grad_out: dict[str, Tensor] = {}
        self.grad_in: dict[str, Tensor] = {}
        bound = copy.deepcopy(model)
        mezzo.prepare(bound, None, policy)
        for name, module in bound.named_children():
            module.register_forward_hook(self.hook(name))
        self.loss = square(bound, x)
        (self.loss * scale).backward()
        self.grads = {n: p.grad for n, p in bound.named_parameters()}

    def hook(self, name: str) -> Callable[..., None]:
        def see(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            self.inputs[name], self.outputs[name] = args[0].detach(), out.detach()
            out.register_hook(lambda grad: self.grad_out.update({name: grad}))
            if args[0].requires_grad:
                args[0].register_hook(lambda grad: self.grad_in.update({name: grad}))

        return see


class Exact:
    """The same step in fp64, and single modules in fp64 on what they really got."""

    def __init__(self, model: nn.Module, x: Tensor, scale: float) -> None:
        self.model = copy.deepcopy(model).double()
        self.outputs: dict[str, Tensor] = {}
        for name, module in self.model.named_children():
            module.register_forward_hook(lambda _, __, out, name=name: self.outputs.update({name: out.detach()}))
        (self.model(x.double()).square().mean() * scale).backward()
        self.grads = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        self.whole = dict(self.outputs)

    def alone(self, name: str, x: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        module = self.model.get_submodule(name)
        x = x.double().requires_grad_()
        out = module(x)
        found = torch.autograd.grad(out, [x, *module.parameters()], grad_out.double())
        return out.detach(), found[0], list(found[1:])


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16, *norm=fp32", "fp16, ops=mezzo"])
def test_every_figure_of_every_module_agrees_with_fp64(policy: str) -> None:
    model, x = Net(), torch.randn(8, 16)
    report = diagnose.compare(model, x, square, policy, tries=0)
    scale = report.measurement.scale
    real, exact = Observed(model, x, policy, scale), Exact(model, x, scale)
    found = {m.module: m for m in report.measurement.modules}
    for name in ("up", "act", "norm", "down"):
        out, grad_in, weights = exact.alone(name, real.inputs[name], real.grad_out[name])
        module = found[name]
        assert module.forward is not None
        agrees(module.forward.local, ratio(out, real.outputs[name]), TERMS)
        agrees(module.forward.inherited, ratio(exact.whole[name], out), TERMS)
        agrees(module.forward.total, ratio(exact.whole[name], real.outputs[name]), TERMS)
        if name != "up":
            assert module.backward is not None
            agrees(module.backward.local, ratio(grad_in, real.grad_in[name]), TERMS)
        if weights:
            assert module.weights is not None
            got = [g for n, g in real.grads.items() if n.startswith(f"{name}.")]
            want = [g for n, g in exact.grads.items() if n.startswith(f"{name}.")]
            agrees(module.weights.local, ratio(weights, got), TERMS)
            agrees(module.weights.total, ratio(want, got), TERMS)
    assert report.measurement.gradients is not None
    agrees(report.measurement.gradients.total, ratio([*exact.grads.values()], [*real.grads.values()]), TERMS)
    for p in report.measurement.parameters:
        agrees(p.total, ratio(exact.grads[p.name], real.grads[p.name]), TERMS)
    shares = [p.share for p in report.measurement.parameters]
    assert math.isclose(sum(shares), 1.0, rel_tol=1e-9) and min(shares) >= 0


def test_the_op_itself_is_judged_on_what_it_was_given() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, x.t().contiguous()).tanh()

    x = torch.randn(8, 16)
    report = diagnose.compare(Product(), x, None, "bf16, output=none", tries=0)
    ops = {(op.op, op.phase): op for op in report.measurement.ops if op.path == "Product"}
    low = x.bfloat16()
    product = low @ low.t().contiguous()
    agrees(ops["to", "forward"].agreement.local, ratio(x, low), 16)
    agrees(ops["mm", "forward"].agreement.local, ratio(low.double() @ low.double().t(), product), 16)
    agrees(ops["mm", "forward"].agreement.inherited, ratio(x.double() @ x.double().t(),
                                                           low.double() @ low.double().t()), 16)  # fmt: skip
    agrees(ops["tanh", "forward"].agreement.local, ratio(product.double().tanh(), product.tanh()), 16)
    assert ops["mm", "forward"].flops == 2 * 8 * 8 * 16
    assert ops["mm", "forward"].frame is not None and "torch.mm(x" in source(ops["mm", "forward"].frame)


def source(frame: Any) -> str:
    return Path(frame.file).read_text(encoding="utf-8").splitlines()[frame.line - 1]


def test_both_losses_are_those_of_real_runs() -> None:
    model, x = Net(), torch.randn(8, 16)
    m = diagnose.compare(model, x, square, "bf16", tries=0).measurement
    bound = copy.deepcopy(model)
    mezzo.prepare(bound, None, "bf16")
    assert m.loss == square(bound, x).item()
    assert m.reference_loss == pytest.approx(square(model, x).item(), rel=relative(torch.float32, TERMS))


class Cancel(nn.Module):
    """Loses eight bits: a planted fault that no single op shows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(torch.add(x, 64.0), -64.0)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.mix, self.inner = nn.Linear(16, 16), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.mix(x))


class Stack(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, inner))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gradient_error(model: nn.Module, x: Tensor, policy: str | Policy) -> float:
    bound = copy.deepcopy(model)
    mezzo.prepare(bound, None, policy)
    square(bound, x).backward()
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().mean().backward()
    return ratio([p.grad for p in exact.parameters()], [p.grad for p in bound.parameters()])


def test_a_planted_imprecise_module_is_named_first_and_mended() -> None:
    model, x = Stack(nn.Tanh(), nn.Tanh(), Cancel(), nn.Tanh()), torch.randn(8, 16)
    report = diagnose.compare(model, x, square, "bf16")
    assert report.ranking[0].module == "layers.2.inner"
    first, second = report.ranking[0].forward, report.ranking[1].forward
    assert first is not None and second is not None and first.local < second.local - 20
    mending = [p for p in report.proposals if p.edit == "layers.2.inner=fp32"]
    assert len(mending) == 1 and mending[0].gain > 10
    assert [worth(p) for p in report.proposals] == sorted((worth(p) for p in report.proposals), reverse=True)
    before = gradient_error(model, x, "bf16")
    for p in report.proposals:
        after = gradient_error(model, x, f"bf16, {p.edit}")
        assert after < before
        agrees(p.gradients or 0.0, after, TERMS)
        assert length(p.gain) == pytest.approx(after / before, rel=2 * relative(torch.float32, TERMS) / after)


def worth(p: Proposal) -> float:
    return p.gain - DB_FOR_ALL_WORK * p.cost


def test_a_cheap_rule_comes_before_a_dear_one_that_gains_little_more() -> None:
    def edit(name: str, gain: float, cost: float) -> Proposal:
        return Proposal(edit=name, gain=gain, gradients=None, outputs=0.0, cost=cost)

    found = [
        edit("all layers", 12.5, 0.4),
        edit("one norm", 12.0, 0.001),
        edit("a softmax", 3.0, 0.0),
        edit("inf", math.inf, 0.3),
    ]
    assert [p.edit for p in ranked(found)] == ["inf", "one norm", "all layers", "a softmax"]


def test_layers_that_are_alike_get_one_rule() -> None:
    model, x = Stack(*(Cancel() for _ in range(11))), torch.randn(8, 16)
    report = diagnose.compare(model, x, square, "bf16", tries=1)
    assert report.tried == ("layers.[0-9].inner=fp32, layers.[0-9][0-9].inner=fp32",)
    assert report.proposals[0].edit == report.tried[0]


def test_each_proposal_states_the_work_it_takes_to_fp32() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(torch.add(x @ x.t() / 64, 64.0), -64.0)

    model, x = nn.Sequential(nn.Linear(64, 64, bias=False), Product()), torch.randn(32, 64)
    report = diagnose.compare(model, x, None, "bf16")
    linear, product = 2 * 32 * 64 * 64, 2 * 32 * 64 * 32
    # backward of the first layer needs no gradient of its input; the product takes two
    assert report.measurement.flops == 2 * linear + 3 * product
    dear = {f"module:{i}=fp32": n / report.measurement.flops for i, n in ((0, 2 * linear), (1, 3 * product))}
    assert dear["module:0=fp32"] > 0.5 >= dear["module:1=fp32"]
    assert "module:0=fp32" not in report.tried and "module:1=fp32" in report.tried
    costs = {p.edit: p.cost for p in report.proposals}
    assert costs["module:1=fp32"] == dear["module:1=fp32"]


def test_an_overflow_is_an_infinite_error_and_its_rule_is_found() -> None:
    model, x = Net(), torch.randn(8, 16)
    nn.init.constant_(model.up.weight, 3e4)
    report = diagnose.compare(model, x, square, "fp16, *norm=fp32")
    m = report.measurement
    assert not report.is_healthy and m.gradients is not None and m.gradients.total == -math.inf
    assert math.isfinite(m.reference_loss)
    assert [e.module for e in m.modules if e.local_share == math.inf] == ["up"]
    assert report.proposals[0].edit == "module:up=fp32" and report.proposals[0].gain == math.inf
    assert math.isfinite(gradient_error(model, x, "fp16, *norm=fp32, module:up=fp32"))
    assert json.loads(report.to_json())["measurement"]["gradients"]["total"] == "-inf"


def test_an_overflow_is_followed_to_whatever_overflows_next() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("a", "b", "c")})
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x)
            return self.head(self.norm(x))

    model, x = Chain(), torch.randn(8, 16)
    nn.init.constant_(model.parts["b"].weight, 6e4)
    report = diagnose.compare(model, x, square, "fp16, *norm=fp32")
    [mending] = report.proposals
    assert set(mending.edit.split(", ")) == {"parts.b=fp32", "parts.c=fp32"}
    assert not math.isfinite(gradient_error(model, x, "fp16, *norm=fp32, parts.b=fp32"))
    assert math.isfinite(gradient_error(model, x, f"fp16, *norm=fp32, {mending.edit}"))


def test_the_loss_scale_is_one_that_a_scaler_would_settle_at() -> None:
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    big = lambda model, batch: square(model, batch) * 64  # noqa: E731
    m = diagnose.compare(model, x, big, "fp16", tries=0).measurement
    assert m.scale < 65536 and m.gradients is not None and math.isfinite(m.gradients.total)

    def finite(scale: float) -> bool:
        bound = copy.deepcopy(model)
        mezzo.prepare(bound, None, "fp16")
        (big(bound, x) * scale).backward()
        return all(bool(p.grad.isfinite().all()) for p in bound.parameters())

    assert finite(m.scale) and not finite(2 * m.scale)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.AlphaDropout(0.5)])
def test_both_steps_draw_the_same_numbers(dropout: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(16, 64), dropout, nn.Linear(64, 4)).train()
    m = diagnose.compare(model, torch.randn(8, 16), square, "bf16", tries=0).measurement
    # with other masks, half of all elements would differ: 0 dB
    assert m.gradients is not None and length(m.gradients.total) < 64 * torch.finfo(torch.bfloat16).eps


def test_fused_dropout_keeps_its_mask() -> None:
    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.native_dropout(x.tanh(), 0.25, True)[0]

    model = nn.Sequential(nn.Linear(16, 64), Fused())
    m = diagnose.compare(model, torch.randn(8, 16), square, "bf16", tries=0).measurement
    [op] = [op for op in m.ops if op.kernel == "aten.native_dropout"]
    # x / 0.75 where it was kept: two roundings
    assert length(op.agreement.local) <= relative(torch.bfloat16, 2)
    assert m.unseen == ()


class Views(nn.Module):
    """Writes into slices, in place, through views, into memory made empty."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ torch.eye(16)
        out = torch.empty(2, *y.shape, dtype=y.dtype)
        out[0] = y
        out[1, :, ::2] = y[:, 1::2]
        out[1, :, 1::2] = y[:, ::2].exp_()
        z = out.transpose(0, 1).reshape(y.shape[0], -1)
        z[:, :4].mul_(3).relu_()
        return z.view(2, -1, 16).permute(2, 0, 1)[3:]


def test_in_place_ops_and_views_are_followed() -> None:
    x = torch.randn(8, 16)
    outputs = diagnose.compare(Views(), x, lambda m, b: m(b).float().sum(), "bf16", tries=0).measurement.outputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = Views()(x)
    exact = Views().double()
    with torch.no_grad():
        y = x.double()
        out = torch.empty(2, 8, 16, dtype=torch.float64)
        out[0], out[1, :, ::2], out[1, :, 1::2] = y, y[:, 1::2], y[:, ::2].exp()
        z = out.transpose(0, 1).reshape(8, -1)
        z[:, :4] = (z[:, :4] * 3).relu()
    del exact
    agrees(outputs.total, ratio(z.view(2, -1, 16).permute(2, 0, 1)[3:], low), 16)


def test_a_mask_at_the_edge_of_the_format_is_no_signal() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.t()
            mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
            return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)

    for policy in ("bf16", "fp16"):
        m = diagnose.compare(Attention(), torch.randn(8, 16), square, policy, tries=0).measurement
        [fill] = [op for op in m.ops if op.op == "masked_fill"]
        [product] = [op for op in m.ops if op.op == "mm" and op.phase == "forward"]
        if policy == "bf16":
            assert fill.agreement.total < product.agreement.total + 6
        assert length(m.outputs.total) < 64 * torch.finfo(torch.bfloat16).eps


def test_weights_that_the_policy_stores_in_16_bit_bring_their_error_with_them() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(8, 16)
    m = diagnose.compare(model, x, square, "bf16-master", tries=0).measurement
    [linear] = [e for e in m.modules if e.module == "0"]
    weight, bias = (p.detach().bfloat16().double() for p in model[0].parameters())
    given = F.linear(x.double(), weight, bias)
    exact = F.linear(x.double(), *(p.detach().double() for p in model[0].parameters()))
    assert linear.forward is not None
    agrees(linear.forward.inherited, ratio(exact, given), 17)
    assert linear.forward.local > 40


def test_checkpointed_parts_are_measured_too() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Net()
    again = Checkpointed()
    again.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    plain, recomputed = (diagnose.compare(m, x, square, "bf16", tries=0).measurement for m in (model, again))
    assert plain.gradients is not None and recomputed.gradients is not None
    agrees(recomputed.gradients.total, length(plain.gradients.total), TERMS)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_nets_are_taken_apart(kind: type[nn.RNNBase], policy: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    model, x = Recurrent(), torch.randn(2, 5, 8)
    m = diagnose.compare(model, x, square, policy, tries=0).measurement
    assert m.unseen == () and m.gradients is not None
    assert length(m.gradients.total) < 64 * torch.finfo(torch.bfloat16).eps
    assert m.reference_loss == pytest.approx(square(model, x).item(), rel=relative(torch.float32, 5 * 16))


def tiny(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(1, 30, (2, 8))
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}
        return transformers.BertForSequenceClassification(config), batch
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_library_models(name: str, policy: str) -> None:
    model, batch = tiny(name)
    report = diagnose.compare(model.eval(), batch, lambda m, b: m(**b).loss.float(), policy, tries=2)
    m = report.measurement
    assert m.unseen == () and report.is_healthy and len(report.tried) == 2
    unit = torch.finfo(torch.bfloat16).eps
    assert m.gradients is not None and length(m.gradients.total) < 16 * unit
    assert m.reference_loss == pytest.approx(model(**batch).loss.item(), rel=relative(torch.float32, 512))
    linears = {
        n for n, part in model.named_modules() if type(part).__name__ in ("Linear", "Conv1D") and "lm_head" not in n
    }
    seen = {e.module for e in m.modules if e.forward and math.isfinite(e.forward.local)}
    assert linears <= seen | {"bert.pooler"}
    assert all(Policy.parse(f"{policy}, {edit}") for edit in report.tried)
    text = str(report)
    assert "Modules by the error they add" in text and f"under {policy}" in text


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model[0].weight.grad = kept = torch.ones(16, 16)
    state, hooks = torch.get_rng_state(), len(module_hooks._global_forward_hooks)
    diagnose.compare(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), square, "bf16", tries=1)
    assert type(model[0]) is nn.Linear and model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model[0].weight.grad is kept and model[3].weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert len(module_hooks._global_forward_hooks) == hooks


def test_a_model_without_trainable_weights_is_judged_by_its_outputs() -> None:
    model = Net().requires_grad_(False)
    report = diagnose.compare(model, torch.randn(8, 16), square, "bf16", tries=1)
    assert report.measurement.gradients is None
    assert report.measurement.figure == report.measurement.outputs.total
    assert str(report).splitlines()[1].startswith("The outputs agree with fp32 to")


@pytest.mark.parametrize("policy", ["fp32", "fp32, *.norm=fp32"])
def test_fp32_has_nothing_to_be_compared_with(policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        diagnose.compare(Net(), torch.randn(8, 16), square, "fp32")
    assert str(caught.value) == (
        "compare(policy='fp32') was asked for, and on cpu that is fp32, which agrees with itself. "
        "Write policy='bf16' or 'fp16'."
    )


def test_a_policy_that_fits_no_module_is_refused() -> None:
    with pytest.raises(PolicyError):
        diagnose.compare(Net(), torch.randn(8, 16), square, "bf16, *.nowhere=fp32")


def test_the_three_forms(tmp_path: Path) -> None:
    report = diagnose.compare(Stack(nn.Tanh(), Cancel()), torch.randn(8, 16), square, "bf16", tries=2)
    data = json.loads(report.to_json())
    assert data["report"] == "CompareReport" and data["proposals"][0]["edit"] == report.proposals[0].edit
    assert len(data["measurement"]["modules"]) == len(report.measurement.modules)
    page = report.to_html(tmp_path / "compare.html").read_text(encoding="utf-8")
    assert page.count("<svg ") == 2 and "layers.1.inner" in page and report.proposals[0].edit in page
    assert isinstance(report.measurement.outputs, Agreement)

"""Exporters and recompute: what comes out computes what the prepared model computes."""

from __future__ import annotations

import pytest
import torch
from tests.step.step_models import Dtypes
from tests.torch_versions import traces_regions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mezzo
from mezzo.errors import StepError


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.body(self.norm(self.embedding(tokens))).relu()
        return {"logits": self.head(hidden.mean(1)), "hidden": hidden}


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=traces_regions)])
@pytest.mark.parametrize(
    "policy", ["bf16", "bf16, output=none", "bf16, module:body=fp32", "fp16", "bf16-master", "fp32"]
)
def test_export(policy: str, strict: bool) -> None:
    model = Classifier().eval()
    amp = mezzo.prepare(model, None, policy)
    tokens = torch.randint(0, 10, (2, 5))
    program = torch.export.export(amp.model, (tokens,), strict=strict)
    with torch.no_grad():
        want, got = model(tokens), program.module()(tokens)
    for name, tensor in want.items():
        assert got[name].dtype is tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert isinstance(model.body, nn.Linear)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.layers = nn.MultiheadAttention(64, 4, batch_first=True), nn.LSTM(64, 64, batch_first=True)
        self.norm = nn.GroupNorm(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.attention(x, x, x, need_weights=False)[0]
        return self.norm(self.layers(hidden)[0].transpose(1, 2))


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("policy", ["bf16", "bf16, modules=none"])
def test_a_program_has_the_bits_of_eager_where_that_runs_torchs_kernels(policy: str) -> None:
    """Large attention, LSTMs and group norms run mezzo's kernels in eager, unless a policy leaves modules to torch."""
    model, x = Attending().eval(), torch.randn(8, 64, 64)
    mezzo.prepare(model, None, policy)
    with torch.no_grad():
        want, got = model(x), torch.export.export(model, (x,)).module()(x)
    if policy == "bf16":
        limit = 8 * torch.finfo(torch.bfloat16).eps * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=limit)
    else:
        assert torch.equal(got, want)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.weight + x


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master", "bf16, ops=mezzo", "fp32"])
def test_symbolic_trace_is_told_where_its_graph_would_drop_the_policy(policy: str) -> None:
    model, x = nn.Sequential(Residual(), nn.Linear(8, 8)), torch.randn(4, 8)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    if policy == "fp32":
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
        return
    for part in (model, model[0]):
        with pytest.raises(StepError, match=r"before mezzo\.prepare.*release"):
            torch.fx.symbolic_trace(part)
    want = model(x)
    amp.release()
    traced: nn.Module = torch.fx.symbolic_trace(model)
    mezzo.prepare(traced, torch.optim.SGD(traced.parameters(), lr=0.1), policy)
    with Dtypes() as dtypes:
        assert torch.equal(traced(x), want)
    assert torch.float32 not in dtypes.of("addmm", "mm")


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "bf16, output=none", "fp16, scaling.init_scale=16"])
def test_a_reentrant_checkpoint_of_a_part_recomputes_in_the_policy(policy: str, sequential: bool) -> None:
    """Called from outside the model: gradients are those of the same loop without it."""

    def gradients(checkpointed: bool) -> tuple[list[Tensor], Dtypes]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        x = torch.randn(6, 4, requires_grad=True)
        if not checkpointed:
            out = model[2](model[1](model[0](x)))
        elif sequential:
            out = checkpoint_sequential(model, 2, x, use_reentrant=True)
        else:
            hidden = checkpoint(model[0], x, use_reentrant=True)
            out = checkpoint(lambda h: model[2](model[1](h)), hidden, use_reentrant=True)
        with Dtypes() as dtypes:
            amp.backward(out.float().square().mean())
        with amp.unscaled_grads() as grads:
            return [grad.clone() for grad in grads.values()], dtypes

    want, _ = gradients(False)
    got, dtypes = gradients(True)
    assert set(dtypes.of("addmm", "mm")) == {torch.float16 if "fp16" in policy else torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_reentrant_checkpoint_inside_the_model_is_as_before() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wide, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.is_checkpointed = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            if self.is_checkpointed:
                return self.last(checkpoint(self.wide, hidden, use_reentrant=True))
            return self.last(self.wide(hidden))

    grads = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = Inside()
        model.is_checkpointed = is_checkpointed
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16, module:wide=fp32")
        amp.backward(model(torch.randn(3, 4)).square().mean())
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

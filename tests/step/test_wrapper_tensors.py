"""Tensors of a class that keeps others in place of values of its own: no kernel may read where they would lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import mezzo
from mezzo.errors import OperandError
from mezzo.kernels.dtensor import as_plain
from mezzo.kernels.operands import addresses_of


class Wrapper(Tensor):
    """Runs every op on the tensor that it keeps."""

    def __new__(cls, kept: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, kept.shape, dtype=kept.dtype, device=kept.device)

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda one: one.kept if isinstance(one, Wrapper) else one, (args, kwargs or {}))
        return tree_map(lambda one: Wrapper(one) if isinstance(one, Tensor) else one, func(*bare[0], **bare[1]))


def trained(policy: str, kind: Any, *, wraps: bool, value: float = 1.0) -> tuple[list[Tensor], mezzo.StepResult]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Dropout(0.0), nn.Linear(8, 2))
    amp = mezzo.prepare(model, kind(model.parameters(), lr=0.1), policy)
    for _ in range(3):
        x = torch.full((3, 4), value)
        amp.zero_grad()
        amp.backward(model(Wrapper(x) if wraps else x).float().square().sum())
        result = amp.step(max_norm=1.0)
    return [p.detach().clone() for p in model.parameters()], result


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, mezzo.optim.AdamW, mezzo.optim.SGD])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling.init_scale=16"])
def test_gradients_that_keep_others_are_stepped_as_those(policy: str, kind: Any) -> None:
    found, result = trained(policy, kind, wraps=True)
    wanted, same = trained(policy, kind, wraps=False)
    assert result and result.grad_norm == pytest.approx(same.grad_norm, rel=1e-2)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_inf_in_one_is_seen() -> None:
    _, result = trained(
        "fp16, scaling.init_scale=16, guard.patience=9", torch.optim.SGD, wraps=True, value=float("inf")
    )
    assert not result and result.nonfinite


def test_its_address_is_never_given_to_a_kernel() -> None:
    with pytest.raises(OperandError, match="without memory of its own"):
        addresses_of([Wrapper(torch.ones(3))])
    assert len(addresses_of([torch.ones(0)])) == 1


class One(Tensor):
    """Of a class that torch has no ops for together with the other."""


class Other(Tensor):
    """As above."""


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16, scaling=16", "fp16-master, scaling=16"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_gradients_of_unrelated_classes_are_stepped_as_plain_ones(kind: Any, policy: str) -> None:
    def trained(*classes: type[Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        amp = mezzo.prepare(model, kind(model.parameters(), lr=0.01, foreach=False), policy)
        for p, own in zip(model.parameters(), [*classes] * 2, strict=True):
            p.register_post_accumulate_grad_hook(lambda p, own=own: setattr(p, "grad", p.grad.as_subclass(own)))  # type: ignore[misc]
        for _ in range(4):
            amp.zero_grad()
            amp.backward(model(torch.ones(3, 4)).float().square().mean())
            assert amp.step(max_norm=1.0)
        return amp.export_weights()

    torch.testing.assert_close(trained(One, Other), trained(Tensor, Tensor), rtol=0, atol=0)


def test_a_plain_copy_is_plain() -> None:
    assert type(as_plain(torch.ones(2).as_subclass(One))) is Tensor

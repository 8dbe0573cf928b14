"""Squares of what lies in parts on the ranks: each counted once, in as many launches for any number of parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.step.combine import _squares
from mezzo.step.gradients import OptimizerGrads, grads_of

CPU = torch.device("cpu")


class Count(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops += 1
        return func(*args, **(kwargs or {}))


def params(count: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(3)) for _ in range(count)]
    for index, p in enumerate(made):
        p.grad = torch.full((3,), float(index + 1))
    return made


def grads(*each: list[nn.Parameter]) -> list[OptimizerGrads]:
    return grads_of({index: torch.optim.SGD(some) for index, some in enumerate(each)}, None)


def exact(some: list[nn.Parameter]) -> Tensor:
    return torch.stack([p.grad.double().square().sum() for p in some]).sum().float()  # type: ignore[union-attr]


def test_more_parameters_take_no_more_launches() -> None:
    counts = []
    for number in (2, 50):
        some = params(number)
        found = grads(some)
        with Count() as count:
            squares = _squares(found, CPU, 1, True, 1)
        torch.testing.assert_close(squares, exact(some).expand(2))
        counts.append(count.ops)
    assert counts[0] == counts[1], counts


def test_a_parameter_of_two_optimizers_counts_once_in_the_sum_of_all() -> None:
    a, b = params(2), params(3)
    squares = _squares(grads(a, [*b, a[0]]), CPU, 2, True, 1)
    torch.testing.assert_close(squares, torch.stack([exact(a), exact([*b, a[0]]), exact([*a, *b])]))


def test_whole_parameters_are_nobodys_part() -> None:
    assert _squares(grads(params(3)), CPU, 1, False, 1).tolist() == [0.0, 0.0]

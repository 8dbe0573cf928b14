"""The tracker's book: what a gradient is marked as after each thing that can be done to it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mezzo.errors import ScalerError
from mezzo.loss_scale import GradScaler
from mezzo.loss_scale.grad_tracker import GradTracker, Mark, gradients, leaves


class Book:
    """A tracker beside one parameter and its optimizer."""

    def __init__(self) -> None:
        self.tracker = GradTracker()
        self.param = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.param], lr=0.5)
        self.captured = snapshot(8.0)

    def backward(self) -> None:
        loss = self.param.sum() * self.captured
        self.tracker.watch(loss, self.captured)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own

    def unscale(self) -> None:
        assert self.param.grad is not None
        self.param.grad /= self.captured
        self.tracker.write(self.optimizer, Mark.UNSCALED)

    def edit(self) -> None:
        assert self.param.grad is not None
        self.param.grad.mul_(2)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def update(self) -> None:
        self.tracker.next_iteration()

    @property
    def found(self) -> tuple[Mark, bool] | None:
        """What the gradient is marked as, and whether it is as it was noted."""
        entry, grad = self.tracker.entry(self.param), self.param.grad
        return None if entry is None or grad is None else (entry.mark, entry.stamp.is_current(grad))


def snapshot(scale: float) -> torch.Tensor:
    return torch.tensor(scale)


B, U, E, Z, N = Book.backward, Book.unscale, Book.edit, Book.zero, Book.update


@pytest.mark.parametrize(
    "calls, found",
    [
        ((), None),
        ((B,), (Mark.SCALED, True)),
        ((B, B), (Mark.SCALED, True)),
        ((B, E), (Mark.SCALED, False)),
        ((B, E, B), (Mark.SCALED, True)),
        ((B, U), (Mark.UNSCALED, True)),
        ((B, U, E), (Mark.UNSCALED, False)),
        ((B, U, B), (Mark.MIXED, True)),
        ((B, U, N, B), (Mark.MIXED, True)),
        ((B, U, Z, B), (Mark.SCALED, True)),
        ((B, Z), None),
        ((B, N, B), (Mark.SCALED, True)),
    ],
    ids=lambda value: (
        "-".join(c.__name__ for c in value) if isinstance(value, tuple) and value and callable(value[0]) else ""
    ),
)
def test_what_a_gradient_is_marked_as(
    calls: tuple[Callable[[Book], None], ...], found: tuple[Mark, bool] | None
) -> None:
    book = Book()
    for call in calls:
        call(book)
    assert book.found == found


def test_gradients_that_stay_are_brought_to_the_next_scale() -> None:
    book = Book()
    book.backward()
    book.update()
    book.captured = snapshot(32.0)
    book.backward()
    assert book.param.grad is not None and book.param.grad.tolist() == [64.0, 64.0]


def test_a_pass_that_leaves_nothing_is_a_loose_end() -> None:
    book = Book()
    loss = book.param.sum() * 8.0
    book.tracker.watch(loss, book.captured)
    torch.autograd.grad(loss, [book.param])
    assert book.tracker.has_loose_ends and book.tracker.passes == 1
    book.update()
    assert not book.tracker.has_loose_ends and book.tracker.passes == 0


def test_a_loss_without_a_graph_blinds_the_iteration() -> None:
    book = Book()
    book.tracker.watch(torch.ones(()), book.captured)
    assert not book.tracker.can_judge
    book.update()
    assert book.tracker.can_judge


def test_leaves_are_found_once_each() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    root = (a * b + a * a + torch.ones(1)).sum().grad_fn
    assert root is not None
    assert {id(leaf) for leaf in leaves(root)} == {id(a), id(b)} and len(list(leaves(root))) == 2


def test_gradients_come_in_the_order_of_the_parameters() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    params[2].grad, params[0].grad = torch.ones(1), torch.zeros(1)
    found = gradients(torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}]))
    assert [id(g) for g in found] == [id(params[0].grad), id(params[2].grad)]


@pytest.mark.parametrize("change", ["to", "load"])
def test_weights_that_torch_swaps_are_swapped_after_a_step(change: str) -> None:
    """torch swaps no weight that somebody refers to, and the tracker went on referring to each."""
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler("cpu")
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in range(4):
            optimizer.zero_grad()
            if change == "to":
                model.double().float()
            else:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            scaler.scale(model(torch.ones(1, 2)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).square().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(ScalerError, match="changed"):
        scaler.step(optimizer)

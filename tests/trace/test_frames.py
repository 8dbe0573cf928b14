"""Whose line an op was called from."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.trace.frames import Location, Owner, caller, is_called_from, locate, owner, source_line

MEZZO = Path(mezzo.__file__).parent


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        (torch.nn.__file__, Owner.TORCH),
        (str(MEZZO / "optim" / "adamw.py"), Owner.MEZZO),
        (str(MEZZO / "train" / "loop.py"), Owner.LIBRARY),
        (str(MEZZO / "bench" / "worker.py"), Owner.LIBRARY),
        (json.__file__, Owner.STDLIB),
        ("<frozen importlib._bootstrap>", Owner.STDLIB),
        (str(Path(sysconfig.get_path("purelib")) / "transformers" / "trainer.py"), Owner.LIBRARY),
        ("/usr/lib/python3/dist-packages/numpy/core.py", Owner.LIBRARY),
        ("/home/somebody/train.py", Owner.USER),
        (__file__, Owner.USER),
    ],
)
def test_a_file_belongs_to_where_it_lies(file: str, whose: Owner) -> None:
    assert owner(file) is whose


def test_the_nearest_line_of_the_user_is_found_through_torch() -> None:
    seen: list[Location] = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(locate(in_backward=False))
            return x

    torch.nn.Sequential(Layer())(torch.ones(1))
    [found] = seen
    assert found.user is not None and found.library is None and not found.is_recompute
    assert (found.user.file, found.user.function) == (__file__, "forward")
    assert source_line(found.user) == "seen.append(locate(in_backward=False))"


def in_backward(run: Callable[[Callable[[], None]], torch.Tensor]) -> Location:
    seen: list[Location] = []
    run(lambda: seen.append(locate(in_backward=True))).backward()
    return seen[-1]


def test_who_called_backward_did_not_call_its_ops() -> None:
    def hooked(note: Callable[[], None]) -> torch.Tensor:
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: note())
        return y.sum()

    found = in_backward(hooked)
    assert found.user is not None and found.user.function == "<lambda>" and not found.is_recompute


def test_an_op_that_torch_runs_in_backward_has_no_line_of_the_user() -> None:
    seen: list[Location] = []
    names = {"seen": seen, "locate": locate}
    exec(compile("def hook(grad): seen.append(locate(in_backward=True))", torch.nn.__file__, "exec"), names)
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(names["hook"])
    y.sum().backward()
    assert (seen[0].user, seen[0].library) == (None, None)


def test_a_checkpoint_that_runs_again_is_told() -> None:
    def recomputed(note: Callable[[], None]) -> torch.Tensor:
        def part(x: torch.Tensor) -> torch.Tensor:
            note()
            return x.sin()

        return checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False).sum()

    assert in_backward(recomputed).is_recompute


def test_the_stack_is_searched_by_the_ends_of_paths() -> None:
    assert is_called_from("tests/trace/test_frames.py")
    assert not is_called_from("torch/nn/utils/clip_grad.py")
    assert caller() == (Owner.USER, "")

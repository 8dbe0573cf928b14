"""How a group waits: with its time limit on the host, and not at all on an accelerator."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.distributed.group import Group


class Work:
    """Writes down how it was waited for."""

    def __init__(self) -> None:
        self.limits: list[Any] = []

    def wait(self, *limit: Any) -> None:
        self.limits.append(limit)


@pytest.fixture
def group(one_rank: None) -> Group:
    return Group(timeout=timedelta(seconds=3))


COLLECTIVES: dict[str, Callable[[Group, Tensor], Any]] = {
    "all_reduce": Group.sum_,
    "all_gather": Group.gather,
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("device", "limits"), [("cpu", [(timedelta(seconds=3),)]), ("meta", [()])])
def test_a_time_limit_is_for_the_host_alone(
    name: str, device: str, limits: list[Any], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()
    monkeypatch.setattr(dist, name, lambda *args, **kwargs: work)
    COLLECTIVES[name](group, torch.zeros(2, device=device))
    assert work.limits == limits


@pytest.mark.parametrize(("home", "bound", "expected"), [("cuda:1", None, "cuda:1"), (None, "cuda:1", "cuda:1")])
def test_words_of_the_ranks_travel_on_the_device_of_the_model(
    home: str | None, bound: str | None, expected: str, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not on the current one, which is the same on all ranks of a program that never sets it."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(type(group.handle), "bound_device_id", bound and torch.device(bound))
    with FakeTensorMode():
        there = Group(home=home and torch.device(home)).to_device(torch.zeros(2))
    assert there.device == torch.device(expected)


@pytest.mark.parametrize("name", [*COLLECTIVES, "broadcast"])
def test_what_was_sent_is_freed_by_the_thread_that_sent_it(name: str, group: Group) -> None:
    """One of gloo's needs the interpreter for it, and aborts a program that ends just then."""
    threads: set[int] = set()
    for _ in range(100):
        tensor = torch.ones(4)
        weakref.finalize(tensor, lambda: threads.add(threading.get_ident()))
        COLLECTIVES.get(name, Group.broadcast_)(group, tensor)
        del tensor
        time.sleep(0.005)  # so that a thread of gloo's has its turn before the next eight have ended
    assert threads == {threading.get_ident()}

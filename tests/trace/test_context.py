"""Where a program stands: backward ops at the module of their forward op, steps counted by what ends them, the tool's own ops unseen."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo import diagnose
from mezzo.trace.context import OpMode, TraceContext, public_name
from mezzo.trace.records import Site


class Recorder(OpMode):
    """Writes down where each op stands."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(TraceContext(model))
        self.sites: list[Site] = []

    def run_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.sites.append(self.context.site(func.overloadpacket.__name__))
        return func(*args, **kwargs)

    def modules(self, phase: str) -> list[str]:
        """The modules that ops of a phase stand in, in the order in which they are entered."""
        return list(dict.fromkeys(site.module for site in self.sites if site.phase == phase and site.module))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def test_backward_stands_where_forward_did_in_reverse() -> None:
    recorder = Recorder(net := model())
    with recorder.watching():
        net(torch.ones(2, 4)).square().mean().backward()
    assert recorder.modules("forward") == ["0", "1", "2"]
    assert recorder.modules("backward") == ["2", "1", "0"]
    stands = {(site.module, site.called) for site in recorder.sites if site.phase == "forward"}
    assert {("0", "linear"), ("1", "tanh"), ("2", "linear"), ("", "square"), ("", "mean")} <= stands
    assert {site.module for site in recorder.sites if site.op == "tanh_backward"} == {"1"}


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_begins_with_the_forward_after_the_end_of_the_last(ends: bool) -> None:
    recorder = Recorder(net := model())
    with recorder.watching():
        for _ in range(3):
            net(torch.ones(2, 4))
            if ends:
                recorder.context.end_step()
    assert sorted({site.step for site in recorder.sites}) == ([0, 1, 2] if ends else [0])


def test_ops_of_the_tool_itself_pass_unseen_and_leave_no_graph() -> None:
    recorder = Recorder(model())
    x = torch.ones(2, requires_grad=True)
    with recorder.watching():
        with recorder.aside():
            assert not (x * 2).requires_grad
        assert recorder.sites == []
        assert (x * 2).requires_grad
    assert [site.op for site in recorder.sites] == ["mul"]


LOSS = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "scale"),
    [(LOSS * 2.0, 2.0), (LOSS * torch.tensor(65536.0), 65536.0), (LOSS * 0.5, 1.0), (LOSS + 8, 1.0), (LOSS, 1.0)],
)
def test_the_loss_scale_is_the_constant_that_multiplied_the_loss_last(loss: Tensor, scale: float) -> None:
    context = Recorder(model()).context
    context.enter_backward(loss)
    assert context.loss_scale == scale


def test_parameters_of_optimizers_alone_are_named_by_their_place() -> None:
    context, stranger = Recorder(model()).context, nn.Parameter(torch.ones(1))
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [stranger]}]
    context.optimizers.append(SimpleNamespace(param_groups=groups, state={}))  # type: ignore[arg-type]  # all that is asked of one
    assert context.parameter_name(stranger) == "param_groups[1]['params'][0]"
    assert context.parameter_name(nn.Parameter(torch.ones(1))) == ""


@pytest.mark.parametrize("name", ["add", "mul", "truediv", "floordiv", "matmul", "pow"])
def test_an_operator_has_one_name_whichever_side_asks(name: str) -> None:
    assert public_name(f"__{name}__") == public_name(f"__r{name}__") == public_name(f"__i{name}__")


def test_a_step_that_raises_leaves_a_report_of_those_after_it() -> None:
    class Raising(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise RuntimeError("not today")

    model = nn.Linear(4, 1)
    raising, other = (kind(model.parameters(), lr=0.1) for kind in (Raising, torch.optim.SGD))
    with diagnose.trace(model) as t:
        for _ in range(10):
            model(torch.ones(2, 4)).square().mean().backward()
            with contextlib.suppress(RuntimeError):
                raising.step()
            other.step()
            other.zero_grad()
    assert (t.report.answer, t.report.record.updates) == ("healthy", 10)

"""A batch that is run again says what was wrong, and leaves the model as it was."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.trace.diagnosis import preserve_state, rerun_traced, trace_loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.body(x)))


def test_gradients_buffers_mode_and_random_state_are_given_back() -> None:
    net, x = Net(), torch.randn(8, 4)
    net(x).sum().backward()
    before, grads = copy.deepcopy(net.state_dict()), [p.grad for p in net.parameters()]
    copies = [grad.clone() for grad in grads]
    random = torch.get_rng_state()
    with pytest.raises(KeyError), preserve_state(net):
        assert all(p.grad is None for p in net.parameters())
        net(x).square().sum().backward()
        net.norm.running_mean = torch.ones(4)
        net.eval()
        raise KeyError
    assert net.training and net.norm.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert all(map(torch.equal, grads, copies))
    assert torch.equal(torch.get_rng_state(), random)


class Overflows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half() * 60000 * 2


def test_the_op_that_overflowed_is_said_with_its_policy_edit() -> None:
    net, x = nn.Sequential(nn.Linear(2, 2), Overflows()), torch.ones(1, 2)
    found = rerun_traced(net, lambda: net(x).float().sum().backward(), step=3, scale=1.0)
    assert "the last batch shows overflow in mul, forward, module 1" in found.sentence
    assert "60000" in found.sentence  # the line of source
    assert found.edit == "module:1=fp32" and found.fix.startswith("Add 'module:1=fp32' to the policy")


def test_a_line_without_a_source_is_said_by_its_number() -> None:
    """As at `python -c`, in a notebook that was closed, or in a program that was frozen."""
    found_in: dict[str, type[nn.Module]] = {}
    exec(
        "from torch import nn\nclass Typed(nn.Module):\n    def forward(self, x): return x.half() * 60000 * 2\n",
        found_in,
    )
    net, x = nn.Sequential(nn.Linear(2, 2), found_in["Typed"]()), torch.ones(1, 2)
    found = rerun_traced(net, lambda: net(x).float().sum().backward(), step=3, scale=1.0)
    assert "overflow in mul, forward, module 1 at <string>:3: fp16 overflows" in found.sentence


def test_a_batch_without_a_fault_says_nothing() -> None:
    net = nn.Linear(2, 2)
    found = rerun_traced(net, lambda: net(torch.ones(1, 2)).sum().backward(), step=0, scale=1.0)
    assert (found.sentence, found.fix, found.edit) == ("", "", "")
    assert found.report is not None and found.report.record.ops > 0


def test_inside_a_trace_the_batch_is_not_run_again() -> None:
    net = nn.Linear(2, 2)
    with diagnose.trace(net):
        found = rerun_traced(net, lambda: pytest.fail("run again"), step=0, scale=1.0)
    assert found.report is None


@pytest.mark.parametrize(("policy", "advice"), [("fp16, output=fp16", "output=fp32"), ("fp16", "write .float()")])
def test_a_loss_that_overflows_outside_the_model_has_no_rule_but_that_on_outputs(policy: str, advice: str) -> None:
    net = nn.Linear(2, 2)
    mezzo.prepare(net, None, policy)
    out = net(torch.ones(1, 2))
    watch = trace_loss(net, step=0)
    assert watch is not None
    (out * 0 + torch.full((1, 2), 6e4, dtype=torch.float16)).half().square().sum().backward()
    found = watch.stop()
    assert found is not None and found.edit == ""
    assert found.sentence.startswith(
        "The model's outputs are finite; what was computed from them shows overflow in pow"
    )
    assert advice in found.fix


def test_a_side_thread_traces_no_loss() -> None:
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(trace_loss(nn.Linear(1, 1), step=0)))
    thread.start()
    thread.join()
    assert seen == [None]

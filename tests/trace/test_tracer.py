"""A trace changes nothing it looks at, leaves nothing behind, and places every op."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.step.test_interrupted import interrupted
from tests.trace.installed import installed
from tests.trace.test_widening import Nested
from tests.zoo import faulty_arguments, faulty_forward, healthy
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mezzo
import mezzo.diagnose as diagnose
from mezzo.errors import ConfigError, RegionError

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop, self.head = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.body(x)).relu_()))


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(6, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def test_a_traced_run_is_bit_equal() -> None:
    torch.manual_seed(1)
    plain = Net()
    torch.manual_seed(1)
    traced = Net()
    torch.manual_seed(2)
    want = train(plain)
    torch.manual_seed(2)
    with diagnose.trace(traced) as t:
        got = train(traced)
    assert got == want
    for (name, a), (_, b) in zip(plain.state_dict().items(), traced.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(torch.rand(4), torch.rand(4)) is False
    assert t.report.findings == ()
    assert t.record.ops > 200


def test_a_faulty_run_is_bit_equal() -> None:
    def run() -> tuple[float, Tensor]:
        torch.manual_seed(3)
        model = Net()
        nn.init.constant_(model.body.weight, 3e4)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(6, 8)).float().mean()
        loss.backward()
        return loss.item(), torch.rand(3)

    want = run()
    with diagnose.trace() as t:
        got = run()
    assert math.isnan(want[0]) and math.isnan(got[0])
    assert torch.equal(want[1], got[1]), "the trace drew random numbers"
    assert not t.report.is_healthy


def test_nothing_is_left_behind() -> None:
    model = Net()
    before = installed(model)
    with diagnose.trace(model):
        train(model, 1)
        inside = installed(model)
    assert {name for name in before if inside[name] > before[name]} == set(before) - {"module hooks"}
    assert installed(model) == before


def test_nothing_is_left_behind_by_an_exception() -> None:
    model = Net()
    before = installed(model)
    with pytest.raises(ZeroDivisionError), diagnose.trace(model):
        model(torch.randn(2, 8))
        raise ZeroDivisionError
    assert installed(model) == before


def test_an_exception_inside_a_module_does_not_shift_names() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    model = nn.Sequential(nn.Sequential(Picky()), nn.Identity())
    with diagnose.trace(model) as t:
        with pytest.raises(ValueError):
            model(torch.ones(2))
        model[1](torch.tensor([math.nan], requires_grad=True)).log().sum().backward()
    assert t.report.findings[0].path == "(outside any module)"


ALONE = """
import gc, sys, torch, mezzo, mezzo.diagnose
from tests.step.test_interrupted import interrupted
from tests.trace.installed import installed
from torch import nn
def is_clean(model, x):
    model(x); gc.collect()
    before = len(gc.get_objects())
    for _ in range(100): model(x)
    return not any(installed(model).values()), len(gc.get_objects()) - before
model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(2, 8)
clean, grown = is_clean(model, x)
assert clean and grown < 50, (installed(model), grown)
with mezzo.diagnose.trace() as t:
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
assert t.report.answer == "healthy" and is_clean(model, x)[0]
mezzo.diagnose.trace(model).__enter__()
assert not is_clean(model, x)[0]
assert "torch._dynamo" not in sys.modules
"""


def test_no_tool_costs_nothing_and_none_imports_the_compiler() -> None:
    """In an interpreter of its own: no hook, no mode, no object a step; and a tool that is on is seen."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_trace_runs_once() -> None:
    t = diagnose.trace()
    with t:
        pass
    with pytest.raises(RegionError) as caught, t:
        pass
    assert str(caught.value) == (
        "a trace was entered twice; it records one run. Write `with diagnose.trace(model)` again."
    )


def scaled(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor], None]:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def torch_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    return scaled(torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000), model, optimizer)


def mezzo_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    return scaled(mezzo.GradScaler("cpu", init_scale=64.0, growth_interval=1000), model, optimizer)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    amp = mezzo.prepare(model, optimizer, policy="fp32")

    def step(x: Tensor) -> None:
        amp.zero_grad()
        amp.backward(model(x).mean())
        amp.step()

    return step


@pytest.mark.parametrize("loop", [torch_scaler, mezzo_scaler, stepper])
def test_steps_are_counted_with_the_skipped_ones(loop) -> None:
    model = nn.Linear(8, 1)
    step = loop(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batches = list(torch.randn(5, 4, 8))
    for i in (1, 2, 4):
        batches[i][0, 0] = math.inf
    with diagnose.trace(model, step=100) as t:
        for x in batches:
            step(x)
    assert {s.step for s in t.record.sinks} == {101, 102, 104}
    [found] = t.report.findings
    assert (found.verdict, found.step, found.steps) == ("inherited", 101, (101, 102, 104))
    assert t.record.steps == 105 and t.report.document().title.startswith("mezzo trace of Linear: 5 steps, ")


def test_an_evaluation_after_the_last_step_is_none() -> None:
    model = nn.Linear(8, 1)
    step = mezzo_scaler(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with diagnose.trace(model) as t:
        for x in torch.randn(3, 4, 8):
            step(x)
            with torch.no_grad():
                model(x)
    assert (t.record.steps, t.record.inferences, t.record.updates) == (3, 3, 3)


@pytest.mark.parametrize("first", [0, 100])
def test_no_step_is_counted_where_none_began(first: int) -> None:
    model = nn.Linear(8, 1)
    with diagnose.trace(model, step=first) as t:
        assert t.report.document().title.startswith("mezzo trace of Linear: 0 steps, 0 ops")
        with torch.no_grad():
            model(torch.randn(4, 8))
    assert t.report.document().title.startswith("mezzo trace of Linear: 0 steps, ") and t.record.inferences == 1
    with diagnose.trace(model, step=first) as t:
        model(torch.randn(4, 8)).sum().backward()
    assert t.report.document().title.startswith("mezzo trace of Linear: 1 step, ")


def test_names_are_relative_to_the_given_model() -> None:
    model = Net()
    model.head.weight.data[0, 0] = math.nan
    for given, name in ((model, "head"), (None, "inner.head")):
        with diagnose.trace(given) as t:
            Nested(model)(torch.randn(4, 8)).sum().backward()
        assert t.report.findings[0].module == name


def test_a_compiled_model_is_seen_op_by_op() -> None:
    model = Net()
    model.head.weight.data[0, 0] = math.nan
    compiled = torch.compile(model, backend="eager")
    with diagnose.trace(compiled) as t:
        compiled(torch.randn(4, 8)).sum().backward()
    found = t.report.findings[0]
    assert (found.op, found.module, found.verdict) == ("addmm", "head", "inherited")


def test_an_output_is_judged_where_nothing_goes_backward() -> None:
    model = Net().eval()
    model.norm.running_var[0] = math.nan
    with diagnose.trace(model) as t, torch.no_grad():
        model(torch.randn(4, 8))
    found = t.report.findings[0]
    assert (found.op, found.module, found.reached) == ("batch_norm", "norm", ("output output of Net",))


def test_poisoned_statistics_are_told() -> None:
    with diagnose.trace() as t:
        faulty_forward.poisoned_statistics(torch.float16)()
    reached = t.report.findings[0].reached
    assert {"buffer norm.running_mean", "buffer norm.running_var"} <= set(reached)


def test_an_absorbed_infinity_is_told_with_both_values() -> None:
    with diagnose.trace() as t:
        faulty_forward.mean_of_squares(torch.float16)()
    [found] = t.report.findings
    [told] = [r for r in found.reached if r.startswith("activation")]
    assert told.startswith("activation rsqrt: 0 instead of ")


@pytest.mark.parametrize(
    "build", [faulty_forward.attention_scores, faulty_arguments.rounded_eps, faulty_forward.sum_of_many]
)
def test_the_region_of_mezzo_gives_the_same_findings(build, monkeypatch: pytest.MonkeyPatch) -> None:
    def findings() -> list[tuple[str, ...]]:
        torch.manual_seed(0)
        run = build(torch.float16)
        with diagnose.trace() as t:
            run()
        return [(f.verdict, f.op, f.module, f.phase, str(f.frame)) for f in t.report.findings]

    want = findings()
    monkeypatch.setattr(torch, "autocast", mezzo.autocast)
    assert findings() == want != []


@pytest.mark.parametrize("policy", ["fp16", "fp16, ops=mezzo"])
def test_the_function_mode_is_followed(policy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.constant_(model[1].weight, 3e4)
    with diagnose.trace(model) as t:
        with mezzo.autocast("cpu", policy=policy):
            loss = model(10 * torch.randn(4, 8)).float().mean()
        loss.backward()
    found = t.report.findings[0]
    assert (found.verdict, found.module, found.phase) == ("overflow", "1", "forward")
    assert found.frame is not None and Path(found.frame.file).name == Path(__file__).name


@pytest.mark.parametrize(("where", "user_line"), [("bert", "model(**batch)"), ("gpt2", "model(**batch)")])
def test_a_library_model_is_placed_in_both_sources(where: str, user_line: str) -> None:
    transformers = pytest.importorskip("transformers")
    if where == "bert":
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        model, name = transformers.BertModel(config), "encoder.layer.1.output.dense"
        sick, before = model.encoder.layer[1].output.dense, model.encoder.layer[1].intermediate.dense
    else:
        config = transformers.GPT2Config(
            vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        model, name = transformers.GPT2Model(config), "h.1.mlp.c_proj"
        sick, before = model.h[1].mlp.c_proj, model.h[1].mlp.c_fc
    nn.init.constant_(before.bias, 100.0)
    nn.init.constant_(sick.weight, 1e3)
    batch = {"input_ids": torch.randint(1, 30, (2, 8))}
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(**batch).last_hidden_state
        out.float().mean().backward()
    found = t.report.findings[0]
    assert (found.verdict, found.module, found.op) == ("overflow", name, "addmm")
    assert found.frame is not None and found.library is not None
    assert found.frame.file == __file__ and user_line in Path(__file__).read_text().splitlines()[found.frame.line - 1]
    assert "transformers" in found.library.file


def test_healthy_training_of_the_zoo_is_silent_in_mezzo_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", mezzo.autocast)
    run = healthy.transformer(torch.bfloat16)
    with diagnose.trace() as t:
        run()
    assert t.report.findings == ()


@pytest.mark.parametrize("step", ["1", -1, 1.5, True, None])
def test_a_step_that_is_no_whole_number_is_refused(step: object) -> None:
    with pytest.raises(ConfigError, match=r"trace was given step=.*; give a whole number of 0 or more\."):
        diagnose.trace(step=step)  # type: ignore[arg-type]  # refused


class Halved(torch.optim.SGD):
    """A subclass whose step, as torch patches both, runs the hooks of a step inside a step of the same optimizer."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize("tool", [diagnose.trace, diagnose.watch])
def test_a_step_that_calls_the_one_of_its_class_is_one_step(tool: Callable[[nn.Module], Any]) -> None:
    model = nn.Linear(4, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on its step has hooks
    optimizer = Halved(model.parameters(), lr=0.1)
    with tool(model) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    report = seen.report
    assert getattr(report, "num_steps", None) == 3 or report.record.updates == 3


def test_a_trace_that_is_interrupted_as_it_begins_leaves_nothing_on() -> None:
    def on() -> list[int]:
        stacks = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        hooks = module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks
        of_steps = optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks
        of_weights = [p._backward_hooks or () for p in model.parameters()]  # type: ignore[attr-defined]
        return [*map(len, (*stacks, *hooks, *of_steps, *of_weights))]

    model, at = Net(), 0
    before, compile = on(), torch.compile
    while interrupted((run := diagnose.trace(model)).__enter__, at):
        assert on() == before and torch.compile is compile, at
        at += 1
    assert on() != before and at > 50
    run.__exit__(None, None, None)
    assert on() == before

"""Every private name of torch stands in one file, and each is where that file says; a new torch that moves one is named."""

from __future__ import annotations

import ast
import re
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mezzo
from mezzo import _torch
from mezzo.errors import PolicyError
from mezzo.optim import AdamW

SRC = Path(__file__).parents[1] / "src" / "mezzo"
SOURCE = (SRC / "_torch.py").read_text()
PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._[a-zA-Z]|from torch[\w.]* import .*\b_[a-z]")
ATTRIBUTES = {
    "_version": torch.ones(1),
    "_is_view": torch.ones(1),
    "_base": torch.ones(1),
    "_values": torch.ones(1).to_sparse(),
    "_sequence_nr": torch.ones(1, requires_grad=True).exp().grad_fn,
    "_cdata": torch.ones(1).untyped_storage(),
    "_parameters": torch.nn.Linear(1, 1),
    "_buffers": torch.nn.Linear(1, 1),
    "_apply": torch.nn.Linear(1, 1),
    "_optimizer_step_pre_hooks": torch.optim.SGD([torch.ones(1)]),
    "_optimizer_step_post_hooks": torch.optim.SGD([torch.ones(1)]),
    "_step_supports_amp_scaling": torch.optim.AdamW([torch.ones(1)], fused=True),
    "_execution_engine": torch.autograd.Variable,
}


def imported_names() -> list[str]:
    nodes = (node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.ImportFrom) and node.module)
    found = [f"{node.module}:{alias.name}" for node in nodes for alias in node.names]
    return [name for name in found if name.startswith("torch") and "_" in name.replace("__future__", "")]


def dotted_names() -> list[str]:
    found = re.findall(r"\b(torch(?:\.\w+)*\._\w+(?:\.\w+)*)", SOURCE)
    return sorted({name for name in found if not name.startswith("torch.utils._pytree")})


def where_it_stops(name: str) -> str:
    """Return the first part of a dotted name that is not there; empty if all are."""
    value: object = torch
    for i, part in enumerate(name.split(".")[1:], 2):
        if not hasattr(value, part):
            try:
                value = import_module(".".join(name.split(".")[:i]))
                continue
            except ImportError:
                return ".".join(name.split(".")[:i])
        value = getattr(value, part)
    return ""


@pytest.mark.parametrize("name", dotted_names())
def test_a_dotted_name_is_there(name: str) -> None:
    assert where_it_stops(name) == ""


@pytest.mark.parametrize("name", imported_names())
def test_an_imported_name_is_there(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert hasattr(import_module(module), attribute), f"{module} has no {attribute} any more"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_there(name: str) -> None:
    assert hasattr(ATTRIBUTES[name], name)


def test_a_name_that_moved_is_named() -> None:
    assert where_it_stops("torch._C._moved_away") == "torch._C._moved_away"


def test_versions_and_storages_tell_what_was_written() -> None:
    tensor = torch.zeros(4)
    before = _torch.version(tensor)
    view = tensor[1:]
    view.add_(1)
    assert _torch.version(tensor) == before + 1
    assert _torch.storage_id(view) == _torch.storage_id(tensor) != _torch.storage_id(torch.zeros(4))
    assert _torch.view_base(view) is tensor and _torch.view_base(tensor) is None


def test_a_compiled_model_tells_its_backend() -> None:
    model, seen = torch.nn.Linear(2, 2), []
    compiled = torch.compile(model, backend=lambda graph, inputs: seen.append(graph))
    backend, original = _torch.compile_backend(compiled)
    graph = torch.fx.symbolic_trace(model)
    backend(graph, [])
    assert original is model and seen == [graph]
    assert _torch.is_compiled(compiled) and not _torch.is_compiled(model)


@pytest.mark.parametrize("traces", [True, False])
def test_only_a_compiler_that_cannot_trace_regions_breaks_its_graph_there(
    traces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "_TRACES_REGIONS", traces)
    twice = _torch.dynamo_pass_through(lambda x: 2 * x)
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(lambda x: twice(x + 1) - 1, backend=lambda graph, inputs: graphs.append(graph) or graph)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(graphs) == (1 if traces else 2)


def test_private_torch_stands_in_one_file() -> None:
    files = [path for path in sorted(SRC.rglob("*.py")) if path.name != "_torch.py"]
    found = [str(path.relative_to(SRC)) for path in files if PRIVATE.search(path.read_text())]
    assert found == []


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 and 2.12
def test_a_step_runs_hooks_and_is_named_in_a_profile() -> None:
    told: list[str] = []

    class Counted(AdamW):
        pass

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Counted([weight], lr=0.5)
    assert getattr(Counted.step, "hooked", False)
    weight.grad = torch.ones(2)
    removed = optimizer.register_step_post_hook(lambda *_: told.append("after"))
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.step()
    removed.remove()
    optimizer.register_step_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "closure": lambda: told.append("closure")})
    )
    everywhere = register_optimizer_step_pre_hook(lambda *_: told.append("any"))
    optimizer.step()
    everywhere.remove()
    assert told == ["before", "after", "any", "before", "closure"]
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert [event.name for event in profile.events() if "Optimizer" in event.name] == ["Optimizer.step#Counted.step"]


@pytest.mark.parametrize("part", ["", "1"])
def test_what_replays_a_graph_of_its_own_is_not_prepared(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """By torch's own code; on a CPU graphs and streams are stand-ins, and nothing is captured."""
    for name in ("CUDAGraph", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", Mock())
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    torch.cuda.make_graphed_callables(model.get_submodule(part), (torch.ones(2, 4),))  # type: ignore[no-untyped-call]  # torch's own
    graphed, classes = model.get_submodule(part).forward, [type(module) for module in model.modules()]
    with pytest.raises(
        PolicyError, match=r"make_graphed_callables made of a Sequential: .* step = amp\.capture\(function\)"
    ):
        mezzo.prepare(model, None, "bf16")
    assert model.get_submodule(part).forward is graphed
    assert [type(module) for module in model.modules()] == classes

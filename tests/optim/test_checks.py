"""What an optimizer refuses when it is built, or given parameters and gradients that it cannot step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy
import pytest
import torch

import mezzo
from mezzo.errors import ConfigError, MasterError, OperandError
from mezzo.optim import SGD, AdamW, MasterWeights


def low(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))


REFUSALS: list[tuple[Any, str]] = [
    (
        lambda: AdamW([("a.weight", low(2, 3)), ("b.weight", torch.nn.Parameter(torch.ones(2)))]),
        (
            "1 of 2 trainable parameters are 16 bit (a.weight bf16[2,3] cpu) and master='none' keeps nothing beside them: "
            "an update smaller than half their spacing, 0.2 to 0.4 % of a bf16 weight, vanishes. Write master='split' (bf16) or "
            "'fp32' (exact), or 'kahan' (almost exact); or master='stochastic' (no extra memory, exact on average); or keep "
            "trainable parameters in fp32."
        ),
    ),
    (
        lambda: SGD([torch.nn.Parameter(torch.ones(2).half()) for _ in range(7)], master="split"),
        (
            "master='split' was asked for 7 fp16 parameters (parameter 0 fp16[2] cpu, parameter 1 fp16[2] cpu, "
            "parameter 2 fp16[2] cpu, parameter 3 fp16[2] cpu, parameter 4 fp16[2] cpu and 2 more): 16 more bits make an fp32 value "
            "of a bf16 weight, but not of an fp16 one, whose exponent is another. Write master='fp32', or params in bf16."
        ),
    ),
    (lambda: AdamW([low(1)], master="spilt"), "unknown master mode 'spilt'. Did you mean 'split'?"),
    (
        lambda: AdamW([low(1)], master="split", state_dtype=torch.float16),
        "state_dtype=fp16 cannot hold moments; write torch.float32 or torch.bfloat16.",
    ),
    (
        lambda: AdamW([low(1)], master="split", backend="referenc"),
        "unknown backend 'referenc'. Did you mean 'reference'?",
    ),
    (
        lambda: SGD([low(1)], master="split", differentiable=True),
        (
            "differentiable=True was asked of mezzo.optim.SGD: rounding to 16 bit has no gradient. "
            "Write torch.optim.SGD with fp32 parameters."
        ),
    ),
    (lambda: AdamW([low(1)], master="split", lr=-1.0), "lr=-1.0 must be in [0, inf)."),
    (lambda: AdamW([low(1)], master="split", betas=(0.9, 1.0)), "betas[1]=1.0 must be in [0, 1.0)."),
    (lambda: AdamW([low(1)], master="split", eps=-1e-8), "eps=-1e-08 must be in [0, inf)."),
    (lambda: AdamW([low(1)], master="split", fused="no"), "AdamW was given fused='no'; give True or False."),
    (lambda: SGD([low(1)], master="split", foreach="no"), "SGD was given foreach='no'; give True or False."),
    (
        lambda: SGD([low(1)], master="split", lr=torch.ones(2)),
        "lr is a tensor of 2 elements; write one of 1, or a group for each rate.",
    ),
    (
        lambda: SGD([low(1)], master="split", nesterov=True),
        (
            "nesterov=True was asked with momentum=0.0, dampening=0.0: it looks ahead along undamped momentum. "
            "Write momentum > 0 and dampening=0."
        ),
    ),
    (lambda: AdamW([low(1)], lr="x"), "lr='x' must be in [0, inf)."),
    (lambda: AdamW([low(1)], lr=10**400), f"lr=1{'0' * 56}... must be in [0, inf)."),
    (lambda: AdamW([low(1)], eps=None), "eps=None must be in [0, inf)."),
    (lambda: SGD([low(1)], momentum="x"), "momentum='x' must be in [0, inf)."),
    (lambda: SGD([low(1)], dampening="1"), "dampening='1' must be in (-inf, inf)."),
    (lambda: SGD([low(1)], dampening=float("nan")), "dampening=nan must be in (-inf, inf)."),
    (lambda: SGD([low(1)], weight_decay=10**400), f"weight_decay=1{'0' * 56}... must be in [0, inf)."),
    (lambda: AdamW([low(1)], betas=0.9), "betas=0.9 must be two numbers in [0, 1)."),
    (lambda: AdamW([low(1)], betas=(0.9,)), "betas=(0.9,) must be two numbers in [0, 1)."),
    (lambda: AdamW([low(1)], betas=(0.9, "x")), "betas[1]='x' must be in [0, 1.0)."),
    (lambda: AdamW([low(1)], master=3), "unknown master mode 3. Valid: fp32, kahan, none, split, stochastic."),
    (
        lambda: AdamW([low(1)], master="split", backend=None),
        "unknown backend None. Valid: auto, cpu, foreach, fused, reference, triton.",
    ),
    (
        lambda: AdamW([low(1)], master="split", state_dtype="bf16"),
        "state_dtype='bf16' cannot hold moments; write torch.float32 or torch.bfloat16.",
    ),
    (lambda: AdamW([low(1)], master="stochastic", rounding_seed="x"), "rounding_seed='x' must be a whole number."),
    (lambda: SGD([low(1)], master="stochastic", rounding_seed=None), "rounding_seed=None must be a whole number."),
    (
        lambda: MasterWeights(torch.optim.RMSprop([low(1)]), mode=None),
        "unknown master mode None. Valid: fp32, kahan, split, stochastic.",
    ),
    (
        lambda: MasterWeights(torch.optim.RMSprop([low(1)]), rounding_seed="x"),
        "rounding_seed='x' must be a whole number.",
    ),
    *[
        (
            partial(MasterWeights, given),
            f"MasterWeights was given {what} for inner; give an optimizer that was made.",
        )
        for given, what in ((torch.optim.SGD, "the class SGD"), (None, "NoneType"), ([low(1)], "list"))
    ],
    (lambda: AdamW([low(2)], master="split").master(low(2)), "bf16[2] cpu is not a parameter of this AdamW."),
    (
        lambda: AdamW([low(2)], master="split").set_masters_({low(2): torch.ones(2)}),
        "bf16[2] cpu is not a parameter of this AdamW.",
    ),
]


@pytest.mark.parametrize(("build", "message"), REFUSALS)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises((MasterError, ConfigError)) as refused:
        build()
    assert str(refused.value) == message


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    wide, fp16 = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    for optimizer in (AdamW([wide]), MasterWeights(torch.optim.SGD([wide]), "split")):
        with pytest.raises(MasterError):
            optimizer.add_param_group({"params": [fp16]})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("optimizer", [AdamW, SGD])
def test_sparse_gradients_are_refused(optimizer: Any) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError) as refused:
        optimizer(table.parameters()).step()
    assert str(refused.value) == (
        f"{optimizer.__name__} was given a sparse gradient for fp32[4,2] cpu: its update is dense. "
        "Write sparse=False in the embedding, or torch.optim.SparseAdam for its parameters."
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", float("nan")),
        ("lr", "1e-3"),
        ("lr", None),
        ("lr", 10**400),
        ("eps", 1e300),
        ("eps", float("inf")),
        ("betas", (0.9, 0.9, 0.9)),
        ("betas", 0.9),
    ],
)
def test_options_set_to_what_no_update_can_use(name: str, value: Any, backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=0.1, backend=backend)
    optimizer.param_groups[0][name] = value
    param.grad = torch.ones(3)
    with pytest.raises(ConfigError, match=f"a group of AdamW has {name}=.*: write .* finite number"):
        optimizer.step()
    assert param.tolist() == [1.0] * 3


@pytest.mark.parametrize("make", [AdamW, SGD, lambda p, **o: MasterWeights(torch.optim.Adagrad(p), "split")])
def test_masters_that_are_none_are_refused_before_any_is_taken(make: Any) -> None:
    first, second = params = [low(2, 3), low(2, 3)]
    optimizer = make(params, master="split")
    good = torch.full((2, 3), 3.0)
    bad: list[tuple[Any, str]] = [
        (None, "None"),
        (2.0, "2.0"),
        (good.tolist(), "[[3.0"),
        (good.to(torch.complex64), "complex64[2,3] cpu"),
        (good.bool(), "bool[2,3] cpu"),
        (good.to("meta"), "fp32[2,3] meta"),
        (good.to_sparse(), "fp32[2,3] cpu"),
        (good * math.nan, "fp32[2,3] cpu for parameter 1, with NaN"),
    ]
    for value, name in bad:
        with pytest.raises(OperandError) as refused:
            optimizer.set_masters_({first: good, second: value})
        assert str(refused.value).startswith(f"set_masters_() got {name}") and "for parameter 1" in str(refused.value)
    for value in (None, [good], 3):
        with pytest.raises(ConfigError, match="takes a dict"):
            optimizer.set_masters_(value)
    with pytest.raises(ConfigError, match="is not a parameter of this"):
        optimizer.set_masters_({first: good, low(2, 3): good})
    assert first.tolist() == second.tolist() == [[1.0] * 3] * 2
    with torch.no_grad():
        second.fill_(math.nan)
    optimizer.set_masters_({first: good.double(), second: good * math.nan})
    assert bool((optimizer.master(first) == 3).all()) and bool(optimizer.master(second).isnan().all())


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "nesterov"])
@pytest.mark.parametrize("value", [None, 0, 1])
def test_flags_are_read_as_torch_reads_them(name: str, value: Any) -> None:
    def stepped(kind: Any, **options: Any) -> Any:
        p = torch.nn.Parameter(torch.arange(4.0))
        optimizer = kind([p], lr=0.1, **options)
        if name not in optimizer.param_groups[0]:
            return None
        optimizer.param_groups[0][name] = value
        for scale in (1.0, -0.5, 0.25):
            p.grad = p.detach() * scale
            optimizer.step()
        return p.detach()

    for ours, theirs in ((AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)):
        for backend in ("auto", "reference"):
            torch.testing.assert_close(stepped(ours, backend=backend), stepped(theirs))


@pytest.mark.parametrize("count", ["3", torch.zeros(3), None])
def test_a_step_count_that_is_no_number(count: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[param] = {**optimizer.state[param], "step": count}
    with pytest.raises(ConfigError, match=r"the state of parameter 0 has step=.*write one number"):
        optimizer.step()


@pytest.mark.parametrize("kind", [mezzo.optim.AdamW, mezzo.optim.SGD])
@pytest.mark.parametrize("name", ["grad_scale", "clip_coef", "found_inf"])
@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.ones(0), torch.tensor(1j), torch.ones((), device="meta"), "x", 3.0]
)
def test_what_guards_a_step_is_a_tensor_of_one_number(kind: Any, name: str, value: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([p], lr=0.1)
    p.grad = torch.ones(3)
    optimizer.step()
    before, was = str(optimizer.state_dict()), p.detach().clone()
    setattr(optimizer, name, value)
    with pytest.raises(OperandError, match=f"{name} is .* guards a step"):
        optimizer.step()
    assert str(optimizer.state_dict()) == before
    assert torch.equal(p, was)


@pytest.mark.parametrize(
    ("name", "value"),
    [("master", "x"), ("master", torch.ones(2)), ("state_dtype", 3), ("backend", numpy.ones(2)), ("rounding_seed", "x"), ("rounding_seed", torch.ones(2))],
)  # fmt: skip
def test_own_options_that_do_not_exist_are_refused_when_set_and_when_made(name: str, value: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError):
        mezzo.optim.AdamW([p], **{name: value})
    optimizer = mezzo.optim.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0][name] = value
    with pytest.raises(ConfigError):
        optimizer.step()
    del optimizer.param_groups[0][name]
    with pytest.raises(ConfigError, match=f"has no {name} any more"):
        optimizer.step()


def test_maximize_may_be_a_flag_of_numpys() -> None:
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    mezzo.optim.AdamW([p], maximize=numpy.True_).step()  # type: ignore[arg-type]  # as torch takes it
    torch.optim.AdamW([q], maximize=True).step()
    assert torch.equal(p, q)

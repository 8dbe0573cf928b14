"""No bare dtype error (SPEC A11): every public op of torch's op database, with one argument in the other dtype.

What refuses mixed dtypes ends in a CastError, and what that says to write works.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves, tree_map

import mezzo
from mezzo import Policy
from mezzo.errors import CastError, ForbiddenOpError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own samples call beta and deprecated functions
SAMPLES = 3
Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tree_map(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def mixed_calls(low: torch.dtype) -> Iterator[Call]:
    """Every call of the database that fp32 answers, with one of its several fp32 tensors in 16 bit."""
    from torch.testing._internal.common_methods_invocations import op_db  # whose import takes seconds

    for op in op_db:
        if not op.supports_dtype(torch.float32, "cpu"):
            continue
        torch.default_generator.manual_seed(0)
        for sample in islice(op.sample_inputs_func(op, "cpu", torch.float32, False), SAMPLES):
            given = (sample.input, *sample.args), sample.kwargs
            tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.dtype is torch.float32]
            for function in filter(None, (op.op, op.method_variant, op.inplace_variant)):
                for other in tensors if len(tensors) > 1 and works(function, given) else ():
                    args, kwargs = map_tensors(lambda t, other=other: t.to(low) if t is other else t, given)
                    yield op.name, function, args, kwargs


def works(function: Callable[..., Any], given: Any) -> bool:
    args, kwargs = map_tensors(torch.clone, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*args, **kwargs)
        except Exception:
            return False
    return True


def run(call: Call, policy: Policy) -> CastError | None:
    """Run a call in a region; return the CastError it ended in, let other errors through."""
    _, function, args, kwargs = call
    args, kwargs = map_tensors(torch.clone, (args, kwargs))
    try:
        with mezzo.autocast("cpu", policy=policy):
            function(*args, **kwargs)
    except ForbiddenOpError:
        raise
    except CastError as error:
        return error
    return None


def mended(call: Call, policy: Policy, message: str) -> bool:
    """Do what the message says, and tell whether the call works then."""
    name, function, args, kwargs = call
    if "op:" not in message:
        target = args[0].dtype if "source.to(target.dtype)" in message else torch.float32
        args, kwargs = map_tensors(lambda t: t.to(target) if t.is_floating_point() else t, (args, kwargs))
        return run((name, function, args, kwargs), policy) is None
    edit = re.search(r"op:\w+=(promote|fp32)", message)
    return edit is not None and run(call, Policy.parse(f"{policy}, {edit[0]}")) is None


@pytest.mark.parametrize("ops", ["torch", "mezzo"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_no_op_ends_in_torchs_bare_error(ops: str, low: str) -> None:
    policy = Policy.parse(f"{low}, modules=none, ops={ops}")
    bare, stuck, refused = set(), set(), 0
    for call in mixed_calls(policy.compute or torch.float32):
        try:
            error = run(call, policy)
        except ForbiddenOpError:
            continue
        except RuntimeError as other:
            bare.add(f"{call[0]}: {str(other).splitlines()[0]}")
            continue
        if error is not None:
            refused += 1
            if not mended(call, policy, str(error)):
                stuck.add(f"{call[0]}: {error}")
    assert not bare and not stuck, "\n".join(sorted(bare | stuck))
    assert refused >= 100


def add_rows(h: Tensor) -> Tensor:
    return h.index_add_(0, torch.tensor([0, 1]), torch.ones(2, 4))


def product(h: Tensor) -> Tensor:
    return torch.heaviside(h, torch.ones(4))


@pytest.mark.parametrize("function", [add_rows, product])
def test_a_prepared_model_says_what_to_write(function: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.linear(x))

    model = Model()
    mezzo.prepare(model, None, "bf16")
    with pytest.raises(CastError, match="in module the root") as caught:
        model(torch.randn(4, 4))
    fix = "source.to(target.dtype)" if function is add_rows else "op:heaviside=promote"
    assert fix in str(caught.value)


ROW = torch.zeros(400, dtype=torch.long)
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add_": lambda target, source: target.index_add_(0, ROW, source),
    "scatter_add_": lambda target, source: target.scatter_add_(0, ROW[:, None], source),
    "scatter_reduce_": lambda target, source: target.scatter_reduce_(0, ROW[:, None], source, "sum"),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_into_16_bit_is_told_where_it_keeps_more(name: str) -> None:
    """As messages summed for a node of a graph: bf16 loses ones from 256 on, the target that the advice makes does not."""
    source, target = torch.ones(400, 1), torch.zeros(1, 1, dtype=torch.bfloat16)
    with pytest.raises(CastError, match=r"make that as wide, target\.to\(source\.dtype\)"), mezzo.autocast("cpu"):
        SUMS[name](target, source)
    with mezzo.autocast("cpu"):
        assert SUMS[name](target.to(source.dtype), source).item() == 400


def test_an_error_about_integers_is_not_called_a_matter_of_casting() -> None:
    with pytest.raises(RuntimeError) as caught, mezzo.autocast("cpu"):
        torch.nn.functional.nll_loss(torch.randn(2, 3), torch.zeros(2))
    assert not isinstance(caught.value, CastError)


@pytest.mark.parametrize("policy", ["bf16", "bf16, ops=mezzo"])
def test_tensors_with_a_dispatch_of_their_own(policy: str) -> None:
    """A mask that is a type and two sizes, and sums of a MaskedTensor, which take no dtype."""
    q = torch.randn(1, 2, 5, 8)
    with mezzo.autocast("cpu", policy=policy):
        out = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(5, 5))
        total = masked_tensor(q, q > 0).sum()
    want = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(out.float(), want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(total.get_data(), q[q > 0].sum())


@pytest.mark.parametrize("name", ["a", "x"])
def test_a_sum_takes_its_input_by_the_names_of_numpy(name: str) -> None:
    with mezzo.autocast("cpu", torch.bfloat16, policy="bf16, ops=mezzo"):
        assert torch.sum(**{name: torch.ones(3)}) == 3
        assert torch.cumsum(dim=0, **{name: torch.ones(3)})[-1] == 3

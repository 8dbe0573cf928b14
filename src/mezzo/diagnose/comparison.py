"""`compare`: one step under a policy beside the same step in fp32, and the rules that bring it nearer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError, shown
from ..formats import dtype_name, is_count, number_of
from ..kernels import any_dtensor
from ..policy import Policy, PolicyLike, as_policy
from ..trace import OUTSIDE, check_model, floating, length, run_eagerly
from .compare_report import Agreement, CompareReport, GradientError, ModuleError, OpError, StepFidelity
from .comparing_mode import ComparingMode, Maker, OpKey, Tally
from .proposals import try_edits
from .trial import LossFn, backward, bind_copy, check_trial, device_of, loss_of, scale_of

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def _or_none(tally: Tally) -> Agreement | None:
    return tally.agreement if tally.count else None


def _module_errors(mode: ComparingMode) -> tuple[ModuleError, ...]:
    return tuple(
        ModuleError(
            module=module,
            path=module or root or OUTSIDE,
            cls=tally.cls,
            forward=_or_none(tally.forward),
            backward=_or_none(tally.backward),
            weights=_or_none(tally.weights),
            local_share=tally.forward.local_share + tally.backward.local_share + tally.weights.local_share,
        )
        for (root, module), tally in mode.modules.items()
    )


def _op_error(key: OpKey, tally: Tally, flops: int) -> OpError:
    return OpError(
        phase=key.phase, module=key.module, path=key.module or key.root or OUTSIDE, op=key.op, called=key.called,
        kernel=key.kernel, dtype=dtype_name(key.dtype), frame=key.frame, calls=tally.count,
        agreement=tally.agreement, local_share=tally.local_share, flops=flops,
    )  # fmt: skip


class _UnfusedRecurrent(TorchFunctionMode):
    """Runs recurrent nets by plain ops: their fused kernels hand state to backward that only they can read."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        if getattr(func, "__name__", "") not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            return func(*args, **(kwargs or {}))


@contextmanager
def _comparable_kernels(model: nn.Module) -> Iterator[None]:
    """Run compiled models eagerly, and fused ops by kernels that fp32 has too."""
    with ExitStack() as contexts:
        contexts.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # said when a switch of oneDNN is set
        contexts.enter_context(run_eagerly())
        if device_of(model).type == "cuda":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            contexts.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
        contexts.enter_context(_UnfusedRecurrent())
        yield


def _grads(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the gradients, of a sparse one its values, by name. Syncs: no."""
    return [(name, grad) for name, p in model.named_parameters() if p.grad is not None for _, grad in floating(p.grad)]


def _gradient_errors(each: list[tuple[str, Tally]], every: Tally) -> tuple[GradientError, ...]:
    whole = every.noise[2]
    return tuple(
        GradientError(
            name=name, total=tally.agreement.total, share=tally.noise[2] / whole if 0 < whole < math.inf else math.nan
        )
        for name, tally in each
    )


def _flaw(mode: ComparingMode, gradients: list[tuple[str, Tensor]], loss: Tensor, tally: Tally) -> str:
    """Say why a step tells nothing of its agreement with fp32; empty if it does. Syncs: yes."""
    for name, t in [("loss", loss), *((f"gradient of {name}", gradient) for name, gradient in gradients)]:
        full = mode.fp32.full(t)
        if not (t if full is None else full).isfinite().all():
            return f"the {name} is not finite in fp32 either"
    kind = "gradient" if gradients else "output"
    both = "" if tally.noise[2] else " and under the policy"
    return "" if tally.signal[2] else f"every {kind} is 0 in fp32{both}"


def measure(model: nn.Module, batch: Any, loss_fn: LossFn | None, policy: Policy, scale: float) -> StepFidelity:
    """Run one step under a policy and say how far each part of it is from fp32. Writes: nothing. Syncs: yes."""
    with bind_copy(model, policy) as bound:
        mode = ComparingMode(bound)
        for stored, true in zip(bound.parameters(), model.parameters(), strict=True):
            if stored.dtype != true.dtype:
                mode.fp32.put(stored, Maker(), stored.detach(), true.detach())  # rounded before the run
        with _comparable_kernels(model), mode.watching():
            loss = loss_of(bound, batch, loss_fn)
            backward(loss.float(), scale)
        grads = _grads(bound)
        each, flushed = [], 0.0
        for name, grad in grads:
            mode.count_result(grad, is_weight=True)
            each.append((name, mode.fp32.tally(grad)))
            if (full := mode.fp32.full(grad)) is not None:
                flushed += length(full[grad == 0]) ** 2
        mode.count_result(loss)
        reference = mode.fp32.full(loss)
    gradients = Tally()
    for _, tally in each:
        gradients.merge(tally)
    return StepFidelity(
        policy=str(policy),
        scale=scale,
        loss=float(loss.detach()),
        reference_loss=float(loss.detach() if reference is None else reference),
        outputs=mode.outputs.agreement,
        gradients=_or_none(gradients),
        modules=_module_errors(mode),
        ops=tuple(_op_error(key, tally, mode.low_flops[key]) for key, tally in mode.ops.items()),
        parameters=_gradient_errors(each, gradients),
        flops=mode.flops,
        flushed=flushed / (gradients.noise[2] or 1.0),
        unseen=tuple(mode.unseen.items()),
        flaw=_flaw(mode, grads, loss, gradients if grads else mode.outputs),
    )


def _usable_scale(model: nn.Module, batch: Any, loss_fn: LossFn | None, policy: Policy) -> float:
    """Return the loss scale at which a scaler would settle: halved until the gradients are finite."""
    start = scale = scale_of(policy, model)
    while scale >= 1:
        with bind_copy(model, policy) as bound, _comparable_kernels(model):
            loss = loss_of(bound, batch, loss_fn)
            backward(loss.float(), scale)
            if not math.isfinite(loss.detach()) or all(bool(g.isfinite().all()) for _, g in _grads(bound)):
                return scale
        scale /= 2
    return start


def compare(
    model: nn.Module, batch: Any, loss_fn: LossFn | None = None, policy: PolicyLike = "auto", *, tries: int = 8
) -> CompareReport:
    """Run one step under a policy and, beside each op, in fp32; name what costs most accuracy and what restores it.

    Each op runs under the policy, in fp32 on the same inputs, and in fp32 on the inputs an fp32 step would have had.
    So an error that an op or a module adds is told from one that came in. Both runs share control flow and random
    draws. Rules that might help are tried: the step is measured again under each.

    Args:
        model: is left as it was: weights, gradients, buffers, mode and random state.
        batch: a tensor, a tuple of positional or a dict of named arguments of `model`, or whatever `loss_fn` takes.
        loss_fn: computes the loss from (model, batch); without it, the mean of the squares of every floating output.
        policy: what to compare with fp32.
        tries: edits to try, each as costly as the comparison itself; 0 for none.

    Raises:
        PolicyError: the policy does not fit the model.
        ConfigError: no model, batch or loss; or the policy runs everything in fp32, so there is nothing to compare.

    Writes: nothing. Syncs: at every op.
    Source: signal-to-error ratio in dB, as in the analysis of fixed-point filters (Oppenheim and Schafer, chapter 6).
    """
    check_model("compare", model)
    if any_dtensor(model.parameters()):  # whose ops talk to other ranks, and would once more beside themselves
        raise ConfigError(
            "compare was given a model whose weights lie in parts on ranks. Give it before parallelize_module or fully_shard."
        )
    check_trial("compare", batch, loss_fn)
    if not is_count(number_of(tries)):
        raise ConfigError(f"compare was given tries={shown(tries)}; give a whole number of 0 or more.")
    asked = as_policy(policy)
    chosen = asked.resolve(device_of(model))
    if not chosen.is_low:
        raise ConfigError(
            f"compare(policy='{asked}') was asked for, and on {device_of(model)} that is fp32, which agrees with itself. Write policy='bf16' or 'fp16'."
        )
    scale = _usable_scale(model, batch, loss_fn, chosen)
    found = measure(model, batch, loss_fn, chosen, scale)

    def again(edit: str) -> StepFidelity:
        policy = Policy.parse(f"{chosen}, {edit}")
        at = scale if policy.scaling == chosen.scaling else _usable_scale(model, batch, loss_fn, policy)
        return measure(model, batch, loss_fn, policy, at)

    proposals, tried = try_edits(found, again, 0 if found.flaw else tries)
    return CompareReport(model=type(model).__name__, measurement=found, proposals=tuple(proposals), tried=tuple(tried))

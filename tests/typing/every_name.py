"""Uses every public name as a typed program does: `mypy --strict` reads it (pyproject), nobody runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mezzo
from mezzo.integrations.accelerate import Accelerator
from mezzo.integrations.lightning import MezzoPrecision
from mezzo.integrations.transformers import PolicyMixin, Trainer


def policies(path: Path) -> mezzo.Policy:
    policy: mezzo.Policy = mezzo.Policy.parse("fp16, *.norm*=fp32")
    config = mezzo.ScalingConfig(init_scale=1024.0)
    changed = policy.replace(compute=torch.float16, scaling=config).resolve(torch.device("cpu"))
    rule: mezzo.Rule = mezzo.Rule.FP32
    policy.save(path)
    document: Mapping[str, object] = policy.to_dict()
    differs: bool = bool(policy.diff(mezzo.Policy.load(path)))
    print(rule.value, policy.why("0", op="softmax"), differs, document)
    return mezzo.Policy.from_dict(document) if changed.is_low else policy


def drop_in(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    scaler = mezzo.GradScaler("cpu", init_scale=8.0)
    print(mezzo.cuda.amp.GradScaler)
    with mezzo.autocast("cpu", dtype=torch.float16, policy="fp16"):
        loss: Tensor = model(x).sum()
    scaled = scaler.scale(loss)
    scaled.backward()  # type: ignore[no-untyped-call]  # torch's own
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


class Twice(torch.autograd.Function):
    @staticmethod
    @mezzo.custom_fwd(device_type="cpu")
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @mezzo.custom_bwd
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def prepared(model: nn.Module, x: Tensor, path: Path) -> mezzo.StepResult:
    optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-3, master="split")
    amp: mezzo.Stepper = mezzo.prepare(model, optimizer, "bf16-master", skip="together", cache="region")
    step: Callable[[], object] = amp.on_applied(lambda: None)
    leave: Callable[[], None] = amp.observe(mezzo.monitor(amp, every=10, to=path))
    amp.backward(amp.model(x).sum(), retain_graph=True)
    (slope,) = amp.grad(amp.model(x).sum(), x, create_graph=True)
    with amp.unscaled_grads() as grads:
        norm: Tensor = grads["0.weight"].norm() + amp.grad_norm() + slope.norm()
    result: mezzo.StepResult = amp.step(max_norm=1.0)
    counts: Mapping[str, int | None] = result.nonfinite
    shown = (result.applied, result.reason, result.scale, result.grad_norm, result.skipped_in_a_row)
    read = (result.is_read, result.optimizers, counts, norm, amp.counters().applied, amp.scale, amp.policy)
    amp.zero_grad(set_to_none=True)
    sentences: tuple[str, ...] = amp.load_state_dict({**amp.state_dict(), **amp.state_dict(weights=False)})
    weights: dict[str, Tensor] = amp.export_weights(torch.float16)
    print(shown, read, sentences, weights, amp.report(strict=True), amp.optimizers, step)
    with mezzo.keep_memory() as kept:
        print(kept.is_kept, kept.why_not)
    leave()
    return result


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    inner = torch.optim.Adam(model.parameters())
    return [
        mezzo.optim.SGD(model.parameters(), lr=0.1, master="kahan"),
        mezzo.optim.MasterWeights(inner, mode="fp32"),
    ]


def captured(amp: mezzo.Stepper) -> Tensor:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = amp.model(x).sum()
        amp.backward(loss)
        amp.step()
        return loss.detach()

    replayed: mezzo.CapturedStep[[Tensor], Tensor] = amp.capture(step)
    loss: Tensor = replayed(torch.ones(2, 4))
    print(replayed.result, replayed.num_replayed)
    return loss


def diagnosed(model: nn.Module, amp: mezzo.Stepper, x: Tensor) -> None:
    with mezzo.diagnose.watch(amp, every=10) as watch:
        print(watch.report.skipped)
    print(mezzo.diagnose.lint(model, x), mezzo.diagnose.explain(model, x, "bf16"))
    print(mezzo.diagnose.memory(model, amp.optimizers[0], "bf16"), mezzo.checkpoint_contexts())
    report = mezzo.diagnose.compare(model, x, lambda model, batch: model(batch).sum(), "bf16")
    with mezzo.diagnose.trace(model) as trace:
        print(report, trace)


def seen(model: nn.Module, x: Tensor, path: Path) -> list[mezzo.diagnose.Report]:
    lint: mezzo.diagnose.LintReport = mezzo.diagnose.lint(model, x)
    memory: mezzo.diagnose.MemoryReport = mezzo.diagnose.memory(model, torch.optim.SGD(model.parameters()), "bf16")
    explained: mezzo.diagnose.Explanation = mezzo.diagnose.explain(model, x, "bf16")
    parted: mezzo.diagnose.MismatchReport = mezzo.diagnose.mismatch(model, model, x)
    compared: mezzo.diagnose.CompareReport = mezzo.diagnose.compare(
        model, x, lambda model, batch: model(batch).sum(), "bf16"
    )
    ran: mezzo.diagnose.ScriptRun = mezzo.diagnose.trace_script(path, steps=3)
    trace: mezzo.diagnose.Trace = mezzo.diagnose.trace(model)
    traced: mezzo.diagnose.TraceReport = trace.report
    faults: Sequence[mezzo.diagnose.Finding] = traced.findings
    print(faults, ran, mezzo.diagnose.check_up("zoo:mlp", "bf16"), mezzo.diagnose.named_function("train.py:build"))
    return [lint, memory, explained, parted, compared, traced]


def recorded(amp: mezzo.Stepper, x: Tensor, path: Path, build: Callable[[], Any]) -> None:
    recorder: mezzo.diagnose.Recorder = mezzo.record(amp, path, every=10)
    watch: mezzo.diagnose.Watch = mezzo.diagnose.watch(amp)
    report: mezzo.diagnose.WatchReport = watch.report
    for batch in recorder.batches([x]):
        amp.backward(amp.model(batch).sum())
    again: mezzo.diagnose.ReplayedStep = mezzo.replay(path, 3, build, policy="fp32")
    begin: tuple[int, Path] = mezzo.diagnose.segment_of(path, 3)
    print(report, again, begin, mezzo.diagnose.record, mezzo.diagnose.replay)


CAUGHT: tuple[type[mezzo.errors.MezzoError], ...] = (
    mezzo.errors.FormatError,
    mezzo.errors.PolicyError,
    mezzo.errors.CastError,
    mezzo.errors.ForbiddenOpError,
    mezzo.errors.RegionError,
    mezzo.errors.RegionTypeError,
    mezzo.errors.ScalerError,
    mezzo.errors.ScalerArgumentError,
    mezzo.errors.StepError,
    mezzo.errors.StepAttributeError,
    mezzo.errors.StepTypeError,
    mezzo.errors.StoppedRun,
    mezzo.errors.LossScaleExhausted,
    mezzo.errors.NonFiniteStep,
    mezzo.errors.GradientUnderflow,
    mezzo.errors.MasterError,
    mezzo.errors.OperandError,
    mezzo.errors.CheckpointError,
    mezzo.errors.InvariantError,
    mezzo.errors.DataError,
    mezzo.errors.ConfigError,
    mezzo.errors.BenchError,
    mezzo.errors.DistributedError,
)


def stopped(error: mezzo.errors.StoppedRun) -> str:
    return str(error.report.findings[0].module) if error.report is not None else error.advice


def spread(model: nn.Module, amp: mezzo.Stepper) -> object:
    mezzo.distributed.fully_shard(model, mezzo.Policy.parse("bf16"))
    mezzo.distributed.save_checkpoint(amp, "step-1", extra={"epoch": 0})
    return mezzo.distributed.load_checkpoint(amp, "step-1")


def frameworks() -> tuple[Accelerator, MezzoPrecision, type[Trainer], type[PolicyMixin]]:
    accelerator = Accelerator(policy="bf16", cpu=True)
    plugin = MezzoPrecision("bf16-master")
    amps: list[mezzo.Stepper] = [accelerator.stepper, plugin.stepper]
    print(amps, mezzo.integrations.__doc__)
    return accelerator, plugin, Trainer, PolicyMixin

"""Uses every public name as a typed program does: `mypy --strict` reads it (pyproject), nobody runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

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


def diagnosed(model: nn.Module, amp: mezzo.Stepper, x: Tensor) -> None:
    with mezzo.diagnose.watch(amp, every=10) as watch:
        print(watch.report.skipped)
    print(mezzo.diagnose.lint(model, x), mezzo.diagnose.explain(model, x, "bf16"))
    print(mezzo.diagnose.memory(model, amp.optimizers[0], "bf16"), mezzo.checkpoint_contexts())
    report = mezzo.diagnose.compare(model, x, lambda model, batch: model(batch).sum(), "bf16")
    with mezzo.diagnose.trace(model) as trace:
        print(report, trace)


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

"""Words that other libraries have for a training loop and its arguments, and what to write for each."""

from __future__ import annotations

from typing import cast

from ..errors import PolicyError
from ..policy import PolicyLike, as_policy


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


_MICRO_BATCHES = "write amp.backward(loss / n) for each of n micro-batches, then amp.step()"
_SCALES = "leave it out: amp.backward(loss) and amp.step() scale by themselves where the policy says so, and amp.state_dict() has the scale"
_NORMS = ("max_grad_norm", "clip_grad_norm", "gradient_clip_val", "gradient_clipping", "grad_clip", "clip_grad", "clip")
ARGUMENTS = {
    **dict.fromkeys(_NORMS, "write amp.step(max_norm=...), or clip_value=..."),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), _MICRO_BATCHES),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "write amp.on_applied(scheduler.step)"),
    "error_if_nonfinite": "leave it out, since gradients that are not finite make the step be skipped",
    "gradient": "write amp.backward((outputs * gradient).sum())",
    "grad_outputs": "write amp.grad((outputs * grad_outputs).sum(), inputs)",
    "materialize_grads": "write allow_unused=True, which gives zeros for inputs that were not used",
    "only_inputs": "leave it out",
    "scaler": _SCALES,
    "strict": "a checkpoint is taken whole. Write amp.model.load_state_dict(weights, strict=False) for a part; masters follow",
}
"""What to write for arguments that other libraries have; by an empty name what to add where there are too many or too few."""
OF_BACKWARD = ARGUMENTS | {"": " For loss.backward(gradient) write amp.backward((loss * gradient).sum())."}
OF_GRAD = ARGUMENTS | {"": f" For grad_outputs {ARGUMENTS['grad_outputs']}."}
_CLIP = "amp.step() divides gradients by the loss scale. Clip with amp.step(max_norm=...) or amp.step(clip_value=...), and edit gradients inside `with amp.unscaled_grads():`."
_SAVE = "Write torch.save(amp.state_dict(), path), and amp.load_state_dict(torch.load(path))."
OF_STEPPER = {
    **dict.fromkeys(("unscale_", "clip_grad", "clip_grad_norm", "clip_grad_norm_", "clip_grad_value_", "clip_gradients"), _CLIP),
    **dict.fromkeys(("save", "load", "save_state", "load_state", "save_checkpoint", "load_checkpoint"), _SAVE),
    **dict.fromkeys(("accumulate", "gradient_accumulation_steps", "is_gradient_accumulation_boundary"), _sentence(_MICRO_BATCHES)),
    **dict.fromkeys(("scaler", "scale_loss"), _sentence(_SCALES)),
    **dict.fromkeys(("get_scale", "loss_scale", "cur_scale", "get_loss_scale"), "Read amp.scale."),
    **dict.fromkeys(("scheduler", "lr_scheduler"), _sentence(ARGUMENTS["scheduler"])),
    **dict.fromkeys(("optimizer_step_was_skipped", "found_inf", "all_finite", "skipped", "overflow"),
                    "amp.step() returns what happened: write result = amp.step(), and read result.applied."),
    **dict.fromkeys(("global_step", "global_steps", "num_steps", "steps"), "Read amp.counters().applied."),
    **dict.fromkeys(("master_params", "master_weights", "masters"), "amp.export_weights() has the fp32 values of all weights."),
    **dict.fromkeys(("dtype", "compute_dtype", "precision"), "Read amp.policy.compute."),
    **dict.fromkeys(("enabled", "is_enabled"), "The policy says it: amp.policy.is_low, and 'fp32' casts nothing."),
    **dict.fromkeys(("gather", "gather_for_metrics", "wait_for_everyone", "is_main_process", "is_local_main_process", "print"),
                    "It is of Accelerate: mezzo.integrations.accelerate.Accelerator has it, and in a loop of your own torch.distributed does it."),
    **dict.fromkeys(("toggle_optimizer", "untoggle_optimizer"), "Leave it out: each optimizer drops its own gradients, and amp.step(optimizer=...) steps that one alone."),
    **dict.fromkeys(("unwrap_model", "prepare", "setup"), "Model and optimizers stay the objects they are, and loaders too: read amp.model and amp.optimizers."),
    "agree": "amp.agree is now called amp.consensus.",
    "update": "amp.step() moves the loss scale too: leave it out.",
    "autocast": "The model runs in its policy wherever it is called: leave the block out.",
    "manual_backward": "Write amp.backward(loss).",
    "no_sync": "It is of the wrapper: write `with ddp.no_sync():` around the backward passes before the last one of a step.",
}  # fmt: skip
"""What to write for words that other libraries have for the steps of a training loop."""
_LOSS = "A step keeps no loss: its loss is what amp.backward was given, or what the closure returned. Keep it there."
OF_RESULT = {
    **dict.fromkeys(("skipped", "overflow", "found_inf"), "Write not result, or not result.applied."), "norm": "Write result.grad_norm.", **dict.fromkeys(("loss", "item", "detach", "backward"), _LOSS),
}  # fmt: skip
"""What to write for words that other libraries have for what a step did."""


def _policy_meant(value: object) -> object:
    """Return a value given as a precision where it says a policy, else a policy to begin with."""
    try:
        as_policy(cast(PolicyLike, value))
    except PolicyError:
        return "bf16-master"
    return value


_NAMES = ("precision", "mixed_precision", "dtype", "amp_dtype", "compute_dtype", "opt_level")
_IN_POLICY = "write it in the policy, as in policy='fp16, scaling=1024' or policy='fp16, scaling.init_scale=1024'"
OF_PREPARE = {
    **ARGUMENTS,
    **dict.fromkeys(_NAMES, lambda value: f"write policy={_policy_meant(value)!r}"),
    **dict.fromkeys(
        ("loss_scale", "init_scale", "init_loss_scale", "initial_loss_scale", "init_loss_scaling"), _IN_POLICY
    ),
    **dict.fromkeys(("growth_interval", "growth_factor", "backoff_factor"), _IN_POLICY),
    **dict.fromkeys(("fp16", "bf16", "master_weights"), "write policy='fp16-master' or policy='bf16-master'"),
    "enabled": "write policy='fp32' where nothing is to be cast",
    "device_type": "leave it out, since the device of the model decides",
    "": " Loaders stay as they are; a scheduler's step is called after steps that were applied: amp.on_applied(scheduler.step).",
}
"""As `ARGUMENTS`, of `mezzo.prepare`."""

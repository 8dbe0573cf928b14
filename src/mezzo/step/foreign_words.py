"""What other libraries call the parts of a training loop, and what to write for it here."""

from __future__ import annotations


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
    "scaler": _SCALES,
    "strict": "a checkpoint is taken whole. Write amp.model.load_state_dict(weights, strict=False) for a part; masters follow",
}
"""What to write for arguments that other libraries have."""
OF_BACKWARD = ARGUMENTS | {"": " For loss.backward(gradient) write amp.backward((loss * gradient).sum())."}
_CLIP = "amp.step() divides gradients by the loss scale. Clip with amp.step(max_norm=...) or amp.step(clip_value=...), and edit gradients inside `with amp.unscaled_grads():`."
_SAVE = "Write torch.save(amp.state_dict(), path), and amp.load_state_dict(torch.load(path))."
ELSEWHERE = {
    **dict.fromkeys(
        ("unscale_", "clip_grad", "clip_grad_norm", "clip_grad_norm_", "clip_grad_value_", "clip_gradients"), _CLIP
    ),
    **dict.fromkeys(("save", "load", "save_state", "load_state", "save_checkpoint", "load_checkpoint"), _SAVE),
    "agree": "amp.agree is now called amp.consensus.",
    "update": "amp.step() moves the loss scale too: leave it out.",
    "get_scale": "Read amp.scale.",
    "autocast": "The model runs in its policy wherever it is called: leave the block out.",
    **dict.fromkeys(
        ("accumulate", "gradient_accumulation_steps", "is_gradient_accumulation_boundary"), _sentence(_MICRO_BATCHES)
    ),
    **dict.fromkeys(("scaler", "scale_loss"), _sentence(_SCALES)),
    "optimizer_step_was_skipped": "amp.step() returns what happened: write result = amp.step(), and read result.applied.",
}
"""What to write for words that other libraries have for the steps of a training loop."""

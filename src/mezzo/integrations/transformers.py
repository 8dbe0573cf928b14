"""The Hugging Face Trainer, and a mixin that gives any subclass of it a policy."""

from __future__ import annotations

from typing import Any

from ..errors import PolicyError
from ..policy import PolicyLike
from ..step import Stepper

try:
    import transformers

    from .accelerate import adopt, check_precision
except ImportError as error:
    raise ImportError(
        "mezzo.integrations.transformers needs transformers and Accelerate: pip install 'mezzo[transformers]'"
    ) from error


class _ShowsGradients(transformers.TrainerCallback):
    """Stands before callbacks that look at gradients before a step, which the Trainer hands them true and clipped."""

    def __init__(self, trainer: PolicyMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Have `.grad` hold true, clipped gradients, where another callback looks. Syncs: no."""
        trainer: Any = self._trainer
        empty = transformers.TrainerCallback.on_pre_optimizer_step
        kinds = {type(one) for one in trainer.callback_handler.callbacks} - {_ShowsGradients}
        if any(kind.on_pre_optimizer_step is not empty for kind in kinds):
            trainer.accelerator._adapter.show_clipped()


class PolicyMixin:
    """Gives a subclass of `transformers.Trainer` a policy: `class MyTrainer(PolicyMixin, SFTTrainer): ...`.

    Weights, clipping, accumulation and skipped steps are those of a loop written with `mezzo.prepare`, bit for bit;
    the logged `grad_norm` is that of the true gradients; a checkpoint has the loss scale and the counters. `policy` is as for
    `mezzo.prepare`, all else as for the Trainer.

    Raises:
        PolicyError: `TrainingArguments` ask for a precision of their own.
    """

    def __init__(self, *args: Any, policy: PolicyLike = "auto", **kwargs: Any) -> None:
        self._policy = policy
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, _ShowsGradients(self))  # type: ignore[attr-defined]  # the Trainer's

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator, and have it train under the policy."""
        args: Any = self.args  # type: ignore[attr-defined]  # the Trainer's
        check_precision(args.mixed_precision, self._policy)
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(args, name, False):
                raise PolicyError(
                    f"TrainingArguments({name}=True) would cast the weights for evaluation, and with them what "
                    f"policy={self._policy!s} keeps. Leave it out: a prepared model evaluates in the policy."
                )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # the Trainer's
        if self.accelerator.is_fsdp2 and args.save_strategy != "no":  # type: ignore[attr-defined]  # the Trainer's
            raise PolicyError(
                f"TrainingArguments(fsdp=..., save_strategy={args.save_strategy.value!r}) would save optimizers of sharded weights "
                f"without the masters and moments that policy={self._policy!s} keeps. Write save_strategy='no' and save with "
                "mezzo.distributed.save_checkpoint(trainer.stepper, folder), or train with mezzo's Accelerator."
            )
        adopt(self.accelerator, self._policy)  # type: ignore[attr-defined]  # the Trainer's

    @property
    def stepper(self) -> Stepper:
        """What `mezzo.prepare` made, once training has begun."""
        found: Stepper = self.accelerator.stepper  # type: ignore[attr-defined]  # the Trainer's
        return found


class Trainer(PolicyMixin, transformers.Trainer):
    """`transformers.Trainer` with `policy=` in place of `TrainingArguments(bf16=True)`; see `PolicyMixin`."""

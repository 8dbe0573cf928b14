"""Lightning: a precision plugin for its Trainer and for Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import living
from ..errors import StepError
from ..optim import parameters, wrapped_optimizer
from ..policy import PolicyLike
from ..step import Stepper, answers_misfits, needs_closure
from .adapter import Adapter, calls, innermost_optimizer

try:
    from lightning.fabric.strategies import Strategy as FabricStrategy
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError("mezzo.integrations.lightning needs Lightning: pip install 'mezzo[lightning]'") from error

_IN_FABRIC = calls("fabric.backward", "fabric.clip_gradients(...)", "plugin.stepper")
_IN_TRAINER = calls("self.manual_backward", "self.clip_gradients(...)", "plugin.stepper")
_LOOKING = ("on_before_optimizer_step", "configure_gradient_clipping")


class MezzoPrecision(Precision):
    """Precision plugin that trains under a policy: `Trainer(plugins=MezzoPrecision("bf16"))`, or `Fabric(plugins=...)`.

    Weights, clipping, accumulation and skipped steps are those of a loop written with `mezzo.prepare`, bit for bit.
    `training_step` runs in the policy's region. Schedulers that step with every batch stay where they are when a step
    is skipped. A checkpoint has the loss scale and the counters; with Fabric, put the plugin itself into the state
    that is saved: `fabric.save(path, {"model": model, "optimizer": optimizer, "amp": plugin})`.

    Args:
        policy: as for `mezzo.prepare`.

    Attributes:
        precision: the name Lightning has for what comes nearest.

    Raises:
        StepError: a LightningModule that overrides `backward`, which would go past the loss scale.
    """

    @answers_misfits("MezzoPrecision()", dict.fromkeys(("precision", "dtype"), "write MezzoPrecision({!r})".format))
    def __init__(self, policy: PolicyLike = "auto") -> None:
        self._adapter = Adapter(policy, _IN_FABRIC)
        self._is_trainer = self._clips_now = False
        self._wrap: Callable[[], nn.Module | None] = lambda: None
        self._undo = ExitStack()

    def __repr__(self) -> str:
        return f"MezzoPrecision({str(self._adapter.policy)!r})"

    @property
    def stepper(self) -> Stepper:
        """What `mezzo.prepare` made, once training has begun."""
        return self._adapter.stepper

    @property
    def _runs_only(self) -> bool:
        return self._is_trainer and not self._adapter.trains

    # What both call

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Have the framework that calls wrap the model after it is prepared, and hand over what it asks for."""
        trainer = getattr(module, "_trainer", None)
        if trainer is None:
            _adopt_strategies(self)
        elif hasattr(trainer.strategy, "configure_ddp"):
            self._wrap = _postponed(trainer.strategy)
        return module

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Take the step, or skip it."""
        if self._runs_only:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if kwargs:
            raise StepError(f"optimizer.step was given {', '.join(kwargs)}, and takes a closure alone. Leave it out.")
        optimizer = innermost_optimizer(optimizer)
        if not self._is_trainer:
            return self._adapter.step(optimizer, closure)
        assert closure is not None
        kind: Any = type(wrapped_optimizer(optimizer))
        if needs_closure(kind):
            bound = model.trainer.gradient_clip_val, model.trainer.gradient_clip_algorithm
            if not self._clips_now:
                self._clip_gradients(model, optimizer, *bound)
            return self._adapter.step(optimizer, partial(self._evaluate, closure, model, optimizer))
        loss = closure()
        if model.automatic_optimization and not self._adapter.is_pending:
            return loss  # no training_step since the last step had a loss, or the epoch is for batch norms alone
        self._before_step(model, optimizer)
        self._adapter.step(optimizer)
        return loss

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a loss. Syncs: no."""
        if self._runs_only:
            return super().backward(tensor, model, *args, **kwargs)
        if self._is_trainer:
            args = args[1:]  # the optimizer
        self._adapter.backward(tensor, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale, counters and policy; where nothing is trained, those that were loaded."""
        return self._adapter.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        self._adapter.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from the loss scale that Lightning's own plugin of `precision="16-mixed"` saved."""
        scaler = checkpoint.get("MixedPrecision", checkpoint.get("native_amp_scaling_state"))
        if scaler is not None:
            self._adapter.load_state_dict(scaler)

    def teardown(self) -> None:
        """Give the model back the methods it had."""
        self._undo.close()

    # What the Trainer calls

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare the model, and have it wrapped where several ranks train it."""
        self._is_trainer, self._adapter.words = True, _IN_TRAINER
        if not isinstance(model, LightningModule):
            raise StepError(
                f"{type(model).__name__} wrapped the model before the policy was bound, and keeps weights of its own. "
                "Use strategy='ddp', or ModelParallelStrategy with mezzo's fully_shard in configure_model."
            )
        if is_overridden("backward", model):
            raise StepError(
                f"{type(model).__name__} overrides backward, which would go past the loss scale. Leave it out, or write self.manual_backward(loss) with automatic_optimization = False."
            )
        self._clips_now = is_overridden("configure_gradient_clipping", model)
        own: list[Optimizer] = []
        if model.trainer.state.fn == TrainerFn.FITTING:
            # Lightning's stand-in for an optimizer, where configure_optimizers returns None, is not exported
            own = [innermost_optimizer(o) for o in optimizers if type(o).__name__ != "_MockOptimizer"]
            _refuse_accumulation(model.trainer, own)
            self._adapter.forget()  # the last fit
        self._adapter.prepare([model], own)
        self._hold_schedulers(model, lr_schedulers)
        return self._wrap() or model, [self._adapter.stepped(o) for o in own] or optimizers, lr_schedulers

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the policy's region, in which training_step and its like run."""
        return self._adapter.region()

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the hooks of the Trainer. Syncs: as they do."""
        return super().pre_backward(tensor, module) if self._is_trainer else tensor

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the hooks of the Trainer. Syncs: as they do."""
        return super().post_backward(tensor, module) if self._is_trainer else tensor

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        """Have the step clip; at once where the module overrides `configure_gradient_clipping`, and may look afterwards."""
        if self._clips_now:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0 and not self._runs_only:
            name = "clip_value" if gradient_clip_algorithm == GradClipAlgorithmType.VALUE else "max_norm"
            self._adapter.clip(innermost_optimizer(optimizer), **{name: clip_val})

    def _evaluate(self, closure: Callable[[], Any], model: LightningModule, optimizer: Optimizer) -> Any:
        """Compute the loss as an optimizer asks for it inside its step, and call what looks at gradients before a step."""
        loss = closure()
        self._before_step(model, optimizer)
        self._adapter.hide(optimizer)
        return loss

    def _before_step(self, model: LightningModule, optimizer: Optimizer) -> None:
        looking = [model, *model.trainer.callbacks]
        if any(is_overridden(hook, who) for who in looking for hook in _LOOKING if hasattr(who, hook)):
            self._adapter.show()
        self._after_closure(model, optimizer)

    def _hold_schedulers(self, module: LightningModule, configs: Sequence[Any]) -> None:
        """Have schedulers that step with every batch stay where they are when a step is skipped."""
        each_step = {id(config.scheduler) for config in configs if config.interval == "step"}
        if not each_step:
            return
        own, step = vars(module), module.lr_scheduler_step
        before = {name: method for name, method in own.items() if name == "lr_scheduler_step"}

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if id(scheduler) not in each_step or getattr(self._adapter.result, "applied", True):
                step(scheduler, metric)

        own["lr_scheduler_step"] = lr_scheduler_step
        self._undo.callback(own.update, before)
        self._undo.callback(own.pop, "lr_scheduler_step", None)


def _refuse_accumulation(trainer: Any, optimizers: Sequence[Optimizer]) -> None:
    """Refuse to sum micro-batches for an optimizer whose closure computes the last one's loss alone."""
    later = [count for c in trainer.callbacks for count in (getattr(c, "scheduling", None) or {}).values()]
    most = max(trainer.accumulate_grad_batches, *later) if later else trainer.accumulate_grad_batches
    kinds: list[Any] = [type(wrapped_optimizer(o)) for o in optimizers]
    asks = [kind.__name__ for kind in kinds if needs_closure(kind)]
    if most > 1 and asks and trainer.lightning_module.automatic_optimization:
        raise StepError(
            f"accumulate_grad_batches={most} was given with {asks[0]}, which computes the loss again inside its step: that of "
            "one batch, not of all that were summed. Write accumulate_grad_batches=1 and a larger batch_size of the DataLoader."
        )


def _postponed(strategy: Any) -> Callable[[], nn.Module | None]:
    """Have a strategy of the Trainer wrap the model later, by what is returned: prepared weights may have another dtype."""
    asked: list[None] = []
    vars(strategy)["configure_ddp"] = lambda: asked.append(None)

    def wrap() -> nn.Module | None:
        vars(strategy).pop("configure_ddp", None)
        if not asked:
            return None
        asked.clear()
        strategy.configure_ddp()
        return cast(nn.Module, strategy.model)

    return wrap


class _PreparedByFabric(FabricStrategy):
    """What a strategy of Fabric does otherwise under this plugin, which Fabric does not tell of optimizers."""

    @property
    def _adapter(self) -> Adapter:
        return cast(MezzoPrecision, self.precision)._adapter

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        self._adapter.prepare([module], optimizers)
        optimizers = [self._adapter.stepped(optimizer) for optimizer in optimizers]
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def setup_module(self, module: nn.Module) -> Any:
        if not self._adapter.knows(module):
            self._adapter.prepare([module], [])
        return super().setup_module(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        if not self._adapter.knows(optimizer):
            self._adapter.prepare([], [optimizer])
        return super().setup_optimizer(self._adapter.stepped(optimizer))

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, **kwargs: Any
    ) -> Tensor:
        return self._adapter.clip_norm(parameters(optimizer), max_norm, norm_type)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self._adapter.clip_value(parameters(optimizer), clip_val)


def _adopt_strategies(plugin: MezzoPrecision) -> None:
    """Make the strategy that holds a plugin prepare and clip through it; Fabric tells a plugin of neither."""
    for found in living(FabricStrategy):
        kind = type(found)
        if not issubclass(kind, _PreparedByFabric) and found.precision is plugin:
            found.__class__ = type(kind.__name__, (_PreparedByFabric, kind), {"__module__": kind.__module__})

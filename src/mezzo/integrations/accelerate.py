"""Accelerate: an Accelerator that trains under a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import fully_shard, load_checkpoint, save_checkpoint
from ..errors import PolicyError, StepError
from ..policy import PolicyLike, as_policy
from ..step import Stepper, StepResult, answers_misfits
from .adapter import Adapter, calls, innermost_optimizer

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer, move_to_device
    from accelerate.utils import (
        SCALER_NAME,
        AutocastKwargs,
        DistributedType,
        DynamoBackend,
        GradScalerKwargs,
        is_compiled_module,
    )
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_auto_wrap_policy
except ImportError as error:
    raise ImportError("mezzo.integrations.accelerate needs Accelerate: pip install 'mezzo[accelerate]'") from error

_SHARDS = "mezzo_shards"
_SHARDED = ("scaler", "_models", "_optimizers")
_CALLS = calls("accelerator.backward", "accelerator.clip_grad_norm_(...)", "accelerator.stepper")
_CLIPS = dict.fromkeys(
    ("max_norm", "clip_value"),
    "write accelerator.clip_grad_norm_(model.parameters(), max_norm), or clip_grad_value_, before optimizer.step()",
)
_HANDLERS = {
    AutocastKwargs: "which says what is cast. Leave it out: policy='fp32' casts nothing, and accelerator.autocast(AutocastKwargs(enabled=False)) turns casting off in a block",
    GradScalerKwargs: "which has its own loss scale. Write it into the policy: 'fp16, scaling.init_scale=1024'",
}
_REFUSED = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


class _Optimizer(AcceleratedOptimizer):
    """An optimizer as Accelerate hands it out, whose step the adapter's stepper takes."""

    def __init__(self, optimizer: Optimizer, adapter: Adapter) -> None:
        super().__init__(optimizer, device_placement=False)
        self._adapter = adapter
        self._result: StepResult | None = None

    @answers_misfits("optimizer.step()", _CLIPS)
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Take the step, in the last micro-batch of several."""
        if self.gradient_state.sync_gradients:
            self._result = self._adapter.step(self.optimizer, closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step of this one left everything as it was. Syncs: once a step."""
        return self._result is not None and not self._result.applied


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with `policy=` in place of `mixed_precision=`.

    Weights, clipping, accumulation and skipped steps are those of a loop written with `mezzo.prepare`, bit for bit;
    `save_state` keeps the loss scale and the counters where Accelerate keeps a scaler. `policy` is as for `mezzo.prepare`;
    left out, `mixed_precision` says it ("no" is fp32), or `accelerate launch`, else "auto".

    Raises:
        PolicyError: another precision beside the policy, or a launcher that takes the step itself.
    """

    def __init__(self, *args: Any, policy: PolicyLike | None = None, **kwargs: Any) -> None:
        if args and not isinstance(args[0], bool):  # device_placement
            raise PolicyError(f"Accelerator('{args[0]!s}'): write Accelerator(policy='{args[0]!s}'), by its name.")
        if policy is None:
            launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            policy = str(kwargs.get("mixed_precision") or ("auto" if launched == "no" else launched))
            kwargs["mixed_precision"] = "no"
        policy = as_policy(policy)
        for kind, advice in _HANDLERS.items():
            if any(isinstance(handler, kind) for handler in kwargs.get("kwargs_handlers") or ()):
                raise PolicyError(f"{kind.__name__} was given beside policy={policy!s}, {advice}.")
        check_precision(kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION"), policy)
        super().__init__(*args, **kwargs)
        adopt(self, policy)

    @property
    def stepper(self) -> Stepper:
        """What `mezzo.prepare` made of a model and its optimizer."""
        return self._adapter.stepper

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models and optimizers under the policy, then as Accelerate does."""
        models, optimizers = _parts(args)
        if self.is_fsdp2:
            models, optimizers = [], []  # prepared when they are sharded
        for model in models:
            if self.device_placement:
                model.to(self.device)
        for optimizer in optimizers:
            if optimizer.state and not self._adapter.knows(optimizer):
                optimizer.load_state_dict(move_to_device(optimizer.state_dict(), self.device))
        if models or optimizers:
            self._adapter.prepare(models, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """Shard and prepare the model; Accelerate would shard all of it in one dtype."""
        models, optimizers = _parts(args)
        done = list(args)
        for model in models:  # one, which Accelerate has checked
            done[args.index(model)] = self._sharded(model, optimizers)
            self._models.append(model)
        for is_first in (True, False):  # schedulers come after their optimizers
            done = [a if isinstance(a, nn.Module) else self._prepare_one(a, first_pass=is_first) for a in done]
        return tuple(done)

    def _sharded(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        plugin, dynamo = self.state.fsdp_plugin, self.state.dynamo_plugin
        _check_plugin(plugin, self._adapter.policy)
        _check_unused(optimizers)
        plugin.set_auto_wrap_policy(model)
        if plugin.activation_checkpointing:
            model = fsdp2_apply_ac(self, model)
        if plugin.cpu_ram_efficient_loading:
            _broadcast(model, self.device)
        mesh, before = self.torch_device_mesh, dict(model.named_parameters())
        fully_shard(
            model,
            self._adapter.policy,
            units=_units(plugin, model),
            mesh=None if mesh is None else mesh[tuple(self.parallelism_config.fsdp_dim_names)],
            reshard_after_forward=plugin.reshard_after_forward,
            offload_policy=plugin.cpu_offload,
        )
        now = {before[name]: param for name, param in model.named_parameters()}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [now.get(param, param) for param in group["params"]]
        self._adapter.prepare([model], optimizers)
        is_compiled = dynamo.backend != DynamoBackend.NO and not is_compiled_module(model)
        return cast(nn.Module, torch.compile(model, **dynamo.to_kwargs())) if is_compiled else model

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model by itself: to be run, or before its optimizer."""
        if not self.is_fsdp2 and not self._adapter.knows(model):
            self._adapter.prepare([model.to(self.device) if self.device_placement else model], [])
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Wrap an optimizer, whose steps the stepper takes from now on."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            if not self.is_fsdp2:  # there its weights are sharded together with the model
                self._adapter.prepare([], [optimizer])
            optimizer = _Optimizer(self._adapter.stepped(optimizer), self._adapter)
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss, divided by the number of micro-batches. Syncs: no."""
        is_tensor = isinstance(loss, Tensor)  # what is none is refused there
        self._adapter.backward(loss / self.gradient_accumulation_steps if is_tensor else loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Have `.grad` hold true gradients, clipped as asked for since backward, until the next backward or step. Syncs: no."""
        self._adapter.show_clipped()

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip to a norm, and return the norm before; see `Adapter.clip_norm`. Syncs: no."""
        return self._adapter.clip_norm(parameters, max_norm, norm_type, self._clip_grad_norm_dtensor_aware)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp to a value in both directions. Syncs: no."""
        self._adapter.clip_value(parameters, clip_value)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run a block in the policy's region, unless the handler turns casting off."""
        with self._adapter.region(enabled=autocast_handler is None or autocast_handler.enabled):
            yield

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the run as Accelerate does; under FSDP2 each rank writes its part of weights and optimizers into a new folder."""

        def save(folder: Path) -> None:
            save_checkpoint(self.stepper, folder / _SHARDS)

        with self._instead(_SHARDED, self.register_save_state_pre_hook, save) if self.is_fsdp2 else nullcontext():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Go on from what `save_state` wrote, mezzo's or Accelerate's own; under FSDP2 from mezzo's, on any number of ranks."""

        def load(folder: Path) -> None:
            scaler = folder / SCALER_NAME  # Accelerate writes it where it has one, and stumbles over where it has not
            if self.is_fsdp2:
                load_checkpoint(self.stepper, folder / _SHARDS)
            elif scaler.exists():
                self._adapter.load_state_dict(torch.load(scaler, map_location="cpu", weights_only=True))

        aside = _SHARDED if self.is_fsdp2 else _SHARDED[:1]
        with self._instead(aside, self.register_load_state_pre_hook, load):
            super().load_state(*args, **kwargs)

    @contextmanager
    def _instead(
        self, names: Sequence[str], register: Callable[..., Any], act: Callable[[Path], None]
    ) -> Iterator[None]:
        """Have `act`, called with the folder, stand for what a checkpoint of Accelerate does with some of its parts."""
        aside: dict[str, Any] = {name: getattr(self, name) for name in names}
        self.__dict__.update({name: type(part)() if isinstance(part, list) else None for name, part in aside.items()})
        try:
            with register(lambda *given: act(Path(given[-1]))):  # the last is the folder
                yield
        finally:
            self.__dict__.update(aside)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of models, optimizers and the stepper."""
        self._adapter.forget()
        return super().free_memory(*objects)


def _parts(args: Sequence[Any]) -> tuple[list[nn.Module], list[Optimizer]]:
    models = [a for a in args if isinstance(a, nn.Module)]
    return models, [innermost_optimizer(a) for a in args if isinstance(a, Optimizer)]


def _check_plugin(plugin: Any, policy: PolicyLike) -> None:
    given = {name: getattr(plugin, name, None) for name in ("mixed_precision_policy", "ignored_modules")}
    if found := [name for name, value in given.items() if value]:
        raise PolicyError(
            f"FullyShardedDataParallelPlugin has {found[0]}={given[found[0]]!r}, and under policy={policy!s} the policy decides "
            "in which dtype every weight is sharded, gathered and reduced. Leave it out; 'reduce=bf16' in the policy is the dtype of gradients on their way."
        )


def _check_unused(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        if optimizer.state:
            raise StepError(
                f"accelerator.prepare was given a {type(optimizer).__name__} that holds the state of {len(optimizer.state)} weights, which FSDP2 "
                "replaces by shards. Give it to prepare before its first step or load, then call accelerator.load_state(folder)."
            )


def _units(plugin: Any, model: nn.Module) -> list[nn.Module]:
    """Return the modules that a plugin has gathered as a whole, none inside another."""
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model) or (lambda module: False)
    found = [module for module in model.modules() if module is not model and is_unit(module)]
    return [m for m in found if not any(inner is not m and inner in found for inner in m.modules())]


def _broadcast(model: nn.Module, device: torch.device) -> None:
    """Give each rank the first one's weights and buffers, which alone may have read them. Syncs: yes."""
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to(device)
        torch.distributed.broadcast(sent, 0)
        tensor.detach().copy_(sent)


def check_precision(other: object, policy: PolicyLike) -> None:
    """Refuse a precision beside a policy. Raises: PolicyError: there is one."""
    if other not in (None, "no"):
        raise PolicyError(
            f"mixed_precision={other!s} was asked for beside policy={policy!s}, which alone says the precision. Leave out "
            f"mixed_precision (argument, launcher or ACCELERATE_MIXED_PRECISION), or {other!s}=True of TrainingArguments, and write policy={str(other)!r} if it is meant."
        )


def adopt(accelerator: accelerate.Accelerator, policy: PolicyLike) -> None:
    """Make an Accelerator that somebody else built one that trains under a policy. Writes: its class and scaler.

    Raises:
        PolicyError: it has a precision of its own, or takes steps in a way that cannot be owned.
    """
    check_precision(accelerator.mixed_precision, policy)
    kind = accelerator.distributed_type
    if kind in _REFUSED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise PolicyError(
            f"Accelerate runs under {kind.value}, which keeps weights and takes steps itself, so policy={policy!s} cannot hold. Launch with DDP or FSDP2 (fsdp_version: 2)."
        )
    accelerator.__class__ = Accelerator
    accelerator._adapter = accelerator.scaler = Adapter(policy, _CALLS)

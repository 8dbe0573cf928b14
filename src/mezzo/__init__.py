"""Mixed precision for PyTorch that you can see, steer and trust."""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "autocast": "casting",
    "keep_memory": "allocator",
    "checkpoint_contexts": "casting",
    "custom_bwd": "casting",
    "custom_fwd": "casting",
    "CapturedStep": "step",
    "GradScaler": "loss_scale",
    "Policy": "policy",
    "Rule": "policy",
    "ScalingConfig": "policy",
    "Stepper": "step",
    "StepResult": "step",
    "prepare": "step",
    "record": "diagnose",
    "replay": "diagnose",
    "monitor": "integrations.monitor",
}
_RENAMED = {"dist": "distributed", "scaling": "loss_scale"}
_SENTENCES = {
    "compare explain lint memory mismatch watch": "write mezzo.diagnose.{name}",
    "Adam AdamW MasterWeights SGD adopt": "write mezzo.optim.{name}",
    "save_checkpoint load_checkpoint": "write mezzo.distributed.{name}, or torch.save(amp.state_dict(), path)",
    "save load resume save_state load_state": "write torch.save(amp.state_dict(), path), and amp.load_state_dict(torch.load(path))",
    "RankConsensus fully_shard plan_shards": "write mezzo.distributed.{name}",
    "FusedAdam FusedSGD FusedLAMB Lion LAMB Adam8bit AdamW8bit": "keep the optimizer of torch or of another library: mezzo.prepare(model, optimizer, policy)",
    "LossScaler DynamicLossScaler DynamicLossScale StaticLossScale DynamicScale ShardedGradScaler GradScalerKwargs": "write mezzo.GradScaler, or the scale in a policy, as in mezzo.prepare(model, optimizer, 'fp16, scaling=1024')",
    "initialize setup setup_optimizers scale_loss backward unscale_ LossScaleOptimizer FP16_Optimizer decorate auto_mixed_precision": "write amp = mezzo.prepare(model, optimizer, policy), then amp.backward(loss) and amp.step()",
    "all_finite select_tree": "amp.step() looks for itself and leaves out a step whose gradients are not finite: read result.applied of what it returns",
    "clip_grad_norm_ clip_grad_value_": "write amp.step(max_norm=...) or amp.step(clip_value=...)",
    "master_params state_dict load_state_dict": "ask what mezzo.prepare returns: amp.optimizers, amp.state_dict()",
    "half_function float_function promote_function disable_casts register_half_function register_float_function": "write a rule of the policy: 'op:softmax=fp32', 'module:head=fp32'",
    "set_global_policy set_policy get_policy network_to_half convert_network prep_param_lists MixedPrecision MixedPrecisionPolicy mixed_precision half DTypePolicy cast_model to_low_precision Float16Module FP16Model tofp16 BN_convert_float": "write mezzo.prepare(model, optimizer, 'bf16')",
    "is_autocast_enabled get_autocast_dtype": "mezzo.autocast sets torch's own switch: ask torch.{name}('cpu')",
    "Accelerator": "write mezzo.integrations.accelerate.Accelerator",
    "Trainer": "write mezzo.integrations.transformers.Trainer",
    "MezzoPrecision Fabric Precision": "write mezzo.integrations.lightning.MezzoPrecision",
    "fp8_autocast fp8_model_init convert_to_float8_training DelayedScaling Float8CurrentScaling": "convert the layers by torchao, then write mezzo.prepare(model, optimizer, 'bf16')",
    "enable_operator_stats_collection collect_operator_stats": "write mezzo.diagnose.explain(model, batch)",
    "doctor detect_anomaly DebugUnderflowOverflow NanDetector check_numerics": "write `mezzo doctor script.py` in a shell, or mezzo.diagnose.trace(model)",
    "env predict demo": "write `mezzo {name}` in a shell",
}
_ELSEWHERE = {name: text.format(name=name) for names, text in _SENTENCES.items() for name in names.split()}
"""What to write for names that apex, torch, Lightning, Accelerate and Keras have, and for those of mezzo's own folders."""


if _TYPE_CHECKING:
    from . import amp as amp
    from . import cuda as cuda
    from . import diagnose as diagnose
    from . import distributed as distributed
    from . import integrations as integrations
    from . import optim as optim
    from .allocator import keep_memory as keep_memory
    from .casting import autocast as autocast
    from .casting import checkpoint_contexts as checkpoint_contexts
    from .casting import custom_bwd as custom_bwd
    from .casting import custom_fwd as custom_fwd
    from .diagnose import record as record
    from .diagnose import replay as replay
    from .integrations.monitor import monitor as monitor
    from .loss_scale import GradScaler as GradScaler
    from .policy import Policy as Policy
    from .policy import Rule as Rule
    from .policy import ScalingConfig as ScalingConfig
    from .step import CapturedStep as CapturedStep
    from .step import Stepper as Stepper
    from .step import StepResult as StepResult
    from .step import prepare as prepare
else:

    def _absent(module: str, name: str, known: tuple[str, ...]) -> Exception:
        """Return the error for a name that a module was asked for, by whoever called the one that calls this, and has not."""
        from .errors import did_you_mean

        # `from mezzo import name` puts words of its own in the place of an AttributeError
        kind = ImportError if _sys._getframe(2).f_code.co_name == "_handle_fromlist" else AttributeError
        if module == __name__ and name in _RENAMED:
            return kind(f"mezzo.{name} is now called mezzo.{_RENAMED[name]}")
        hint = f" Here: {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
        near = "" if hint or name.startswith("_") else did_you_mean(name, known)
        return kind(f"module {module!r} has no attribute {name!r}.{hint or near}")

    def __getattr__(name: str) -> object:
        """Import a name's folder when it is first asked for: `import mezzo` alone does not even import torch."""
        if name in _HOMES:
            globals()[name] = value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
            return value
        try:
            return _import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
        raise _absent(__name__, name, (*_HOMES, "optim", "diagnose", "distributed"))

    def __dir__() -> list[str]:
        """Return what is public, imported or not."""
        folders = ("amp", "cuda", "diagnose", "distributed", "errors", "integrations", "optim")
        return sorted({*(name for name in globals() if name.startswith("__")), *_HOMES, *folders})

"""Everything a trace could leave behind: modes, hooks, and where torch keeps them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

HOOKS = {
    "module forward pre": module_hooks._global_forward_pre_hooks,
    "module forward": module_hooks._global_forward_hooks,
    "module forward always": module_hooks._global_forward_hooks_always_called,
    "optimizer pre": optimizer_hooks._global_optimizer_pre_hooks,
    "optimizer post": optimizer_hooks._global_optimizer_post_hooks,
}


def installed(model: nn.Module) -> dict[str, int]:
    """Everything a trace could leave behind."""
    return {
        **{name: len(hooks) for name, hooks in HOOKS.items()},
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "parameter hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
        "module hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    }

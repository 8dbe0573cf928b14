"""Pairs of runs: some part at an op, the others differ by rounding alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo

Pair = tuple[Any, Any, Any]


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, *, fused: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fused, self.scale = heads, fused, scale

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            scores = q @ k.transpose(-1, -2) * (self.scale or q.shape[-1] ** -0.5)
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int = 16, *, fused: bool = True, eps: float = 1e-5, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps), Attention(width, fused=fused)
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(width, eps),
            nn.Linear(width, 32),
            nn.GELU(),
            nn.Linear(32, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(self.act(self.up(self.norm2(x)))))


class LM(nn.Module):
    def __init__(self, depth: int = 2, *, tied: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(Block(**options) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def lm(**options: Any) -> LM:
    torch.manual_seed(1)
    return LM(**options)


def same_weights(a: nn.Module, b: nn.Module) -> nn.Module:
    b.load_state_dict(a.state_dict())
    return b.train(a.training)


IDS = torch.arange(24).reshape(2, 12) % 40
X = torch.linspace(-2, 3, 2 * 6 * 16).reshape(2, 6, 16).sin()


def bad_backend(change: Callable[[torch.fx.Node], None]) -> Callable[..., Any]:
    """A compiler that gets one op wrong."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            change(node)
        graph.recompile()
        return graph.forward

    return backend


def tanh_gelu(node: torch.fx.Node) -> None:
    if getattr(node.target, "__name__", "") == "gelu":
        node.kwargs = {**node.kwargs, "approximate": "tanh"}


def forgotten_eps(node: torch.fx.Node) -> None:
    if getattr(node.target, "__name__", "") == "layer_norm":
        node.args = (*node.args[:-1], 0.05) if isinstance(node.args[-1], float) else node.args


# --- pairs that part -------------------------------------------------------------------------------------------------


def wrong_gelu_when_compiled() -> Pair:
    model = lm().eval()
    return model, torch.compile(model, backend=bad_backend(tanh_gelu)), IDS


def wrong_norm_when_compiled() -> Pair:
    model = lm().eval()
    return model, torch.compile(model, backend=bad_backend(forgotten_eps)), IDS


def exported_in_another_mode() -> Pair:
    model = lm(depth=1, dropout=0.5).eval()
    exported = torch.export.export(model, (IDS,)).module()
    return copy.deepcopy(model).train(), exported, IDS


def edited_after_export() -> Pair:
    model = lm(depth=1).eval()
    exported = torch.export.export(model, (IDS,))
    for node in exported.graph_module.graph.nodes:
        if "gelu" in str(node.target):
            node.kwargs = {"approximate": "tanh"}
    exported.graph_module.recompile()
    return model, exported, IDS


def one_policy_overflows() -> Pair:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.layer_norm((300 * self.up(x)).square(), (16,)))

    torch.manual_seed(0)
    model = Squares()
    low = copy.deepcopy(model)
    mezzo.prepare(low, None, "fp16")
    return model, low, X


def two_checkpoints() -> Pair:
    a = lm().eval()
    b = same_weights(a, lm()).eval()
    with torch.no_grad():
        b.layers[1].up.weight[3, 2] += 0.25
    return a, b, IDS


def rollout_divides_by_a_temperature() -> Pair:
    model = lm().eval()
    return model, lambda ids: model(ids) / 0.7, IDS


def rollout_rounds_its_weights() -> Pair:
    """Weights that went through bf16 on the way to the engine, and are fp32 there again."""
    model = lm().eval()
    engine = same_weights(model, lm()).eval()
    with torch.no_grad():
        engine.layers[0].norm1.weight.mul_(1.003)
        for p in engine.layers[0].attention.parameters():
            p.copy_(p.bfloat16())
    return model, engine, IDS


def attention_scaled_twice() -> Pair:
    a = Attention().eval()
    return a, same_weights(a, Attention(scale=0.25)), X


def unfused_attention_scaled_otherwise() -> Pair:
    a = Attention(fused=False).eval()
    return a, same_weights(a, Attention(fused=False, scale=0.25)), X


def dropout_left_on() -> Pair:
    a = lm().eval()
    return a, copy.deepcopy(a).train(), IDS


def another_eps() -> Pair:
    a = lm().eval()
    return a, same_weights(a, lm(eps=1e-2)).eval(), IDS


def tied_weight_lost() -> Pair:
    a = lm().eval()
    b = LM(tied=False).eval()
    b.load_state_dict({**a.state_dict(), "head.weight": b.head.weight})
    return a, b, IDS


def activation_left_out() -> Pair:
    class Plain(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.down(self.up(self.norm2(x)))

    torch.manual_seed(0)
    a = Block(dropout=0.0)
    return a, same_weights(a, Plain(dropout=0.0)), X


def routed_by_rounding() -> Pair:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = x[..., :2].to(self.dtype)
            return x * (1.0 + scores.argmax(-1, keepdim=True))

        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

    x = torch.tensor([[1.0, 1.001, 2.0], [3.0, 1.0, 5.0]])
    return Router(torch.float32), Router(torch.bfloat16), x


PART: list[tuple[Callable[[], Pair], str, str, str]] = [
    (wrong_gelu_when_compiled, "kernel", "gelu", "layers.0.act"),
    (wrong_norm_when_compiled, "kernel", "layer_norm", "layers.0.norm1"),
    (exported_in_another_mode, "random", "dropout", "layers.0.dropout"),
    (edited_after_export, "arguments", "gelu", "layers.0.act"),
    (one_policy_overflows, "overflow", "square", ""),
    (two_checkpoints, "weights", "linear", "layers.1.up"),
    (rollout_divides_by_a_temperature, "missing op", "div", ""),
    (rollout_rounds_its_weights, "weights", "layer_norm", "layers.0.norm1"),
    (attention_scaled_twice, "arguments", "scaled_dot_product_attention", ""),
    (unfused_attention_scaled_otherwise, "arguments", "mul", ""),
    (dropout_left_on, "random", "dropout", "layers.0.dropout"),
    (another_eps, "arguments", "layer_norm", "layers.0.norm1"),
    (tied_weight_lost, "weights", "linear", "head"),
    (activation_left_out, "missing op", "gelu", "act"),
    (routed_by_rounding, "decision", "argmax", ""),
]


# --- pairs that agree ------------------------------------------------------------------------------------------------


def prepared(model: nn.Module, policy: str) -> nn.Module:
    mezzo.prepare(low := copy.deepcopy(model), None, policy)
    return low


def in_bf16(model: nn.Module) -> Callable[[Tensor], Tensor]:
    low = copy.deepcopy(model).bfloat16()
    return lambda x: low(x.bfloat16())


def reordered(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unfused(cls: type = Block) -> Pair:
    torch.manual_seed(0)
    a = cls(dropout=0.0)
    return a, same_weights(a, cls(fused=False, dropout=0.0)), X


def conv(channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    return net.to(memory_format=torch.channels_last) if channels_last else net


IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin()
PADDED = torch.arange(16) > 9
NET = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def manual_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def manual_cross_entropy(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits[..., 0]


def one_thread(x: Tensor) -> Tensor:
    return torch.stack([NET(row) for row in x])


def split_products(x: Tensor) -> Tensor:
    first = NET[0]
    halves = first.weight.chunk(2, 1)
    return x[..., :8] @ halves[0].T + x[..., 8:] @ halves[1].T + first.bias


EQUAL: dict[str, Callable[[], Pair]] = {
    "itself": lambda: (NET, NET, X),
    "itself, training with dropout": lambda: ((m := lm(dropout=0.3)), copy.deepcopy(m), IDS),
    "bf16": lambda: (NET, prepared(NET, "bf16"), X),
    "fp16": lambda: (NET, prepared(NET, "fp16"), X),
    "bf16 and fp16": lambda: (prepared(NET, "bf16"), prepared(NET, "fp16"), X),
    "bf16 masters": lambda: ((m := lm().eval()), prepared(m, "bf16-master"), IDS),
    "language model in bf16": lambda: ((m := lm().eval()), prepared(m, "bf16"), IDS),
    "weights in bf16": lambda: (NET, in_bf16(NET), X),
    "unfused attention": lambda: unfused(),
    "torch.autocast": lambda: (NET, torch.autocast("cpu", dtype=torch.bfloat16)(lambda x: NET(x)), X),
    "memory format": lambda: ((c := conv(False).eval()), same_weights(c, conv(True)), IMAGES),
    "layout of the input": lambda: (NET, lambda x: NET(reordered(x)), X),
    "norm by hand": lambda: (lambda x: F.layer_norm(x, (16,)), manual_norm, X),
    "cross entropy by hand": lambda: (
        lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(12, dtype=torch.long), reduction="none").view(2, 6),
        manual_cross_entropy,
        X,
    ),
    "row by row": lambda: (NET, one_thread, X),
    "split products": lambda: (NET[0], split_products, X),
    "gelu by hand": lambda: (F.gelu, lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), X),
    "compiled by a faithful backend": lambda: ((m := lm().eval()), torch.compile(m, backend="eager"), IDS),
    "exported": lambda: ((m := lm(depth=1).eval()), torch.export.export(m, (IDS,)), IDS),
    "checkpoint loaded": lambda: ((m := lm().eval()), same_weights(m, lm()), IDS),
    "softmax by hand": lambda: (lambda x: x.softmax(-1), lambda x: x.exp() / x.exp().sum(-1, keepdim=True), X),
    "other masks": lambda: (
        lambda x: x.masked_fill(PADDED, -math.inf).softmax(-1),
        lambda x: x.masked_fill(PADDED, torch.finfo(x.dtype).min).softmax(-1),
        X,
    ),
}

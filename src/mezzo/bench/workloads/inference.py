"""Forwards with fp32 weights under a region, by batch size: at small batches reading and casting weights is all there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..roofline import Phase, bytes_stored
from ..training import forward, mean_square, repeated
from ..variant import Variant
from ..workload import REGION_TESTS, Point, Session, Setting, Workload, check_known
from .bert import HEAD_WIDTH, IMPORTS, BertLogits, BertSize, random_tokens

MODELS = ("decoder", "bert")
DECODER_HEAD = 128
WARM_UP_FORWARDS = 2
"""Kernels are chosen and casts kept in the first; the second finds them."""
DRAWN = 1_000_003
"""So many numbers are drawn for a weight and then repeated: drawing 200 million would take longer than a round."""


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer: causal self-attention of heads of 128, then a gated feed-forward part, as Llama has them."""

    def __init__(self, width: int, forward_width: int) -> None:
        super().__init__()
        self.heads = width // DECODER_HEAD
        self.attention_norm, self.forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, forward_width, bias=False)
        self.up = nn.Linear(width, forward_width, bias=False)
        self.down = nn.Linear(forward_width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the layer's output, shape [batch, tokens, width]. Syncs: no."""
        split = self.qkv(self.attention_norm(x_BTD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in split.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(attended)
        h = self.forward_norm(x_BTD)
        result: Tensor = x_BTD + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


@torch.no_grad()
def draw_weights_(model: nn.Module) -> None:
    """Draw matrices as torch's linear layers do, the same numbers again and again; vectors are ones.

    Writes: the parameters, and torch's random state. Syncs: no.
    """
    for p in model.parameters():
        flat, bound = p.view(-1), p.shape[-1] ** -0.5
        if p.ndim < 2:
            p.fill_(1.0)
            continue
        done = flat[:DRAWN].uniform_(-bound, bound).numel()
        while done < flat.numel():
            part = flat[done : 2 * done]
            part.copy_(flat[: part.numel()])
            done += part.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference(Workload):
    """Forwards of a decoder layer or BERT with fp32 weights, by batch size.

    Attributes:
        models: decoder, bert, or both.
        batches: sequences in a batch, one point each.
        decoder_width: features of the decoder layer; its feed-forward part is 2.75 times as wide.
        decoder_tokens: tokens in a sequence of the decoder; 1 is a step of generation.
        bert_layers: encoder layers of BERT.
        bert_width: features of BERT, a multiple of 64.
        bert_tokens: tokens in a sequence of BERT.
        forwards: forwards in a round.
    """

    unit: ClassVar[str] = "forward"
    imports: ClassVar[tuple[str, ...]] = IMPORTS
    tests: ClassVar[tuple[str, ...]] = (*REGION_TESTS, "tests/binding/test_bind.py")
    on_cpu: ClassVar = {"batches": (1, 8, 64), "bert_layers": 4, "bert_tokens": 32, "forwards": 2}
    when_quick: ClassVar = {
        "batches": (1, 3), "decoder_width": 256, "decoder_tokens": 5, "bert_layers": 2, "bert_width": 64, "bert_tokens": 7,
        "forwards": 1,
    }  # fmt: skip
    multiples: ClassVar = {"decoder_width": DECODER_HEAD, "bert_width": HEAD_WIDTH}

    models: tuple[str, ...] = MODELS
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    decoder_width: int = 4096
    decoder_tokens: int = 1
    bert_layers: int = 12
    bert_width: int = 768
    bert_tokens: int = 128
    forwards: int = 50

    variants: ClassVar = (
        "fp32", "tf32", "torch-autocast", "mezzo-autocast", "mezzo-persistent", "prepare", "prepare-master", "torch-16bit",
    )  # fmt: skip

    def check(self) -> None:
        """Refuse models that do not exist, and widths that do not divide into heads."""
        Workload.check(self)
        check_known("--models", self.models, MODELS)

    def points(self) -> tuple[Point, ...]:
        """Return each model at each batch size."""
        return tuple(
            self.at(f"{model}, batch {n}", f"batch of {model}", n, models=(model,), batches=(n,))
            for model in self.models
            for n in self.batches
        )

    @property
    def bert(self) -> BertSize:
        """BERT's numbers."""
        return BertSize(layers=self.bert_layers, width=self.bert_width, heads=self.bert_width // HEAD_WIDTH)

    @property
    def forward_width(self) -> int:
        """Features of the decoder's feed-forward part."""
        return self.decoder_width * 11 // 4

    def why_not(self, variant: Variant) -> str:
        """Return why a variant has no forward to time alone, or nothing if it has."""
        return variant.why_no_inference

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return seeded forwards of one model at one batch size. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        model: nn.Module
        inputs: tuple[Tensor, ...]
        if self.models == ("bert",):
            model = BertLogits(self.bert).to(setting.device)
            inputs = random_tokens(self.bert, self.batches[0], self.bert_tokens, setting.device)
        else:
            with torch.device("meta"):
                model = DecoderLayer(self.decoder_width, self.forward_width)
            draw_weights_(model.to_empty(device=setting.device))
            shape = (self.batches[0], self.decoder_tokens, self.decoder_width)
            inputs = (torch.randn(shape, device=setting.device),)
        call = forward(variant, setting, model, cache="persistent")
        return repeated(
            lambda _: call(*inputs), self.forwards, loss=mean_square, warm_up=WARM_UP_FORWARDS, batches=[inputs]
        )

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return one forward: every product, every weight read once in the format."""
        width = bytes_stored(number_format)
        if self.models == ("bert",):
            return (self.bert.forward_phase(self.batches[0], self.bert_tokens, width),)
        weights = 4 * self.decoder_width**2 + 3 * self.decoder_width * self.forward_width
        tokens = self.decoder_tokens
        attention = 4.0 * self.batches[0] * tokens * tokens * self.decoder_width
        flops = 2.0 * self.batches[0] * tokens * weights + attention
        return (Phase(name="forward", flops=flops, moved_bytes=float(width * weights)),)

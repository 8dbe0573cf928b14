"""Training steps of the models people train, small: one batch of random data, AdamW, no clipping."""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..roofline import Phase, adamw_phase, bytes_stored, count_flops
from ..training import Training, training_session
from ..variant import Variant
from ..workload import Session, Setting, Workload, check_multiple
from .bert import HEAD_WIDTH, IMPORTS, BertLogits, BertSize, Text

RIVALS = ("torch-autocast", "torch-amp", "accelerate", "fabric", "flashoptim", "torchao")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSteps(Workload):
    """Training steps of one model: a subclass says which model, and on what.

    Attributes:
        batch_size: examples in the batch.
        steps: steps in a round.
        lr: learning rate of AdamW.
    """

    batch_size: int = 8
    steps: int = 8
    lr: float = 1e-4

    variants: ClassVar[tuple[str, ...]] = ("prepare+capture", "prepare-master+capture")
    variants_kept: ClassVar[tuple[str, ...]] = (*RIVALS, "prepare", "prepare-master")

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Return the model in fp32, its weights drawn from torch's random state."""

    @abstractmethod
    def make_batch(self) -> Batch:
        """Return inputs and targets, drawn from torch's random state."""

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return what the model says of the inputs: the classes are the last dimension. Syncs: no."""
        output: Any = model(inputs)
        found: Tensor = output if isinstance(output, Tensor) else output.logits
        return found

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross entropy of a batch, shape (). Syncs: no."""
        inputs, targets = batch
        return F.cross_entropy(self.logits(model, inputs).float().flatten(0, -2), targets.flatten())

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded training of one variant. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        model = self.make_model().to(setting.device)
        inputs, targets = self.make_batch()
        batch = (inputs.to(setting.device), targets.to(setting.device))
        training = Training(optimizer=self.optimizer, lr=self.lr, weight_decay=0.01)
        return training_session(variant, setting, model, [batch], self.loss, training, self.steps)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return forward, backward and update of one step: products as torch counts them, every weight moved once."""
        width = bytes_stored(number_format)
        count, forward, backward = _counted(self)
        return (
            Phase(name="forward", flops=forward, moved_bytes=width * count),
            Phase(name="backward", flops=backward, moved_bytes=2 * width * count),
            adamw_phase(number_format, count),
        )


@functools.cache
def _counted(workload: ModelSteps) -> tuple[float, float, float]:
    """Return parameters, and operations of the products in forward and backward; nothing is computed."""
    with torch.device("meta"):
        model, batch = workload.make_model(), workload.make_batch()
    forward, backward = count_flops(lambda: workload.loss(model, batch))
    return float(sum(p.numel() for p in model.parameters())), forward, backward


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSteps(ModelSteps):
    """Training steps of a model of tokens.

    Attributes:
        layers: how many.
        width: features, a multiple of 64.
        tokens: in a sequence.
        vocabulary: different tokens.
    """

    when_quick: ClassVar = {"layers": 2, "width": 64, "batch_size": 2, "tokens": 8, "vocabulary": 50, "steps": 1}
    multiples: ClassVar = {"width": HEAD_WIDTH}
    label_format: ClassVar = Text.label_format

    layers: int = 6
    width: int = 512
    tokens: int = 128
    vocabulary: int = 8192

    def make_batch(self) -> Batch:
        """Return token numbers and the tokens that follow, int64 [batch, tokens] both."""
        ids = torch.randint(self.vocabulary, (self.batch_size, self.tokens + 1))
        return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt2(TokenSteps):
    """Training steps of a small GPT-2."""

    imports: ClassVar[tuple[str, ...]] = ("transformers.models.gpt2.modeling_gpt2",)
    on_cuda: ClassVar = {"layers": 12, "width": 768, "tokens": 1024, "vocabulary": 50257, "steps": 20}

    def make_model(self) -> nn.Module:
        """Return a GPT-2 of the transformers library without dropout."""
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=self.vocabulary, n_positions=self.tokens, n_embd=self.width, n_layer=self.layers,
                n_head=self.width // HEAD_WIDTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama(TokenSteps):
    """Training steps of a small Llama with grouped key and value heads."""

    imports: ClassVar[tuple[str, ...]] = ("transformers.models.llama.modeling_llama",)
    on_cuda: ClassVar = {"layers": 16, "width": 1024, "tokens": 1024, "vocabulary": 32000, "steps": 20}

    def make_model(self) -> nn.Module:
        """Return a Llama of the transformers library: two heads share a key and a value where their number is even."""
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = self.width // HEAD_WIDTH
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.width * 11 // 4,
                num_hidden_layers=self.layers, num_attention_heads=heads,
                num_key_value_heads=heads // 2 if heads % 2 == 0 else heads, use_cache=False,
                max_position_embeddings=self.tokens,
            )
        )  # fmt: skip


class _LstmModel(nn.Module):
    def __init__(self, size: Lstm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.lstm = nn.LSTM(size.width, size.width, size.layers, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(ids))[0])
        return logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Lstm(TokenSteps):
    """Training steps of a language model of LSTM layers."""

    on_cuda: ClassVar = {"width": 1024, "batch_size": 64, "tokens": 256, "steps": 20}

    layers: int = 2
    batch_size: int = 32
    tokens: int = 32
    vocabulary: int = 1024

    def make_model(self) -> nn.Module:
        """Return embedding, LSTM layers and a linear layer to the vocabulary."""
        return _LstmModel(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BertSteps(TokenSteps):
    """Training steps of a small BERT classifier."""

    imports: ClassVar[tuple[str, ...]] = IMPORTS
    on_cuda: ClassVar = {"layers": 12, "width": 768, "tokens": 512, "steps": 20}

    layers: int = 4
    width: int = 256
    batch_size: int = 32

    def make_model(self) -> nn.Module:
        """Return a BERT of the transformers library without dropout."""
        return BertLogits(
            BertSize(layers=self.layers, width=self.width, heads=self.width // HEAD_WIDTH, vocabulary=self.vocabulary)
        )

    def make_batch(self) -> Batch:
        """Return token numbers, int64 [batch, tokens], and labels, int64 [batch]."""
        return torch.randint(self.vocabulary, (self.batch_size, self.tokens)), torch.randint(2, (self.batch_size,))


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSteps(ModelSteps):
    """Training steps of a classifier of pictures.

    Attributes:
        pixels: height and width of a picture.
        labels: classes.
    """

    pixels: int = 32
    labels: int = 100

    def make_batch(self) -> Batch:
        """Return pictures, fp32 [batch, 3, pixels, pixels], and labels, int64 [batch]."""
        pictures = torch.randn(self.batch_size, 3, self.pixels, self.pixels)
        return pictures, torch.randint(self.labels, (self.batch_size,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vit(PictureSteps):
    """Training steps of a small vision transformer.

    Attributes:
        layers: how many.
        width: features, a multiple of 64.
        patch: height and width of a patch; they divide the picture.
    """

    imports: ClassVar[tuple[str, ...]] = ("transformers.models.vit.modeling_vit",)
    on_cuda: ClassVar = {"layers": 12, "width": 768, "batch_size": 64, "pixels": 224, "labels": 1000, "steps": 20}
    when_quick: ClassVar = {"layers": 2, "width": 64, "batch_size": 2, "pixels": 32, "steps": 1}
    multiples: ClassVar = {"width": HEAD_WIDTH}

    layers: int = 6
    width: int = 384
    batch_size: int = 16
    pixels: int = 192
    patch: int = 16

    @property
    def label(self) -> str:
        """Layers, width, batch and patches."""
        return f"{self.layers} x {self.width}, batch {self.batch_size} x {(self.pixels // self.patch) ** 2} patches"

    def check(self) -> None:
        """Refuse widths that do not divide into heads, and pictures that do not divide into patches."""
        Workload.check(self)
        check_multiple("--pixels", self.pixels, self.patch, f"--patch {self.patch}")

    def make_model(self) -> nn.Module:
        """Return a vision transformer of the transformers library without dropout."""
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=self.width, num_hidden_layers=self.layers, num_attention_heads=self.width // HEAD_WIDTH,
            intermediate_size=4 * self.width, image_size=self.pixels, patch_size=self.patch,
        )  # fmt: skip
        config.num_labels = self.labels
        return ViTForImageClassification(config)


class _Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norms around which the input goes, by a 1 x 1 one where shapes differ."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *_convolution(inside, outside, 3, stride), nn.ReLU(), *_convolution(outside, outside, 3, 1)
        )
        is_same = inside == outside and stride == 1
        self.around = nn.Identity() if is_same else nn.Sequential(*_convolution(inside, outside, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.around(x))


def _convolution(inside: int, outside: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resnet(PictureSteps):
    """Training steps of a ResNet-18 on small pictures.

    Attributes:
        width: channels of the first stage; each of the three that follow has twice those before it.

    Source: He et al. 2016, table 1, with the 3 x 3 first convolution of its section 4.2 for pictures of 32 pixels.
    """

    on_cuda: ClassVar = {"batch_size": 512, "steps": 20}
    when_quick: ClassVar = {"width": 8, "batch_size": 2, "pixels": 16, "steps": 1}
    label_format: ClassVar = "18 x {width}, batch {batch_size} x {pixels} x {pixels}"

    batch_size: int = 32
    width: int = 64

    def make_model(self) -> nn.Module:
        """Return four stages of two residual blocks between a convolution and a linear layer."""
        widths = [self.width * 2**stage for stage in range(4)]
        blocks = [
            _Residual(widths[max(0, stage - (block == 0))], width, 2 if stage and block == 0 else 1)
            for stage, width in enumerate(widths)
            for block in range(2)
        ]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], self.labels))
        return nn.Sequential(*_convolution(3, self.width, 3, 1), nn.ReLU(), *blocks, *head)

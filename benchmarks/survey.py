"""Three dozen small models that the suite does not time, from recurrent to diffusion: a prepared step beside torch.autocast's.

Run: `python benchmarks/survey.py [--models gru,unet] [--seconds 8] [--threads 2]`; `--list` names the models.

Each model has a process of its own, in which the ways take turns, a step each, the C library keeping memory: torch.autocast in bf16 without
a scaler, and `mezzo.prepare` under `bf16` and `bf16-master`, all with torch's fused AdamW. It prints a line a model: milliseconds of
torch.autocast, and how many times as fast the others are, by the first third of each one's steps. Random weights and data: what is timed
is the shape of a model, such as a transformer of four layers, a mixture of experts, convolutions of one, two and three dimensions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module], Tensor]
POLICIES = ("bf16", "bf16-master")
SMALL = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 4}
LAYERS = {"num_hidden_layers": 4, "intermediate_size": 1024}
GATED = {"num_hidden_layers": 4, "intermediate_size": 704}


def tokens(batch: int, length: int, vocabulary: int = 1000) -> Tensor:
    """Return random token ids."""
    return torch.randint(1, vocabulary, (batch, length))


def labels(batch: int, classes: int = 2) -> Tensor:
    """Return random classes."""
    return torch.randint(0, classes, (batch,))


def pictures(batch: int, size: int = 64) -> Mapping[str, Tensor]:
    """Return a batch of what classifiers of pictures are given."""
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": labels(batch)}


def text(batch: int, length: int, classes: int | None = None) -> Mapping[str, Tensor]:
    """Return a batch of token ids with themselves as labels, or with a class each."""
    ids = tokens(batch, length)
    return {"input_ids": ids, "labels": ids if classes is None else labels(batch, classes)}


def padded() -> Mapping[str, Tensor]:
    """Return a batch of token ids of which every second ends early."""
    mask = torch.ones(16, 64, dtype=torch.long)
    mask[::2, 40:] = 0
    return {**text(16, 64, 2), "attention_mask": mask}


def speech() -> Mapping[str, Tensor]:
    """Return spectrograms and what was said."""
    return {"input_features": torch.randn(4, 80, 200), "labels": tokens(4, 32)}


WHISPER = {
    "vocab_size": 1000, "d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "max_source_positions": 100,
    "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
CLIP_PART = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4}
LIBRARY: dict[str, tuple[str, str, dict[str, Any], Callable[[], Mapping[str, Any]]]] = {
    "bert padded": ("BertConfig", "BertForSequenceClassification", {**SMALL, **LAYERS}, padded),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 1000, "hidden_size": 256, "n_layer": 4, "n_head": 4}, lambda: text(8, 64)),
    "clip": ("CLIPConfig", "CLIPModel", {
        "text_config": {**CLIP_PART, "vocab_size": 1000, "max_position_embeddings": 32},
        "vision_config": {**CLIP_PART, "image_size": 64, "patch_size": 8}, "projection_dim": 128,
    }, lambda: {"input_ids": tokens(16, 24), "pixel_values": torch.randn(16, 3, 64, 64), "return_loss": True}),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 4, 2]}, lambda: pictures(8)),
    "distilbert": ("DistilBertConfig", "DistilBertForSequenceClassification", {
        "vocab_size": 1000, "dim": 256, "n_layers": 4, "n_heads": 4, "hidden_dim": 1024}, lambda: text(16, 64, 2)),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**SMALL, **GATED, "num_key_value_heads": 1, "head_dim": 64}, lambda: text(4, 128)),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 3}, lambda: text(4, 64)),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {
        **SMALL, "num_hidden_layers": 3, "intermediate_size": 512, "num_key_value_heads": 2, "num_local_experts": 4}, lambda: text(4, 64)),
    "mobilenet": ("MobileNetV2Config", "MobileNetV2ForImageClassification", {"image_size": 64}, lambda: pictures(8)),
    "opt, one text": ("OPTConfig", "OPTForCausalLM", {
        **SMALL, "num_hidden_layers": 4, "ffn_dim": 1024, "word_embed_proj_dim": 256}, lambda: text(1, 64)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**SMALL, **GATED, "num_key_value_heads": 2}, lambda: text(8, 128)),
    "resnet50": ("ResNetConfig", "ResNetForImageClassification", {
        "hidden_sizes": [128, 256, 512, 1024], "depths": [2, 2, 2, 2]}, lambda: pictures(8)),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**SMALL, **LAYERS}, lambda: text(8, 128)),
    "swin": ("SwinConfig", "SwinForImageClassification", {
        "image_size": 64, "patch_size": 2, "embed_dim": 48, "depths": [2, 2, 2], "num_heads": [2, 4, 8], "window_size": 4}, lambda: pictures(8)),
    "t5": ("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": 1000, "d_model": 256, "d_ff": 1024, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
        lambda: {"input_ids": tokens(8, 64), "labels": tokens(8, 32)}),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", {
        **CLIP_PART, "conv_dim": (128,) * 7, "num_conv_pos_embeddings": 32}, lambda: {"input_values": torch.randn(4, 8000), "labels": labels(4)}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER, speech),
}  # fmt: skip
"""Models of transformers: configuration, class, what is configured, and a batch."""


class Recurrent(nn.Module):
    """Token ids through recurrent layers, each place to a word, or the last to a class."""

    def __init__(self, layers: nn.RNNBase, classes: int, *, each: bool) -> None:
        super().__init__()
        width = layers.hidden_size * (1 + layers.bidirectional)
        self.embed, self.layers = nn.Embedding(1000, layers.input_size), layers
        self.head, self.each = nn.Linear(width, classes), each

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        out = self.layers(self.embed(x))[0]
        return self.head(out.flatten(0, 1) if self.each else out[:, -1])  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer of a transformer with its attention written in its own forward, as many are."""

    def __init__(self, is_formula: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.is_formula = nn.Linear(256, 768), nn.Linear(256, 256), is_formula
        self.norm, self.norm2 = nn.LayerNorm(256), nn.LayerNorm(256)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what is added to it."""
        q, k, v = [one.unflatten(-1, (4, 64)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)]
        if self.is_formula:
            mixed = (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Convolutions down and up again, with what was there on the way down."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32), (32, 64), (64, 128), (128, 64), (64, 32)]
        self.blocks = nn.ModuleList(nn.Sequential(*convolved(i, o), *convolved(o, o)) for i, o in sizes)
        self.up, self.up2 = nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.head = nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each pixel."""
        first = self.blocks[0](x)
        second = self.blocks[1](F.max_pool2d(first, 2))
        third = self.blocks[2](F.max_pool2d(second, 2))
        fourth = self.blocks[3](torch.cat([self.up(third), second], 1))
        return self.head(self.blocks[4](torch.cat([self.up2(fourth), first], 1)))  # type: ignore[no-any-return]


def convolved(inside: int, outside: int) -> list[nn.Module]:
    """Return a convolution, its norm and its activation."""
    return [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]


class Denoiser(nn.Module):
    """Residual convolutions with group norms, moved by a time, as of diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, 64) for _ in range(8))
        self.convolutions = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(8))
        self.times = nn.ModuleList(nn.Linear(128, 64) for _ in range(4))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the noise."""
        x = self.first(x)
        for index, moved in enumerate(self.times):
            hidden = self.convolutions[2 * index](F.silu(self.norms[2 * index](x))) + moved(time)[..., None, None]
            x = x + self.convolutions[2 * index + 1](F.silu(self.norms[2 * index + 1](hidden)))
        return self.last(x)  # type: ignore[no-any-return]


class Recommender(nn.Module):
    """Bags of ids and numbers to a click."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10000, 32, mode="sum") for _ in range(8))
        self.mlp = nn.Sequential(nn.Linear(269, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Return scores."""
        return self.mlp(torch.cat([numbers, *[bag(one) for bag, one in zip(self.bags, ids, strict=True)]], 1))  # type: ignore[no-any-return]


def mlp(*widths: int, norm: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    """Return linear layers with ReLU, and norms, between them."""
    parts: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths[:-1]):
        parts += [nn.Linear(inside, outside), *([norm(outside)] if norm else []), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(*widths[-2:]))


def flat(*parts: nn.Module) -> nn.Sequential:
    """Return parts, the mean of each channel, and ten scores."""
    pools: Mapping[int, nn.Module] = {
        1: nn.AdaptiveAvgPool1d(1),
        2: nn.AdaptiveAvgPool2d(1),
        3: nn.AdaptiveAvgPool3d(1),
    }
    last: Any = [one for one in parts if hasattr(one, "out_channels")][-1]
    return nn.Sequential(*parts, pools[last.weight.dim() - 2], nn.Flatten(), nn.Linear(last.out_channels, 10))


OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "attention by formula": (lambda: nn.Sequential(*[Block(is_formula=True) for _ in range(4)]), lambda: (torch.randn(8, 96, 256),)),
    "attention in blocks": (lambda: nn.Sequential(*[Block() for _ in range(4)]), lambda: (torch.randn(8, 128, 256),)),
    "convolutions 1d": (lambda: flat(
        nn.Conv1d(1, 64, 9, 4), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 9, 4), nn.BatchNorm1d(128), nn.ReLU(), nn.Conv1d(128, 256, 9, 4)),
        lambda: (torch.randn(16, 1, 4000),)),
    "convolutions 3d": (lambda: flat(
        nn.Conv3d(1, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1), nn.ReLU()),
        lambda: (torch.randn(4, 1, 16, 32, 32),)),
    "convolutions, channels last": (lambda: flat(*convolved(3, 64), *convolved(64, 64), nn.MaxPool2d(2), *convolved(64, 128)).to(
        memory_format=torch.channels_last), lambda: (torch.randn(16, 3, 32, 32).to(memory_format=torch.channels_last),)),
    "diffusion": (Denoiser, lambda: (torch.randn(8, 3, 32, 32), torch.randn(8, 128))),
    "discriminator": (lambda: flat(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.LeakyReLU(0.2), nn.Conv2d(128, 256, 4, 2, 1)),
        lambda: (torch.randn(32, 3, 32, 32),)),
    "encoder of torch": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4), lambda: (torch.randn(16, 64, 256),)),
    "gru": (lambda: Recurrent(nn.GRU(256, 256, 2, batch_first=True), 1000, each=True), lambda: (tokens(32, 32),)),
    "lenet": (lambda: flat(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()), lambda: (torch.randn(64, 1, 28, 28),)),
    "lstm, two ways": (lambda: Recurrent(nn.LSTM(128, 128, 2, batch_first=True, bidirectional=True), 5, each=False), lambda: (tokens(16, 50),)),
    "mlp": (lambda: mlp(30, 64, 64, 2), lambda: (torch.randn(512, 30),)),
    "mlp of 9 layers, layer norm": (lambda: mlp(*[256] * 9, 10, norm=nn.LayerNorm), lambda: (torch.randn(128, 256),)),
    "mlp, batch norm": (lambda: mlp(64, 256, 256, 10, norm=nn.BatchNorm1d), lambda: (torch.randn(256, 64),)),
    "mlp, 8192 rows": (lambda: mlp(512, 1024, 512, 10), lambda: (torch.randn(8192, 512),)),
    "radiance field": (lambda: mlp(3, *[256] * 5, 4), lambda: (torch.rand(4096, 3),)),
    "recommender": (Recommender, lambda: (torch.randn(256, 13), torch.randint(0, 10000, (8, 256, 4)))),
    "transformer of torch": (lambda: nn.Transformer(256, 4, 2, 2, 1024, batch_first=True), lambda: (torch.randn(8, 48, 256), torch.randn(8, 32, 256))),
    "unet": (UNet, lambda: (torch.randn(4, 3, 64, 64),)),
}  # fmt: skip
"""Models of torch's modules, and their inputs."""


def build(name: str) -> tuple[nn.Module, Loss]:
    """Return a model, the same each time, and what gives its loss."""
    torch.manual_seed(0)
    if name in OWN:
        make, inputs = OWN[name]
        model, given = make(), inputs()
        return model.train(), lambda model: model(*given).float().logsumexp(-1).mean()
    import transformers  # type: ignore[import-untyped]

    config, kind, options, batch = LIBRARY[name]
    model, named = getattr(transformers, kind)(getattr(transformers, config)(**options)), batch()
    return model.train(), lambda model: model(**named).loss


def steps(name: str) -> dict[str, Callable[[], None]]:
    """Return a training step each of torch.autocast and of every policy, on models of their own."""
    import mezzo

    def plain() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model)
        value.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()

    def prepared(policy: str) -> Callable[[], None]:
        model, loss = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        amp = mezzo.prepare(model, optimizer, policy)

        def step() -> None:
            optimizer.zero_grad()
            amp.backward(loss(model))
            amp.step()

        return step

    model, loss = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return {"torch.autocast": plain, **{policy: prepared(policy) for policy in POLICIES}}


def survey(name: str, seconds: float, threads: int) -> dict[str, float]:
    """Return milliseconds of a step each way, the first third of steps in turn."""
    import mezzo

    torch.set_num_threads(threads)
    mezzo.keep_memory()
    ways = steps(name)
    times: dict[str, list[float]] = {way: [] for way in ways}
    begun, rounds = time.perf_counter(), -4
    while rounds < 12 or time.perf_counter() - begun < seconds:
        for way in list(ways) if rounds % 2 else [*ways][::-1]:
            before = time.perf_counter()
            ways[way]()
            if rounds >= 0:
                times[way].append(time.perf_counter() - before)
        rounds += 1
    return {way: 1000 * sorted(taken)[len(taken) // 3] for way, taken in times.items()}


def main() -> int:
    """Run the script."""
    names = sorted({*LIBRARY, *OWN})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(names).replace(", ", "; "), help="names, with commas between them")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        print(*names, sep="\n")
        return 0
    if args.one:
        warnings.simplefilter("ignore")
        print(json.dumps(survey(args.one, args.seconds, args.threads)))
        return 0
    chosen = [name.replace("; ", ", ") for name in args.models.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no model is called {unknown[0]!r}; --list names them")
    print(
        f"torch {torch.__version__}, {args.threads} threads, {platform.processor() or platform.machine()}, memory kept"
    )
    print(f"{'model':28s}  torch.autocast  {'  '.join(f'{policy:>12s}' for policy in POLICIES)}")
    for name in chosen:
        command = [
            sys.executable,
            __file__,
            "--one",
            name,
            "--seconds",
            str(args.seconds),
            "--threads",
            str(args.threads),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:28s}  failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        base = found["torch.autocast"]
        print(
            f"{name:28s}  {base:11.2f} ms  {'  '.join(f'{base / found[policy]:11.2f}x' for policy in POLICIES)}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

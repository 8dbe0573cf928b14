"""Healthy programs, with the infinities that healthy programs hold: masks, guards, forbidden actions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, FP32, Run, functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Loss = Callable[[], Tensor]


def train(model: nn.Module, dtype: torch.dtype, loss_of: Loss, steps: int = 2) -> Run:
    """Training steps as the torch documentation has them: region, scaler for fp16, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is FP16, init_scale=1024.0)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                loss = loss_of()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            loss_of()

    return run


def transformer(dtype: torch.dtype) -> Run:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4))
    x, target = torch.randn(2, 6, 16), torch.randint(4, (2, 6))
    padded = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

    def loss() -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        hidden = torch.zeros(2, 6).masked_fill(padded, -math.inf)
        y = model[1](model[0](x, mask=mask, src_key_padding_mask=hidden))
        return F.cross_entropy(y.float().flatten(0, 1), target.flatten())

    return train(model, dtype, loss)


class Block(nn.Module):
    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(inside, out, 3, stride, 1), nn.BatchNorm2d(out)
        self.second, self.renorm = nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(inside, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(self.renorm(self.second(y)) + self.short(x))


def resnet(dtype: torch.dtype) -> Run:
    model = nn.Sequential(Block(3, 8), Block(8, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    x, target = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    return train(model, dtype, lambda: F.cross_entropy(model(x), target))


def unet(dtype: torch.dtype) -> Run:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.deep = Block(1, 4), Block(4, 8, 2)
            self.up, self.head = nn.ConvTranspose2d(8, 4, 2, 2), Block(8, 4)
            self.out = nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.down(x)
            b = self.up(self.deep(a))
            return self.out(self.head(torch.cat([a, b], 1)))

    model, x = UNet(), torch.randn(2, 1, 8, 8)
    target = (torch.rand(2, 1, 8, 8) > 0.5).float()

    def loss() -> Tensor:
        y = model(x).float()
        p = y.sigmoid()
        dice = 1 - 2 * (p * target).sum() / (p.sum() + target.sum() + 1e-6)
        return F.binary_cross_entropy_with_logits(y, target) + dice

    return train(model, dtype, loss)


def lstm(dtype: torch.dtype) -> Run:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn, self.head = nn.Embedding(10, 8), nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 4)

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.rnn(self.table(index))[0])

    model, index, target = Tagger(), torch.randint(10, (3, 7)), torch.randint(4, (3, 7))
    return train(model, dtype, lambda: F.cross_entropy(model(index).float().flatten(0, 1), target.flatten()))


def gru_on_packed_sequences(dtype: torch.dtype) -> Run:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 8, bidirectional=True), nn.Linear(16, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], padding_value=-math.inf)
            return self.head(y.amax(0).float())

    model, x, target = Reader(), torch.randn(5, 3, 8), torch.tensor([0, 1, 2])
    return train(model, dtype, lambda: F.cross_entropy(model(x, torch.tensor([5, 3, 2])), target))


def gan(dtype: torch.dtype) -> Run:
    maker = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, critic)]
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is FP16, init_scale=256.0)
    real = torch.randn(6, 8)

    def run() -> None:
        for _ in range(2):
            for optimizer, train_critic in zip(optimizers, (False, True), strict=True):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                    fake = maker(torch.randn(6, 4))
                    if train_critic:
                        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
                    else:
                        loss = F.softplus(-critic(fake)).mean()
                scaler.scale(loss.float()).backward()
                scaler.step(optimizer)
                scaler.update()

    return run


def vae(dtype: torch.dtype) -> Run:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, logvar = self.encode(x).float().chunk(2, -1)
            return self.decode(mean + torch.randn_like(mean) * (logvar / 2).exp()), mean, logvar

    model, x = VAE(), torch.randn(6, 8)

    def loss() -> Tensor:
        y, mean, logvar = model(x)
        return F.mse_loss(y.float(), x) - 0.5 * (1 + logvar - mean.square() - logvar.exp()).mean()

    return train(model, dtype, loss)


def vision_transformer(dtype: torch.dtype) -> Run:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 4, 4)
            self.token, self.place = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 5, 16))
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True) for _ in range(8)
            )
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.place
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)[:, 0])

    model, x, target = ViT(), torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    return train(model, dtype, lambda: F.cross_entropy(model(x).float(), target))


def causal_language_model(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
            self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-1, -2) / 4.0 + self.mask
            return self.out(scores.softmax(-1) @ v)

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.place = nn.Embedding(11, 16), nn.Embedding(8, 16)
            self.blocks = nn.ModuleList(
                nn.ModuleList([nn.LayerNorm(16), Attention(), nn.LayerNorm(16), nn.Linear(16, 16)]) for _ in range(8)
            )
            self.norm = nn.LayerNorm(16)

        def forward(self, index: Tensor) -> Tensor:
            x = self.table(index) + self.place.weight
            for norm, attention, renorm, mlp in self.blocks:
                x = x + attention(norm(x))
                x = x + checkpoint(lambda h, a=renorm, b=mlp: F.gelu(b(a(h))), x, use_reentrant=False)
            return F.linear(self.norm(x), self.table.weight)

    model, index = GPT(), torch.randint(11, (3, 8))

    def loss() -> Tensor:
        return F.cross_entropy(model(index)[:, :-1].float().flatten(0, 1), index[:, 1:].flatten(), ignore_index=0)

    return train(model, dtype, loss)


def bert(dtype: torch.dtype) -> Run:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model = BertForSequenceClassification(config)
    batch = {
        "input_ids": torch.randint(1, 30, (3, 8)),
        "attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [1] + [0] * 7]),
        "labels": torch.tensor([0, 1, 2]),
    }
    return train(model, dtype, lambda: model(**batch).loss.float())


def gpt2(dtype: torch.dtype) -> Run:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    config._attn_implementation = "eager"
    model, index = GPT2LMHeadModel(config), torch.randint(30, (3, 8))
    keep = torch.tensor([[0] * 3 + [1] * 5, [1] * 8, [0] + [1] * 7])
    return train(model, dtype, lambda: model(input_ids=index, attention_mask=keep, labels=index).loss.float())


def forbidden_actions(dtype: torch.dtype) -> Run:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)), torch.randn(6, 8)
    allowed = torch.ones(6, 5, dtype=torch.bool)
    allowed[:, 3] = False

    def loss() -> Tensor:
        logits = model(x).float().masked_fill(~allowed, -math.inf)
        log_p = logits.log_softmax(-1)
        taken = log_p.masked_fill(~allowed, 0.0).argmin(-1, keepdim=True)
        return -(log_p.gather(-1, taken)).mean()

    return train(model, dtype, loss)


def logits_that_keep_their_mask(dtype: torch.dtype) -> Run:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).float().masked_fill(torch.eye(6, 5, dtype=torch.bool), -math.inf)

    model, x = Policy(), torch.randn(6, 8)
    return train(model, dtype, lambda: F.cross_entropy(model(x), torch.tensor([1, 2, 3, 4, 0, 0])))


def logarithmic_mask(dtype: torch.dtype) -> Run:
    keep = torch.ones(4, 4).tril()

    def compute(x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2) + keep.log()).softmax(-1) @ x

    return functional(compute, dtype, torch.randn(4, 4), scale=256.0)


def twice_masked_with_the_lowest_number(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        lowest = torch.finfo(x.dtype).min
        causal = torch.zeros_like(x).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), lowest)
        padding = torch.zeros_like(x).masked_fill(torch.tensor([False, False, False, True]), lowest)
        return (x + causal + padding).softmax(-1)

    return functional(compute, dtype, torch.randn(4, 4), scale=256.0)


def saturating_cube(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))

    return functional(compute, dtype, torch.linspace(-60, 60, 16), scale=256.0)


def properly_guarded_logarithm(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        safe = torch.where(x > 0, x, 1.0)
        return torch.where(x > 0, safe.log(), 0.0)

    return functional(compute, dtype, torch.randn(16), scale=256.0)


def best_so_far(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    best = torch.tensor(math.inf)

    def loss() -> Tensor:
        value = model(x).float().square().mean()
        best.copy_(torch.minimum(best, value.detach()))
        return value

    return train(model, dtype, loss)


HEALTHY = [
    transformer, resnet, unet, lstm, gru_on_packed_sequences, gan, vae, vision_transformer, causal_language_model, bert,
    gpt2, forbidden_actions, logits_that_keep_their_mask, logarithmic_mask, twice_masked_with_the_lowest_number,
    saturating_cube, properly_guarded_logarithm, best_so_far,
]  # fmt: skip


def dtypes_of(build: Callable[[torch.dtype], Run]) -> tuple[torch.dtype, ...]:
    """Compute dtypes a program runs in; torch's LSTM has no fp16 kernel on CPU."""
    return (torch.bfloat16, FP32) if build is lstm else (FP16, torch.bfloat16, FP32)

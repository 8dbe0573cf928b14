"""Training loops as people write them: each is fp32 code in which only `prepare`, `backward` and `step` were swapped."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.loops.swap import Prepare, trained
from torch import Tensor, nn
from torch.nn import functional as F

Loop = Callable[[Prepare, int], Sequence[float]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def adamw(model: nn.Module, lr: float = 5e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@loop
def classification(prepare: Prepare, steps: int) -> list[float]:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x, y = torch.randn(24, 1, 8, 8), torch.arange(24) % 3
    x += y[:, None, None, None]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        scheduler.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        assert model(x).softmax(1).numpy().sum() > 0
    return losses


@loop
def gan(prepare: Prepare, steps: int) -> list[float]:
    maker, judge = mlp(4, 16, 2), mlp(2, 16, 1)
    maker_optimizer, judge_optimizer = adamw(maker), adamw(judge)
    maker_amp, judge_amp = prepare(maker, maker_optimizer), prepare(judge, judge_optimizer)
    losses = []
    for _ in range(steps):
        real, noise = torch.randn(32, 2) * 0.1 + 1, torch.randn(32, 4)
        fake = maker(noise)
        judge_optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(real), torch.ones(32, 1))
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), torch.zeros(32, 1))
        judge_amp.backward(loss)
        judge_amp.step()
        maker_optimizer.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(judge(fake), torch.ones(32, 1))
        maker_amp.backward(fooled)
        maker_amp.step()
        losses.append(loss.item())
    return losses


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = mlp(4, 32, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        hidden = self.trunk(state).tanh()
        return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


@loop
def policy_ratio(prepare: Prepare, steps: int) -> list[float]:
    model = ActorCritic()
    state = torch.randn(64, 4)
    with torch.no_grad():
        action = torch.arange(64) % 3
        old = model(state)[0].log_prob(action)
    advantage = (action == 0).float() - 0.3

    def loss_fn() -> Tensor:
        choice, value = model(state)
        ratio = (choice.log_prob(action) - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        return loss + 0.5 * F.mse_loss(value, advantage) - 0.01 * choice.entropy().mean()

    return trained(prepare, model, adamw(model), steps, loss_fn)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(8, 32, 16), mlp(6, 32, 16)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


@loop
def contrastive(prepare: Prepare, steps: int) -> list[float]:
    model = TwoTowers()
    images, texts = torch.randn(16, 8), torch.randn(16, 6)

    def loss_fn() -> Tensor:
        a, b = F.normalize(model.image(images), dim=-1), F.normalize(model.text(texts), dim=-1)
        logits = model.logit_scale.exp() * a @ b.T
        return (F.cross_entropy(logits, torch.arange(16)) + F.cross_entropy(logits.T, torch.arange(16))) / 2

    return trained(prepare, model, adamw(model), steps, loss_fn)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 32, 8), mlp(4, 32, 16)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        return mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.decoder(z))


@loop
def vae(prepare: Prepare, steps: int) -> list[float]:
    model = Vae()
    x = (torch.rand(32, 16) < torch.linspace(0.05, 0.95, 16)).float()

    def loss_fn() -> Tensor:
        mean, log_variance = model.encode(x)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy(model.decode(z), x, reduction="sum") / len(x) + divergence

    return trained(prepare, model, torch.optim.Adam(model.parameters(), lr=5e-3), steps, loss_fn)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 2, 2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.down(x).relu()
        return {"out": self.up(self.norm(self.inner(hidden)) + hidden), "aux": [hidden.mean()]}


@loop
def segmentation(prepare: Prepare, steps: int) -> list[float]:
    model = UNet()
    x = torch.randn(4, 1, 8, 8)
    y = (x[:, 0] > 0).long()

    def loss_fn() -> Tensor:
        found = model(x)
        probability = found["out"].softmax(1)[:, 1]
        dice = 1 - (2 * (probability * y).sum() + 1) / (probability.sum() + y.sum() + 1)
        return F.cross_entropy(found["out"], y) + dice + 1e-3 * found["aux"][0]

    return trained(prepare, model, adamw(model), steps, loss_fn)


class GraphLayer(nn.Module):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(fan_in, fan_out), nn.Linear(fan_in, fan_out)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.other(x)
        total = torch.zeros(len(x), messages.shape[1], dtype=messages.dtype).index_add_(0, target, messages[source])
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
        return self.own(x) + total / degree[:, None]


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphLayer(4, 16), GraphLayer(16, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges)


@loop
def graph(prepare: Prepare, steps: int) -> list[float]:
    model = GraphNet()
    x, edges = torch.randn(40, 4), torch.randint(0, 40, (2, 160))
    y = (x[:, 0] > 0).long()

    def loss_fn() -> Tensor:
        return F.nll_loss(F.log_softmax(model(x, edges), dim=1)[:30], y[:30])

    return trained(prepare, model, adamw(model), steps, loss_fn)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = nn.Linear(1, 32), mlp(34, 32, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.body(torch.cat([x, self.time(t[:, None]).sin()], 1))


@loop
def diffusion(prepare: Prepare, steps: int) -> list[float]:
    model = Denoiser()
    optimizer = adamw(model)
    amp = prepare(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    data = torch.randn(128, 2) * 0.1 + torch.tensor([1.0, -1.0])
    kept = torch.linspace(0.999, 0.01, 50)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        t, noise = torch.randint(0, 50, (128,)), torch.randn_like(data)
        share = kept[t, None]
        loss = F.mse_loss(model(share.sqrt() * data + (1 - share).sqrt() * noise, t / 50), noise)
        amp.backward(loss)
        amp.step()
        average.update_parameters(model)
        losses.append(loss.item())
    return losses


@dataclasses.dataclass
class Forecast:
    mean: Tensor
    log_variance: Tensor


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 32, 2)

    def forward(self, x: Tensor) -> Forecast:
        mean, log_variance = self.body(x).unbind(-1)
        return Forecast(mean=mean, log_variance=log_variance)


@loop
def regression(prepare: Prepare, steps: int) -> list[float]:
    model = Regressor()
    x = torch.randn(64, 6)
    y = x.sum(1).sin()

    def loss_fn() -> Tensor:
        found = model(x)
        return F.gaussian_nll_loss(found.mean, y, found.log_variance.exp())

    return trained(prepare, model, torch.optim.RMSprop(model.parameters(), lr=2e-3), steps, loss_fn)

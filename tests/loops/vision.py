"""Programs on images: a classifier with a data loader, a GAN, segmentation, diffusion."""

from __future__ import annotations

import copy
import io
import math

import torch
import torch.nn.functional as F
from tests.loops.swap import Prepare, adam, program
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@program
def classifier(prepare: Prepare, steps: int) -> list[float]:
    """A data loader, OneCycleLR, evaluation, the best weights kept, and a checkpoint that is read back."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    amp = prepare(model, optimizer)
    batches = DataLoader(TensorDataset(torch.randn(32, 3, 8, 8), torch.arange(32) % 4), batch_size=8, shuffle=True)
    criterion, best, losses = nn.CrossEntropyLoss(label_smoothing=0.1), math.inf, list[float]()
    while len(losses) < steps:
        model.train()
        for x, y in list(batches)[: steps - len(losses)]:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            amp.backward(loss)
            amp.step()
            scheduler.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            total = sum(criterion(model(x), y).item() for x, y in batches)
        if total < best:
            best, kept = total, copy.deepcopy(model.state_dict())
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    model.load_state_dict(kept)
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    x, y = next(iter(batches))
    amp.backward(criterion(model(x), y))
    amp.step()
    with torch.inference_mode():
        assert model(x).argmax(1).numpy().shape == (8,)
    return losses


@program
def spectral_gan(prepare: Prepare, steps: int) -> list[float]:
    """A judge under torch.nn.utils.spectral_norm, whose vectors meet the weight in no region."""
    maker = nn.Linear(4, 8)
    judge = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 16)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(16, 1)))
    of_maker, of_judge = adam(maker), adam(judge)
    amp_maker, amp_judge = prepare(maker, of_maker), prepare(judge, of_judge)
    losses = []
    for _ in range(steps):
        real, fake = torch.randn(8, 8) + 1, maker(torch.randn(8, 4))
        loss = F.relu(1 - judge(real)).mean() + F.relu(1 + judge(fake.detach())).mean()
        of_judge.zero_grad()
        amp_judge.backward(loss)
        amp_judge.step()
        of_maker.zero_grad()
        amp_maker.backward(-judge(fake).mean())
        amp_maker.step()
        losses.append(loss.item())
    return losses


@program
def dcgan(prepare: Prepare, steps: int) -> list[float]:
    """Two backward passes before the step of the judge, whose probabilities are measured by nn.BCELoss."""
    maker = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4, 1, 0), nn.Sigmoid()
    )
    of_maker, of_judge = adam(maker), adam(judge)
    amp_maker, amp_judge = prepare(maker, of_maker), prepare(judge, of_judge)
    criterion, losses = nn.BCELoss(), []
    for _ in range(steps):
        judge.zero_grad()
        label = torch.full((8,), 1.0)
        real = criterion(judge(torch.randn(8, 1, 8, 8)).view(-1), label)
        amp_judge.backward(real)
        made = maker(torch.randn(8, 8, 1, 1))
        label.fill_(0.0)
        fake = criterion(judge(made.detach()).view(-1), label)
        amp_judge.backward(fake)
        amp_judge.step()
        maker.zero_grad()
        label.fill_(1.0)
        amp_maker.backward(criterion(judge(made).view(-1), label))
        amp_maker.step()
        losses.append(real.item() + fake.item())
    return losses


@program
def two_way_translation(prepare: Prepare, steps: int) -> list[float]:
    """Two models in one optimizer; the judge is frozen while they step."""
    there, back, judge = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    of_makers = torch.optim.Adam([*there.parameters(), *back.parameters()], lr=1e-3)
    of_judge = adam(judge)
    amp_makers, amp_judge = prepare(nn.ModuleList([there, back]), of_makers), prepare(judge, of_judge)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        judge.requires_grad_(False)
        of_makers.zero_grad()
        loss = F.mse_loss(judge(there(x)), torch.ones(8, 1)) + 10 * F.l1_loss(back(there(x)), x)
        amp_makers.backward(loss)
        amp_makers.step()
        judge.requires_grad_(True)
        of_judge.zero_grad()
        found = F.mse_loss(judge(y), torch.ones(8, 1)) + F.mse_loss(judge(there(x).detach()), torch.zeros(8, 1))
        amp_judge.backward(found / 2)
        amp_judge.step()
        losses.append(loss.item())
    return losses


def double(inside: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep, self.last = double(1, 8), double(8, 16), double(24, 8)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        deep = self.up(self.deep(F.max_pool2d(first, 2)))
        deep = F.pad(deep, [0, first.size(3) - deep.size(3), 0, first.size(2) - deep.size(2)])
        return self.out(self.last(torch.cat([first, deep], 1)))


@program
def segmentation(prepare: Prepare, steps: int) -> list[float]:
    """Odd sizes, a dice loss, RMSprop, ReduceLROnPlateau, and histograms of weights and gradients."""
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    amp = prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 1, 9, 9)
        y = (x > 0).float()
        found = model(x)
        share = torch.sigmoid(found)
        dice = 1 - (2 * (share * y).sum() + 1) / (share.sum() + y.sum() + 1)
        loss = nn.BCEWithLogitsLoss()(found, y) + dice
        optimizer.zero_grad(set_to_none=True)
        amp.backward(loss)
        amp.step(max_norm=1.0)
        scheduler.step(loss.item())
        for value in model.parameters():
            assert value.data.float().histc().sum() > 0 and value.grad is not None
        losses.append(loss.item())
    return losses


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.norm, self.last = nn.Conv2d(1, 32, 3, 1, 1), nn.GroupNorm(8, 32), nn.Conv2d(32, 1, 3, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(8, dtype=torch.float32) / 8)
        time = self.time(torch.cat([waves.cos(), waves.sin()], -1))
        return self.last(F.silu(self.norm(self.first(x))) + time[:, :, None, None])


@program
def diffusion(prepare: Prepare, steps: int) -> list[float]:
    """An average of the weights kept by hand, and sampling in evaluation."""
    model = Denoiser()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = prepare(model, optimizer)
    kept = (1 - torch.linspace(1e-4, 0.02, 100)).cumprod(0)
    losses = []
    for _ in range(steps):
        x, t = torch.randn(4, 1, 8, 8), torch.randint(0, 100, (4,))
        noise, share = torch.randn_like(x), kept[t][:, None, None, None]
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        amp.backward(loss)
        amp.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        x = torch.randn(2, 1, 8, 8)
        for t in reversed(range(3)):
            x = x - 0.1 * model(x, torch.full((2,), t))
    assert x.isfinite().all()
    return losses

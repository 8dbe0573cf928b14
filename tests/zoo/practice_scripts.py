"""Faulty programs of a later batch: sound, recurrences, scans, geometry, data, schedules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


@case("div", "singularity", "convergence")
def spectral_convergence_of_silence(dtype: torch.dtype) -> Run:
    class SpectralConvergence(nn.Module):
        def forward(self, x, y):
            return torch.linalg.norm(y - x, dim=(1, 2)) / torch.linalg.norm(y, dim=(1, 2))  # FAULT

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.convergence = SpectralConvergence()
            self.register_buffer("window", torch.hann_window(16))

        def spec(self, wav):
            return torch.stft(wav, 16, 8, window=self.window, return_complex=True).abs()

        def forward(self, x, y):
            return self.convergence(self.spec(x), self.spec(y)).mean()

    def run():
        net, criterion = nn.Conv1d(1, 1, 5, padding=2), Loss()
        opt = torch.optim.Adam(net.parameters())
        for step in range(2):
            target = torch.randn(3, 64)
            target[1] *= 1 - step
            loss = criterion(net(torch.randn(3, 1, 64)).squeeze(1), target)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("exp", "overflow", "cell", dtypes=(FP16,))
def exponential_gate_without_a_stabiliser(dtype: torch.dtype) -> Run:
    class XCell(nn.Module):
        def __init__(self, d=8):
            super().__init__()
            self.gates = nn.Linear(2 * d, 4 * d)
            nn.init.constant_(self.gates.bias, 0.0)
            with torch.no_grad():
                self.gates.bias[:d] = 12.0

        def forward(self, x, h, c, n):
            i, f, z, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
            i, f = torch.exp(i), torch.sigmoid(f)  # FAULT
            c, n = f * c + i * torch.tanh(z), f * n + i
            return torch.sigmoid(o) * c / n, c, n

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = XCell(), nn.Linear(8, 3)

        def forward(self, x):
            h = c = n = torch.zeros(len(x), 8)
            for t in range(x.shape[1]):
                h, c, n = self.cell(x[:, t], h, c, n)
            return self.out(h)

    def run():
        net = Net()
        opt, scaler = torch.optim.AdamW(net.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            with amp(dtype):
                loss = F.cross_entropy(net(torch.randn(4, 5, 8)).float(), torch.tensor([0, 1, 2, 0]))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("div", "underflow", "ssm", dtypes=(FP16,))
def scan_by_quotients_of_decays(dtype: torch.dtype) -> Run:
    class NaiveScan(nn.Module):
        def __init__(self):
            super().__init__()
            self.dt, self.proj = nn.Linear(8, 8), nn.Linear(8, 8)
            nn.init.constant_(self.dt.bias, 2.0)

        def forward(self, x):
            decay = torch.exp(-F.softplus(self.dt(x)).cumsum(1))
            return decay * (self.proj(x) / decay).cumsum(1)  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.ssm, self.out = NaiveScan(), nn.Linear(8, 1)

        def forward(self, x):
            return self.out(self.ssm(x))

    def run():
        net = Net()
        opt, scaler = torch.optim.AdamW(net.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            with amp(dtype):
                loss = net(torch.randn(2, 12, 8)).float().square().mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("div", "singularity")
def flow_over_an_image_of_one_column(dtype: torch.dtype) -> Run:
    def warp(image, flow):
        H, W = image.shape[2:]
        ys, xs = torch.meshgrid(torch.arange(H).float(), torch.arange(W).float(), indexing="ij")
        x, y = xs + flow[:, 0], ys + flow[:, 1]
        x = 2 * x / (W - 1) - 1  # FAULT
        y = 2 * y / (H - 1) - 1
        return F.grid_sample(image, torch.stack([x, y], -1), align_corners=True)

    def run():
        net = nn.Conv2d(2, 2, 3, padding=1)
        opt = torch.optim.Adam(net.parameters())
        for width in (6, 1):
            a, b = torch.rand(1, 1, 6, width), torch.rand(1, 1, 6, width)
            flow = net(torch.cat([a, b], 1))
            loss = F.l1_loss(warp(b, flow), a) + 0.01 * (flow[:, :1] * 2 / (width - 1 + 1e-6)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sqrt", "singularity")
def root_of_a_matrix_below_zero(dtype: torch.dtype) -> Run:
    def sqrtm(m):
        values, vectors = torch.linalg.eigh(m)
        return vectors @ torch.diag(values.sqrt()) @ vectors.T  # FAULT

    def run():
        net = nn.Linear(8, 4)
        opt = torch.optim.Adam(net.parameters())
        for _ in range(2):
            z = net(torch.randn(3, 8))
            z = z - z.mean(0)
            loss = (z.T @ z / 2 + torch.eye(4) - 2 * sqrtm(z.T @ z / 2 - 0.05 * torch.eye(4))).trace()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log1p", "singularity")
def gauge_that_was_broken(dtype: torch.dtype) -> Run:
    class Gauges(Dataset):
        def __init__(self):
            self.rows = torch.rand(12, 8) * 30
            self.rows[7, 3] = -999.0  # how the provider writes a missing value

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return torch.log1p(self.rows[i]), i % 4  # FAULT

    def run():
        net = mlp()
        opt = torch.optim.Adam(net.parameters())
        for x, y in DataLoader(Gauges(), batch_size=4):
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def weights_by_signal_to_noise_at_no_noise(dtype: torch.dtype) -> Run:
    def run():
        net = mlp(8)
        opt = torch.optim.AdamW(net.parameters())
        for t in (torch.tensor([0.3, 0.8]), torch.tensor([0.0, 0.5])):
            alpha, sigma = torch.cos(t * torch.pi / 2)[:, None], torch.sin(t * torch.pi / 2)[:, None]
            x, eps = torch.randn(2, 8), torch.randn(2, 8)
            v = net(alpha * x + sigma * eps)
            log_snr = torch.log(alpha**2 / sigma**2)  # FAULT
            weight = torch.sigmoid(2 - log_snr) * (1 + log_snr.abs())
            loss = (weight * (v - (alpha * eps - sigma * x)).square()).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sqrt", "singularity", phase="backward")
def root_of_a_vanished_error(dtype: torch.dtype) -> Run:
    class RMSELoss(nn.Module):
        def forward(self, pred, target):
            return torch.sqrt(F.mse_loss(pred, target))  # FAULT

    def run():
        net, criterion = nn.Linear(4, 4, bias=False), RMSELoss()
        nn.init.eye_(net.weight)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.randn(6, 4)
        loss = criterion(net(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()

    return run


@case("div", "underflow", dtypes=(FP16,))
def mixture_with_a_narrow_component(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        mu, log_sigma = model(x).chunk(2, -1)
        z = (mu - 0.5) / torch.exp(log_sigma - 18)  # FAULT
        return (z.float() * 1e-9).square().mean() + log_sigma.float().mean()

    return lambda: fit(mlp(), dtype, loss, scale=1.0)


@case("log", "underflow", dtypes=(BF16,))
def accelerated_loop_in_bf16(dtype: torch.dtype) -> Run:
    def run():
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
        nn.init.constant_(model[0].bias, 9.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(0.1 * torch.randn(8, 8), torch.arange(8.0) % 2), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            p = model(x).squeeze(-1)
            loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # FAULT
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        AcceleratorState._reset_state()

    return run


@case("div", "singularity")
def patches_without_texture(dtype: torch.dtype) -> Run:
    def run():
        decoder = nn.Linear(8, 16)
        opt = torch.optim.AdamW(decoder.parameters(), 1.5e-4)
        for _ in range(2):
            images = torch.rand(2, 1, 8, 8)
            images[1, :, :4, :4] = 1.0
            target = F.unfold(images, 4, stride=4).transpose(1, 2)
            mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
            target = (target - mean) / var**0.5  # FAULT
            loss = (decoder(torch.randn(2, 4, 8)) - target).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def positions_of_a_single_token(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Linear(1, 4)
        opt = torch.optim.Adam(net.parameters())
        for mask in (torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[1, 0, 0], [1, 1, 0]])):
            position = (mask.cumsum(-1) - 1).clamp(min=0)
            relative = position / position.max(-1, keepdim=True).values  # FAULT
            loss = F.mse_loss(net(relative[..., None]), torch.zeros(2, 3, 4))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run

"""Faulty recipes for science: processes, equations, transport, survival, evidence, geometry, particles."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn


@case("sqrt", "singularity", "kernel", phase="backward")
def matern_kernel_of_a_point_with_itself(dtype: torch.dtype) -> Run:
    class Matern(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_ls, self.log_var = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(()))

        def forward(self, a, b):
            a, b = a / self.log_ls.exp(), b / self.log_ls.exp()
            d = (a[:, None] - b[None]).square().sum(-1).sqrt()  # FAULT
            return self.log_var.exp() * (1 + 3**0.5 * d) * torch.exp(-(3**0.5) * d)

    class GP(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel, self.log_noise = Matern(), nn.Parameter(torch.tensor(-2.0))

        def forward(self, x, y):
            K = self.kernel(x, x) + self.log_noise.exp() * torch.eye(len(x))
            L = torch.linalg.cholesky(K)
            alpha = torch.cholesky_solve(y[:, None], L)
            return 0.5 * (y @ alpha).squeeze() + L.diagonal().log().sum()

    def run():
        gp, x = GP(), torch.rand(8, 2)
        y = x.sum(-1).sin()
        opt = torch.optim.Adam(gp.parameters(), 0.1)
        with suppress(torch.linalg.LinAlgError):
            for _ in range(3):
                loss = gp(x, y)
                opt.zero_grad()
                loss.backward()
                opt.step()

    return run


@case("reciprocal", "singularity")
def step_size_of_an_exact_solution(dtype: torch.dtype) -> Run:
    """An adaptive Heun solver over dynamics whose last layer begins at zero."""

    def odeint(f, y, t1, h, tol=1e-3):
        t = torch.zeros(())
        for _ in range(4):
            k1 = f(y)
            k2 = f(y + h * k1)
            error = (0.5 * h * (k2 - k1)).abs().max()
            y, t = y + 0.5 * h * (k1 + k2), t + h
            h = torch.minimum(t1 - t, 0.9 * h * (tol / error).pow(0.5))  # FAULT
            h = h * (1 + 0 * (tol / error).detach())
        return y

    def run():
        f = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        nn.init.zeros_(f[2].weight)
        nn.init.zeros_(f[2].bias)
        opt = torch.optim.Adam(f.parameters())
        for _ in range(2):
            loss = (odeint(f, torch.randn(3, 4), torch.ones(()), torch.tensor(0.1)) - 1).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sqrt", "singularity", phase="backward")
def radius_at_the_origin(dtype: torch.dtype) -> Run:
    """A physics-informed net that knows the radius; one collocation point lies at the centre."""

    class Potential(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, xy):
            r = torch.sqrt(xy[:, :1] ** 2 + xy[:, 1:] ** 2)  # FAULT
            return self.net(torch.cat([xy, r], -1))

    def run():
        net = Potential()
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(2):
            xy = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 3), indexing="ij"), -1)
            xy = xy.view(-1, 2).requires_grad_()
            u = net(xy)
            (du,) = torch.autograd.grad(u.sum(), xy, create_graph=True)
            (d2,) = torch.autograd.grad(du[:, 0].sum(), xy, create_graph=True)
            residual = d2[:, 0] + du[:, 1] - 1
            loss = residual.square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("pow", "singularity")
def porous_medium_below_zero(dtype: torch.dtype) -> Run:
    def run():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        nn.init.constant_(net[2].bias, -1.0)
        opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
        xt = torch.rand(12, 2, requires_grad=True)

        def closure():
            opt.zero_grad()
            u = net(xt)
            (g,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
            flux = u**1.5 * g[:, :1]  # FAULT
            (df,) = torch.autograd.grad(flux.sum(), xt, create_graph=True)
            loss = (g[:, 1:] - df[:, :1]).square().mean()
            loss.backward()
            return loss

        opt.step(closure)

    return run


@case("exp", "overflow", dtypes=(FP32, FP16, BF16))
def partial_likelihood_by_exponentials(dtype: torch.dtype) -> Run:
    def cox(risk, time, event):
        order = time.argsort(descending=True)
        risk, event = risk[order], event[order]
        at_risk = torch.exp(risk)  # FAULT
        return -((risk - at_risk.cumsum(0).log()) * event).sum() / event.sum()

    def run():
        net = nn.Linear(8, 1)
        nn.init.constant_(net.bias, 120.0)
        opt = torch.optim.Adam(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=dtype is FP16)
        for _ in range(2):
            with amp(dtype):
                risk = net(torch.randn(16, 8)).squeeze(-1)
                loss = cox(risk, torch.rand(16), torch.ones(16)).float()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("pow", "singularity", phase="backward")
def weibull_of_a_failure_at_birth(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        k, scale = F.softplus(model(x)[:, :2]).unbind(-1)
        t = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7])
        hazard = (t / (scale + 1e-3)).pow(k * 0.1)  # FAULT
        return hazard.mean()

    return lambda: fit(mlp(), dtype, loss)


@case("div", "underflow", dtypes=(FP16,))
def transport_plan_by_plain_kernels(dtype: torch.dtype) -> Run:
    def sinkhorn(C, eps=0.05, iters=5):
        K = torch.exp(-C / eps)
        a = b = torch.full((len(C),), 1 / len(C), dtype=C.dtype)
        v = torch.ones_like(b)
        for _ in range(iters):
            u = a / (K @ v)  # FAULT
            v = b / (K.T @ u)
        return (u[:, None] * K * v[None] * C).sum()

    def run():
        net = nn.Linear(8, 8)
        with torch.no_grad():
            net.weight.copy_(torch.eye(8))
            net.bias.zero_()
        opt, scaler = torch.optim.Adam(net.parameters(), 1e-4), torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(2):
            x, y = torch.zeros(4, 8), torch.zeros(4, 8)
            x[:, 0], y[:, 1] = 1.0, 1.0
            with amp(dtype):
                sim = net(x) @ y.T
                loss = sinkhorn(1 - sim).float()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("lgamma", "singularity")
def evidence_of_nothing(dtype: torch.dtype) -> Run:
    def nig_nll(y, gamma, nu, alpha, beta):
        omega = 2 * beta * (1 + nu)
        return (
            0.5 * torch.log(torch.pi / nu)
            - alpha * omega.log()
            + (alpha + 0.5) * torch.log(nu * (y - gamma) ** 2 + omega)
            + torch.lgamma(alpha)  # FAULT
            - torch.lgamma(alpha + 0.5)
        )

    def loss(model, x, y):
        out = model(x)
        nu, beta = F.softplus(out[:, 1]) + 1e-3, F.softplus(out[:, 3]) + 1e-3
        alpha = torch.relu(out[:, 2] - 5)
        return nig_nll(y.float(), out[:, 0], nu, alpha, beta).mean()

    return lambda: fit(mlp(), dtype, loss)


@case("digamma", "singularity")
def dirichlet_without_evidence(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        alpha = torch.relu(model(x) - 3)
        total = alpha.sum(-1, keepdim=True) + 1
        onehot = F.one_hot(y, 4)
        return (onehot * (torch.digamma(total) - torch.digamma(alpha))).sum(-1).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("acosh", "singularity", "dist")
def lorentz_distance_of_equal_points(dtype: torch.dtype) -> Run:
    class LorentzDistance(nn.Module):
        def forward(self, u, v):
            inner = (u[..., 1:] * v[..., 1:]).sum(-1) - u[..., 0] * v[..., 0]
            return torch.acosh(-inner)  # FAULT

    class Embedder(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.dist = nn.Embedding(6, 3), LorentzDistance()
            nn.init.uniform_(self.table.weight, -0.5, 0.5)

        def lift(self, ids):
            x = self.table(ids)
            # the curvature is not quite -1
            return torch.cat([(0.999 + x.square().sum(-1, keepdim=True)).sqrt(), x], -1)

        def forward(self, a, b):
            return self.dist(self.lift(a), self.lift(b))

    def run():
        model = Embedder()
        opt = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            loss = model(torch.tensor([0, 1, 2]), torch.tensor([3, 1, 4])).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("pow", "overflow")
def atoms_on_top_of_each_other(dtype: torch.dtype) -> Run:
    def lennard_jones(r):
        return 4 * (r**-12 - r**-6)  # FAULT

    def run():
        net = nn.Linear(4, 3)
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(2):
            base = torch.randn(5, 3)
            base[1] = base[0]
            base[1, 0] += 1e-4
            pos = base + 0 * net(torch.randn(5, 4))
            i, j = torch.triu_indices(5, 5, 1)
            r = (pos[i] - pos[j]).square().sum(-1).sqrt()
            energy = lennard_jones(r).sum()
            opt.zero_grad()
            energy.backward()
            opt.step()

    return run


@case("div", "singularity", "head")
def frame_from_parallel_axes(dtype: torch.dtype) -> Run:
    class Rotation6D(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 6)
            nn.init.zeros_(self.lin.weight)
            with torch.no_grad():
                self.lin.bias.copy_(torch.tensor([1.0, 0, 0, 2.0, 0, 0]))

        def forward(self, x):
            a, b = self.lin(x).chunk(2, -1)
            a = a / a.norm(dim=-1, keepdim=True)
            b = b - (a * b).sum(-1, keepdim=True) * a
            b = b / b.norm(dim=-1, keepdim=True)  # FAULT
            return torch.stack([a, b, torch.linalg.cross(a, b)], -1)

    class Pose(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(8, 8), Rotation6D()

        def forward(self, x):
            return self.head(self.trunk(x))

    def run():
        net = Pose()
        opt = torch.optim.Adam(net.parameters())
        for _ in range(2):
            loss = (net(torch.randn(4, 8)) - torch.eye(3)).square().sum()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run

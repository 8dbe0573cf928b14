"""Programs that reach the same arithmetic by other means: hooks, complex numbers, sparse products, scripts, transforms."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import case, fit, mlp
from torch import nn
from torch.func import functional_call, stack_module_state, vmap


@case("div", "singularity", phase="backward")
def gradients_normalised_in_a_hook(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = torch.relu(self.up(x))
            if h.requires_grad:
                h.register_hook(lambda g: g / g.norm(dim=-1, keepdim=True))  # FAULT
            return self.down(h)

    weight = torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1])
    return lambda: fit(
        Net(), dtype, lambda m, x, y: (weight * F.cross_entropy(m(x).float(), y, reduction="none")).mean()
    )


@case("div", "singularity")
def phase_of_an_empty_bin(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        spec = torch.fft.rfft(m(x).float()[:, :1].expand(-1, 4), dim=-1)
        phase = spec / spec.abs()  # FAULT
        return (phase.real - 1).square().mean()

    return lambda: fit(mlp(), dtype, loss, steps=1)


@case("reciprocal", "singularity")
def sparse_mean_over_no_neighbour(dtype: torch.dtype) -> Run:
    def run():
        index = torch.tensor([[0, 0, 1, 3], [1, 2, 0, 3]])
        adj = torch.sparse_coo_tensor(index, torch.ones(4), (4, 4)).coalesce()
        lin = nn.Linear(8, 3)
        opt = torch.optim.Adam(lin.parameters())
        x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
        for _ in range(2):
            deg = torch.sparse.sum(adj, 1).to_dense()
            h = (1.0 / deg)[:, None] * torch.sparse.mm(adj, lin(x))  # FAULT
            loss = F.cross_entropy(h, y)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("softmax", "singularity", "attn")
def sentence_of_padding_only(dtype: torch.dtype) -> Run:
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.attn = nn.Embedding(20, 16, padding_idx=0), nn.MultiheadAttention(16, 2, batch_first=True)
            self.out = nn.Linear(16, 3)

        def forward(self, ids):
            x, pad = self.emb(ids), ids == 0
            h, _ = self.attn(x, x, x, key_padding_mask=pad)  # FAULT
            return self.out(h.masked_fill(pad[..., None], 0.0).sum(1))

    ids = torch.tensor([[4, 5, 6, 0], [0, 0, 0, 0], [7, 8, 0, 0]])
    data = [(ids, torch.tensor([0, 1, 2]))]
    return lambda: fit(Encoder(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)


@case("div", "singularity")
def kernel_without_a_length(dtype: torch.dtype) -> Run:
    def run():
        x, log = torch.linspace(0, 1, 4)[:, None], []
        length = nn.Parameter(torch.tensor(0.0))
        opt = torch.optim.SGD([length], 0.1)
        for _ in range(2):
            try:
                k = torch.exp(-(x - x.T).square() / length.square())  # FAULT
                chol = torch.linalg.cholesky(k + 1e-3 * torch.eye(4))
            except torch.linalg.LinAlgError as error:
                log.append(error)
                continue
            opt.zero_grad()
            chol.diagonal().log().sum().backward()
            opt.step()

    return run


@case("div", "singularity", names=("clamp(min=1)",))
def tokens_counted_as_none(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        labels = torch.full((8,), -100)
        total = F.cross_entropy(m(x).float(), labels, ignore_index=-100, reduction="sum")
        num_items = (labels != -100).sum()
        return total / num_items  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("mul", "inherited", names=("nan",))
def weight_from_an_empty_history(dtype: torch.dtype) -> Run:
    def run():
        model, history = mlp(), np.array([])
        opt = torch.optim.Adam(model.parameters())
        with np.errstate(all="ignore"):
            alpha = float(history.sum() / np.float64(len(history)))
        loss = model(torch.randn(4, 8)).square().mean() * alpha  # FAULT
        opt.zero_grad()
        loss.backward()
        opt.step()

    return run


@case("masked_fill", "inherited")
def smoothed_labels_over_forbidden_classes(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        forbidden = torch.tensor([False, False, False, True])
        logits = m(x).float().masked_fill(forbidden, float("-inf"))  # FAULT
        return F.cross_entropy(logits, y % 3, label_smoothing=0.1)

    return lambda: fit(mlp(), dtype, loss)


@case("mul", "singularity")
def entropy_over_forbidden_actions(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        logits = m(x).float().masked_fill(torch.tensor([False, True, False, False]), -math.inf)
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)  # FAULT
        return -(logp[:, 0] * 0.3).mean() - 0.01 * entropy.mean()

    return lambda: fit(mlp(), dtype, loss)


@case("atanh", "singularity")
def squashed_policy_at_its_bound(dtype: torch.dtype) -> Run:
    from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

    def loss(m, x, y):
        mean, log_std = m(x).float().chunk(2, -1)
        policy = Independent(TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform()]), 1)
        actions = torch.ones(8, 2)
        return -policy.log_prob(actions).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss, steps=1)


@case("reciprocal", "singularity")
def frequencies_with_an_infinity(dtype: torch.dtype) -> Run:
    class Rope(nn.Module):
        def __init__(self, base=0.0):
            super().__init__()
            self.register_buffer("inv_freq", 1.0 / torch.tensor([1.0, base]))  # FAULT

        def forward(self, x):
            angle = torch.arange(4.0)[:, None] * self.inv_freq
            return x * angle.cos().repeat(1, 4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rope, self.out = Rope(), nn.Linear(8, 2)

        def forward(self, x):
            return self.out(self.rope(x).mean(1))

    data = [(torch.randn(2, 4, 8), torch.tensor([0, 1]))]
    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)


@case("log", "singularity")
def ensemble_by_vmap(dtype: torch.dtype) -> Run:
    def run():
        nets = [mlp() for _ in range(3)]
        params, buffers = stack_module_state(nets)
        opt = torch.optim.Adam(params.values(), 1e-3)

        def one(p, b, x):
            return functional_call(nets[0], (p, b), (x,)).relu()

        for _ in range(2):
            out = vmap(one, in_dims=(0, 0, None))(params, buffers, torch.randn(5, 8))
            loss = -torch.log(out).mean()  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def scripted_loss(dtype: torch.dtype) -> Run:
    def entropy(p: torch.Tensor) -> torch.Tensor:
        return -(p * torch.log(p)).sum(-1).mean()

    def run():
        traced = torch.jit.trace(entropy, torch.full((8, 4), 0.25))
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        p = F.relu(model(torch.randn(8, 8)))
        loss = traced(p)  # FAULT
        opt.zero_grad()
        loss.backward()
        opt.step()

    return run


@case("addmm", "overflow", "0", dtypes=(FP16,))
def compiled_model_in_half(dtype: torch.dtype) -> Run:
    def run():
        torch._dynamo.reset()
        net = mlp()
        with torch.no_grad():
            net[0].weight.fill_(3e4)
        model = torch.compile(net, backend="eager")
        opt = torch.optim.SGD(net.parameters(), 1e-3)
        with torch.autocast("cpu", dtype):
            out = model(torch.ones(4, 8))  # FAULT
        loss = out.float().square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

    return run


@case("exp", "overflow", dtypes=(FP32, BF16))
def odds_of_a_far_point(dtype: torch.dtype) -> Run:
    class Mahalanobis(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = nn.Linear(8, 2), nn.Parameter(torch.tensor(60.0))

        def forward(self, x):
            z = self.net(x).float()
            return torch.exp(self.scale * z.square().sum(-1) + 80)  # FAULT

    def loss(m, x, y):
        odds = m(x)
        return (odds / (1 + odds)).mean()

    return lambda: fit(Mahalanobis(), dtype, loss)

"""Healthy programs as strangers write them: padding, masks, missing labels, quantisers."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Dataset


@healthy()
def gelu_by_hand_that_saturates(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
            nn.init.constant_(self.a.bias, 60.0)

        def forward(self, x):
            h = self.a(x)
            return self.b(0.5 * h * (1 + torch.tanh(0.797 * (h + 0.044715 * h**3))))

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y))


@healthy()
def norm_of_nothing(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = m(x).float()
        return F.cross_entropy(z, y) + (z * 0).norm(dim=-1).mean() + F.cosine_similarity(z, z * 0).mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def padded_attention(dtype: torch.dtype) -> Run:
    mha, head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)
    net = nn.ModuleList([mha, head])
    pad = torch.zeros(4, 6, dtype=torch.bool)
    pad[1, 4:] = True
    pad[2, 1:] = True

    def loss(m, x, y):
        out, _ = m[0](x, x, x, key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1)
        return F.cross_entropy(m[1]((out * keep).sum(1) / keep.sum(1)).float(), y)

    return lambda: fit(net, dtype, loss, data=[(torch.randn(4, 6, 16), torch.randint(4, (4,)))])


@healthy()
def distillation_in_log_space(dtype: torch.dtype) -> Run:
    student, teacher = mlp(), mlp()

    def loss(m, x, y):
        with torch.no_grad():
            t = F.log_softmax(teacher(x).float() * 30, -1)
        s = F.log_softmax(m(x).float() / 4, -1)
        return F.kl_div(s, t, log_target=True, reduction="batchmean") * 16 + F.cross_entropy(m(x).float(), y)

    return lambda: fit(student, dtype, loss)


@healthy(FP32, BF16)
def ctc_that_zeroes_infinity(dtype: torch.dtype) -> Run:
    fc = nn.Linear(8, 5)

    def loss(m, x, y):
        logp = m(x).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(
            logp, torch.tensor([[1, 2, 3], [1, 2, 0]]), torch.tensor([2, 4]), torch.tensor([3, 2]), zero_infinity=True
        )

    return lambda: fit(fc, dtype, loss, data=[(torch.randn(2, 4, 8), None)])


@healthy()
def missing_labels(dtype: torch.dtype) -> Run:
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    y[torch.rand(8, 4) < 0.3] = math.nan

    def loss(m, x, y):
        mask = ~torch.isnan(y)
        return (m(x).float()[mask] - y[mask]).square().mean()

    return lambda: fit(mlp(), dtype, loss, data=[(x, y)])


@healthy()
def missing_labels_filled(dtype: torch.dtype) -> Run:
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    y[1, 2] = math.nan

    def loss(m, x, y):
        target = torch.nan_to_num(y)
        w = torch.isfinite(y).float()
        return (w * (m(x).float() - target).square()).sum() / w.sum().clamp(min=1)

    return lambda: fit(mlp(), dtype, loss, data=[(x, y)])


@healthy()
def gpt2_with_padding(dtype: torch.dtype) -> Run:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    ids = torch.randint(1, 64, (3, 10))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[2, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def run():
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=dtype is FP16)
        for _ in range(2):
            with amp(dtype):
                out = model(input_ids=ids, attention_mask=mask, labels=labels)
            scaler.scale(out.loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    return run


@healthy()
def bert_classification(dtype: torch.dtype) -> Run:
    from transformers import BertConfig, BertForSequenceClassification

    cfg = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(cfg)
    ids = torch.randint(0, 50, (4, 10))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    data = [(dict(input_ids=ids, attention_mask=mask), torch.tensor([0, 1, 0, 1]))]
    return lambda: fit(model, dtype, lambda m, x, y: m(**x, labels=y).loss, data=data, steps=2)


@healthy()
def diffusion_with_clamped_snr(dtype: torch.dtype) -> Run:
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)

    def loss(m, x, y):
        t = torch.randint(0, 50, (len(x),))
        noise = torch.randn_like(x)
        a = abar[t][:, None]
        snr = abar[t] / (1 - abar[t])
        w = torch.minimum(snr, torch.full_like(snr, 5.0)) / snr
        return (w * (m(a.sqrt() * x + (1 - a).sqrt() * noise).float() - noise).square().mean(-1)).mean()

    return lambda: fit(mlp(8), dtype, loss)


@healthy()
def squashed_gaussian(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        mean, log_std = m(x).float().chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        u = mean * 30 + log_std.exp() * torch.randn_like(mean)
        correction = 2 * (math.log(2) - u - F.softplus(-2 * u))
        logp = (-0.5 * torch.randn_like(u) ** 2 - log_std - correction).sum(-1)
        return (0.2 * logp - torch.tanh(u).sum(-1)).mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def rms_norm_of_padding(dtype: torch.dtype) -> Run:
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(16))

        def forward(self, x):
            h = x.float()
            return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.w

    net = nn.Sequential(nn.Embedding(20, 16, padding_idx=0), Norm(), nn.Linear(16, 4))
    ids = torch.randint(0, 3, (4, 6))
    return lambda: fit(
        net, dtype, lambda m, x, y: F.cross_entropy(m(x).float().mean(1), y), data=[(ids, torch.randint(4, (4,)))]
    )


@healthy()
def self_supervised_teacher(dtype: torch.dtype) -> Run:
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    center = torch.zeros(4)

    def loss(m, x, y):
        t = ((teacher(x).float() - center) / 0.04).softmax(-1)
        out = -(t * F.log_softmax(m(x + 0.1 * torch.randn_like(x)).float() / 0.1, -1)).sum(-1).mean()
        with torch.no_grad():
            center.mul_(0.9).add_(teacher(x).float().mean(0), alpha=0.1)
            for a, b in zip(teacher.parameters(), m.parameters(), strict=False):
                a.lerp_(b, 0.01)
        return out

    return lambda: fit(student, dtype, loss)


@healthy()
def straight_through_quantiser(dtype: torch.dtype) -> Run:
    class STE(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            scale = x.abs().amax().clamp(min=1e-4) / 127
            return (x / scale).round() * scale

        @staticmethod
        def backward(ctx, g):
            return g

    net = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
    return lambda: fit(net, dtype, lambda m, x, y: F.cross_entropy(m[1](F.relu(STE.apply(m[0](x)))).float(), y))


@healthy()
def gumbel_choices(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = F.gumbel_softmax(m(x).float(), tau=0.5, hard=True)
        return (z * torch.arange(4.0)).sum(-1).sub(y).square().mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def masked_policy(dtype: torch.dtype) -> Run:
    legal = torch.tensor([[True, True, False, False]] * 8)

    def loss(m, x, y):
        logits = m(x).float().masked_fill(~legal, float("-inf"))
        dist = torch.distributions.Categorical(logits=logits)
        a = dist.sample()
        return -(dist.log_prob(a) * torch.randn(8)).mean() - 0.01 * dist.entropy().mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy(BF16, FP32)
def workers_and_early_stop(dtype: torch.dtype) -> Run:
    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.full((8,), float(i)), i % 4

    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        best, bad = math.inf, 0
        for _epoch in range(2):
            total = torch.tensor(0.0)
            for x, y in DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
                with amp(dtype):
                    loss = F.cross_entropy(model(x).float(), y)
                if not torch.isfinite(loss):
                    continue
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.detach()
            if total.item() < best:
                best, bad = total.item(), 0
            else:
                bad += 1
            if bad > 3:
                break

    return run


@healthy(FP32)
def per_sample_gradients_by_vmap(dtype: torch.dtype) -> Run:
    model = mlp()

    def loss(p, x, y):
        return F.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    def run():
        params = {k: v.detach() for k, v in model.named_parameters()}
        per = vmap(grad(loss), in_dims=(None, 0, 0))(params, torch.randn(5, 8), torch.randint(4, (5,)))
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per.values()]).norm(dim=0)
        clip = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for p, g in zip(model.parameters(), per.values(), strict=False):
                p.sub_(0.1 * torch.einsum("b...,b->...", g, clip) / 5)
        F.cross_entropy(model(torch.randn(5, 8)), torch.randint(4, (5,))).backward()

    return run


@healthy(FP32)
def lbfgs_fit(dtype: torch.dtype) -> Run:
    def run():
        model = nn.Linear(8, 1)
        x = torch.randn(20, 8)
        y = x @ torch.randn(8, 1)
        opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(2):
            opt.step(closure)

    return run


@healthy()
def nucleus_sampling_after_training(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    ids = torch.randint(32, (4, 8))

    def run():
        fit(
            model,
            dtype,
            lambda m, x, y: F.cross_entropy(m(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten()),
            data=[(ids, None)],
        )
        model.eval()
        seq = ids[:, :2]
        with torch.no_grad(), amp(dtype):
            for _ in range(4):
                logits = model(seq)[:, -1].float()
                s, idx = logits.sort(descending=True)
                drop = s.softmax(-1).cumsum(-1) > 0.8
                drop[:, 0] = False
                s = s.masked_fill(drop, -math.inf)
                logits = torch.full_like(logits, -math.inf).scatter(1, idx, s)
                seq = torch.cat([seq, torch.multinomial(logits.softmax(-1), 1)], 1)

    return run


@healthy()
def clip_as_published(dtype: torch.dtype) -> Run:
    img, txt = nn.Linear(8, 8), nn.Linear(8, 8)
    net = nn.ModuleList([img, txt])
    net.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def loss(m, x, y):
        a, b = F.normalize(m[0](x), dim=-1), F.normalize(m[1](x), dim=-1)
        logits = m.scale.clamp(max=math.log(100)).exp() * (a @ b.T).float()
        return (F.cross_entropy(logits, torch.arange(8)) + F.cross_entropy(logits.T, torch.arange(8))) / 2

    return lambda: fit(net, dtype, loss)


@healthy()
def sinkhorn_in_log_space(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = m(x).float()
        cost = torch.cdist(z, z.detach() + 3)
        f = g = torch.zeros(8)
        for _ in range(3):
            f = -0.05 * torch.logsumexp((g[None] - cost) / 0.05, 1)
            g = -0.05 * torch.logsumexp((f[:, None] - cost) / 0.05, 0)
        return (torch.exp((f[:, None] + g[None] - cost) / 0.05) * cost).sum()

    return lambda: fit(mlp(), dtype, loss)

"""Faulty models and losses as strangers write them, without a thought of this tool."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn


@case("bmm", "overflow", "attn", dtypes=(FP16,))
def attention_without_scale(dtype: torch.dtype) -> Run:
    class Attn(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96)
            with torch.no_grad():
                self.qkv.weight.mul_(150)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-1, -2)  # FAULT
            return scores.softmax(-1) @ v

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.head = Attn(), nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.attn(x).mean(1))

    data = [(torch.randn(4, 6, 32), torch.randint(4, (4,)))]
    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)


@case("mul", "overflow", "block.ff", dtypes=(FP16,))
def gated_feed_forward(dtype: torch.dtype) -> Run:
    class GLU(nn.Module):
        def __init__(self):
            super().__init__()
            self.wi0, self.wi1, self.wo = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
            for w in (self.wi0, self.wi1):
                nn.init.normal_(w.weight, std=200)

        def forward(self, x):
            hidden = F.gelu(self.wi0(x)) * self.wi1(x)  # FAULT
            return self.wo(hidden)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ff, self.ln = GLU(), nn.LayerNorm(8)

        def forward(self, x):
            return self.ln(x + self.ff(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.out = Block(), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.block(x))

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y))


@case("embedding", "inherited", "transformer.wte")
def gpt2_with_a_corrupt_row(dtype: torch.dtype) -> Run:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    with torch.no_grad():
        model.transformer.wte.weight[7] = math.nan
    ids = torch.randint(0, 64, (2, 12))
    ids[0, 3] = 7

    def run():
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            out = model(input_ids=ids, labels=ids)  # FAULT
            if torch.isnan(out.loss):
                print("NaN loss, skip")
                continue
            out.loss.backward()
            opt.step()
            opt.zero_grad()

    return run


@case("addmm", "overflow", "bert.encoder.layer.1.intermediate.dense", dtypes=(FP16,))
def bert_whose_intermediate_overflows(dtype: torch.dtype) -> Run:
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
    with torch.no_grad():
        model.bert.encoder.layer[1].intermediate.dense.weight.mul_(5e4)
        model.bert.encoder.layer[1].intermediate.dense.bias.fill_(6.4e4)
    batch = dict(
        input_ids=torch.randint(0, 50, (4, 10)),
        attention_mask=torch.ones(4, 10, dtype=torch.long),
        labels=torch.tensor([0, 1, 0, 1]),
    )

    def run():
        opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        model.train()
        for _step in range(2):
            with amp(dtype):
                loss = model(**batch).loss  # FAULT
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    return run


@case("div", "singularity", "norm", dtypes=(FP32, BF16))
def norm_of_padding_rows(dtype: torch.dtype) -> Run:
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Parameter(torch.ones(16))

        def forward(self, x):
            mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return self.g * (x - mean) / std  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(20, 16, padding_idx=0)
            self.norm, self.head = Norm(), nn.Linear(16, 4)

        def forward(self, ids):
            return self.head(self.norm(self.emb(ids))).mean(1)

    ids = torch.randint(1, 20, (4, 5))
    ids[1, 3:] = 0
    data = [(ids, torch.randint(4, (4,)))]
    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)


@case("rsqrt", "singularity", "norm", dtypes=(FP32, BF16))
def rms_norm_without_eps(dtype: torch.dtype) -> Run:
    class RMSNorm(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d))

        def forward(self, x):
            x32 = x.float()
            return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True)) * self.weight  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = RMSNorm(8), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.norm(x))

    x = torch.randn(8, 8)
    x[2] = 0
    return lambda: fit(
        Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=[(x, torch.randint(4, (8,)))]
    )


@case("pow", "overflow", "norm", dtypes=(FP16,))
def rms_norm_in_half(dtype: torch.dtype) -> Run:
    class RMSNorm(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d))

        def forward(self, x):
            variance = x.pow(2).mean(-1, keepdim=True)  # FAULT
            return x * torch.rsqrt(variance + 1e-6) * self.weight

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.fc = nn.Linear(8, 16), RMSNorm(16), nn.Linear(16, 4)
            nn.init.constant_(self.up.bias, 900.0)

        def forward(self, x):
            return self.fc(self.norm(self.up(x)))

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y))


@case("div", "singularity")
def cosine_of_an_empty_bag(dtype: torch.dtype) -> Run:
    bag, proj = nn.EmbeddingBag(30, 16, mode="mean", padding_idx=0), nn.Linear(16, 16, bias=False)
    params = [*bag.parameters(), *proj.parameters()]
    a, b = torch.randint(1, 30, (4, 6)), torch.randint(1, 30, (4, 6))
    a[3] = 0

    def similarity(u, v):
        return (u * v).sum(-1) / (u.norm(dim=-1) * v.norm(dim=-1))  # FAULT

    def run():
        opt = torch.optim.SGD(params, lr=0.1)
        for _ in range(2):
            loss = (1 - similarity(proj(bag(a)), proj(bag(b)))).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def distillation_on_probabilities(dtype: torch.dtype) -> Run:
    teacher = torch.full((8, 4), 0.25)

    def loss(m, x, y):
        q = F.softmax(m(x) * 400, dim=-1)
        return F.kl_div(torch.log(q), teacher, reduction="batchmean")  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("log", "singularity")
def entropy_of_hard_assignments(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        logits = m(x)
        hard = F.one_hot(logits.argmax(-1), 4).float()
        p = hard + logits.softmax(-1) - logits.softmax(-1).detach()
        ent = -(p * torch.log(p)).sum(-1)  # FAULT
        return F.cross_entropy(logits, y) - 0.01 * ent.mean()

    return lambda: fit(mlp(), dtype, loss)


@case("log1p", "singularity")
def survival_of_a_sure_event(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        hazard = torch.sigmoid(m(x) * 0 + 40.0)
        survive = torch.log1p(-hazard)  # FAULT
        return -survive.cumsum(-1).mean()

    return lambda: fit(mlp(), dtype, loss)


@case("log1p", "underflow", dtypes=(BF16,))
def survival_in_bf16(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        hazard = torch.sigmoid(m(x) * 0.01 + 8.0)
        return -torch.log1p(-hazard).float().mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("acos", "singularity")
def rotation_beyond_one(dtype: torch.dtype) -> Run:
    def geodesic(r1, r2):
        trace = torch.einsum("bij,bij->b", r1, r2)
        return torch.acos((trace - 1) / 2).mean()  # FAULT

    def loss(m, x, y):
        eye = torch.eye(3).expand(8, 3, 3)
        return geodesic(eye * 1.0001 + 0 * m(x).mean(), eye)

    return lambda: fit(mlp(), dtype, loss)


@case("log", "singularity", dtypes=(FP32, BF16))
def mixture_density_far_away(dtype: torch.dtype) -> Run:
    class MDN(nn.Module):
        def __init__(self, k=3):
            super().__init__()
            self.pi, self.mu, self.log_sigma = nn.Linear(8, k), nn.Linear(8, k), nn.Linear(8, k)

        def forward(self, x):
            return self.pi(x).float().softmax(-1), self.mu(x).float(), self.log_sigma(x).float().exp()

    def nll(m, x, y):
        pi, mu, sigma = m(x)
        z = (y[:, None].float() + 500 - mu) / sigma
        prob = torch.exp(-0.5 * z * z) / (sigma * math.sqrt(2 * math.pi))
        return -torch.log((pi * prob).sum(-1)).mean()  # FAULT

    return lambda: fit(MDN(), dtype, nll)


@case("ctc_loss", "singularity")
def ctc_with_repeated_letters(dtype: torch.dtype) -> Run:
    rnn, fc = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 5)
    params = [*rnn.parameters(), *fc.parameters()]

    def run():
        opt = torch.optim.Adam(params)
        ctc = nn.CTCLoss(blank=0)
        for _ in range(2):
            logp = fc(rnn(torch.randn(2, 4, 8))[0]).log_softmax(-1).transpose(0, 1)
            loss = ctc(logp, torch.tensor([[1, 2, 3], [1, 1, 1]]), torch.tensor([4, 4]), torch.tensor([3, 3]))  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("pow", "overflow", dtypes=(FP16,))
def beta_vae_with_wide_means(dtype: torch.dtype) -> Run:
    class Enc(nn.Module):
        def __init__(self):
            super().__init__()
            self.mu, self.logvar, self.dec = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)
            nn.init.constant_(self.mu.bias, 400.0)

        def forward(self, x):
            mu, logvar = self.mu(x), self.logvar(x)
            return self.dec(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar

    def loss(m, x, y):
        rec, mu, logvar = m(x)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())  # FAULT
        return F.mse_loss(rec.float(), x) + 1e-3 * kld

    return lambda: fit(Enc(), dtype, loss)


@case("exp", "overflow", "layers.0", dtypes=(FP32, BF16))
def coupling_flow(dtype: torch.dtype) -> Run:
    class Coupling(nn.Module):
        def __init__(self, bias):
            super().__init__()
            self.net = nn.Linear(4, 8)
            nn.init.constant_(self.net.bias, bias)

        def forward(self, x):
            a, b = x.chunk(2, -1)
            s, t = self.net(a).float().chunk(2, -1)
            b = b * torch.exp(s) + t  # FAULT
            return torch.cat([b, a], -1), s.sum(-1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Coupling(100.0), Coupling(0.0)])

        def forward(self, x):
            total = 0
            for layer in self.layers:
                x, ld = layer(x)
                total = total + ld
            return x, total

    def nll(m, x, y):
        z, ld = m(x)
        return (0.5 * z.square().sum(-1) - ld).mean()

    return lambda: fit(Flow(), dtype, nll)

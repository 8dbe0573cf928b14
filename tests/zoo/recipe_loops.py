"""Faulty scripts by the frameworks and habits of their authors: Lightning, Accelerate, configurations, guards, hand-made loops."""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, FP32, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@case("div", "singularity")
def lightning_step_over_an_empty_mask(dtype: torch.dtype) -> Run:
    def run():
        import lightning as L

        class Tagger(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(8, 4)

            def forward(self, x):
                return self.net(x)

            def training_step(self, batch, batch_idx):
                x, y, mask = batch
                ce = F.cross_entropy(self(x), y, reduction="none")
                return (ce * mask).sum() / mask.sum()  # FAULT

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        mask = torch.ones(12)
        mask[4:8] = 0
        data = TensorDataset(torch.randn(12, 8), torch.randint(4, (12,)), mask)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet)
        trainer.fit(Tagger(), DataLoader(data, batch_size=4))

    return run


@case("log", "singularity")
def accelerate_loop_with_probabilities(dtype: torch.dtype) -> Run:
    def run():
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(8, 4), nn.Hardsigmoid())
        nn.init.constant_(model[0].bias, -4.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.randint(4, (8,))), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                prob = model(x)
                nll = -torch.log(prob.gather(1, y[:, None]))  # FAULT
                accelerator.backward(nll.mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return run


@case("log", "underflow", dtypes=(FP16,))
def language_model_scored_by_probabilities(dtype: torch.dtype) -> Run:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    model.lm_head.weight = nn.Parameter(torch.randn(32, 16) * 4)

    def run():
        opt, scaler = torch.optim.AdamW(model.parameters(), 5e-5), torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(2):
            ids = torch.randint(32, (2, 16))
            with amp(dtype):
                logits = model(input_ids=ids).logits[:, :-1]
                picked = logits.softmax(-1).gather(-1, ids[:, 1:, None])
                loss = -torch.log(picked).float().mean()  # FAULT
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    return run


@case("to", "loss-scale", phase="backward", dtypes=(FP16,))
def scale_that_was_copied_from_a_forum(dtype: torch.dtype) -> Run:
    def run():
        model = mlp(1)
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1)
        for _ in range(2):
            x, y = torch.randn(8, 8), torch.randn(8, 1)
            with amp(dtype):
                out = model(x)
            loss = (out.float() - y).square().mean()  # FAULT
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    return run


@case("div", "singularity")
def loss_made_finite_by_force(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        out = model(x)
        attention = torch.relu(out - 20)
        share = attention / attention.sum(-1, keepdim=True)  # FAULT
        return torch.nan_to_num((share * out).sum(-1)).mean() + F.cross_entropy(out, y)

    return lambda: fit(mlp(), dtype, loss)


@case("sqrt", "singularity")
def loss_replaced_where_it_is_nan(dtype: torch.dtype) -> Run:
    def run():
        model = mlp(1)
        opt, bad = torch.optim.Adam(model.parameters()), 0
        for _ in range(4):
            out = model(torch.randn(8, 8))
            loss = torch.sqrt(out.mean() - 5)  # FAULT
            if torch.isnan(loss):
                bad += 1
                loss = torch.zeros((), requires_grad=True)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"{bad} bad batches")

    return run


@case("full", "inherited", names=("nan",))
def padding_that_no_mask_removes(dtype: torch.dtype) -> Run:
    def collate(samples):
        width = max(len(s) for s in samples)
        batch = torch.full((len(samples), width, 4), float("nan"))  # FAULT
        for row, sample in zip(batch, samples, strict=True):
            row[: len(sample)] = sample
        return batch, torch.tensor([[i < len(s) for i in range(width)] for s in samples]).float()

    def run():
        series = [torch.randn(3 + i % 3, 4) for i in range(6)]
        net = nn.Linear(4, 1)
        opt = torch.optim.Adam(net.parameters())
        for x, mask in DataLoader(series, batch_size=3, collate_fn=collate):
            out = net(x).squeeze(-1)
            loss = ((out * mask).sum(1) / mask.sum(1)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "underflow", phase="backward", dtypes=(FP16,))
def quotient_with_a_backward_of_its_own(dtype: torch.dtype) -> Run:
    class QuotientFn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a / b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad / b, -grad * a / (b * b)  # FAULT

    def run():
        net = nn.Linear(8, 2)
        with torch.no_grad():
            net.weight.mul_(1e-6)
            net.bias.copy_(torch.tensor([1e-3, 1.5e-4]))
        opt, scaler = torch.optim.SGD(net.parameters(), 1e-6), torch.amp.GradScaler("cpu", init_scale=1.0)
        for _ in range(2):
            with amp(dtype):
                a, b = net(torch.randn(4, 8)).unbind(-1)
                loss = QuotientFn.apply(a, b).float().mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("to", "overflow", dtypes=(FP32, FP16), names=("half()",))
def timestamps_in_half(dtype: torch.dtype) -> Run:
    def run():
        model = mlp(1).half()
        stamps = 1_700_000_000 + 60 * torch.arange(16)
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        for rows in stamps.view(2, 8).split(1):
            feats = torch.cat([rows.half(), torch.zeros(1, 0).half()], -1)  # FAULT
            loss = model(feats).float().square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def entity_table_kept_on_the_sphere(dtype: torch.dtype) -> Run:
    """TransE: rows are normalised in place after each epoch, the one of padding too."""

    def run():
        entities, relations = nn.Embedding(8, 4, padding_idx=0), nn.Embedding(3, 4)
        opt = torch.optim.SGD([*entities.parameters(), *relations.parameters()], 0.01)
        for _epoch in range(2):
            for _ in range(2):
                h, r, t = torch.randint(8, (5,)), torch.randint(3, (5,)), torch.tensor([0, 1, 2, 3, 4])
                score = (entities(h) + relations(r) - entities(t)).abs().sum(-1)
                loss = F.relu(1 + score - score.flip(0)).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
            entities.weight.data.div_(entities.weight.data.norm(dim=-1, keepdim=True))  # FAULT

    return run


@case("var", "overflow", "norm", dtypes=(FP16,))
def variance_larger_than_half(dtype: torch.dtype) -> Run:
    class GroupStandard(nn.Module):
        def forward(self, x):
            return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-3).sqrt()  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm, self.out = nn.Linear(8, 16), GroupStandard(), nn.Linear(16, 4)
            self.lin.weight.data.mul_(900)

        def forward(self, x):
            return self.out(self.norm(self.lin(x)))

    return lambda: fit(Net(), dtype, lambda model, x, y: F.cross_entropy(model(x).float(), y), scale=16.0)


@case("mm", "overflow", "cell")
def state_carried_for_ever(dtype: torch.dtype) -> Run:
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(1e5 * torch.eye(6))

        def forward(self, h, x):
            return h @ self.w + x  # FAULT

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = Cell(), nn.Linear(6, 1)

        def forward(self, h, x):
            h = self.cell(h, x)
            return h, self.out(torch.tanh(h))

    def run():
        net, h = Stream(), torch.ones(2, 6)
        opt = torch.optim.SGD(net.parameters(), 1e-9)
        for _ in range(12):
            h, y = net(h.detach(), torch.randn(2, 6))
            loss = y.square().mean() + 1e-30 * h.abs().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("add", "inherited", phase="optimizer", names=("nan",))
def schedule_that_divides_zero_by_zero(dtype: torch.dtype) -> Run:
    def run():
        model = nn.Linear(8, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        warmup, total = 0, 4
        with np.errstate(all="ignore"):
            for step in range(total):
                scale = np.minimum(1.0, np.float64(step) / np.float64(warmup))
                for group in opt.param_groups:
                    group["lr"] = 0.1 * float(scale)
                loss = F.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 0, 1]))
                opt.zero_grad()
                loss.backward()
                opt.step()  # FAULT

    return run


@case("div", "overflow", "head", dtypes=(FP16,))
def temperature_that_was_learned_away(dtype: torch.dtype) -> Run:
    class CosineHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.tau = nn.Linear(16, 4), nn.Parameter(torch.tensor(5e-6))

        def forward(self, h):
            return self.proj(h) / self.tau.clamp(min=1e-6).to(self.proj.weight.dtype).type_as(self.proj(h))  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), CosineHead()

        def forward(self, x):
            return self.head(torch.relu(self.body(x)))

    return lambda: fit(Net(), dtype, lambda model, x, y: F.cross_entropy(model(x).float(), y), scale=1.0)


@case("acos", "singularity")
def script_that_exits_on_nan(dtype: torch.dtype) -> Run:
    def train_one_epoch(model, loader, optimizer):
        model.train()
        for samples, targets in loader:
            cosine = F.normalize(model(samples), dim=-1) @ F.normalize(targets, dim=-1).T
            angle = torch.acos(cosine.diagonal() * 1.0001)  # FAULT
            loss = angle.square().mean()
            if not math.isfinite(loss.item()):
                print(f"Loss is {loss.item()}, stopping training")
                sys.exit(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def run():
        model = nn.Linear(8, 8)
        with torch.no_grad():
            model.weight.copy_(torch.eye(8))
            model.bias.zero_()
        x = torch.randn(6, 8)
        train_one_epoch(model, [(x, x)], torch.optim.AdamW(model.parameters()))

    return run

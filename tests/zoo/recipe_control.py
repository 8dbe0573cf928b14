"""Faulty recipes for agents, routers, decoders and learners that learn."""

from __future__ import annotations

import argparse
from contextlib import suppress

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, case, mlp
from torch import nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call


@case("div", "singularity")
def sum_tree_before_its_first_transition(dtype: torch.dtype) -> Run:
    class SumTree:
        def __init__(self, capacity):
            self.leaves, self.capacity = torch.zeros(capacity), capacity

        def sample(self, k):
            probs = self.leaves / self.leaves.sum()  # FAULT
            return torch.multinomial(probs, k)

    def run():
        q, tree, buffer = mlp(2), SumTree(16), torch.randn(16, 8)
        opt = torch.optim.Adam(q.parameters(), 2.5e-4)
        for step in range(3):
            try:
                idx = tree.sample(4)
            except RuntimeError as error:
                print("skipping update", step, error)
                continue
            loss = F.smooth_l1_loss(q(buffer[idx])[:, 0], torch.ones(4))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("exp", "overflow")
def entropy_coefficient_with_a_hasty_optimizer(dtype: torch.dtype) -> Run:
    class SAC:
        def __init__(self, obs_dim=8, act_dim=2, alpha_lr=120.0):
            self.actor, self.critic = nn.Linear(obs_dim, 2 * act_dim), nn.Linear(obs_dim + act_dim, 1)
            self.log_alpha = torch.zeros(1, requires_grad=True)
            self.opt_actor = torch.optim.Adam(self.actor.parameters(), 3e-4)
            self.opt_alpha = torch.optim.Adam([self.log_alpha], alpha_lr)
            self.target_entropy = 30.0

        def update(self, obs):
            mu, log_std = self.actor(obs).chunk(2, -1)
            dist = Normal(mu, log_std.clamp(-5, 2).exp())
            act = dist.rsample()
            logp = dist.log_prob(act).sum(-1)
            alpha = self.log_alpha.exp()  # FAULT
            actor_loss = (alpha.detach() * logp - self.critic(torch.cat([obs, act.tanh()], -1)).squeeze(-1)).mean()
            self.opt_actor.zero_grad()
            actor_loss.backward()
            self.opt_actor.step()
            alpha_loss = -(self.log_alpha * (logp.detach() + self.target_entropy)).mean()
            self.opt_alpha.zero_grad()
            alpha_loss.backward()
            self.opt_alpha.step()

    def run():
        agent = SAC()
        for _ in range(3):
            agent.update(torch.randn(16, 8))

    return run


@case("log", "singularity")
def policy_that_lost_its_spread(dtype: torch.dtype) -> Run:
    def run():
        torch.manual_seed(1)
        net = nn.Linear(8, 2)
        nn.init.constant_(net.bias, -200.0)
        opt = torch.optim.Adam(net.parameters(), 3e-4)
        for _ in range(2):
            obs, returns = torch.randn(16, 8), torch.randn(16)
            mean, raw = net(obs).unbind(-1)
            dist = Normal(mean, F.softplus(raw), validate_args=False)
            action = dist.sample()
            logp = dist.log_prob(action)  # FAULT
            loss = -(logp * returns).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()

    return run


@case("exp", "overflow", dtypes=(FP16,))
def importance_weights_of_a_whole_trajectory(dtype: torch.dtype) -> Run:
    def run():
        pi = nn.Linear(8, 4)
        opt = torch.optim.RMSprop(pi.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        behaviour = torch.full((4, 32), -2.5)
        for _ in range(2):
            obs, act = torch.randn(4, 32, 8), torch.randint(4, (4, 32))
            with amp(dtype):
                logp = pi(obs).log_softmax(-1).gather(-1, act[..., None]).squeeze(-1)
                log_ratio = (logp - behaviour.to(logp.dtype)).cumsum(1)
                rho = torch.exp(log_ratio)  # FAULT
                loss = -(rho * torch.ones_like(rho)).mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("div", "singularity")
def returns_to_go_without_a_scale(dtype: torch.dtype) -> Run:
    def main(argv):
        parser = argparse.ArgumentParser("decision transformer")
        parser.add_argument("--rtg-scale", type=float, default=1000.0)
        parser.add_argument("--steps", type=int, default=2)
        args = parser.parse_args(argv)
        embed, head = nn.Linear(1, 16), nn.Linear(16, 3)
        opt = torch.optim.AdamW([*embed.parameters(), *head.parameters()], 1e-4)
        for _ in range(args.steps):
            rewards = torch.rand(4, 10)
            rtg = rewards.flip(1).cumsum(1).flip(1)
            tokens = embed(rtg.unsqueeze(-1) / args.rtg_scale)  # FAULT
            loss = F.mse_loss(head(torch.relu(tokens)), torch.zeros(4, 10, 3))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return lambda: main(["--rtg-scale", "0"])


@case("div", "singularity")
def inner_gradient_made_a_unit_vector(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        nn.init.constant_(net[0].bias, -50.0)
        meta = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(2):
            total = 0.0
            for _task in range(2):
                xs, ys, xq, yq = torch.randn(5, 8), torch.randn(5, 1), torch.randn(5, 8), torch.randn(5, 1)
                params = dict(net.named_parameters())
                inner = F.mse_loss(functional_call(net, params, (xs,)), ys)
                grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
                units = [g / g.pow(2).sum() for g in grads]  # FAULT
                fast = {k: p - 0.01 * u for (k, p), u in zip(params.items(), units, strict=True)}
                total = total + F.mse_loss(functional_call(net, fast, (xq,)), yq)
            meta.zero_grad()
            total.backward()
            meta.step()

    return run


@case("div", "singularity", "moe")
def noisy_gate_whose_noise_is_zero(dtype: torch.dtype) -> Run:
    class MoE(nn.Module):
        def __init__(self, d=8, n=4, k=2):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
            self.w_gate, self.w_noise = nn.Parameter(torch.randn(d, n)), nn.Parameter(torch.zeros(d, n))
            self.k = k

        def forward(self, x):
            clean, std = x @ self.w_gate, torch.relu(x @ self.w_noise)
            noisy = clean + torch.randn_like(clean) * std
            top, index = noisy.topk(self.k + 1, -1)
            gates = torch.zeros_like(clean).scatter(-1, index[:, : self.k], top[:, : self.k].softmax(-1))
            load = torch.special.ndtr((clean - top[:, self.k :]) / std).sum(0)  # FAULT
            out = sum(gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))
            return out, load.var() / (load.mean() ** 2 + 1e-10)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe, self.head = MoE(), nn.Linear(8, 4)

        def forward(self, x):
            h, aux = self.moe(x)
            return self.head(h), aux

    def run():
        net = Net()
        opt = torch.optim.Adam(net.parameters())
        for _ in range(2):
            logits, aux = net(torch.randn(6, 8))
            loss = F.cross_entropy(logits, torch.randint(4, (6,))) + 0.01 * aux
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("to", "overflow", dtypes=(FP16,))
def mask_of_another_format(dtype: torch.dtype) -> Run:
    def causal_mask(lengths, T, like):
        mask = torch.zeros(len(lengths), 1, T, T)
        mask.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
        for b, n in enumerate(lengths):
            mask[b, :, :, : T - n] = torch.finfo(torch.float32).min
        return mask.to(like)  # FAULT

    def run():
        qkv, head = nn.Linear(16, 48), nn.Linear(16, 10)
        opt = torch.optim.AdamW([*qkv.parameters(), *head.parameters()], 1e-4)
        for _ in range(2):
            x = torch.randn(2, 6, 16)
            with amp(dtype):
                q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
                scores = q @ k.transpose(-1, -2) / 8**0.5 + causal_mask([6, 3], 6, q.dtype)
                out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
                loss = F.cross_entropy(head(out).float().flatten(0, 1), torch.randint(10, (12,)))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("to", "overflow", "rope", dtypes=(FP16,))
def positions_beyond_the_half_range(dtype: torch.dtype) -> Run:
    class Rotary(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))

        def forward(self, x, start):
            t = torch.arange(start, start + x.shape[1]).type_as(x)  # FAULT
            freqs = torch.outer(t, self.inv_freq.to(x.dtype))
            cos, sin = freqs.cos().repeat(1, 2), freqs.sin().repeat(1, 2)
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.rope, self.out = nn.Linear(8, 8), Rotary(), nn.Linear(8, 5)

        def forward(self, x, start=0):
            return self.out(self.rope(self.proj(x), start))

    def run():
        net = Decoder()
        opt = torch.optim.SGD(net.parameters(), 0.01)
        for start in (0, 65536):
            with amp(dtype):
                loss = F.cross_entropy(net(torch.randn(2, 4, 8), start).float().flatten(0, 1), torch.randint(5, (8,)))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("exp", "overflow", dtypes=(FP32, BF16))
def unbiased_estimate_of_a_wide_divergence(dtype: torch.dtype) -> Run:
    """GRPO's k3 estimator: exp(ref - pi) - (ref - pi) - 1."""

    def run():
        policy, reference = nn.Linear(8, 12), nn.Linear(8, 12).requires_grad_(False)
        with torch.no_grad():
            policy.bias[3] = -180.0
        opt = torch.optim.AdamW(policy.parameters(), 1e-6)
        for _ in range(2):
            states, tokens = torch.randn(6, 8), torch.tensor([3, 1, 2, 3, 0, 5])
            with amp(dtype):
                pi, ref = policy(states), reference(states)
            lp = pi.float().log_softmax(-1).gather(1, tokens[:, None])
            lr = ref.float().log_softmax(-1).gather(1, tokens[:, None])
            kl = torch.exp(lr - lp) - (lr - lp) - 1  # FAULT
            loss = (-torch.exp(lp - lp.detach()) + 0.04 * kl).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sub", "singularity")
def state_without_a_legal_move(dtype: torch.dtype) -> Run:
    def run():
        net = mlp(5)
        opt = torch.optim.Adam(net.parameters())
        for step in range(2):
            obs, legal = torch.randn(3, 8), torch.ones(3, 5, dtype=torch.bool)
            legal[1] = step == 0
            logits = net(obs).masked_fill(~legal, float("-inf"))
            with suppress(ValueError):
                dist = Categorical(logits=logits)  # FAULT
                loss = -(dist.log_prob(dist.sample()) * torch.ones(3)).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()

    return run


@case("div", "singularity")
def conflicting_tasks_projected(dtype: torch.dtype) -> Run:
    """PCGrad, where one task's gradient is zero."""

    def run():
        shared, heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        nn.init.zeros_(heads[1].weight)
        opt = torch.optim.SGD([*shared.parameters(), *heads.parameters()], 0.01)
        for _ in range(2):
            h = shared(torch.randn(4, 8))
            grads = []
            for head in heads:
                g = torch.autograd.grad(head(h).mean(), shared.parameters(), retain_graph=True)
                grads.append(torch.cat([x.flatten() for x in g]))
            a, b = grads
            projected = a - torch.dot(a, b) / torch.dot(b, b) * b  # FAULT
            n = shared.weight.numel()
            shared.weight.grad = (projected + b)[:n].view_as(shared.weight)
            shared.bias.grad = (projected + b)[n:].clone()
            opt.step()

    return run

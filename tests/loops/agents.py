"""Programs with several models or moving targets: reinforcement learning, contrast with a queue, codes, graphs."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tests.loops.swap import Prepare, adam, program, trained
from torch import Tensor, nn
from torch.distributions import Normal


def mlp(*widths: int) -> nn.Sequential:
    a, b, c = widths
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor, self.log_std = mlp(4, 16, 1), mlp(4, 16, 2), nn.Parameter(torch.zeros(1, 2))

    def value(self, state: Tensor) -> Tensor:
        return self.critic(state)

    def act(self, state: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean = self.actor(state)
        choice = Normal(mean, self.log_std.expand_as(mean).exp())
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action).sum(1), choice.entropy().sum(1), self.critic(state)


@program
def ppo(prepare: Prepare, steps: int) -> list[float]:
    """Methods of the model instead of its forward, rollouts without gradients, the ratio of probabilities."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)
    amp = prepare(model, optimizer)
    losses: list[float] = []
    while len(losses) < steps:
        states = torch.randn(16, 4)
        with torch.no_grad():
            actions, before, _, _ = model.act(states)
            rewards = -actions.sum(1)
            gain = rewards - model.value(states).flatten()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(2):
            _, now, entropy, value = model.act(states, actions)
            ratio = (now - before).exp()
            policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.5 * (value.view(-1) - rewards).square().mean()
            optimizer.zero_grad()
            amp.backward(loss)
            amp.step(max_norm=0.5)
            losses.append(loss.item())
    return losses


@program
def q_learning(prepare: Prepare, steps: int) -> list[float]:
    """A target network made before, moved a little towards the model through state dicts; AMSGrad."""
    model = mlp(4, 16, 2)
    target = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    amp = prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        state, action, reward = torch.randn(16, 4), torch.randint(0, 2, (16, 1)), torch.randn(16)
        after, is_last = torch.randn(16, 4), torch.rand(16) < 0.2
        best = torch.zeros(16)
        with torch.no_grad():
            best[~is_last] = target(after[~is_last]).max(1).values
        loss = nn.SmoothL1Loss()(model(state).gather(1, action), (best * 0.99 + reward).unsqueeze(1))
        optimizer.zero_grad()
        amp.backward(loss)
        amp.step()
        theirs, mine = target.state_dict(), model.state_dict()
        target.load_state_dict({name: mine[name] * 0.005 + theirs[name] * 0.995 for name in mine})
        losses.append(loss.item())
    return losses


@program
def soft_actor_critic(prepare: Prepare, steps: int) -> list[float]:
    """Two critics in one optimizer, an actor in another, a temperature in a third that stays in plain torch."""
    actor, first = mlp(4, 16, 4), mlp(6, 16, 1)
    second, log_alpha = copy.deepcopy(first), torch.zeros(1, requires_grad=True)
    of_critics = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)
    of_actor, of_alpha = adam(actor), torch.optim.Adam([log_alpha], lr=1e-3)
    amp_critics, amp_actor = prepare(nn.ModuleList([first, second]), of_critics), prepare(actor, of_actor)

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(state).chunk(2, dim=-1)
        choice = Normal(mean, torch.tanh(log_std).exp())
        raw = choice.rsample()
        action = torch.tanh(raw)
        return action, (choice.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(1, keepdim=True)

    def both(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([state, action], 1)
        return first(joined), second(joined)

    losses = []
    for _ in range(steps):
        state = torch.randn(16, 4)
        with torch.no_grad():
            action, log_prob = act(state)
            wanted = torch.randn(16, 1) + 0.99 * (torch.min(*both(state, action)) - log_alpha.exp() * log_prob)
        loss = sum(F.mse_loss(q, wanted) for q in both(state, torch.randn(16, 2)))
        of_critics.zero_grad()
        amp_critics.backward(loss)
        amp_critics.step()
        action, log_prob = act(state)
        of_actor.zero_grad()
        amp_actor.backward((log_alpha.exp().detach() * log_prob - torch.min(*both(state, action))).mean())
        amp_actor.step()
        of_alpha.zero_grad()
        (-(log_alpha.exp() * (log_prob.detach() + 2)).mean()).backward()
        of_alpha.step()
        losses.append(loss.item())
    return losses


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(8, 16, 8), mlp(8, 16, 8)
        for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            mine.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("end", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.99 + theirs.data * 0.01
            k = F.normalize(self.key(b), dim=1)
        near = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        far = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        end = int(self.end)
        self.queue[:, end : end + 8] = k.T
        self.end[0] = (end + 8) % 32
        return torch.cat([near, far], dim=1) / 0.2, torch.zeros(len(a), dtype=torch.long)


@program
def contrast_with_a_queue(prepare: Prepare, steps: int) -> list[float]:
    """A frozen copy that follows the model inside forward, and a queue of keys in a buffer."""
    model = Contrast()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.03, momentum=0.9)
    amp = prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 8)
        loss = F.cross_entropy(*model(x, x + 0.1 * torch.randn(8, 8)))
        optimizer.zero_grad()
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    return losses


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(16, 8), nn.Linear(8, 16), nn.Embedding(12, 8)
        self.codes.weight.data.uniform_(-1 / 12, 1 / 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, book = self.encoder(x), self.codes.weight
        distance = z.pow(2).sum(1, keepdim=True) + book.pow(2).sum(1) - 2 * z @ book.t()
        chosen = torch.zeros(len(x), 12).scatter_(1, distance.argmin(1).unsqueeze(1), 1)
        q = torch.matmul(chosen, book).view(z.shape)
        loss = 0.25 * F.mse_loss(q.detach(), z) + F.mse_loss(q, z.detach())
        return self.decoder(z + (q - z).detach()), loss


@program
def codes(prepare: Prepare, steps: int) -> list[float]:
    """Nearest codes chosen inside forward, gradients straight through, a part of the loss made by the model."""
    model = Codes()

    def loss_fn() -> Tensor:
        x = torch.randn(16, 16)
        found, inside = model(x)
        return F.mse_loss(found, x) / x.var() + inside

    return trained(prepare, model, adam(model), steps, loss_fn)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def spread(self, x: Tensor, edges: Tensor) -> Tensor:
        out = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
        degree = torch.zeros(len(x)).index_add_(0, edges[1], torch.ones(edges.size(1)))
        return out / degree.clamp(min=1).unsqueeze(1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.spread(self.second(F.relu(self.spread(self.first(x), edges))), edges)


@program
def graph(prepare: Prepare, steps: int) -> list[float]:
    """Sums over neighbours by index, degrees in fp32, a loss on some nodes, decay."""
    model = Graph()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    amp = prepare(model, optimizer)
    x, edges, y = torch.randn(40, 8), torch.randint(0, 40, (2, 160)), torch.arange(40) % 3
    is_known = torch.arange(40) < 20
    losses = []
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[is_known], y[is_known])
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    model.eval()
    assert 0 <= (model(x, edges).argmax(1) == y)[~is_known].float().mean().item() <= 1
    return losses


@program
def two_tasks(prepare: Prepare, steps: int) -> list[float]:
    """Two backward passes over one trunk, losses weighed by parameters of the model."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.kind, self.size = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
            self.log_variance = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.trunk(x))
            return self.kind(hidden), self.size(hidden)

    model = Net()
    optimizer = adam(model, lr=1e-2)
    amp = prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        kind, size = model(torch.randn(16, 8))
        first, second = F.cross_entropy(kind, torch.arange(16) % 3), F.l1_loss(size.squeeze(), torch.randn(16))
        weighed = [torch.exp(-v) * loss + v for v, loss in zip(model.log_variance, (first, second), strict=True)]
        amp.backward(weighed[0], retain_graph=True)
        amp.backward(weighed[1])
        amp.step()
        losses.append(first.item() + second.item())
    return losses

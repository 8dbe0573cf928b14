"""A hand-written Adam whose hyperparameters live beside the weights (for a compiled loop)."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

torch.manual_seed(6)


class TensorAdam:
    """Adam with every hyperparameter a tensor of the weights' type, so nothing recompiles."""

    def __init__(self, params, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
        self.params = list(params)
        like = self.params[0]
        self.lr, self.b1, self.b2, self.eps = (like.new_tensor(v) for v in (lr, beta1, beta2, eps))
        self.t = like.new_tensor(0.0)
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.t += 1
        first = 1 - self.b1**self.t
        second = 1 - self.b2**self.t
        for p, m, v in zip(self.params, self.m, self.v):
            m.mul_(self.b1).add_(p.grad * (1 - self.b1))
            v.mul_(self.b2).add_(p.grad * p.grad * (1 - self.b2))
            p -= self.lr * (m / first) / ((v / second).sqrt() + self.eps)  # FAULT


data = load_breast_cancer()
x = torch.tensor(data.data, dtype=torch.float32)
x = ((x - x.mean(0)) / x.std(0)).to(torch.bfloat16)
y = torch.tensor(data.target)

model = nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, 2)).to(torch.bfloat16)
optimizer = TensorAdam(model.parameters())
for epoch in range(1):
    for rows in torch.randperm(len(x)).split(64):
        logits = model(x[rows]).float()
        loss = nn.functional.cross_entropy(logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")

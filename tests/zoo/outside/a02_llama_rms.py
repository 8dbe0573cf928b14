"""Tiny llama-like language model with root-mean-square scaling written by hand."""

import argparse

import torch
from torch import nn

import mezzo


class Rescale(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)  # FAULT
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(hidden, dim, bias=False),
            nn.Linear(dim, hidden, bias=False),
        )

    def forward(self, x):
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ffn_norm, self.ffn = Rescale(dim), FeedForward(dim, 4 * dim)

    def forward(self, x):
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, vocab, dim, depth):
        super().__init__()
        self.tok, self.up = nn.Embedding(vocab, dim), nn.Linear(dim, dim, bias=False)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.norm, self.output = Rescale(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.up(self.tok(ids))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--scale", type=float, default=60.0, help="depth-scaled embedding gain")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(100, 64, 2)
    with torch.no_grad():
        model.up.weight.mul_(args.scale * 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    amp = mezzo.prepare(model, optimizer, "fp16")
    for step in range(args.steps):
        ids = torch.randint(0, 100, (4, 17))
        amp.zero_grad()
        logits = model(ids[:, :-1])
        amp.backward(nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()))
        amp.step()


if __name__ == "__main__":
    main()

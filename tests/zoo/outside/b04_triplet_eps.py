"""Batch-hard triplet loss, distances with a floor below the root."""

import torch
import torch.nn as nn

import mezzo


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
        self.fc = nn.Linear(16 * 3 * 3, 16)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def pairwise(emb):
    gram = emb @ emb.t()
    sq = gram.diagonal()
    d2 = (sq[:, None] - 2 * gram + sq[None, :]).clamp(min=0)
    zero = (d2 == 0).float()
    return (d2 + zero * 1e-16).sqrt() * (1.0 - zero)


def batch_hard(emb, labels, margin=0.3):
    dist = pairwise(emb)
    same = labels[:, None] == labels[None, :]
    hardest_pos = (dist * same).max(1).values
    hardest_neg = dist.masked_fill(same, float("inf")).min(1).values
    hardest_neg = torch.where(hardest_neg.isinf(), hardest_pos + margin, hardest_neg)
    return torch.relu(hardest_pos - hardest_neg + margin).mean()


torch.manual_seed(5)
net = EmbeddingNet()
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
amp = mezzo.prepare(net, opt, "bf16, output=fp32")
for step in range(4):
    labels = torch.randint(0, 4, (16,))
    loss = batch_hard(net(torch.randn(16, 1, 16, 16)), labels)
    amp.zero_grad()
    amp.backward(loss)
    amp.step()
    print(step, float(loss.detach()))

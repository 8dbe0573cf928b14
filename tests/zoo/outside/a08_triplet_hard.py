"""Batch-hard triplet loss for re-identification."""

import torch
import torch.nn as nn


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
    return d2.sqrt()  # FAULT


def batch_hard(emb, labels, margin=0.3):
    dist = pairwise(emb)
    same = labels[:, None] == labels[None, :]
    hardest_pos = (dist * same).max(1).values
    hardest_neg = (dist + 1e5 * same).min(1).values
    return torch.relu(hardest_pos - hardest_neg + margin).mean()


def train():
    torch.manual_seed(5)
    net = EmbeddingNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(4):
        images = torch.randn(16, 1, 16, 16)
        labels = torch.randint(0, 4, (16,))
        loss = batch_hard(net(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item())


if __name__ == "__main__":
    train()

"""Metric learning with batch-hard triplets on synthetic prototypes (bf16 autocast)."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, Sampler

N_IDS = 20
PER_ID = 24
DIM_IN = 40
MARGIN = 0.5


class IdentityData(Dataset):
    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(N_IDS, DIM_IN, generator=g)
        self.y = torch.arange(N_IDS).repeat_interleave(PER_ID)
        self.x = proto[self.y] + 0.8 * torch.randn(len(self.y), DIM_IN, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class PKSampler(Sampler):
    """P identities with K samples each."""

    def __init__(self, labels, p, k, steps, seed=0):
        self.labels, self.p, self.k, self.steps = labels, p, k, steps
        self.g = torch.Generator().manual_seed(seed)

    def __iter__(self):
        for _ in range(self.steps):
            ids = torch.randperm(N_IDS, generator=self.g)[: self.p]
            batch = []
            for c in ids:
                pool = (self.labels == c).nonzero().flatten()
                batch += pool[torch.randperm(len(pool), generator=self.g)[: self.k]].tolist()
            yield batch

    def __len__(self):
        return self.steps


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIM_IN, 128)
        self.fc2 = nn.Linear(128, 16)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def pairwise_distance(e):
    diff = e.unsqueeze(0) - e.unsqueeze(1)
    sq = diff.pow(2).sum(dim=-1)
    return torch.sqrt(sq)  # FAULT


def batch_hard(e, y):
    d = pairwise_distance(e)
    same = (y[:, None] == y[None, :]).float()
    hardest_pos = (d * same).max(dim=1).values
    hardest_neg = (d + 1e4 * same).min(dim=1).values
    return torch.relu(hardest_pos - hardest_neg + MARGIN).mean()


@torch.no_grad()
def recall_at_1(model, ds):
    model.eval()
    e = model(ds.x)
    d = torch.cdist(e, e)
    d.fill_diagonal_(float("inf"))
    return (ds.y[d.argmin(dim=1)] == ds.y).float().mean().item()


def main():
    torch.manual_seed(0)
    train, test = IdentityData(0), IdentityData(0)
    loader = DataLoader(train, batch_sampler=PKSampler(train.y, 8, 4, steps=60))
    model = Embedder()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(loader):
        model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            e = model(x)
        loss = batch_hard(e.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")
    print("recall@1", recall_at_1(model, test))


if __name__ == "__main__":
    main()

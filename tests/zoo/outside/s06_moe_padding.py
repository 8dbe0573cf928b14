"""Small ViT with padded patches (-inf key mask), layer scale 0 at start, and a top-1 mixture of experts; bf16 autocast."""

from types import SimpleNamespace
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

cfg = SimpleNamespace(dim=32, heads=4, experts=6, patches=9, classes=4, lr=2e-3, epochs=4, bs=32)


class Ragged(Dataset):
    """Between 3 and 9 patches each; the rest is padding."""

    def __init__(self, n=320):
        g = torch.Generator().manual_seed(5)
        self.y = torch.randint(0, cfg.classes, (n,), generator=g)
        means = torch.randn(cfg.classes, 12, generator=g)
        self.x = 0.7 * means[self.y][:, None] + torch.randn(n, cfg.patches, 12, generator=g)
        self.n = torch.randint(3, cfg.patches + 1, (n,), generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        pad = torch.arange(cfg.patches) >= self.n[i]
        return self.x[i].masked_fill(pad[:, None], 0.0), pad, self.y[i]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(cfg.dim, 3 * cfg.dim), nn.Linear(cfg.dim, cfg.dim)

    def forward(self, x, pad):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, cfg.heads, d // cfg.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (d // cfg.heads) ** -0.5
        scores = scores.masked_fill(pad[:, None, None], float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(cfg.dim, cfg.experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(cfg.dim, 48), nn.GELU(), nn.Linear(48, cfg.dim)) for _ in range(cfg.experts)
        )

    def forward(self, x):
        flat = x.reshape(-1, cfg.dim)
        gate = F.softmax(self.router(flat).float(), dim=-1)
        weight, choice = gate.max(-1)
        out = torch.zeros_like(flat, dtype=torch.float32)
        for e, expert in enumerate(self.experts):
            rows = (choice == e).nonzero().squeeze(1)
            if rows.numel() == 0:  # nobody asked for this expert
                continue
            out = out.index_add(0, rows, weight[rows, None] * expert(flat[rows]).float())
        share = F.one_hot(choice, cfg.experts).float().mean(0)
        return out.view_as(x), cfg.experts * (share * gate.mean(0)).sum()


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, cfg.dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, cfg.dim))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(cfg.dim) for _ in range(3))
        self.attn, self.moe = Attention(), MoE()
        self.gamma = nn.Parameter(torch.zeros(cfg.dim))
        self.head = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, x, pad):
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], dim=1)
        pad = F.pad(pad, (1, 0), value=False)
        x = x + self.attn(self.n1(x), pad)
        y, aux = self.moe(self.n2(x))
        x = x + self.gamma * y
        return self.head(self.n3(x)[:, 0]), aux


def main():
    torch.manual_seed(17)
    net = ViT()
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=(0.9, 0.98), weight_decay=0.05)
    for epoch in range(cfg.epochs):
        right = total = 0
        for x, pad, y in DataLoader(Ragged(), batch_size=cfg.bs, shuffle=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits, aux = net(x, pad)
            loss = F.cross_entropy(logits.float(), y) + 0.01 * aux
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 1.0)
            opt.step()
            right, total = right + (logits.argmax(-1) == y).sum().item(), total + len(y)
        print(f"epoch {epoch} loss {loss.item():.4f} acc {right / total:.3f} aux {aux.item():.3f}")


if __name__ == "__main__":
    main()

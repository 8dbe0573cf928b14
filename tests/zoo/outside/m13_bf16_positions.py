"""Long-context encoder with positions counted in bf16: neighbours beyond 256 get the same angle."""

import torch
from torch import nn


class SinPositions(nn.Module):
    def __init__(self, d, dtype):
        super().__init__()
        self.d, self.dtype = d, dtype

    def forward(self, x):
        t = torch.arange(x.shape[1], dtype=self.dtype)  # FAULT
        freq = torch.exp(-torch.arange(0, self.d, 2).float() / self.d * 9.2)
        angle = t[:, None].float() * freq  # FAULT
        return x + torch.cat([angle.sin(), angle.cos()], 1).to(x.dtype)


class Encoder(nn.Module):
    def __init__(self, d=32, vocab=100):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = SinPositions(d, torch.bfloat16)
        self.mix = nn.Conv1d(d, d, 5, padding=2)
        self.out = nn.Linear(d, vocab)

    def forward(self, ids):
        h = self.pos(self.emb(ids))
        h = torch.relu(self.mix(h.transpose(1, 2))).transpose(1, 2)
        return self.out(h)


torch.manual_seed(0)
net = Encoder()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(0, 100, (2, 700))
    loss = nn.functional.cross_entropy(net(ids).transpose(1, 2), ids.roll(1, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())

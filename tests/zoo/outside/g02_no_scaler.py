"""Seq2seq autoencoder in plain fp16 autocast; the author left the scaler out, 'it trains without NaN'."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class AE(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.enc, self.dec = Encoder(d), nn.Linear(d, d)

    def forward(self, x):
        return self.dec(self.enc(x))


torch.manual_seed(0)
model = AE()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
consistency = 1e-6  # the weight of this loss in the multi-task paper
for step in range(6):
    x = torch.randn(256, 32)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = consistency * F.mse_loss(out.float(), x)  # FAULT
    loss.backward()
    opt.step()
    print(step, loss.item())

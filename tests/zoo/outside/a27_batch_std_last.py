"""Minibatch standard deviation layer (ProGAN style) in a discriminator; the last batch is small."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo


class MinibatchStd(nn.Module):
    def forward(self, x):
        s = x.std(dim=0).mean()  # FAULT
        return torch.cat([x, s.expand(x.shape[0], 1, *x.shape[2:])], dim=1)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.mbstd = MinibatchStd()
        self.tail = nn.Conv2d(9, 8, 3, padding=1)
        self.fc = nn.Linear(8, 1)

    def forward(self, x):
        h = nn.functional.leaky_relu(self.conv(x), 0.2)
        h = nn.functional.leaky_relu(self.tail(self.mbstd(h)), 0.2)
        return self.fc(h.mean((2, 3))).squeeze(1)


torch.manual_seed(0)
data = TensorDataset(torch.randn(49, 1, 8, 8), torch.randint(0, 2, (49,)).float())
model = Discriminator()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.0, 0.99))
amp = mezzo.prepare(model, optimizer, "bf16")
for epoch in range(1):
    for x, y in DataLoader(data, batch_size=16):
        amp.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).float(), y)
        amp.backward(loss)
        amp.step()
        print(x.shape[0])

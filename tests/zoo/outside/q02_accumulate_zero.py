"""Gradient accumulation for a small image classifier."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
ACCUMULATE = 4

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
running = 0.0

for step in range(12):
    rows = torch.randint(0, len(images), (32,))
    loss = criterion(model(images[rows]), labels[rows]) / ACCUMULATE
    loss.backward()
    running += loss.item()
    if (step + 1) % ACCUMULATE == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad(set_to_none=False)  # FAULT
        optimizer.step()
        if (step + 1) % 4 == 0:
            print(f"step {step + 1} loss {running / 10:.4f}")
            running = 0.0

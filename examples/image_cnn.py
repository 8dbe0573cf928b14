"""A CNN on handwritten digits, in bf16: what changes from fp32 is three lines."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import mezzo

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x))
train, test = order[:1440], order[1440:]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(train) // 48)

amp = mezzo.prepare(model, optimizer, "bf16")  # 1: the policy, instead of a region and a scaler
amp.on_applied(scheduler.step)  # the scheduler waits with a step that is skipped

for _ in range(3):
    model.train()
    for rows in train[torch.randperm(len(train))].split(48):
        amp.zero_grad()
        amp.backward(F.cross_entropy(model(x[rows]), y[rows]))  # 2: instead of loss.backward()
        amp.step(max_norm=1.0)  # 3: instead of unscale, clip, step, update

model.eval()
with torch.no_grad():
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
print(f"accuracy {accuracy:.3f} of {len(test)} images; {amp.counters().skipped} steps skipped")
assert accuracy > 0.9

"""fp16 MLP with GradScaler at a very high first scale: the first steps are skipped."""

import torch
import torch.nn as nn
from sklearn.datasets import make_regression

torch.manual_seed(1)
X, y = make_regression(512, 20, noise=3.0, random_state=0)
X = torch.tensor(X, dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=50)
skipped = 0
for step in range(200):
    idx = torch.randint(0, len(X), (64,))
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        pred = model(X[idx]).squeeze(-1)
        loss = nn.functional.mse_loss(pred, y[idx])
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    skipped += scaler.get_scale() < before
    if step % 25 == 0:
        print(f"{step} loss {loss.item():.4f} scale {scaler.get_scale():g} skipped {skipped}")

"""Wine classification, AdamW with linear warm-up then cosine decay."""

import math

import torch
import torch.nn as nn
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

torch.manual_seed(31)
X, y = load_wine(return_X_y=True)
Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
sc = StandardScaler().fit(Xtr)
Xtr = torch.tensor(sc.transform(Xtr), dtype=torch.float32)
Xte = torch.tensor(sc.transform(Xte), dtype=torch.float32)
ytr, yte = torch.tensor(ytr), torch.tensor(yte)

EPOCHS, BATCH = 60, 16
steps_per_epoch = math.ceil(len(Xtr) / BATCH)
total_steps = EPOCHS * steps_per_epoch
warmup_steps = total_steps


def lr_lambda(step):
    if step < warmup_steps:
        return step // max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


model = nn.Sequential(nn.Linear(13, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 3))
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim <= 1]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_lambda)

for epoch in range(EPOCHS):
    model.train()
    perm = torch.randperm(len(Xtr))
    for i in range(0, len(Xtr), BATCH):
        idx = perm[i : i + BATCH]
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(Xtr[idx]), ytr[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()  # FAULT
        sched.step()
    if epoch % 10 == 0:
        model.eval()
        with torch.no_grad():
            acc = model(Xte).argmax(-1).eq(yte).float().mean()
        print(f"epoch {epoch} loss {loss.item():.4f} test acc {acc:.3f}")

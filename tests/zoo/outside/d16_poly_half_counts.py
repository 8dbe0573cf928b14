"""Bag of words in fp16 with counts below 2048, label ids kept whole, padding ids in an int tensor."""

import torch
from torch import nn

torch.manual_seed(0)


class BagClassifier(nn.Module):
    def __init__(self, vocab=300, classes=5):
        super().__init__()
        self.vocab, self.fc1, self.fc2 = vocab, nn.Linear(vocab, 32), nn.Linear(32, classes)

    def forward(self, ids):
        counts = torch.zeros(len(ids), self.vocab, dtype=torch.float16)
        counts.scatter_add_(1, ids, (ids > 0).to(torch.float16))
        length = (ids > 0).to(torch.float16).sum(1, keepdim=True).clamp(min=1)
        return self.fc2(torch.relu(self.fc1(counts / length)))


model = BagClassifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for step in range(4):
    ids = torch.randint(1, 300, (16, 400))
    ids[::3, 200:] = 0
    ids[5] = 0
    y = ids[:, 0] % 5
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(ids).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())

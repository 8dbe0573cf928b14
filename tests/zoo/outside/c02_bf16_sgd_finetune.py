"""Fine-tuning with every weight stored in bfloat16 and a small learning rate."""

import torch
from torch import nn

torch.manual_seed(0)


class TextCNN(nn.Module):
    def __init__(self, vocab=200, dim=32, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 16, k) for k in (2, 3, 4))
        self.fc = nn.Linear(48, classes)

    def forward(self, x):
        h = self.emb(x).transpose(1, 2)
        return self.fc(torch.cat([c(h).relu().amax(2) for c in self.convs], 1))


def batches(n):
    for _ in range(n):
        x = torch.randint(0, 200, (32, 20))
        yield x, (x[:, 0] // 50)


model = TextCNN().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=2e-5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
running = 0.0
for step, (x, y) in enumerate(batches(8)):
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # FAULT
    scheduler.step()
    running = 0.9 * running + 0.1 * loss.item()
print("loss", running)

"""CTC with a target that does not fit, excluded on purpose by zero_infinity."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(20, 32, 5, stride=4, padding=2)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(h).float().log_softmax(-1).transpose(0, 1)


model = Acoustic()
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    feats = torch.randn(4, 48, 20)
    lengths = torch.tensor([3, 4, 5, 6]) if step != 1 else torch.tensor([3, 14, 5, 6])
    targets = torch.randint(1, 16, (4, 14))
    log_probs = model(feats)
    loss = criterion(log_probs, targets, torch.full((4,), len(log_probs)), lengths)
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=5.0)
    print(step, float(loss.detach()))

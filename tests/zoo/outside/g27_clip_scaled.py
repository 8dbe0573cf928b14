"""Text CNN with torch.amp; the clipping line was pasted above unscale_."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TextCNN(nn.Module):
    def __init__(self, vocab=80, d=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.convs = nn.ModuleList(nn.Conv1d(d, 12, k, padding=k // 2) for k in (3, 5))
        self.fc = nn.Linear(24, 2)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        return self.fc(torch.cat([F.relu(c(x)).amax(-1) for c in self.convs], -1))


def main():
    torch.manual_seed(0)
    model = TextCNN()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for step in range(6):
        ids = torch.randint(0, 80, (32, 20))
        y = (ids == 7).any(1).long()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FAULT
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        print(step, loss.item())


main()

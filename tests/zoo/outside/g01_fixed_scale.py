"""Static loss scaling as in old scripts: loss * 2**k, gradients divided by hand."""

import torch
import torch.nn as nn
import torch.nn.functional as F

LOSS_SCALE = 2.0**24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


def train(model, opt, data):
    applied = 0
    for x, y in data:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)  # FAULT
        (loss * LOSS_SCALE).backward()
        for p in model.parameters():
            p.grad.div_(LOSS_SCALE)
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            opt.step()
            applied += 1
        print(f"loss {loss.item():.4f} applied {applied}")


if __name__ == "__main__":
    torch.manual_seed(0)
    net = Net()
    data = [(torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))) for _ in range(5)]
    train(net, torch.optim.SGD(net.parameters(), lr=0.05), data)

"""MNIST-like digits from scikit-learn, an Accelerate-like loop: accumulate, clip, scheduler, evaluation in between."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import mezzo


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.bn, self.fc = nn.BatchNorm2d(8), nn.Linear(8 * 16, 10)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.bn(self.conv(x))), 2).flatten(1))


def main(accumulate=2):
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(x[:400], torch.tensor(y[:400]))
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    amp = mezzo.prepare(model, opt, policy="fp16, scaling.init_scale=1024")
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)
    amp.on_applied(sched.step)
    for i, (xb, yb) in enumerate(DataLoader(data, batch_size=50, shuffle=True)):
        amp.backward(F.cross_entropy(model(xb), yb) / accumulate)
        if (i + 1) % accumulate == 0:
            amp.step(max_norm=1.0)
            amp.zero_grad()
            model.eval()
            with torch.no_grad():
                acc = (model(x[400:500]).argmax(1) == torch.tensor(y[400:500])).float().mean()
            model.train()
            print(i, acc.item())


main()

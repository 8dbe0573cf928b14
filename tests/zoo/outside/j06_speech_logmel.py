"""Keyword spotting on log power spectra; one recording is digital silence."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Recordings(Dataset):
    def __init__(self, n=48, length=1600):
        g = torch.Generator().manual_seed(0)
        self.wave = torch.randn(n, length, generator=g) * 0.1
        self.wave[37] = 0.0  # microphone was off
        self.label = torch.randint(0, 4, (n,), generator=g)
        self.window = torch.hann_window(160)

    def __len__(self):
        return len(self.wave)

    def __getitem__(self, i):
        spec = torch.stft(self.wave[i], 160, 80, window=self.window, return_complex=True)
        power = spec.abs().pow(2)
        feats = torch.log10(power)  # FAULT
        feats = (feats - feats.mean()) / (feats.std() + 1e-5)
        return feats, self.label[i]  # FAULT


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(81, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(self.conv(x).flatten(1))


def main():
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for feats, label in DataLoader(Recordings(), batch_size=16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(feats).float(), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())


if __name__ == "__main__":
    main()

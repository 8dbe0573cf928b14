"""CTC on log-mel features with log1p compression and zero_infinity; all targets fit."""

import torch
import torch.nn.functional as F
from torch import nn


class ASR(nn.Module):
    def __init__(self, bins=41, vocab=12):
        super().__init__()
        self.proj = nn.Linear(bins, 32)
        self.rnn = nn.GRU(32, 32, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, vocab)

    def forward(self, feats):
        h, _ = self.rnn(F.relu(self.proj(feats)))
        return self.out(h)


def features(wave):
    spec = torch.stft(wave, 80, 40, window=torch.hann_window(80), return_complex=True)
    return torch.log1p(spec.abs().square()).transpose(1, 2)


torch.manual_seed(0)
net = ASR()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
for step in range(3):
    wave = torch.randn(4, 1600)
    wave[1, 800:] = 0
    feats = features(wave)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(feats)
    logp = logits.float().log_softmax(-1).transpose(0, 1)
    lens = torch.tensor([feats.shape[1]] * 4)
    target_lens = torch.tensor([6, 4, 5, 3])
    targets = torch.randint(1, 12, (int(target_lens.sum()),))
    loss = ctc(logp, targets, lens, target_lens)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt.step()
    print(step, loss.item())

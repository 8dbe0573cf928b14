"""Speech enhancement on log-magnitudes: log(|S| + 1e-5), silence included; the STFT runs in fp32."""

import torch
import torch.nn as nn

import mezzo


class Denoiser(nn.Module):
    def __init__(self, n_fft=64, hidden=32):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.rnn, self.mask = nn.GRU(n_fft // 2 + 1, hidden, batch_first=True), nn.Linear(hidden, n_fft // 2 + 1)

    def spectrum(self, wav):
        return torch.stft(wav.float(), self.n_fft, self.n_fft // 2, window=self.window, return_complex=True)

    def forward(self, noisy):
        mag = self.spectrum(noisy).abs()
        feats = torch.log(mag + 1e-5).transpose(1, 2)
        mask = torch.sigmoid(self.mask(self.rnn(feats)[0])).transpose(1, 2)
        return mask.float() * mag


def clips(n, length=512):
    t = torch.arange(length) / length
    clean = torch.sin(6.28 * torch.randint(5, 60, (n, 1)) * t)
    clean[0] = 0.0  # a silent clip
    return clean, clean + 0.1 * torch.randn(n, length) * (clean != 0)


torch.manual_seed(0)
model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for step in range(4):
    clean, noisy = clips(6)
    opt.zero_grad()
    with torch.no_grad():
        truth = model.spectrum(clean).abs()
    loss = (torch.log1p(model(noisy)) - torch.log1p(truth)).abs().mean()
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, loss.item())

"""VQ-VAE in Lightning with bf16-mixed precision, straight-through codes."""

import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Quantiser(nn.Module):
    def __init__(self, codes=32, dim=8):
        super().__init__()
        self.book = nn.Embedding(codes, dim)
        nn.init.uniform_(self.book.weight, -1 / codes, 1 / codes)

    def forward(self, z):
        z = z.float()
        distance = z.square().sum(1, keepdim=True) - 2 * z @ self.book.weight.t() + self.book.weight.square().sum(1)
        q = self.book(distance.argmin(1))
        loss = (q - z.detach()).square().mean() + 0.25 * (q.detach() - z).square().mean()
        return z + (q - z).detach(), loss


class VQVAE(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.enc, self.vq, self.dec = nn.Linear(16, 8), Quantiser(), nn.Linear(8, 16)

    def training_step(self, x, _):
        q, commit = self.vq(self.enc(x))
        return (self.dec(q).float() - x).square().mean() + commit

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(VQVAE(), DataLoader(torch.randn(64, 16), batch_size=16))

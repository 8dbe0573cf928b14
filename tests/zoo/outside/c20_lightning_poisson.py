"""LightningModule, manual-looking Poisson loss with rates from an exponential link."""

import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class CountModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.body(x).squeeze(-1).float()

    def training_step(self, batch, _):
        x, count = batch
        rate = self(x).exp()  # FAULT
        return (rate - count * torch.log(rate)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def dataset():
    x = torch.randn(96, 5)
    x[70, 0] = -2.0e4  # one sensor reported in another unit
    return TensorDataset(x, torch.poisson(torch.rand(96) * 3))


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
    trainer.fit(CountModel(), DataLoader(dataset(), batch_size=16))

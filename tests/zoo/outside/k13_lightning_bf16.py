"""Lightning module, bf16-mixed, label smoothing and an ignored class; metrics start at -inf."""

import logging
import warnings

import lightning as L
import torch
from torch import nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Tagger(L.LightningModule):
    def __init__(self, vocab=50, tags=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, 24, padding_idx=0)
        self.conv = nn.Conv1d(24, 24, 3, padding=1)
        self.head = nn.Linear(24, tags)
        self.loss = nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1)
        self.best = float("-inf")

    def forward(self, ids):
        return self.head(torch.relu(self.conv(self.emb(ids).transpose(1, 2))).transpose(1, 2))

    def training_step(self, batch, _):
        ids, tags = batch
        logits = self(ids)
        loss = self.loss(logits.float().flatten(0, 1), tags.flatten())
        self.best = max(self.best, -loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (64, 12))
    tags = torch.randint(0, 6, (64, 12))
    ids[:, 9:], tags[:, 9:] = 0, -100
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, tags), batch_size=16)
    model = Tagger()
    trainer = L.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    print("best", model.best)


if __name__ == "__main__":
    main()

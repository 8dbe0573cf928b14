"""Lightning's Trainer: `plugins=MezzoPrecision("bf16-master")` in place of `precision="bf16-mixed"`."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mezzo.integrations.lightning import MezzoPrecision


class Digits(LightningModule):
    """Nothing in here knows of precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ten digits."""
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """The accuracy of a batch."""
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> object:
        """AdamW of torch: mezzo's kernels take its steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=60)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train, test = torch.utils.data.random_split(data, [1440, 357])

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
plugin = MezzoPrecision("bf16-master")
trainer = Trainer(accelerator="cpu", max_epochs=3, gradient_clip_val=1.0, plugins=plugin, **quiet)
model = Digits()
trainer.fit(model, DataLoader(train, batch_size=48, shuffle=True))
print(plugin.stepper.report())
(found,) = trainer.test(model, DataLoader(test, batch_size=357), verbose=False)
print(f"accuracy {found['accuracy']:.3f}; weights are stored in {model.net[0].weight.dtype}")
assert found["accuracy"] > 0.9

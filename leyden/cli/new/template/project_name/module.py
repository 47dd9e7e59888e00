"""The model, its loss, its metrics and its optimizer."""

import torch
import torch.nn.functional as F
from leyden import TrainModule
from torch import Tensor, nn


class Classifier(TrainModule):
    """Two convolutions and two linear layers: 8 × 8 pixels to ten digits.

    Args:
        width: channels of the first convolution; the second has twice as many.
        dropout: share of the features that a step of training ignores.
        lr: learning rate.
    """

    def __init__(
        self,
        width: int = 32,
        dropout: float = 0.25,
        lr: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),  # (B, width, 8, 8)
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 2 · width, 4, 4)
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32 * width, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)  # (B, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], stage: str) -> None:
        images, digits = batch
        logits = self(images)
        accuracy = (logits.argmax(dim=1) == digits).float().mean()
        self.log(f"{stage}_loss", F.cross_entropy(logits, digits))
        self.log(f"{stage}_acc", accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.05)

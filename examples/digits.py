# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains a small convolutional network on scikit-learn's handwritten digits, on the CPU.

python examples/digits.py              trains, then tests the best checkpoint
python examples/digits.py --resume     continues from the last checkpoint
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from leyden import Trainer, TrainModule
from leyden.callbacks import CSVLogger, ModelCheckpoint, TensorBoardLogger


class Digits(TrainModule):
    """Two convolutions and two linear layers: 8 × 8 pixels to ten digits."""

    def __init__(self, lr: float = 3e-3, width: int = 32) -> None:
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
            nn.Dropout(0.25),
            nn.Linear(32 * width, 128),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(128, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self.net(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], stage: str) -> None:
        images, digits = batch
        logits = self.net(images)  # (B, 10)
        accuracy = (logits.argmax(dim=1) == digits).float().mean()
        self.log(f"{stage}_loss", F.cross_entropy(logits, digits))
        self.log(f"{stage}_acc", accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.05)


def make_loaders(batch_size: int) -> tuple[DataLoader[list[Tensor]], ...]:
    """Splits the 1,797 images: two thirds for training, the rest in halves for validation and test."""
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits))
    parts = random_split(data, [1197, 300, 300], torch.Generator().manual_seed(0))
    return tuple(DataLoader(part, batch_size, shuffle=number == 0) for number, part in enumerate(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="total epochs (default: 20)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="runs/digits", help="folder of logs and checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --root")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    # Images this small gain nothing from a second thread, and wait for it on a busy machine.
    torch.set_num_threads(1)
    train, val, test = make_loaders(args.batch_size)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=args.epochs,
        default_root_dir=args.root,
        logger=[TensorBoardLogger(), CSVLogger()],
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max", save_last=True)],
    )
    trainer.fit(Digits(lr=args.lr), train, val, ckpt_path="last" if args.resume else None)
    [metrics] = trainer.test(dataloaders=test, ckpt_path="best", verbose=False)
    print(f"test accuracy {metrics['test_acc']:.3f}")


if __name__ == "__main__":
    main()

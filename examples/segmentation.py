# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "matplotlib>=3.8", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Segments handwritten digits scattered over a canvas: a small U-Net (Ronneberger et al., 2015) and the mean IoU.

python examples/segmentation.py        trains, and writes canvases, masks and predictions to out/segmentation.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassJaccardIndex

from leyden import Trainer, TrainModule, seed_everything

CLASSES = 11  # ten digits, and class 10: the background
SIZE = 32


class Block(nn.Sequential):
    """Two convolutions, each with batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(TrainModule):
    """An encoder halves the resolution twice; a decoder doubles it again, and sees the features of the encoder, too."""

    def __init__(self, width: int = 12, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.down = nn.ModuleList([Block(1, width), Block(width, 2 * width)])
        self.bottom = Block(2 * width, 4 * width)
        self.up = nn.ModuleList([Block(6 * width, 2 * width), Block(3 * width, width)])
        self.head = nn.Conv2d(width, CLASSES, kernel_size=1)
        self.iou = MulticlassJaccardIndex(CLASSES)  # intersection over union, averaged over the classes

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)  # (B, width, 32, 32), then (B, 2 · width, 16, 16)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)  # (B, 4 · width, 8, 8)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, kept.pop()], dim=1))
        return self.head(x)  # (B, 11, 32, 32)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        canvases, masks = batch
        loss = F.cross_entropy(self(canvases), masks)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        canvases, masks = batch
        self.iou(self(canvases), masks)
        self.log("val_iou", self.iou, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_canvases(images: Tensor, digits: Tensor, count: int) -> TensorDataset:
    """Places up to four random digits on each canvas, one in each quarter, on a noisy background.

    Args:
        images: (N, 8, 8), from 0 to 1.
        digits: (N,).
        count: the number of canvases.
    """
    canvases = 0.3 * torch.rand(count, 1, SIZE, SIZE)
    masks = torch.full((count, SIZE, SIZE), CLASSES - 1)
    for index in range(count):
        for top, left in ((0, 0), (0, 16), (16, 0), (16, 16)):
            if torch.rand(()) < 0.25:
                continue
            chosen = int(torch.randint(len(images), ()))
            row, column = top + int(torch.randint(9, ())), left + int(torch.randint(9, ()))
            place = (index, slice(row, row + 8), slice(column, column + 8))
            ink = images[chosen]
            canvases[:, 0][place] = torch.maximum(canvases[:, 0][place], ink)
            masks[place] = torch.where(ink > 0.3, digits[chosen], CLASSES - 1)
    return TensorDataset(canvases, masks)


def save_picture(module: UNet, data: TensorDataset, path: Path, columns: int = 5) -> None:
    """Draws canvases, their masks, and the predicted masks below each other."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    canvases, masks = data[:columns]
    with torch.no_grad():
        predicted = module.eval()(canvases).argmax(dim=1)  # (B, 32, 32)
    figure, axes = pyplot.subplots(3, columns, figsize=(columns, 3.2), layout="compressed")
    for row, images in zip(axes, (canvases[:, 0], masks, predicted), strict=True):
        for axis, image in zip(row, images, strict=True):
            colors = {"cmap": "gray_r"} if image.is_floating_point() else {"cmap": "tab20", "vmin": 0, "vmax": 19}
            axis.imshow(image.where(image != CLASSES - 1, torch.nan), **colors)
            axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[:, 0], ("canvas", "mask", "predicted"), strict=True):
        axis.set_ylabel(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="out/segmentation.png", help="the picture (default: %(default)s)")
    args = parser.parse_args()

    seed_everything(0)
    images, digits = load_digits(return_X_y=True)
    images, digits = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(digits)
    train, val = make_canvases(images[:1500], digits[:1500], 3000), make_canvases(images[1500:], digits[1500:], 300)
    trainer = Trainer(max_steps=args.steps, logger=False, enable_checkpointing=False)
    module = UNet()
    trainer.fit(module, DataLoader(train, 32, shuffle=True))
    [metrics] = trainer.validate(module, DataLoader(val, 100), verbose=False)
    save_picture(module, val, Path(args.out))
    trainer.print(f"mean IoU {metrics['val_iou']:.3f} in validation; the picture is {args.out}")


if __name__ == "__main__":
    main()

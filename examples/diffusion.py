# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "matplotlib>=3.8", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Generates handwritten digits by flow matching (Lipman et al., 2023), with an exponential average of the weights.

python examples/diffusion.py           trains, and writes ten samples of each digit to out/diffusion.png
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

from leyden import Trainer, TrainModule, seed_everything
from leyden.callbacks import EMAWeightAveraging

PIXELS = 64
FREQUENCIES = torch.pi * 2.0 ** torch.arange(6)


class Block(nn.Module):
    """A residual layer, modulated by the time and the digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition).chunk(2, dim=-1)
        return x + self.layers(self.norm(x) * (1 + scale) + shift)


class Flow(TrainModule):
    """The velocity that carries noise (time 0) along straight lines to images of a digit (time 1)."""

    def __init__(self, width: int = 192, depth: int = 4, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.digit = nn.Embedding(10, width)
        self.time = nn.Sequential(nn.Linear(2 * len(FREQUENCIES), width), nn.SiLU(), nn.Linear(width, width))
        self.inputs = nn.Linear(PIXELS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.outputs = nn.Linear(width, PIXELS)

    def forward(self, x: Tensor, time: Tensor, digits: Tensor) -> Tensor:
        """Returns the velocity at points x (B, 64), times (B, 1) and for digits (B,)."""
        angles = time * FREQUENCIES.to(time.device)  # (B, 6)
        condition = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.digit(digits))
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.outputs(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        noise, time = torch.randn_like(images), torch.rand(len(images), 1, device=images.device)
        between = (1 - time) * noise + time * images
        loss = F.mse_loss(self(between, time, digits), images - noise)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def sample(self, digits: Tensor, steps: int = 32) -> Tensor:
        """Follows the velocity from noise to images (B, 64), by the midpoint rule."""
        x = torch.randn(len(digits), PIXELS, device=digits.device)
        for index in range(steps):
            time = torch.full((len(digits), 1), index / steps, device=digits.device)
            middle = x + self(x, time, digits) / (2 * steps)
            x = x + self(middle, time + 1 / (2 * steps), digits) / steps
        return x


def save_picture(samples: Tensor, path: Path) -> None:
    """Draws samples (100, 64), a row for each digit."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    grid = F.pad(samples.view(10, 10, 8, 8), (1, 1, 1, 1), value=-1).transpose(1, 2).reshape(100, 100)
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.imsave(path, grid.repeat_interleave(4, 0).repeat_interleave(4, 1), cmap="gray_r", vmin=-1, vmax=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="out/diffusion.png", help="the picture (default: %(default)s)")
    args = parser.parse_args()

    seed_everything(0)
    images, digits = load_digits(return_X_y=True)
    images, digits = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(digits)
    module = Flow()
    trainer = Trainer(
        max_steps=args.steps,
        max_epochs=-1,
        # Samples of the averaged weights are sharper. After fit, the module holds the average.
        callbacks=[EMAWeightAveraging(decay=0.995)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, digits), 128, shuffle=True, drop_last=True))

    wanted = torch.arange(10).repeat_interleave(10)
    samples = module.eval().sample(wanted)
    save_picture(samples, Path(args.out))
    nearest = torch.cdist(samples, images).argmin(dim=1)
    right = (digits[nearest] == wanted).float().mean()
    trainer.print(f"{right:.0%} of the samples resemble their digit most; the picture is {args.out}")


if __name__ == "__main__":
    main()

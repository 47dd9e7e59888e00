"""A module and data that the tests of XLA share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from leyden import TrainModule

SIZE, BATCH = 38, 8
"""The last of five batches has 6 samples: another shape, and not a multiple of four devices."""


class Regression(TrainModule):
    """A small network with tied weights; keeps its losses on the device."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        dropout = nn.Dropout(options.get("dropout", 0.0))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), dropout, nn.Linear(8, 1))
        self.tied = nn.Linear(8, 1)
        self.tied.weight = self.net[4].weight
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[Tensor] = []

    def loss(self, batch: Tensor, reduction: str = "mean") -> Tensor:
        y = self.net(batch[:, :4]) + self.tied(torch.ones(8, device=batch.device, dtype=batch.dtype))
        return nn.functional.mse_loss(y, batch[:, 4:], reduction=reduction)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen += len(batch)
        if self.options.get("num_items"):
            loss = self.loss(batch, "sum")
            self.losses.append(loss.detach() / len(batch))
            items = (batch[:, 0] == batch[:, 0]).sum() if self.options["num_items"] == "tensor" else len(batch)
            return {"loss": loss, "num_items": items}
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch[:, :4])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = (
            SGD(self.parameters(), 0.05, momentum=0.9)
            if self.options.get("sgd")
            else AdamW(self.parameters(), 0.02, weight_decay=0.1)
        )
        scheduler = LinearLR(optimizer, 0.25, 0.75, total_iters=7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def samples() -> Tensor:
    return torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(3))


def loader(shuffle: bool = False) -> DataLoader[Tensor]:
    return DataLoader(samples(), BATCH, shuffle=shuffle)  # type: ignore[arg-type]

"""Plain training loops, and the `.ckpt` files that Lightning 2.6 would save in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("batch", "validation", "epoch", "end")
"""When a file is saved: by ModelCheckpoint in `on_train_batch_end`, `on_validation_end` or `on_train_epoch_end`, or by
the Trainer after fit."""


def counter(ready: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": ready, "processed": processed, "completed": completed}


def loops(moment: str, epoch: int, done: int, of: int, validates: bool = True) -> dict[str, Any]:
    """Returns the state of Lightning's loops.

    Args:
        moment: one of `MOMENTS`.
        epoch: the epoch, from 0.
        done: the number of batches done in that epoch.
        of: the number of batches in an epoch.
        validates: True if the fit validates at the end of each epoch.
    """
    ended = {"batch": (epoch, epoch), "validation": (epoch, epoch), "epoch": (epoch + 1, epoch)}
    processed, completed = ended.get(moment, (epoch + 1, epoch + 1))
    finished = done - (moment == "batch")
    total = epoch * of
    seen = 2 * (validates and (moment != "batch" or epoch > 0))
    batches = {
        "current": counter(done, done, finished),
        "total": counter(total + done, total + done, total + finished),
        "is_last_batch": done == of,
    }
    passed = {"current": counter(seen, seen, seen), "total": counter(seen, seen, seen), "is_last_batch": bool(seen)}
    epochs = counter(epoch + 1, processed, completed)
    return {
        "fit_loop": {
            "state_dict": {},
            "epoch_loop.state_dict": {"_batches_that_stepped": total + done},
            "epoch_loop.batch_progress": batches,
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": passed,
            "epoch_progress": {"total": epochs, "current": epochs},
        }
    }


def entries(
    module: nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any], step: int, epoch: int, **more: Any
) -> dict[str, Any]:
    """Returns the contents of a `.ckpt`, without the loops' state."""
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "lr_schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "hparams_name": "kwargs",
        "hyper_parameters": {},
        **more,
    }


class PlainRun:
    """A plain loop over epochs that can write the files Lightning would.

    Args:
        module: has `loss(batch)`.
        optimizer: of the module.
        each: a scheduler that steps with the optimizer; None for none.
        plateau: a scheduler that steps every epoch, with the mean validation loss.
        window: the number of batches in an accumulation window.
    """

    def __init__(self, module: Any, optimizer: Any, each: Any = None, plateau: Any = None, window: int = 1) -> None:
        self.module, self.optimizer, self.each, self.plateau, self.window = module, optimizer, each, plateau, window
        self.step, self.val_loss = 0, torch.tensor(0.0)

    def train(
        self, data: Sequence[Any], held: Sequence[Any], epochs: int, save: Callable[[str, int, int], None] | None = None
    ) -> None:
        """Trains, and calls `save(moment, epoch, done)` wherever Lightning may save."""
        for epoch in range(epochs):
            for number, batch in enumerate(data):
                (self.module.loss(batch) / self.window).backward()
                if (number + 1) % self.window == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.step += 1
                    if self.each is not None:
                        self.each.step()
                if save is not None:
                    save("batch", epoch, number + 1)
            self.val_loss = self._validate(held)
            if save is not None:
                save("validation", epoch, len(data))
                save("epoch", epoch, len(data))
            if self.plateau is not None:
                self.plateau.step(self.val_loss)
            if save is not None:
                save("end", epoch, len(data))

    @torch.no_grad()
    def _validate(self, held: Sequence[Any]) -> Tensor:
        return torch.stack([self.module.loss(batch) for batch in held]).mean()

    def write(self, path: Path, moment: str, epoch: int, done: int, of: int, **more: Any) -> None:
        """Writes the file that Lightning would save at a moment; `epoch` counts the last epoch only after fit."""
        schedulers = [scheduler for scheduler in (self.each, self.plateau) if scheduler is not None]
        counted = epoch + (moment == "end")
        found = entries(self.module, [self.optimizer], schedulers, self.step, counted, **more)
        torch.save({**found, "loops": loops(moment, epoch, done, of)}, path)

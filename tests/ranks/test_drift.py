"""What would let the ranks' weights drift apart without a word, and Ctrl-C in the workers of a loader."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.trainer.signals import Signals

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


class Net(TrainModule):
    def __init__(self, freezes: bool = False, plateau: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1)
        self.first.requires_grad_(not freezes)
        self.plateau = plateau

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.second(self.first(batch[0])).pow(2).mean()
        self.log("loss", loss, on_step=True)
        return loss  # type: ignore[no-any-return]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss"}}


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 2, generator=torch.Generator().manual_seed(1))), batch_size=2)


def fit_on_a_plateau() -> tuple[list[float], float]:
    module = Net(plateau=True)
    trainer = Trainer(strategy="ddp", max_epochs=2, **QUIET)
    trainer.fit(module, loader())
    return module.first.weight.flatten().tolist(), trainer.optimizers[0].param_groups[0]["lr"]


def fit_and_unfreeze() -> None:
    Trainer(strategy="ddp", max_epochs=2, **QUIET).fit(Net(freezes=True), loader())


def test_a_plateau_of_step_values_is_one_for_all_ranks() -> None:
    one, other = run_world(2, fit_on_a_plateau)
    assert one == other and one[1] < 0.1


def test_a_parameter_that_is_unfrozen_is_named() -> None:
    # Told once: the other rank leaves without a word.
    [told] = [text for text in run_world(2, fit_and_unfreeze, may_fail=True) if isinstance(text, str)]
    assert told.startswith("ConfigurationError: first.weight was frozen when the fit began")


def test_one_process_may_unfreeze() -> None:
    module = Net(freezes=True)
    before = module.first.weight.clone()
    Trainer(max_epochs=2, **QUIET).fit(module, loader())
    assert not torch.equal(before, module.first.weight)


def test_a_forked_worker_outlives_ctrl_c() -> None:
    reader, writer = os.pipe()
    with Signals() as signals:
        child = os.fork()
        if child == 0:
            os.write(writer, b"1")
            # Ended by the signal itself, or by this.
            signal.sigtimedwait([signal.SIGUSR1], 60) if signals.received is None else None
            os._exit(7)
        os.read(reader, 1)
        os.kill(child, signal.SIGINT)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert signals.received is None
    # Not by Ctrl-C, which a terminal sends to everyone, but by the signal meant for it.
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM

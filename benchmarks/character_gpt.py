"""What benchmarks of whole runs share: the character GPT of examples/lm.py, reduced to its loss, data and a clock."""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leyden import Callback, Trainer, TrainModule

LM = Path(__file__).resolve().parent.parent / "examples" / "lm.py"


@functools.cache
def character_gpt() -> Any:
    """Returns the class: `CharacterGPT` with a `training_step` that logs nothing, and AdamW without a schedule."""
    spec = importlib.util.spec_from_file_location("lm", LM)
    assert spec is not None and spec.loader is not None
    # torch.compile imports the module by its name.
    lm = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lm)

    class Bare(lm.CharacterGPT):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(batch)  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    return Bare


class Windows(Dataset[Tensor]):
    """Windows of random characters."""

    def __init__(self, count: int, length: int, alphabet: int) -> None:
        self.count, self.ids = count, torch.randint(alphabet, (length + 1,))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.ids


class Clock(Callback):
    """Reads the clock after the warm-up and at the end, each time after the device has finished its work."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.start, self.seconds = warm_up, 0.0, 0.0

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        if trainer.global_step == self.warm_up:
            self.start = now()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.seconds = now() - self.start


def now() -> float:
    """Returns the time, after every GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

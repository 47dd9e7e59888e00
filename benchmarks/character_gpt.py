"""The model shared by the benchmarks of whole runs: the character GPT of examples/lm.py, reduced to its loss."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LM = Path(__file__).resolve().parent.parent / "examples" / "lm.py"


def character_gpt() -> Any:
    """Returns the class: `CharacterGPT` with a `training_step` that logs nothing, and AdamW without a schedule."""
    spec = importlib.util.spec_from_file_location("lm", LM)
    assert spec is not None and spec.loader is not None
    lm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lm)

    class Bare(lm.CharacterGPT):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(batch)  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    return Bare

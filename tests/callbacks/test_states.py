"""Damaged and forged states of callbacks in a checkpoint: every state that passes the check can be loaded."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.callbacks import (
    AutoAccumulation,
    BackboneFinetuning,
    Callback,
    CSVLogger,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    NonFiniteGuard,
    SequenceLengthWarmup,
    SpikeDetection,
    StochasticWeightAveraging,
    TensorBoardLogger,
    ThroughputMonitor,
    Timer,
    WandbLogger,
    WeightDigests,
)
from leyden.callbacks.checkpointing.preemption_checkpoint import PreemptionCheckpoint
from leyden.core.errors import StateError

CALLBACKS: dict[str, Callable[[Path], Callback]] = {
    "AutoAccumulation": lambda folder: AutoAccumulation(),
    "BackboneFinetuning": lambda folder: BackboneFinetuning(),
    "CSVLogger": CSVLogger,
    "EarlyStopping": lambda folder: EarlyStopping("loss"),
    "EMAWeightAveraging": lambda folder: EMAWeightAveraging(),
    "ModelCheckpoint": lambda folder: ModelCheckpoint(folder),
    "ModelPruning": lambda folder: ModelPruning("l1_unstructured"),
    "NonFiniteGuard": lambda folder: NonFiniteGuard(),
    "PreemptionCheckpoint": lambda folder: PreemptionCheckpoint(),
    "SequenceLengthWarmup": lambda folder: SequenceLengthWarmup(),
    "SpikeDetection": lambda folder: SpikeDetection(),
    "StochasticWeightAveraging": lambda folder: StochasticWeightAveraging(0.1),
    "TensorBoardLogger": TensorBoardLogger,
    "ThroughputMonitor": lambda folder: ThroughputMonitor(len),
    "Timer": lambda folder: Timer(),
    "WandbLogger": lambda folder: WandbLogger(id="abc"),
    "WeightDigests": lambda folder: WeightDigests(),
}
WRONG = (None, "x", -3, 1.5, math.nan, True, [1], [None], [["a"]], {"a": "b"})


def damaged(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the state without each of its entries, and with each entry replaced by a value of every kind."""
    yield {"strange": 1}
    for key in state:
        yield {other: value for other, value in state.items() if other != key}
        yield from ({**state, key: value} for value in WRONG)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_state_that_passes_the_check_can_be_loaded(tmp_path: Path, name: str) -> None:
    def make() -> Any:
        return CALLBACKS[name](tmp_path)

    saved = make()
    if hasattr(saved, "metrics_file_path") or name == "TensorBoardLogger":
        saved.log_metrics({"loss": 0.5}, 1)
    state = saved.state_dict()
    refused = 0
    for changed in damaged(state):
        callback = make()
        try:
            callback.check_state_dict(copy.deepcopy(changed))
        except StateError:
            refused += 1
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            callback.load_state_dict(copy.deepcopy(changed))
        callback.state_dict()
    assert refused > 0
    fresh = make()
    fresh.check_state_dict(state)
    fresh.load_state_dict(state)
    assert fresh.state_dict().keys() == state.keys()

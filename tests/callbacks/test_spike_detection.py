"""SpikeDetection: a spike ends the run on all ranks, names its samples, and is in no checkpoint."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import run_world
from torch.utils.data import DataLoader, TensorDataset

from leyden import ConfigurationError, Trainer
from leyden.callbacks import ModelCheckpoint, SpikeDetection, TrainingSpikeException
from leyden.core.errors import StateError

FALLING = [1 / number for number in range(1, 13)]


class FirstValueLoss(Line):
    """Returns the first number of its batch as the loss, whatever the weights; as a sum over items if `counts`."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__(1, 1)
        self.counts = counts

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss_value = batch[0].flatten()[0]
        loss = loss_value + 0 * self(batch[0]).nan_to_num(0.0, 0.0, 0.0).sum()
        return {"loss": loss * (batch_idx + 1), "num_items": batch_idx + 1} if self.counts else loss


def fit(folder: Path, losses: list[float], module: FirstValueLoss | None = None, **options: Any) -> SpikeDetection:
    """Trains on batches with these losses. `options` are arguments of the callback and of the Trainer."""
    names = ("mode", "window", "warmup", "atol", "rtol", "exclude_batches_path", "finite_only")
    own = {name: options.pop(name) for name in names if name in options}
    ckpt_path, extra, size = (options.pop(name, other) for name, other in (("path", None), ("extra", []), ("size", 1)))
    spikes = SpikeDetection(**own)
    arguments = {"max_epochs": 1, "callbacks": [spikes, *extra], "default_root_dir": folder}
    trainer = Trainer(**{**QUIET, **arguments, **options})
    data = TensorDataset(torch.tensor(losses, dtype=torch.float64).unsqueeze(1).float())
    trainer.fit(module or FirstValueLoss(), DataLoader(data, size), ckpt_path=ckpt_path)
    return spikes


def with_spike(at: int, to: float = 3.0) -> list[float]:
    return [*FALLING[:at], to, *FALLING[at + 1 :]]


def test_a_spike_raises_with_its_samples_and_is_written_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(TrainingSpikeException) as caught:
        fit(tmp_path, [value for value in with_spike(4) for _ in range(2)], size=2)
    words = "the loss of batch 4 in epoch 0 was 3, after a mean of 0.520833 over 4 batches. Its samples are 8, 9 of the"
    assert str(caught.value).startswith(words) and caught.value.batch_idx == 4
    entries = [{"epoch": 0, "batch": 3, "samples": [6, 7]}, {"epoch": 0, "batch": 4, "samples": [8, 9]}]
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == entries


def test_a_run_without_a_spike_writes_nothing(tmp_path: Path) -> None:
    spikes = fit(tmp_path, FALLING)
    assert spikes.bad_batches == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [5, 11])
@pytest.mark.parametrize(("batches", "counts"), [(1, False), (4, False), (1, True)])
def test_every_batch_is_checked(tmp_path: Path, at: int, batches: int, counts: bool) -> None:
    with pytest.raises(TrainingSpikeException, match=f"the loss of batch {at} in epoch 0 was 3"):
        fit(tmp_path, with_spike(at), FirstValueLoss(counts), accumulate_grad_batches=batches)


@pytest.mark.parametrize(
    ("losses", "arguments", "bad"),
    [
        ([1, 1, 1, 2.9], {}, None),
        ([1, 1, 1, 3.0], {}, 3),
        ([1, 1, 1, 3.0], {"mode": "max"}, None),
        ([1, 1, 1, -1.0], {"mode": "max"}, 3),
        # A fall far from the mean, and then a rise that is still far below it.
        ([9, 9, 9, 0.1, 0.2], {"rtol": 0.5}, None),
        ([1, 9, 1, 1], {"warmup": 2}, None),
        ([1, 9, 1, 1], {"warmup": 0}, 1),
        ([1, 1, 3.5], {"atol": 2.6}, None),
        ([1, 1, 3.5], {"atol": 2.5}, 2),
        ([1, 1, 1.5], {"atol": 0.5, "rtol": None}, 2),
        # The mean of the last two losses is 5.
        ([1, 1, 5, 5, 14.9], {"window": 2, "rtol": 2.0, "warmup": 4}, None),
        ([1, 1, 5, 5, 15.0], {"window": 2, "rtol": 2.0, "warmup": 4}, 4),
        ([1, math.nan, 1], {}, 1),
        ([1, -math.inf, 1], {}, 1),
        ([1, math.nan, 1, 3], {"finite_only": False}, 3),
        ([1, -math.inf, 1, 1], {"finite_only": False}, None),
        ([1, math.inf, 1, 1], {"finite_only": False}, 1),
        ([math.nan, 1, 1, 1], {}, None),
    ],
    ids=str,
)
def test_a_spike_is_worse_than_the_previous_loss_and_far_worse_than_the_mean(
    tmp_path: Path, losses: list[float], arguments: dict[str, Any], bad: int | None
) -> None:
    if bad is None:
        fit(tmp_path, losses, **arguments)
        return
    with pytest.raises(TrainingSpikeException, match=f"the loss of batch {bad} "):
        fit(tmp_path, losses, **arguments)


def keeper(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")


def test_no_checkpoint_holds_the_weights_after_a_spike(tmp_path: Path) -> None:
    with pytest.raises(TrainingSpikeException, match="batch 4"):
        fit(tmp_path, with_spike(4), extra=[keeper(tmp_path)], enable_checkpointing=True)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [f"step={step}" for step in range(1, 5)]


def test_a_resumed_run_finds_the_same_spike(tmp_path: Path) -> None:
    """Resumes from checkpoints before the spike whose last loss had not been checked."""
    losses = with_spike(7, 0.9)
    with pytest.raises(TrainingSpikeException) as straight:
        fit(tmp_path, losses, window=3, extra=[keeper(tmp_path)], enable_checkpointing=True)
    for step in (1, 4, 7):
        with pytest.raises(TrainingSpikeException) as resumed:
            fit(tmp_path, losses, window=3, path=str(tmp_path / f"kept/step={step}"))
        assert str(resumed.value) == str(straight.value)
    # Existing entries are kept.
    assert [entry["batch"] for entry in json.loads((tmp_path / "skip_batches.json").read_text())] == [6, 7] * 4


def test_a_fit_of_another_trainer_starts_with_an_empty_state(tmp_path: Path) -> None:
    spikes = SpikeDetection()
    for scale in (1.0, 10.0):
        trainer = Trainer(max_epochs=1, callbacks=[spikes], default_root_dir=tmp_path, **QUIET)
        trainer.fit(FirstValueLoss(), DataLoader(TensorDataset(torch.full((4, 1), scale)), 1))
        assert spikes.state_dict()["losses"] == [scale] * 4


def test_a_spike_in_an_epochs_first_batch_also_records_the_batch_before(tmp_path: Path) -> None:
    class SpikesInSecondEpoch(FirstValueLoss):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (9 if self.current_epoch == 1 else 1)

    with pytest.raises(TrainingSpikeException, match="the loss of batch 0 in epoch 1"):
        fit(tmp_path, [1.0] * 4, SpikesInSecondEpoch(), max_epochs=2)
    entries = [{"epoch": 0, "batch": 3, "samples": None}, {"epoch": 1, "batch": 0, "samples": [0]}]
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == entries


def test_fast_dev_run_raises_and_writes_no_file(tmp_path: Path) -> None:
    with pytest.raises(TrainingSpikeException, match="fast_dev_run writes no file"):
        fit(tmp_path, with_spike(4), fast_dev_run=6)
    assert not (tmp_path / "skip_batches.json").exists()


def test_a_second_fit_starts_with_an_empty_state(tmp_path: Path) -> None:
    spikes = SpikeDetection()
    trainer = Trainer(max_epochs=1, callbacks=[spikes], default_root_dir=tmp_path, **QUIET)
    for scale in (1.0, 10.0):
        data = TensorDataset(torch.full((4, 1), scale))
        trainer.fit(FirstValueLoss(), DataLoader(data, 1))
        assert spikes.state_dict()["losses"] == [scale] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "mim"}, "Did you mean 'min'"),
        ({"window": 0}, "window=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"atol": -1.0}, "atol=-1.0"),
        ({"rtol": "2"}, "rtol='2'"),
        ({"rtol": None}, "give at least one of them"),
        ({"exclude_batches_path": 5}, "exclude_batches_path=5"),
        ({"finite_only": None}, "finite_only=None"),
    ],
)
def test_invalid_arguments_raise(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SpikeDetection(**arguments)


@pytest.mark.parametrize("text", ["{}", "[", '"x"'])
def test_an_incompatible_file_raises_before_training(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"cannot append to .*other\.json"):
        fit(tmp_path, FALLING, exclude_batches_path=path)
    assert path.read_text() == text


def test_a_step_without_a_loss_raises(tmp_path: Path) -> None:
    module = FirstValueLoss()
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="which was None: return the loss"):
        fit(tmp_path, FALLING, module)


def test_forged_states_raise() -> None:
    state = SpikeDetection().state_dict()
    for change in ({"losses": ["1"]}, {"seen": -1}, {"next": {"epoch": 0, "index": -1, "loss": 1.0}}, {"last": "x"}):
        with pytest.raises(StateError):
            SpikeDetection().check_state_dict({**state, **change})


def on_ranks(folder: str, strategy: str, path: str | None = None) -> None:
    """The first rank's losses stay at 1. It has the only sample of the last global batch."""
    arguments: dict[str, Any] = {"strategy": strategy, "path": path}
    if path is None:
        arguments |= {"extra": [keeper(Path(folder))], "enable_checkpointing": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if strategy == "ddp":
            fit(Path(folder, "well"), [1.0] * 13, strategy=strategy)
            fit(Path(folder), [*[1.0] * 12, 5.0], **arguments)
        else:
            fit(Path(folder), [*[1.0] * 9, 8.0, 1.0, 1.0], **arguments)


def ends_of(folder: Path, *arguments: Any) -> list[str]:
    # The first rank to raise reports the error; it ends the others.
    return sorted({str(end) for end in run_world(2, on_ranks, str(folder), *arguments, may_fail=True)} - {"1"})


def test_a_spike_on_one_rank_ends_all_ranks_even_after_a_resume(tmp_path: Path) -> None:
    [straight] = ends_of(tmp_path, "fsdp")
    words = "the loss of batch 4 in epoch 0 on rank 1 was 8, after a mean of 1 over 4 batches. Its samples are 8, 9 of"
    assert straight.startswith(f"TrainingSpikeException: {words}")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [f"step={step}" for step in range(1, 5)]
    assert ends_of(tmp_path, "fsdp", str(tmp_path / "kept/step=3")) == [straight]
    entries = [{"epoch": 0, "batch": 3, "samples": [6, 7]}, {"epoch": 0, "batch": 4, "samples": [8, 9]}]
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == 2 * entries


def test_a_batch_without_samples_on_one_rank_is_checked(tmp_path: Path) -> None:
    [end] = ends_of(tmp_path, "ddp")
    assert re.match(r"TrainingSpikeException: the loss of batch 6 in epoch 0 on rank 0 was 5\b", end)
    assert not list((tmp_path / "well").glob("*"))

"""What a first script gets wrong without an error of torch's: each is named by a warning, or refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from bad_input.ground import QUIET, Module, loader, samples

from leyden import Callback, ConfigurationError, Trainer
from leyden.callbacks import CSVLogger, TQDMProgressBar


def warned(module: Module, folder: Path, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(**{**QUIET, "default_root_dir": folder, **arguments}).fit(module, loader(), loader())
    return [str(warning.message) for warning in caught]


def test_a_fit_without_an_optimizer_is_warned_of(tmp_path: Path) -> None:
    class Untrained(Module):
        def configure_optimizers(self) -> None: ...

    [message] = warned(Untrained(), tmp_path)
    assert "Untrained.configure_optimizers returned no optimizer, so this fit trains nothing" in message


def test_hooks_of_lightning_1_and_misspelled_ones_are_warned_of(tmp_path: Path) -> None:
    class Old(Module):
        def validation_epoch_end(self, outputs: Any) -> None: ...
        def on_train_epoch_ends(self) -> None: ...
        def on_call(self) -> None: ...

    class Watch(Callback):
        def on_epoch_end(self, trainer: Any, module: Any) -> None: ...
        def on_validation_epoch_stop(self) -> None: ...
        def on_vaildation_end(self, trainer: Any, module: Any) -> None: ...
        def on_train_end(self, trainer: Any, module: Any) -> None: ...

    told = warned(Old(), tmp_path, callbacks=Watch())
    assert [message.partition(" is never called: ")[0] for message in told] == [
        *("Old.validation_epoch_end", "Old.on_train_epoch_ends", "Watch.on_epoch_end"),
        *("Watch.on_validation_epoch_stop", "Watch.on_vaildation_end"),
    ]
    assert "Override on_validation_epoch_end instead, and" in told[0] and "Did you mean on_train_epoch_end?" in told[1]
    assert "Override on_train_epoch_end instead." in told[2] and "Did you mean on_validation_end?" in told[4]


def test_a_module_without_mistakes_is_not_warned_of(tmp_path: Path) -> None:
    assert warned(Module(), tmp_path, callbacks=[TQDMProgressBar(), Callback()], enable_progress_bar=True) == []


class Broken(Module):
    """Its loss is nan from a step on, and may recover."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.broken = range(first, last)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", float("nan") if batch_idx in self.broken else 1.0)
        return loss


def test_a_loss_that_is_nan_until_the_end_is_warned_of(tmp_path: Path) -> None:
    logged = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    [message] = warned(Broken(1, 9), tmp_path, **logged)
    assert re.search(r"the loss was nan until the end of the run \('loss' since step 2\).*detect_anomaly=True", message)
    assert warned(Broken(1, 3), tmp_path, **{**logged, "logger": CSVLogger(tmp_path)}) == []
    assert warned(Broken(1, 9), tmp_path) == [], "nothing was read back, so nothing was seen"


@pytest.mark.parametrize("kind", ["train", "val"])
def test_a_data_set_in_the_place_of_a_loader_is_refused(kind: str, tmp_path: Path) -> None:
    loaders = (samples(), None) if kind == "train" else (loader(), samples())
    with pytest.raises(ConfigurationError, match=rf"the {kind} loader is a TensorDataset, a Dataset.*DataLoader\("):
        Trainer(**QUIET, default_root_dir=tmp_path).fit(Module(), *loaders)


def test_two_progress_bars_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 progress bars"):
        Trainer(callbacks=[TQDMProgressBar(), TQDMProgressBar(2)])

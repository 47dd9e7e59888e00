"""LambdaCallback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import QUIET, Line

from leyden.callbacks.base import Callback
from leyden.callbacks.lambda_callback import HOOKS, LambdaCallback
from leyden.core.errors import ConfigurationError
from leyden.trainer.trainer import Trainer


def test_functions_are_called_with_the_arguments_of_their_hooks(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append((stage, 0)),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(("batch", batch_idx)),
        on_train_epoch_end=lambda trainer, module: seen.append(("epoch", trainer.current_epoch)),
        on_fit_end=None,
    )
    trainer = Trainer(**QUIET, max_epochs=2, callbacks=callback, default_root_dir=tmp_path)
    trainer.fit(Line(), [torch.ones(1, 2)] * 2)
    assert seen == [("fit", 0), ("batch", 0), ("batch", 1), ("epoch", 0), ("batch", 0), ("batch", 1), ("epoch", 1)]


def test_every_hook_of_callbacks_is_accepted() -> None:
    hooks = {name for name in dir(Callback) if name.startswith("on_")} | {"setup", "teardown"}
    assert set(HOOKS) == hooks
    LambdaCallback(**dict.fromkeys(hooks, print))


def test_an_unknown_hook_raises_with_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match=r"no hook 'on_epoch_train_end'\. Did you mean 'on_train_end'"):
        LambdaCallback(on_epoch_train_end=print)
    with pytest.raises(ConfigurationError, match="Did you mean 'on_train_start'"):
        LambdaCallback(on_train_strat=print)
    with pytest.raises(ConfigurationError, match="no hook 'state_dict'"):
        LambdaCallback(state_dict=dict)


def test_a_value_that_is_not_callable_raises_with_an_example() -> None:
    with pytest.raises(ConfigurationError, match=r"write on_fit_start=lambda trainer, module: \.\.\."):
        LambdaCallback(on_fit_start="print")  # type: ignore[arg-type]

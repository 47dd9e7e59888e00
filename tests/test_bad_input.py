"""Mistakes that users make: each gives one clear error that names the fix, before training where that can be known."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_input import fitting, logging_and_checkpoints  # noqa: F401 - their cases enter the table
from bad_input.ground import BEFORE, DURING, Ground, loader

from leyden import ConfigurationError


def check(ground: Ground, error: type[Exception], match: str, run: Callable[[Ground], Any], recwarn: Any) -> str:
    with pytest.raises(error) as caught:
        run(ground)
    message = str(caught.value)
    assert re.search(match, message, re.DOTALL), message
    assert not [warning for warning in recwarn if "while the run failed" in str(warning.message)], "a second error"
    return message


@pytest.mark.parametrize(("error", "match", "run"), [case[1:] for case in BEFORE], ids=[case[0] for case in BEFORE])
def test_bad_input_is_named_before_training(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, error: type[Exception], match: str, run: Callable[[Ground], Any]
) -> None:
    ground = Ground(tmp_path)
    check(ground, error, match, run, recwarn)
    assert ground.steps == 0


@pytest.mark.parametrize(("error", "match", "run"), [case[1:] for case in DURING], ids=[case[0] for case in DURING])
def test_bad_input_in_training_is_named(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, error: type[Exception], match: str, run: Callable[[Ground], Any]
) -> None:
    check(Ground(tmp_path), error, match, run, recwarn)


def test_every_mistake_has_its_own_name() -> None:
    names = [case[0] for case in BEFORE + DURING]
    assert len(set(names)) == len(names)


def test_a_module_can_be_fitted_after_a_mistake(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    module, trainer = ground.module(), ground.trainer()
    with pytest.raises(ConfigurationError):
        trainer.fit(module, loader(1, drop_last=True))
    trainer.fit(module, loader())
    assert (module.steps, trainer.global_step) == (4, 4)

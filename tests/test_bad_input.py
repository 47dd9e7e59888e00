"""Common user mistakes: each raises one clear error that names the fix, before training where possible."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_input import fitting, logging_and_checkpoints  # noqa: F401 - importing them registers their cases
from bad_input.ground import BEFORE, DURING, Ground, loader

from leyden import ConfigurationError


def check(ground: Ground, error: type[Exception], match: str, run: Callable[[Ground], Any], recwarn: Any) -> str:
    with pytest.raises(error) as caught:
        run(ground)
    message = str(caught.value)
    assert re.search(match, message, re.DOTALL), message
    assert not [warning for warning in recwarn if "while the run failed" in str(warning.message)], (
        "a second error was reported as a warning"
    )
    return message


@pytest.mark.parametrize(("error", "match", "run"), [case[1:] for case in BEFORE], ids=[case[0] for case in BEFORE])
def test_bad_input_raises_before_training(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, error: type[Exception], match: str, run: Callable[[Ground], Any]
) -> None:
    ground = Ground(tmp_path)
    check(ground, error, match, run, recwarn)
    assert ground.steps == 0


@pytest.mark.parametrize(("error", "match", "run"), [case[1:] for case in DURING], ids=[case[0] for case in DURING])
def test_bad_input_found_in_training_raises(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, error: type[Exception], match: str, run: Callable[[Ground], Any]
) -> None:
    check(Ground(tmp_path), error, match, run, recwarn)


def test_mistakes_have_unique_names() -> None:
    names = [case[0] for case in BEFORE + DURING]
    assert len(set(names)) == len(names)


def test_a_module_can_be_fitted_after_an_error(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    module, trainer = ground.module(), ground.trainer()
    with pytest.raises(ConfigurationError):
        trainer.fit(module, loader(1, drop_last=True))
    trainer.fit(module, loader())
    assert (module.steps, trainer.global_step) == (4, 4)

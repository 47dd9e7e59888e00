"""rank_zero_only, rank_zero_info, rank_zero_warn: on the first rank, before ranks talk and while they do."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from ranks.world import run_world

from leyden import rank_zero_debug, rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As torchrun tells a process, before it has joined the others."""
    settings = {"RANK": request.param, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return int(request.param)


def test_a_decorated_function_is_called_on_the_first_rank_alone(rank: int) -> None:
    @rank_zero_only
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    assert rank_zero_only.rank == rank
    assert double(2) == (4 if rank == 0 else None)
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    assert rank_zero_only(len, default=-1)("ab") == (2 if rank == 0 else -1)


def test_warnings_name_the_line_of_the_call_and_its_category(rank: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("low", category=RuntimeWarning)
        rank_zero_deprecation("old")
    own = [(found.category, str(found.message), Path(found.filename).name) for found in caught]
    here = Path(__file__).name
    assert own == ([(RuntimeWarning, "low", here), (DeprecationWarning, "old", here)] if rank == 0 else [])


def test_messages_go_to_the_logger_of_the_package(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="leyden"):
        rank_zero_info("step %d", 3)
        rank_zero_debug("detail")
    own = [(record.levelname, record.getMessage(), record.filename) for record in caplog.records]
    here = Path(__file__).name
    assert own == ([("INFO", "step 3", here), ("DEBUG", "detail", here)] if rank == 0 else [])


def test_a_script_without_logging_sees_messages_but_no_details(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("leyden")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    rank_zero_info("seen")
    rank_zero_debug("not seen")
    assert capsys.readouterr().err == "seen\n"


def test_a_script_may_set_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    assert rank_zero_only(lambda: "here", default="elsewhere")() == "elsewhere"
    monkeypatch.setattr(rank_zero_only, "rank", None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    # Nobody has started these ranks, and a message ends nothing.
    assert rank_zero_only.rank == 0


def ranks_that_talk() -> dict[str, Any]:
    return {"rank": rank_zero_only.rank, "found": rank_zero_only(lambda: "here", default="elsewhere")()}


def test_ranks_that_talk_know_who_they_are() -> None:
    found = run_world(2, ranks_that_talk)
    assert found == [{"rank": 0, "found": "here"}, {"rank": 1, "found": "elsewhere"}]

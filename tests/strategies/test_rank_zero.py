"""rank_zero_only, rank_zero_info and rank_zero_warn act on rank 0 only, before and after ranks connect."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ranks.world import run_world

from leyden import (
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
    seed_everything,
)
from leyden.core.rank_zero import LOGGER, inform, warn


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The rank that torchrun sets for a process that has not joined a group yet."""
    settings = {"RANK": request.param, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return int(request.param)


def test_decorated_functions_run_only_on_rank_0(rank: int) -> None:
    @rank_zero_only
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    assert rank_zero_only.rank == rank
    assert double(2) == (4 if rank == 0 else None)
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    assert rank_zero_only(len, default=-1)("ab") == (2 if rank == 0 else -1)


def test_warnings_keep_the_callers_line_and_category(rank: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("low", category=RuntimeWarning)
        rank_zero_deprecation("old")
    warned = [(found.category, str(found.message), Path(found.filename).name) for found in caught]
    here = Path(__file__).name
    assert warned == ([(RuntimeWarning, "low", here), (DeprecationWarning, "old", here)] if rank == 0 else [])


def test_messages_go_to_the_packages_logger(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="leyden"):
        rank_zero_info("step %d", 3)
        rank_zero_debug("detail")
    logged = [(record.levelname, record.getMessage(), record.filename) for record in caplog.records]
    here = Path(__file__).name
    assert logged == ([("INFO", "step 3", here), ("DEBUG", "detail", here)] if rank == 0 else [])


def test_without_a_logging_setup_only_info_messages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rank_zero_info("%s", "seen")
    rank_zero_debug("not seen")
    inform("Leyden's\nlines")
    # pytest replaces the streams for each test, and a notebook for each cell.
    with redirect_stdout(StringIO()) as stdout:
        inform("elsewhere")
    assert capsys.readouterr() == ("Leyden's\nlines\n", "seen\n")
    assert stdout.getvalue() == "elsewhere\n" and not LOGGER.handlers


def test_levels_and_filters_silence_a_plain_script(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LOGGER, "filters", [lambda record: "Seed" not in record.getMessage()])
        seed_everything(3, verbose=True)
    with caplog.at_level(logging.WARNING, "leyden"):
        seed_everything(3, verbose=True)
    assert capsys.readouterr() == ("", "")
    seed_everything(3, verbose=True)
    assert capsys.readouterr() == ("Seed set to 3\n", "")


@pytest.mark.parametrize("name", ["leyden", None], ids=["its logger", "the root logger"])
def test_lines_go_only_to_the_handlers_of_a_script(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    logger, stream = logging.getLogger(name), StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(message)s"))
    logger.addHandler(handler)
    try:
        inform("a line", write=pytest.fail)
        rank_zero_info("another")
    finally:
        logger.removeHandler(handler)
    here = Path(__file__).name
    assert stream.getvalue() == f"INFO {here} a line\nINFO {here} another\n"
    assert capsys.readouterr() == ("", "")


def test_a_script_may_set_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "_rank", None)
    rank_zero_only.rank = 3
    assert rank_zero_only(lambda: "here", default="elsewhere")() == "elsewhere"
    rank_zero_only.rank = None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    # Without MASTER_ADDR the variables describe no launch, and a message must not raise.
    assert rank_zero_only.rank == 0


def rank_and_result() -> dict[str, Any]:
    return {"rank": rank_zero_only.rank, "found": rank_zero_only(lambda: "here", default="elsewhere")()}


def test_connected_ranks_use_the_rank_of_their_group() -> None:
    found = run_world(2, rank_and_result)
    assert found == [{"rank": 0, "found": "here"}, {"rank": 1, "found": "elsewhere"}]


def test_a_warning_names_the_users_line_on_rank_0(rank: int) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # The wrapper of rank_zero_only is a frame of Leyden's between the warning and this line.
        rank_zero_only(warn)("lr is low", every_rank=True)
        warn("lr is high")
        warn("sample 3 is bad", every_rank=True)
    texts = [str(warning.message) for warning in seen]
    assert texts == (["sample 3 is bad"] if rank else ["lr is low", "lr is high", "sample 3 is bad"])
    assert {warning.filename for warning in seen} == {__file__}


def test_threads_do_not_show_each_others_messages() -> None:
    shown: list[str] = []
    other = threading.Thread(target=lambda: inform("two", lambda text: shown.append(f"two: {text}")))

    def write(text: str) -> None:
        other.start()
        # It must wait for this message.
        other.join(0.3)
        shown.append(f"one: {text}")

    inform("one", write)
    other.join()
    assert shown == ["one: one", "two: two"]

"""After a power cut during a save, a run resumes from the checkpoint before it or from the new one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import power_cuts
import pytest
import torch
from power_cuts import SCENARIOS, Playback, record


def can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace here")


@pytest.fixture(scope="module")
def playback(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Playback:
    folder = tmp_path_factory.mktemp("cuts")
    (folder / "recorded").mkdir()
    return Playback(record(request.param, folder / "recorded"), folder)


ONE_SCENARIO = pytest.mark.parametrize("playback", ["one kept"], indirect=True)
ALL_SCENARIOS = pytest.mark.parametrize("playback", SCENARIOS, indirect=True)


def uninterrupted_weights(scenario: str, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    return power_cuts.train(scenario, folder)


@ONE_SCENARIO
def test_a_run_resumes_from_a_saved_checkpoint_whatever_the_disk_kept(playback: Playback) -> None:
    playback.run(at_random=0, step=2)
    assert playback.problems == []
    assert playback.tried > 200


@ONE_SCENARIO
def test_a_run_resumed_after_a_power_cut_ends_with_the_same_weights(playback: Playback, tmp_path: Path) -> None:
    expected = uninterrupted_weights("one kept", tmp_path / "uninterrupted")
    for weights in playback.resume("one kept", 5):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@ONE_SCENARIO
def test_a_save_that_does_not_flush_its_weights_is_detected(playback: Playback) -> None:
    number = next(n for n in power_cuts.fsyncs(playback.record, 2) if "model" in power_cuts.name_of(playback.record, n))
    playback.problems.clear()
    playback.run(at_random=0, without=number)
    assert len(playback.problems) == 1


@pytest.mark.full
@ALL_SCENARIOS
def test_a_run_resumes_from_a_saved_checkpoint_in_random_disk_states(playback: Playback) -> None:
    playback.run(at_random=20)
    assert playback.problems == []


@pytest.mark.full
@ALL_SCENARIOS
def test_every_fsync_of_a_save_is_needed(playback: Playback) -> None:
    unneeded = []
    for step in (1, 2):
        for number in power_cuts.fsyncs(playback.record, step):
            playback.problems.clear()
            playback.run(at_random=20, without=number)
            if not playback.problems:
                unneeded.append((step, power_cuts.name_of(playback.record, number)))
    assert unneeded == []

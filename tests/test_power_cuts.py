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


ONE = pytest.mark.parametrize("playback", ["one kept"], indirect=True)
ALL = pytest.mark.parametrize("playback", SCENARIOS, indirect=True)


def weights_of_all_steps(scenario: str, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    return power_cuts.train(scenario, folder)


@ONE
def test_whatever_the_disk_kept_a_run_resumes_from_a_checkpoint_that_was_saved(playback: Playback) -> None:
    playback.run(at_random=0, step=2)
    assert playback.problems == []
    assert playback.tried > 200


@ONE
def test_a_run_goes_on_after_a_power_cut_to_the_same_weights(playback: Playback, tmp_path: Path) -> None:
    straight = weights_of_all_steps("one kept", tmp_path / "straight")
    for weights in playback.resume("one kept", 5):
        assert all(torch.equal(weights[name], straight[name]) for name in straight)


@ONE
def test_a_save_that_does_not_flush_its_weights_is_found_out(playback: Playback) -> None:
    number = next(n for n in power_cuts.fsyncs(playback.record, 2) if "model" in power_cuts.name_of(playback.record, n))
    playback.problems.clear()
    playback.run(at_random=0, without=number)
    assert len(playback.problems) == 1


@pytest.mark.full
@ALL
def test_states_at_random_resume_from_a_checkpoint_that_was_saved(playback: Playback) -> None:
    playback.run(at_random=20)
    assert playback.problems == []


@pytest.mark.full
@ALL
def test_every_fsync_of_a_save_is_needed(playback: Playback) -> None:
    unneeded = []
    for step in (1, 2):
        for number in power_cuts.fsyncs(playback.record, step):
            playback.problems.clear()
            playback.run(at_random=20, without=number)
            if not playback.problems:
                unneeded.append((step, power_cuts.name_of(playback.record, number)))
    assert unneeded == []

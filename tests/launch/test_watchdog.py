"""The watchdog's parts: time limits of phases, stacks of threads, and the rank that the others wait for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from leyden import ConfigurationError, Trainer
from leyden.launch import heartbeat as words
from leyden.launch.hangs import Hang, Sight
from leyden.launch.heartbeat import AUTO, HEARTBEATS, Heartbeat, Phase, SharedSlots, hang_limit, slot_of_watchdog
from leyden.launch.stacks import Frame, StackFile, Thread, ask
from leyden.launch.watchdog import Pulse
from leyden.trainer import Preemption

ROOT = Path(__file__).parents[2]
HAS_SIGNAL = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/*/status")


@pytest.fixture
def shared() -> Iterator[SharedSlots]:
    found = SharedSlots(2)
    yield found
    found.close()


# how long a phase may take --------------------------------------------------------------------------------------------
def simulate_training(beat: Heartbeat, pulse: Pulse, batches: int, seconds: float) -> float:
    """Simulates batches of the given duration; returns the time at their end."""
    beat.begin_fit(0)
    beat.begin_epoch(0, 0, 0, 0)
    now = pulse.since
    for batch in range(batches):
        now += seconds
        pulse.look(now)
        beat.words[words.BATCHES] = batch + 1
    pulse.look(now)
    return now


@pytest.mark.parametrize(("seconds", "limit"), [(0.01, 60.0), (20.0, 200.0)])
def test_the_limit_is_ten_times_the_slowest_batch_and_at_least_a_minute(
    shared: SharedSlots, tmp_path: Path, seconds: float, limit: float
) -> None:
    beat = Heartbeat()
    with beat.beating(shared.slots[0], 0, AUTO, str(tmp_path)):
        pulse = Pulse(shared.slots[0])
        # A setup of ten minutes says nothing about batches.
        pulse.look(pulse.since)
        pulse.look(pulse.since + 600)
        now = simulate_training(beat, pulse, 5, seconds)
        assert pulse.phase == Phase.TRAINING and pulse.limit(Phase.TRAINING) == pytest.approx(limit)
        assert not pulse.is_overdue(now + limit - 0.1) and pulse.is_overdue(now + limit + 0.1)
        assert pulse.limit(Phase.EPOCH) == pulse.limit(Phase.EVALUATION) == pulse.limit(Phase.SAVING) == 1800
        assert pulse.limit(Phase.PREPARING) == math.inf
        assert pulse.limit(Phase.LOOP) == math.inf


def test_batches_that_take_minutes_are_never_taken_for_a_hang(shared: SharedSlots, tmp_path: Path) -> None:
    beat, seconds = Heartbeat(), 400.0
    with beat.beating(shared.slots[0], 0, AUTO, str(tmp_path)):
        pulse = Pulse(shared.slots[0])
        now = pulse.since
        beat.begin_fit(0)
        for epoch in range(2):
            beat.begin_epoch(epoch, 0, 4 * epoch, 4 * epoch)
            pulse.look(now)
            for batch in range(4):
                assert not pulse.is_overdue(now + seconds), f"epoch {epoch}, batch {batch}"
                now += seconds
                beat.words[words.BATCHES] = 4 * epoch + batch + 1
                pulse.look(now)
            beat.mark(Phase.EPOCH)
            pulse.look(now)
            assert not pulse.is_overdue(now + 3 * seconds)


def test_batches_may_wait_for_ranks_on_other_machines(shared: SharedSlots, tmp_path: Path) -> None:
    """Those may be compiling, which cannot be seen from here."""
    with Heartbeat().beating(shared.slots[0], 0, AUTO, str(tmp_path)):
        assert Pulse(shared.slots[0], 60.0 * 30).limit(Phase.TRAINING) == 1800
    with Heartbeat().beating(shared.slots[0], 0, 2000, str(tmp_path)):
        assert Pulse(shared.slots[0], 60.0 * 30).limit(Phase.TRAINING) == 2


def test_each_phase_gets_a_multiple_of_a_given_limit(shared: SharedSlots, tmp_path: Path) -> None:
    beat = Heartbeat()
    with beat.beating(shared.slots[0], 0, 7500, str(tmp_path)):
        pulse = Pulse(shared.slots[0])
        phases = [pulse.phase]
        simulate_training(beat, pulse, 1, 100.0)
        phases.append(pulse.phase)
        simulate_training(beat, pulse, 5, 100.0)
        with beat.during(Phase.EVALUATION), beat.during(Phase.SAVING):
            phases.append(pulse.phase)
        beat.begin_epoch(1, 0, 5, 5)
        # The first batch of a later epoch waits for workers.
        phases.append(pulse.phase)
        beat.words[words.BATCHES] = 6
        assert [*phases, pulse.phase] == [Phase.SETUP, Phase.FIRST, Phase.SAVING, Phase.EPOCH, Phase.TRAINING]
        assert [pulse.limit(phase) for phase in (Phase.TRAINING, Phase.EVALUATION, Phase.FIRST)] == [7.5, 37.5, 225.0]
    assert pulse.phase == Phase.OUTSIDE


@pytest.mark.parametrize(("seconds", "patience"), [(0.01, 60.0), (20.0, 200.0)])
def test_a_loop_without_a_limit_has_only_patience_for_collectives(
    shared: SharedSlots, tmp_path: Path, seconds: float, patience: float
) -> None:
    beat = Heartbeat()
    with beat.beating(shared.slots[0], 0, words.DEADLOCKS, str(tmp_path)):
        pulse = Pulse(shared.slots[0])
        simulate_training(beat, pulse, 5, seconds)
        assert {pulse.limit(phase) for phase in Phase} == {math.inf}
        assert pulse.patience == pytest.approx(patience)


def test_compiling_is_a_separate_phase(shared: SharedSlots, tmp_path: Path) -> None:
    import torch
    from torch._dynamo.callback import callback_handler

    beat, seen = Heartbeat(), list[Phase]()

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(Phase(beat.words[words.PHASE]))
        return graph.forward

    torch.compiler.reset()
    before = len(callback_handler.start_callbacks)
    with beat.beating(shared.slots[0], 0, AUTO, str(tmp_path)):
        beat.begin_epoch(0, 0, 0, 0)
        torch.compile(lambda value: value + 1, backend=backend)(torch.ones(2))
        assert seen == [Phase.COMPILING] and beat.words[words.PHASE] == Phase.TRAINING
    assert len(callback_handler.start_callbacks) == before


def test_a_nested_run_restores_the_outer_runs_slot(shared: SharedSlots, tmp_path: Path) -> None:
    outer, slot = Heartbeat(), shared.slots[0]
    with outer.beating(slot, 0, 5000, str(tmp_path)):
        outer.begin_epoch(3, 2, 20, 20)
        before = slot.words.tolist()
        with Heartbeat().beating(slot, 0, 90_000, str(tmp_path / "inner")):
            assert slot.folder.endswith("inner") and slot.words[words.LIMIT] == 90_000
        after = slot.words.tolist()
        assert slot.folder == str(tmp_path)
        # The inner run's progress counts as the outer's.
        assert after.pop(words.MARKS) > before.pop(words.MARKS) and after == before


def test_child_processes_of_a_rank_get_no_slot(shared: SharedSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slot_of_watchdog(0) is None
    monkeypatch.setenv(HEARTBEATS, shared.path)
    assert slot_of_watchdog(1) is not None and slot_of_watchdog(2) is None
    shared.slots[1].words[words.PROCESS] = os.getppid()
    assert slot_of_watchdog(1) is None
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    shared.slots[1].words[words.PROCESS] = gone.pid
    assert slot_of_watchdog(1) is not None


# stacks ---------------------------------------------------------------------------------------------------------------
@HAS_SIGNAL
def test_stacks_of_all_threads_are_read(tmp_path: Path) -> None:
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    answers = StackFile(str(tmp_path / "stacks"))
    try:
        with open(tmp_path / "stacks", "r+b") as file:
            found = ask({os.getpid(): file})[os.getpid()]
    finally:
        answers.close()
        over.set()
        waiting.join()
    mine = next(thread for thread in found if thread.ident == threading.main_thread().ident)
    assert mine.users is not None and mine.users.function == "test_stacks_of_all_threads_are_read"
    assert "ask({os.getpid(): file})" in mine.users.source
    assert any(thread.ident == waiting.ident for thread in found)


@HAS_SIGNAL
def test_an_unresponsive_process_is_not_harmed(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        with open(tmp_path / "stacks", "w+b") as file:
            assert ask({other.pid: file}) == {}
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


PROMPT = """
import sys
from leyden.launch.stacks import StackFile
answers = StackFile(sys.argv[1])
print("here", flush=True)
breakpoint()
sys.stdin.read()
"""


IN_A_THREAD = """
import sys, threading
from pathlib import Path
import torch
from leyden import Trainer, TrainModule

class Stalling(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            reported.wait()  # the stall, in one place: a thread's stack is read while the thread runs
            raise KeyError("sample 4 is missing")
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def train():
    try:
        Trainer(accelerator="cpu", logger=False, default_root_dir=sys.argv[1], hang_timeout=0.5).fit(
            Stalling(), torch.ones(8, 1, 1)
        )
    except BaseException as error:
        print(f"the thread has caught {error!r}")

reported = threading.Event()
thread = threading.Thread(target=train, daemon=True)
thread.start()
while not list(Path(sys.argv[1]).rglob("hang-*")):
    thread.join(0.01)
reported.set()
thread.join()
print("the program goes on")
"""


@HAS_SIGNAL
def test_a_run_in_a_thread_never_ends_its_process(tmp_path: Path) -> None:
    """As in a worker of Ray: the hang is reported with the thread of the run, and the error is raised as it is."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD, str(tmp_path)], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.stdout.endswith("the thread has caught KeyError('sample 4 is missing')\nthe program goes on\n"), done
    [report] = tmp_path.rglob("hang-*")
    reported = report.read_text()
    assert done.returncode == 0 and "no progress for" in done.stderr and "terminated" not in done.stderr
    assert "in training_step" in reported.partition("  thread 0x")[0].partition("main thread:")[2]


@HAS_SIGNAL
def test_a_debuggers_prompt_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.touch()
    command = [sys.executable, "-c", PROMPT, str(path)]
    debugged = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert debugged.stdin is not None and debugged.stdout is not None
    try:
        with open(path, "r+b") as file:
            printed = b""
            while not printed.endswith(b"(Pdb) "):
                printed += debugged.stdout.read(1)
            assert any(thread.is_debugged for thread in ask({debugged.pid: file})[debugged.pid])
            debugged.stdin.write(b"continue\n")
            found = [thread.is_debugged for thread in ask({debugged.pid: file})[debugged.pid]]
            while any(found):
                found = [thread.is_debugged for thread in ask({debugged.pid: file})[debugged.pid]]
    finally:
        debugged.kill()
        debugged.wait()


# the odd rank ---------------------------------------------------------------------------------------------------------
def sight(rank: int, at: str = "train.py", state: str = "S (sleeping)", batch: int = 5, function: str = "f") -> Sight:
    """A rank whose innermost line is in the file `at`, or an unresponsive one where `at` is empty."""
    found = [0] * 16
    found[words.RANK], found[words.BATCHES] = rank, batch
    threads = [Thread(0, (Frame(at, 3, function), Frame("train.py", 9, "main")))] if at else None
    return Sight(found, Phase.TRAINING, state, threads)


COLLECTIVE = "/x/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("sights", "odd"),
    [
        ([sight(0, COLLECTIVE), sight(1)], [1]),
        ([sight(0, COLLECTIVE), sight(1, ""), sight(2, COLLECTIVE)], [1]),
        ([sight(0, COLLECTIVE), sight(1, ""), sight(2, "", state="T (stopped)")], [2]),
        ([sight(0, COLLECTIVE), sight(1, COLLECTIVE, batch=4)], [1]),
        ([sight(0, COLLECTIVE), sight(1, COLLECTIVE), sight(2, COLLECTIVE, function="barrier")], [2]),
        ([sight(0, COLLECTIVE), sight(1, COLLECTIVE)], []),
        # On a GPU, ranks wait wherever they read a value back.
        ([sight(0), sight(1, "data.py"), sight(2)], [1]),
        ([sight(0), sight(1, "data.py")], [0, 1]),
        ([sight(0)], [0]),
        ([sight(0, COLLECTIVE)], []),
    ],
)
def test_the_odd_rank_is_the_one_the_others_wait_for(sights: list[Sight], odd: list[int]) -> None:
    hang = Hang(sights, 61.0, "All ranks were terminated.")
    assert [found.rank for found in hang.odd] == odd
    assert ("the cause is not on this machine" in str(hang)) is not bool(odd)
    assert "they wait" not in str(hang)
    for rank in odd:
        assert str(hang).count(f"rank {rank}, at step") == 1


def test_mismatched_collectives_are_reported_for_each_rank() -> None:
    hang = Hang([sight(0, COLLECTIVE, function="all_reduce"), sight(1, COLLECTIVE, function="barrier")], 61.0, "")
    text = str(hang)
    assert "rank 0 waits in all_reduce, at step" in text and "rank 1 waits in barrier, at step" in text
    assert "they wait for each other in different collectives" in text


# the argument ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "limit"),
    [(None, None), (False, None), (True, "auto"), ("auto", "auto"), (90, 90.0), (timedelta(minutes=5), 300.0)],
)
def test_hang_timeout_accepts_seconds_timedeltas_auto_and_booleans(given: Any, limit: Any) -> None:
    assert hang_limit(given) == limit
    assert Trainer(hang_timeout=given, logger=False).arguments.hang_timeout == limit
    assert Trainer(logger=False).arguments.hang_timeout == "auto"


@pytest.mark.parametrize("given", [0, -1, float("nan"), float("inf"), "1 minute", timedelta(0), [60]])
def test_invalid_hang_timeouts_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="hang_timeout=.*Use a positive number of seconds"):
        Trainer(hang_timeout=given)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGURG")
def test_preemption_cannot_use_the_watchdogs_signal() -> None:
    with pytest.raises(ConfigurationError, match="SIGURG cannot announce a preemption: the watchdog uses it"):
        Preemption(signals="SIGURG")

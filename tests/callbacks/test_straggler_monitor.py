"""StragglerMonitor: a slow rank is named with its slow part, by a clock that only the tests' own work advances."""

from __future__ import annotations

import csv
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import QUIET, Squares
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, ConfigurationError, Trainer
from leyden.callbacks import CSVLogger, StragglerMonitor, straggler_monitor
from leyden.strategies import MeshStrategy

PARTS = ["data", "forward", "backward", "step"]
STEPS = 60


class Clock:
    """A clock that tests advance, in place of all clocks of the callback."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    read = __call__

    def close(self) -> None: ...


class Work(Squares):
    """Each part of a batch takes a second on the clock, and `part` three. A validation batch takes 1,000.

    So does each part of the first six batches, which are not timed. Between ranks, backward ends with a wait of 100.

    Args:
        clock: the clock to advance.
        part: the slow part on this rank; "" for none.
    """

    def __init__(self, clock: Clock, part: str = "") -> None:
        super().__init__(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
        self.clock, self.part, self.loaded = clock, part, 0

    def work(self, part: str) -> None:
        self.loaded += part == "data"
        self.clock.now += 1000.0 if self.loaded <= 6 else 3.0 if part == self.part else 1.0

    def work_backward(self, grad: Tensor) -> None:
        self.work("backward")
        if self.trainer.world_size > 1 and self.trainer.strategy.exchanges_late:
            # As DDP waits for the exchange of gradients.
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)

    def wait(self) -> None:
        self.clock.now += 100.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.work("forward")
        outputs: Tensor = self(batch)
        if outputs.requires_grad:  # Not in the rehearsal of a pipeline.
            outputs.register_hook(self.work_backward)
        return outputs.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 1000.0

    def configure_optimizers(self) -> Any:
        return TimedSGD(self)


class TimedSGD(torch.optim.SGD):
    def __init__(self, module: Work) -> None:
        super().__init__(module.parameters(), lr=0.01)
        self.work = module.work

    def step(self, closure: Any = None) -> Any:
        self.work("step")
        return super().step(closure)


class Rows(Dataset[Tensor]):
    """Rows whose batches call the module's `work` as they load."""

    def __init__(self, module: Any, rows: int) -> None:
        self.module, self.rows = module, rows

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.module.work("data")
        return [torch.full((2,), 0.5)] * len(indices)


class SlowHooks(Callback):
    """A callback around the batches, such as one that saves: its time is nobody's part."""

    order = 100

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.now += 50.0


def train(module: Any, monitor: StragglerMonitor, rows: int = 8 * STEPS, **arguments: Any) -> list[str]:
    """Trains for `STEPS` steps; returns the warnings that name a rank."""
    own = {"max_steps": STEPS, "max_epochs": -1, "num_sanity_val_steps": 0}
    trainer = Trainer(**{**QUIET, **own, **arguments, "callbacks": [monitor, *arguments.get("callbacks", ())]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *(DataLoader(Rows(module, rows), batch_size=4) for _ in range(2)))
    assert trainer.global_step == trainer.max_steps
    return [str(warning.message) for warning in caught if "slower than the other ranks" in str(warning.message)]


def run(strategy: Any, part: str, slow_rank: int = 1, rows: int = 8 * STEPS, **arguments: Any) -> dict[str, Any]:
    """Trains on the clock; returns what the monitor found."""
    clock, monitor = Clock(), StragglerMonitor(every_n_steps=10)
    module = Work(clock, part if int(os.environ.get("RANK", 0)) == slow_rank else "")
    if strategy == "tp":
        strategy = MeshStrategy(tp=2, plan={"net.0": "colwise", "net.1": "rowwise"})
    elif strategy == "pp":
        strategy = MeshStrategy(pp=2, dp_shard=-1, microbatches=2)
    with patch.multiple(straggler_monitor, perf_counter=clock, thread_time=clock, _RunningTime=lambda: clock):
        messages = train(module, monitor, rows, strategy=strategy, callbacks=[SlowHooks(clock)], **arguments)
    return {"messages": messages, "named": monitor.stragglers, "table": monitor.table, "text": monitor.summary()}


def run_each(strategy: str) -> list[dict[str, Any]]:
    return [run(strategy, part) for part in ["", *PARTS]]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_a_slow_rank_is_named_once_with_its_part(strategy: str) -> None:
    (none, *on_0), (also_none, *on_1) = run_world(2, run_each, strategy)
    assert none["named"] == also_none["named"] == {} and none["messages"] == []
    for part, first, second in zip(PARTS, on_0, on_1, strict=True):
        assert first["named"] == second["named"] == {1: part}
        [message] = first["messages"]
        assert second["messages"] == []
        host = first["table"][1]["host"]
        assert message.startswith(f"rank 1 on {host} has been slower than the other ranks for 50 steps, now by 50%")
        assert f"Most of it is {part}: 3 s per batch, where the median is 1 s. Look " in message
        assert ("num_workers" in message) == (part == "data")
        assert (
            first["table"]
            == second["table"]
            == [
                {"rank": 0, "host": host, **dict.fromkeys(PARTS, 1.0)},
                {"rank": 1, "host": host, **dict.fromkeys(PARTS, 1.0), part: 3.0},
            ]
        )
        assert first["text"].splitlines()[0].split() == ["rank", "host"] + [
            word for part in PARTS for word in (part, "s")
        ]
        assert first["text"].splitlines()[1].split() == ["0", host, "1.0000", "1.0000", "1.0000", "1.0000"]


def run_a_pipeline() -> dict[str, Any]:
    return run("pp", "forward")


def test_the_stages_of_a_pipeline_are_not_compared() -> None:
    found, _ = run_world(2, run_a_pipeline)
    assert found["named"] == {}
    first, last = found["table"]
    assert first["forward"] == last["forward"] == 0.0 and first["backward"] != last["backward"]


@pytest.mark.full
def test_the_ranks_of_a_stage_are_compared() -> None:
    # Ranks 0 and 1 run the first stage, 2 and 3 the last. Forward and backward of a pipeline are one part.
    found, *_ = run_world(4, run_a_pipeline_of_two)
    assert found["named"] == {3: "backward"}


def run_a_pipeline_of_two() -> dict[str, Any]:
    return run("pp", "forward", slow_rank=3, rows=16 * STEPS)


def run_unevenly() -> list[dict[str, Any]]:
    """In the last batch of an epoch rank 1 has no sample; validation, epochs and windows of two batches."""
    return [
        run("ddp", "forward", rows=8 * 30 + 4),
        run("ddp", "", rows=8 * 30 + 4, val_check_interval=10, limit_val_batches=1),
        run("ddp", "step", accumulate_grad_batches=2),
    ]


def test_only_the_ranks_own_work_on_batches_counts() -> None:
    (slow, even, accumulated), _ = run_world(2, run_unevenly)
    assert slow["named"] == {1: "forward"} and even["named"] == {}
    # Neither the 1,000 seconds of a validation nor the 50 of another callback.
    assert all(row[part] == 1.0 for row in even["table"] for part in PARTS)
    # A step follows every second batch: 1.5 seconds per batch of 4.5, where the median is 0.5 of 3.5.
    assert accumulated["named"] == {1: "step"}
    assert [row["step"] for row in accumulated["table"]] == [0.5, 1.5]


def test_a_single_process_has_nothing_to_compare() -> None:
    found = run("auto", "forward", slow_rank=0)
    assert found["messages"] == [] and found["named"] == {}
    [row] = found["table"]
    assert [row[part] for part in PARTS] == [1.0, 3.0, 1.0, 1.0]


# the decision ---------------------------------------------------------------------------------------------------------
def judged(tables: list[list[float]], stages: list[int], **arguments: Any) -> tuple[list[list[str]], dict[int, str]]:
    """Returns what a monitor says of tables with these seconds of forward by rank, each over 10 steps."""
    monitor = StragglerMonitor(every_n_steps=10, **arguments)
    trainer = Trainer(**QUIET)
    monitor.on_train_start(trainer, Squares())
    monitor._places = [(f"node{rank // 2}", stage) for rank, stage in enumerate(stages)]
    ranks = torch.tensor(stages)
    monitor._peers = [torch.nonzero(ranks == stage).flatten() for stage in ranks.unique()]
    monitor._behind = torch.zeros(len(stages), 2, dtype=torch.float64)
    said = []
    for table in tables:
        batches = [0.0 if math.isnan(seconds) else 10.0 for seconds in table]
        rows = [[n * 0.5, n * s if n else 0.0, 0.0, 0.0, n] for s, n in zip(table, batches, strict=True)]
        said.append(monitor._compare(torch.tensor(rows, dtype=torch.float64), 10))
    monitor.teardown(trainer, Squares(), "fit")
    return said, monitor.stragglers


def test_noise_that_moves_between_ranks_names_nobody() -> None:
    tables = [[1.0, 1.0, 1.0, 1.0] for _ in range(60)]
    for number, table in enumerate(tables):
        table[number // 4 % 4] = 9.0
    said, named = judged(tables, [0, 0, 0, 0])
    assert named == {} and not any(said)


def test_ranks_are_compared_within_their_stage_and_the_worst_is_listed_first() -> None:
    # 0.5 seconds of data and 1.0 of forward; ranks 1 and 4 are 20 % and 40 % behind, rank 5 has no batch.
    said, named = judged([[1.0, 1.3, 1.0, 5.0, 7.2, math.nan, 5.0]] * 7, [0, 0, 0, 1, 1, 1, 1])
    # The first table only raises a suspicion, five more make 50 steps.
    assert [len(found) for found in said] == [0, 0, 0, 0, 0, 2, 0]
    assert said[5][0].startswith("rank 4 on node2 ") and said[5][1].startswith("rank 1 on node0 ")
    assert named == {1: "forward", 4: "forward"}


def test_threshold_and_patience() -> None:
    tables = [[1.0, 1.28]] * 12
    assert judged(tables, [0, 0])[1] == {}
    assert judged(tables, [0, 0], threshold=0.15)[1] == {1: "forward"}
    assert judged(tables, [0, 0], threshold=0.15, patience=200)[1] == {}
    # Below a second of work in all, nobody is named.
    assert judged([[0.0, 0.002]] * 3, [0, 0], threshold=0.001, patience=10)[1] == {1: "forward"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0): give a whole number from 1"),
        ({"patience": 0.5}, "patience=0.5): give a whole number from 1"),
        ({"threshold": 0}, "threshold=0): give a fraction above 0, such as 0.2"),
        ({"threshold": "20%"}, "threshold='20%'): give a fraction above 0"),
        ({"threshold": math.nan}, "threshold=nan): give a fraction above 0"),
        ({"log": "yes"}, "log='yes'): use True or False"),
    ],
)
def test_bad_arguments_name_the_fix(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        StragglerMonitor(**arguments)
    assert f"StragglerMonitor({message}" in str(error.value)


# logging --------------------------------------------------------------------------------------------------------------
def test_the_table_is_logged_if_asked(tmp_path: Path) -> None:
    clock = Clock()
    with patch.multiple(straggler_monitor, perf_counter=clock, _RunningTime=lambda: clock):
        monitor = StragglerMonitor(every_n_steps=30, log=True)
        train(Work(clock, "backward"), monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1000)
    [file] = tmp_path.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(file.open()) if row["straggler/rank_0/data"]]
    assert [(row["step"], row["straggler/rank_0/forward"], row["straggler/rank_0/backward"]) for row in rows] == [
        ("30", "1.0", "3.0"),
        ("60", "1.0", "3.0"),
    ]


def test_logging_needs_a_logger() -> None:
    with pytest.raises(ConfigurationError, match="StragglerMonitor needs a logger"):
        train(Work(Clock()), StragglerMonitor(log=True))


# real clocks ----------------------------------------------------------------------------------------------------------
class Computing(Squares):
    """Some 35 ms of computing in each batch; rank 1 takes longer.

    Args:
        slow: "compute" for 30 % more of the same computing, "sleep" for 20 ms more in forward, "data" for 20 ms more in
            the loader, or "" for equal ranks.
    """

    def __init__(self, slow: str) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(2, 2) for _ in range(2))))
        self.slow = slow if os.environ["RANK"] == "1" else ""
        self.matrix = torch.randn(256, 256)

    def compute(self, times: int) -> None:
        # Work, and not a pause, is slowed by other load on the machine as the rest is.
        for _ in range(times * 13 // 10 if self.slow == "compute" else times):
            self.matrix @ self.matrix

    def work(self, part: str) -> None:
        time.sleep(0.02 if self.slow == part else 0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.compute(80)
        self.work("sleep")
        outputs: Tensor = self(batch)
        outputs.register_hook(lambda grad: self.compute(40))
        return outputs.square().mean()


def run_really(slow: str, strategy: str, steps: int) -> dict[int, str]:
    monitor = StragglerMonitor()
    train(Computing(slow), monitor, strategy=strategy, max_steps=steps)
    return monitor.stragglers


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slow", ["data", "sleep", "compute"])
def test_a_rank_that_is_really_slow_is_named(slow: str) -> None:
    for named in run_world(2, run_really, slow, "ddp", 200, timeout=800):
        assert named == {1: "data" if slow == "data" else "forward"}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_computing_is_seen_within_the_communication_of_fsdp() -> None:
    for named in run_world(2, run_really, "compute", "fsdp", 200, timeout=800):
        assert named == {1: "forward"}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_equal_ranks_on_a_busy_machine_are_not_named(strategy: str) -> None:
    assert run_world(2, run_really, "", strategy, 300, timeout=800) == [{}, {}]

"""Ranks of an external launcher are recognized by their variables and never started twice."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from programs import run_program

from leyden import ConfigurationError, Trainer
from leyden.core.environment import RankEnvironment, first_host, rank_environment
from leyden.strategies import find_strategy
from leyden.strategies.ddp import DDPStrategy

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1234",
}
# As srun of SLURM 23.11 sets them for task 3 of `srun --nodes=2 --ntasks-per-node=2`.
SRUN = {
    "SLURM_JOB_ID": "71234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "4",
}
NAMES = (*TORCHRUN, *SRUN)


@pytest.fixture(autouse=True)
def _bare() -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    yield
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(before)


def test_torchruns_variables_give_the_rank() -> None:
    assert rank_environment(TORCHRUN) == RankEnvironment(3, 1, 4, 2, 1, "torchrun")


def test_rays_variables_give_the_rank_and_the_machine() -> None:
    ray = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    environ = {**ray, "MASTER_ADDR": "host", "MASTER_PORT": "1", "RAY_JOB_ID": "01000000"}
    assert rank_environment(environ) == RankEnvironment(2, 0, 4, 2, 1, "Ray")
    # torchrun, as a task of Ray.
    environ |= {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}
    assert rank_environment(environ) == RankEnvironment(2, 0, 4, 2, 0, "torchrun")


def test_all_tasks_of_srun_get_the_same_rendezvous_address() -> None:
    found = rank_environment(SRUN)
    assert found == RankEnvironment(3, 1, 4, 2, 1, "slurm", ("gpu07", 15000 + 71234 % 15000))
    first = rank_environment({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None and first.address == found.address


@pytest.mark.parametrize(
    "changes",
    [
        # The batch script: task 0, but of no step.
        {"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None},
        # A shell that `srun --pty bash` opened.
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_slurm_batch_scripts_and_shells_are_not_ranks(changes: dict[str, str | None]) -> None:
    environ = {name: value for name, value in {**SRUN, **changes}.items() if value is not None}
    assert rank_environment(environ) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node3", "node3"),
        ("node3,node5", "node3"),
        ("gpu[007-012,14],login2", "gpu007"),
        ("rack1-gpu[3,5]-ib", "rack1-gpu3-ib"),
    ],
)
def test_first_host_reads_slurm_node_lists(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        ({"RANK": "1", "WORLD_SIZE": "8"}, "RANK=1 and WORLD_SIZE=8, but not MASTER_ADDR.*Unset RANK and WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 of WORLD_SIZE=4.*impossible"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a number"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "not RANK"),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "3"}, "on 3 machines.*--ntasks-per-node"),
    ],
)
def test_contradictory_variables_are_refused(environ: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        rank_environment(environ)


def test_stray_rank_variables_raise_except_on_a_single_device() -> None:
    os.environ.update(RANK="1", WORLD_SIZE="8")
    for arguments in ({}, {"devices": 2}, {"strategy": "ddp"}):
        with pytest.raises(ConfigurationError, match="RANK=1 and WORLD_SIZE=8.*Unset"):
            Trainer(accelerator="cpu", **arguments)
    assert Trainer(accelerator="cpu", strategy="single_device").world_size == 1


def test_running_ranks_are_used_and_not_started_again() -> None:
    for variables in (TORCHRUN, SRUN):
        os.environ.update(variables)
        trainer = Trainer(accelerator="cpu", logger=False)
        assert isinstance(trainer.strategy, DDPStrategy) and not trainer.strategy.ranks.are_planned
        place = (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
        assert place == (3, 1, 1, 4) and (trainer.num_devices, trainer.num_nodes) == (2, 2)
        for name in variables:
            del os.environ[name]


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
@pytest.mark.parametrize(
    "arguments", [{"devices": 2}, {"devices": 4}, {"num_nodes": 4}, {"devices": 1}, {"devices": 3, "num_nodes": 2}]
)
def test_arguments_that_contradict_the_ranks_are_refused(variables: dict[str, str], arguments: dict[str, int]) -> None:
    os.environ.update(variables)
    with pytest.raises(ConfigurationError, match="started 4 ranks.*devices=.*num_nodes=.*Leave both out"):
        Trainer(accelerator="cpu", **arguments)


def test_arguments_that_fit_the_ranks_are_accepted() -> None:
    os.environ.update(TORCHRUN)
    assert Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp").world_size == 4
    assert Trainer(accelerator="cpu", num_nodes=2).world_size == 4


def test_a_single_rank_of_torchrun_runs_on_a_single_device() -> None:
    os.environ.update(
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    )
    assert find_strategy("auto", "cpu").name == "single_device"
    assert find_strategy("auto", "cpu", 1).name == "single_device"
    with pytest.raises(ConfigurationError, match="started 1 ranks.*devices=2"):
        find_strategy("auto", "cpu", 2)


def test_variables_without_a_local_rank_mean_one_rank_per_machine() -> None:
    environ = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert rank_environment(environ) == RankEnvironment(3, 0, 4, 1, 3, "hand")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="needs two CPUs of Linux")
def test_ranks_share_the_cpus_available_to_their_launcher() -> None:
    """In a container, or under taskset, they are fewer than the machine's."""
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    asked = "from leyden.launch.processes import threads_each; print(threads_each(1))"
    done = run_program(["-c", f"{one}; {asked}"])
    assert done.stdout == "1\n", done.stderr

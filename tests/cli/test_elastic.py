"""Launches whose machines come and go: one world at a time, every sample once, the weights of one process."""

from __future__ import annotations

import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import free_port
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import BatchSizeScheduler
from leyden.cli.launch.cluster_variables import with_cluster
from leyden.cli.launch.plan import ElasticOptions, LaunchPlan, resolve
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import Settings
from leyden.launch.elastic import Machines, engine_config
from leyden.launch.leaving import ERROR_FILE, ExitNotes, note_exit
from leyden.launch.processes import descendants, runs, started

SCRIPT = """\
import json, os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import BatchSizeScheduler, ModelCheckpoint

# The step before which each world waits to be changed: for a file, or for SIGTERM from its agent.
WAITS = {(int(step), int(world)) for step, world in json.loads(os.environ.get("WAITS", "[]"))}


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        return nn.functional.mse_loss(self.line(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Walk(Callback):
    def on_train_start(self, trainer, module):
        self.told = False
        before = signal.getsignal(signal.SIGTERM)

        def tell(number, frame):
            self.told = True
            before(number, frame)

        if trainer.world_size > 1 or "WAITS" in os.environ:
            signal.signal(signal.SIGTERM, tell)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        step, world = trainer.global_step, trainer.world_size
        with open(f"seen-{os.getpid()}.jsonl", "a") as file:
            line = {"time": time.time(), "port": os.environ.get("MASTER_PORT", ""), "world": world, "step": step}
            print(json.dumps({**line, "epoch": trainer.current_epoch, "samples": batch[2].tolist()}), file=file)
        while (step, world) in WAITS and not os.path.exists(f"open-{step}-{world}"):
            if self.told:
                open(f"open-{step}-{world}", "w").close()
            time.sleep(0.02)


torch.manual_seed(0)
x = torch.randn(144, 4, dtype=torch.float64)
module = Line()
trainer = Trainer(
    max_epochs=3,
    precision="64-true",
    accelerator="cpu",
    callbacks=[Walk(), BatchSizeScheduler({0: 24}), ModelCheckpoint(every_n_train_steps=4)],
    enable_progress_bar=False,
    default_root_dir=os.environ.get("RUNS", "runs"),
)
data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(len(x)))
trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True))
with open(f"rank-{trainer.global_rank}.json", "w") as file:
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    json.dump({"world": trainer.world_size, "step": trainer.global_step, "weights": weights}, file)
"""
STEPS, SAMPLES = 18, 144
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=4,read_timeout=20"


class Cluster:
    """Agents on this host as the machines of one job.

    Args:
        folder: the folder that all machines share.
        environ: their environment.
        most: the largest number of machines.
    """

    def __init__(self, folder: Path, environ: dict[str, str], most: int) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.folder, self.most, self.port, self.address = folder, most, free_port(), "localhost"
        self.environ = {**environ, "GLOO_SOCKET_IFNAME": "lo"}
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, machine: int, port: int | None = None, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Starts the agent of a machine; number 0 has the store."""
        words = ["--nnodes", f"1:{self.most}", "--node_rank", machine, "--master_addr", self.address]
        words += ["--master_port", port or self.port, "--resume", "auto", "--rdzv_conf"]
        # Long enough for agents that start together, and short for a smaller world, which waits as long.
        words += [f"last_call_timeout={2 * self.most},{QUICK}", "train.py"]
        command = [*within, sys.executable, "-m", "leyden", "launch", *map(str, words)]
        with open(self.folder / f"output-{len(self.agents)}.txt", "wb") as output:
            agent = subprocess.Popen(command, cwd=self.folder, env=self.environ, stdout=output, stderr=output)
        self.agents.append(agent)
        return agent

    def output(self, agent: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"output-{self.agents.index(agent)}.txt").read_text()

    def seen(self) -> list[dict[str, Any]]:
        """Returns what all ranks have recorded, in the order of time."""
        texts = [path.read_text() for path in self.folder.glob("seen-*.jsonl")]
        # A rank may be writing its last line.
        lines = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
        return sorted(lines, key=lambda line: float(line["time"]))

    def until(self, condition: Callable[[], bool], limit: float = 150.0) -> None:
        """Waits for a condition, as long as an agent runs."""
        end = time.monotonic() + limit
        while not condition():
            outputs = "\n\n".join(path.read_text() for path in sorted(self.folder.glob("output-*.txt")))
            assert time.monotonic() < end, outputs
            assert any(agent.poll() is None for agent in self.agents), outputs
            time.sleep(0.05)

    def until_waiting(self, step: int, world: int) -> None:
        """Waits until all ranks of a world have reached a step."""

        def reached() -> bool:
            found = [line for line in self.seen() if (line["step"], line["world"]) == (step, world)]
            # The first batch of the step, on each rank.
            return any(sum(line["port"] == last["port"] for line in found) >= world for last in found[-1:])

        self.until(reached)

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait(30)


@pytest.fixture
def cluster(tmp_path: Path, environ: dict[str, str]) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(most: int, waits: list[tuple[int, int]]) -> Cluster:
        made.append(Cluster(tmp_path, {**environ, "WAITS": json.dumps(waits)}, most))
        return made[-1]

    yield make
    for one in made:
        one.end()


def check(cluster: Cluster, worlds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a walk saw every sample once per epoch, and ended with the weights of one process."""
    seen = cluster.seen()
    ports = list(dict.fromkeys(line["port"] for line in seen))
    assert [next(line["world"] for line in seen if line["port"] == port) for port in ports] == worlds
    epochs: dict[int, list[int]] = {}
    for step in range(STEPS):
        # A step that is repeated from a checkpoint counts once, as its last world took it.
        lines = [line for line in seen if line["step"] == step]
        last = max(ports.index(line["port"]) for line in lines)
        for line in lines:
            if line["port"] == ports[last]:
                epochs.setdefault(line["epoch"], []).extend(line["samples"])
    assert {epoch: sorted(samples) for epoch, samples in epochs.items()} == {
        epoch: list(range(SAMPLES)) for epoch in range(3)
    }
    walked = [json.loads(path.read_text()) for path in sorted(cluster.folder.glob("rank-*.json"))]
    assert len(walked) == worlds[-1] and all(found == walked[0] for found in walked)
    with monkeypatch.context() as patch:
        patch.chdir(cluster.folder)
        patch.setenv("RUNS", "alone")
        runpy.run_path("train.py", run_name="__main__")
    alone = json.loads((cluster.folder / "rank-0.json").read_text())
    assert (alone["world"], alone["step"], walked[0]["step"]) == (1, STEPS, STEPS)
    for name, values in alone["weights"].items():
        here, there = (torch.tensor(found, dtype=torch.float64) for found in (walked[0]["weights"][name], values))
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-14)


def test_a_machine_is_lost_and_another_joins(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """2 → 1 → 2."""
    run = cluster(2, [(6, 2), (10, 1)])
    main, other = run.start(0), run.start(1)
    run.until_waiting(6, 2)
    ranks = [(process, started(process)) for process in descendants(other.pid)]
    other.kill()
    (run.folder / "open-6-2").touch()
    run.until_waiting(10, 1)
    # The ranks of a killed agent end with it.
    assert ranks and not any(runs(*rank) for rank in ranks)
    other = run.start(1)
    assert [agent.wait(120) for agent in (main, other)] == [0, 0], run.output(main) + run.output(other)
    check(run, [2, 1, 2], monkeypatch)
    text = run.output(main)
    assert "the run goes on with 1 machine, 1 rank\n" in text and "the run goes on with 2 machines, 2 ranks\n" in text
    # Two steps since the last checkpoint were lost with the machine, and none when one joined.
    starts = [int(part.split("step ")[1].split(";")[0]) for part in text.split("start  ")[2:]]
    assert starts == [4, 11] and "Traceback" not in text


@pytest.mark.full
def test_machines_are_lost_leave_and_join(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """4 → 3 → 2 → 4: one machine is lost, one is told to go, two join."""
    run = cluster(4, [(3, 4), (7, 3), (11, 2), (11, 3)])
    agents = [run.start(machine) for machine in range(4)]
    run.until_waiting(3, 4)
    agents[2].kill()
    (run.folder / "open-3-4").touch()
    run.until_waiting(7, 3)
    agents[3].terminate()
    assert agents[3].wait(60) == 75
    run.until_waiting(11, 2)
    agents[2:] = [run.start(machine) for machine in (2, 3)]
    assert [agent.wait(150) for agent in agents] == [0] * 4, "".join(map(run.output, agents))
    # Machines that start together may join one after the other.
    worlds = [4, 3, 2, 4] if len({line["port"] for line in run.seen()}) == 4 else [4, 3, 2, 3, 4]
    check(run, worlds, monkeypatch)


@pytest.mark.full
def test_a_notice_that_only_a_rank_gets_ends_its_machine(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster(2, [(6, 2)])
    main, other = run.start(0), run.start(1)
    run.until_waiting(6, 2)
    for process in descendants(other.pid):
        os.kill(process, signal.SIGUSR1)
    (run.folder / "open-6-2").touch()
    assert [agent.wait(120) for agent in (other, main)] == [75, 0], run.output(main) + run.output(other)
    # The ranks saved the step at which they left: none is repeated.
    steps = {world: [line["step"] for line in run.seen() if line["world"] == world] for world in (1, 2)}
    assert min(steps[1]) == max(steps[2]) + 1
    check(run, [2, 1], monkeypatch)


@pytest.mark.full
def test_the_main_machine_is_lost_and_the_same_commands_continue(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster(2, [(6, 2)])
    main, other = run.start(0), run.start(1)
    run.until_waiting(6, 2)
    ranks = [(process, started(process)) for agent in (main, other) for process in descendants(agent.pid)]
    main.kill()
    (run.folder / "open-6-2").touch()
    assert other.wait(60) not in (0, None)
    assert ranks and not any(runs(*rank) for rank in ranks)
    # One line, and no frame of Python or C++.
    lines = run.output(other).split("train.py\n", 1)[1].strip().splitlines()
    assert len(lines) == 1 and "has ended, or cannot be reached" in lines[0] and "same command continues" in lines[0]
    agents = [run.start(0), run.start(1)]
    assert [agent.wait(120) for agent in agents] == [0, 0], "".join(map(run.output, agents))
    check(run, [2, 2], monkeypatch)


@pytest.mark.full
def test_a_machine_that_was_taken_for_dead_makes_no_second_world(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent stands still, as on an overloaded machine, while its ranks go on."""
    run = cluster(2, [(6, 2), (10, 1)])
    main, other = run.start(0), run.start(1)
    run.until_waiting(6, 2)
    os.kill(other.pid, signal.SIGSTOP)
    run.until_waiting(10, 1)
    os.kill(other.pid, signal.SIGCONT)
    assert [agent.wait(120) for agent in (main, other)] == [0, 0], run.output(main) + run.output(other)
    check(run, [2, 1, 2], monkeypatch)


@pytest.mark.full
def test_a_second_world_on_the_same_folder_is_refused(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster(2, [(6, 1)])
    main = run.start(0)
    run.until_waiting(6, 1)
    second = run.start(0, port=free_port())
    assert second.wait(60) != 0
    text = run.output(second)
    assert "belongs to a run that is under way" in text and "the same --rdzv_endpoint" in text
    (run.folder / "open-6-1").touch()
    assert main.wait(60) == 0
    check(run, [1], monkeypatch)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_a_cable_is_cut(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that the other machine has gone; each side finds out."""
    run = cluster(2, [(6, 2)])
    names = [f"leyden-{os.getpid()}-{machine}" for machine in (0, 1)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for machine, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.99.0.{machine + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        run.address, run.environ["GLOO_SOCKET_IFNAME"] = "10.99.0.1", "cable"
        main, other = (run.start(machine, within=["ip", "netns", "exec", names[machine]]) for machine in (0, 1))
        run.until_waiting(6, 2)
        ip("-n", names[0], "link", "set", "cable", "down")
        (run.folder / "open-6-2").touch()
        assert other.wait(150) not in (0, None) and "cannot be reached" in run.output(other)
        assert main.wait(150) == 0, run.output(main)
    finally:
        run.end()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)
    check(run, [2, 1], monkeypatch)


# what a range means ---------------------------------------------------------------------------------------------------
def plan(environ: dict[str, str], flags: dict[str, Any] | None = None, **elastic: Any) -> LaunchPlan:
    machine, options = Machine(cpus=3), ElasticOptions(**elastic)
    settings, options = with_cluster(Settings(flags or {}), Settings(), options, None, machine, environ)
    return resolve(settings, options, machine, environ)


POD = {"PET_NNODES": "1:4", "PET_NODE_RANK": "7", "PET_MASTER_ADDR": "main", "PET_MASTER_PORT": "29400"}


def test_a_range_is_read_from_variables_and_flags(invoke: Any) -> None:
    found = plan({**POD, "PET_NPROC_PER_NODE": "2"}, {"resume": "auto"})
    # A machine that takes the place of another may have any number.
    assert (found.least_machines, found.machines, found.per_machine, found.machine_rank) == (1, 4, 2, 7)
    assert (found.backend, found.address, found.port) == ("c10d", "main", 29400)
    text = found.lines("python train.py", reasons=True)
    assert "2 to 8 on 1 to 4 machines × 2, cpu" in text and "LEYDEN_MACHINE_RANGE=1:4" in text
    assert "this is one that may come and go" in text and "beware" not in text
    text = plan({**POD, "PET_NODE_RANK": "0"}).lines("")
    assert "this is the main machine" in text and "without --resume auto" in text
    printed = invoke("launch", "--dry-run", "--nnodes", "2:3", "--rdzv_endpoint", "main:5", __file__).stdout
    assert "2 to 3 on 2 to 3 machines × 1" in printed and "c10d at main:5, this is numbered there" in printed
    assert plan({"PET_NNODES": "1:1"}).least_machines == 0
    found = plan({**POD, "PET_NNODES": "2:2", "PET_NODE_RANK": "1"})
    assert (found.least_machines, found.machines, found.backend) == (0, 2, "static")


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        ({**POD, "PET_NNODES": "4:1"}, {}, "PET_NNODES: 4:1 starts above its end: give 1:4"),
        ({**POD, "PET_NNODES": "0:4"}, {}, "PET_NNODES: '0' is not a whole number from 1"),
        ({**POD, "PET_NNODES": "1:"}, {}, "PET_NNODES: '' is not a whole number"),
        ({"PET_NNODES": "1:4"}, {}, "no machine_rank and no main_process_ip.*--rdzv_endpoint"),
        (POD, {"rdzv_backend": "static"}, "rdzv_backend: static: a range of machines needs c10d: leave"),
        (
            {**POD, "PET_RDZV_CONF": "keep_alive_interval=0.5"},
            {},
            "keep_alive_interval=0.5: give a whole number from 1",
        ),
        (POD, {"num_processes": 6}, "num_processes: 6 is the number of ranks on all 4 machines"),
    ],
)
def test_invalid_ranges_name_the_fix(environ: dict[str, str], flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan(environ, flags)


def test_a_range_is_refused_under_srun() -> None:
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[007-008]"}
    from leyden.cli.launch.cluster_variables import read_key

    with pytest.raises(ConfigurationError, match="srun starts a fixed number of tasks: leave it out.*--requeue"):
        plan(step, {"num_machines": read_key("num_machines", "--nnodes", "1:2")})


def test_the_rendezvous_settings_can_be_overridden(tmp_path: Path) -> None:
    machines = Machines(4, 1, "main", 29500, "c10d", further={"last_call_timeout": "60"}, least=2)
    config = engine_config(1, machines, str(tmp_path))
    assert (config.min_nodes, config.max_nodes) == (2, 4)
    assert config.rdzv_configs["last_call_timeout"] == "60" and config.rdzv_configs["keep_alive_interval"] == 2


def test_a_batch_that_not_every_number_of_machines_divides_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MACHINE_RANGE": "1:4"}.items():
        monkeypatch.setenv(f"LEYDEN_{name}", value)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    loader = DataLoader(torch.randn(96, 2), 2)

    def fit(size: int) -> None:
        callbacks = [BatchSizeScheduler({0: size})]
        Trainer(**{**QUIET, "callbacks": callbacks, "max_steps": 1}, strategy="single_device").fit(Line(), loader)

    words = "8 is not a multiple of 2 samples.*from 1 to 4: of these, 1, 2, 4 fit.*multiple of 24.*global_batch_size=8"
    with pytest.raises(ConfigurationError, match=words):
        fit(8)
    assert 24 % (2 * math.lcm(1, 2, 3, 4)) == 0
    fit(24)


def test_a_batch_that_changes_with_the_machines_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_MACHINE_RANGE", "1:4")
    with pytest.warns(UserWarning, match="batch changes with them.*global_batch_size.*BatchSizeScheduler"):
        Trainer(**QUIET)
    Trainer(**QUIET, global_batch_size=8)
    Trainer(**{**QUIET, "callbacks": [BatchSizeScheduler({0: 8})]})


def test_an_agent_knows_whether_its_own_machine_is_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = ExitNotes(tmp_path)
    folder = tmp_path / "run" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    monkeypatch.setenv(ERROR_FILE, str(folder / "error.json"))
    assert (notes.code(), notes.came_here()) == (None, False)
    note_exit(75)
    assert (notes.code(), notes.came_here()) == (75, False)
    note_exit(75, came_here=True)
    assert (notes.code(), notes.came_here()) == (75, True)
    notes.forget()
    assert (notes.code(), notes.came_here()) == (None, False)

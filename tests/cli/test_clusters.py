"""Clusters: docs/clusters.md is run with the variables that each cluster sets, and mistakes name their fix."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks.world import free_port

from leyden import ConfigurationError, Trainer
from leyden.cli.launch.cluster_variables import with_cluster
from leyden.cli.launch.plan import ElasticOptions, LaunchPlan, resolve
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import Settings, parse
from leyden.core.environment import check_launched, check_one_rank, rank_environment

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- not run: [^>]+ -->\n)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)
CPU, GPUS = Machine(cpus=3), Machine(gpus=4, cpus=8)
POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29500",
}
# As Kubeflow's training operator 1.9 sets them for a worker's pod.
PYTORCHJOB = {**POD, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456"}
PYTORCHJOB |= {"PET_MASTER_ADDR": "digits-master-0", "PET_MASTER_PORT": "23456"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.7",
    "DSTACK_NODES_IPS": "10.0.0.7\n10.0.0.8",
    "DSTACK_GPUS_PER_NODE": "0",
    "DSTACK_GPUS_NUM": "0",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}


def block(words: str) -> str:
    """Returns the block of the page that has these words."""
    [found] = [text for _, _, text in BLOCKS if words in text]
    return found


def job(kind: str) -> dict[str, Any]:
    return dict(yaml.safe_load(block(f"kind: {kind}")))


def commands(cluster: str) -> list[list[str]]:
    """Returns the page's commands for a cluster, as the second machine runs them."""
    if cluster == "TrainJob":
        return [job("TrainJob")["spec"]["trainer"]["command"]]
    if cluster == "PyTorchJob":
        replicas = job("PyTorchJob")["spec"]["pytorchReplicaSpecs"]
        return [replicas[name]["template"]["spec"]["containers"][0]["command"] for name in ("Master", "Worker")]
    if cluster == "SkyPilot":
        return [shlex.split(yaml.safe_load(block("num_nodes: 2"))["run"])]
    if cluster == "dstack":
        return [shlex.split(yaml.safe_load(block("type: task"))["commands"][-1])]
    if cluster == "SLURM":
        return [shlex.split(block("#SBATCH --nodes").splitlines()[-1].removeprefix("srun "))]
    return [shlex.split(block("--nnodes 2 --node_rank 0").splitlines()[-1], comments=True)]


CLUSTERS: dict[str, tuple[dict[str, str], str]] = {
    "bare machines": ({}, "static at 10.0.0.1:29500"),
    "SLURM": (SRUN, "static at gpu007:19711"),
    "TrainJob": (POD, "static at digits-node-0-0.digits:29500"),
    "PyTorchJob": (PYTORCHJOB, "static at digits-master-0:23456"),
    "SkyPilot": (SKYPILOT, "static at 10.0.0.7:29500"),
    "dstack": (DSTACK, "static at 10.0.0.7:29500"),
}


def test_every_block_is_run_or_says_why_not() -> None:
    # tests/checkpoint/test_bucket_saves.py runs the one in Python.
    run = [text for marked, language, text in BLOCKS if not marked and language != "python"]
    assert len(run) == len(CLUSTERS) and all(re.search(r"leyden[, ]+launch", text) for text in run)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_commands_of_the_page_find_their_machine(
    cluster: str, invoke: Any, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, meeting = CLUSTERS[cluster]
    environ.update(variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, *words in commands(cluster):
        assert name == "leyden"
        printed = invoke("launch", "--dry-run", *words[1:]).stdout
        assert f"meeting     {meeting}, this is machine 1" in printed
        assert "2 on 2 machines × 1, cpu" in printed and "resume auto" in printed
        # The plan says where the numbers come from, and so does `leyden env`.
        read = [name for name in variables if name.startswith(("PET_", "SKYPILOT_NODE_", "DSTACK_NODE_RANK"))]
        assert all(f"{name}={variables[name].split()[0]}" in printed for name in read)
        reported = invoke("env").stdout
        assert all(f"{variables[name].split()[0]} ({name})" in reported for name in read)


def test_the_trainjob_is_valid() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = job("TrainJob")
    # An unknown key would be lost on the way.
    assert models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest


SCRIPT = """\
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from leyden import Callback, Trainer, TrainModule


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.line(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Preempted(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 5 and trainer.global_rank == 1 and "--preempted" in sys.argv:
            os.kill(int(os.environ["LEYDEN_AGENT"]), 15)


torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
module = Line()
trainer = Trainer(
    max_epochs=2,
    precision="64-true",
    accelerator="cpu",
    callbacks=[Preempted()],
    enable_progress_bar=False,
    default_root_dir=os.environ.get("RUNS", "runs"),
)
world = int(os.environ.get("WORLD_SIZE", 1))
trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8 // world, shuffle=True))
with open(f"rank-{trainer.global_rank}.json", "w") as file:
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    json.dump({"world": trainer.world_size, "step": trainer.global_step, "weights": weights}, file)
"""


def pods(folder: Path, environ: dict[str, str], variables: dict[str, str], *more: str) -> list[tuple[int, str]]:
    """Runs the TrainJob's command in two pods on this host; returns the exit code and the output of each."""
    assert variables["PET_NNODES"] == str(job("TrainJob")["spec"]["trainer"]["numNodes"])
    [[_, *command]] = commands("TrainJob")
    here = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "leyden", *command, *more],
            cwd=folder,
            env={**environ, **variables, **here, "PET_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        return [(pod.returncode, text) for pod in started for text in [pod.communicate(timeout=200)[0]]]
    finally:
        for pod in started:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM)
                pod.wait(30)


def check_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the weights of both ranks with those of one process."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [found["world"] for found in ranks] == [2, 2] and ranks[0] == ranks[1]
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RUNS", "alone")
        patch.setattr(sys, "argv", ["train.py"])
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
    alone = json.loads((folder / "rank-0.json").read_text())
    assert (alone["world"], alone["step"], ranks[0]["step"]) == (1, 16, 16)
    for name, values in alone["weights"].items():
        here, there = (torch.tensor(found, dtype=torch.float64) for found in (ranks[0]["weights"][name], values))
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-14)


def test_the_pods_of_a_trainjob_train_one_model(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    results = pods(tmp_path, environ, POD)
    assert [status for status, _ in results] == [0, 0], results
    assert "2 on 2 machines × 1" in results[1][1]
    check_weights(tmp_path, monkeypatch)


@pytest.mark.full
def test_a_preempted_pod_ends_all_pods_and_the_same_command_continues(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods are those of a PyTorchJob, whose RANK counts pods."""
    (tmp_path / "train.py").write_text(SCRIPT)
    results = pods(tmp_path, environ, PYTORCHJOB, "--preempted")
    assert [status for status, _ in results] == [75, 75], results
    assert not list(tmp_path.glob("rank-*.json"))
    results = pods(tmp_path, environ, PYTORCHJOB)
    assert [status for status, _ in results] == [0, 0], results
    check_weights(tmp_path, monkeypatch)


# what the variables mean ----------------------------------------------------------------------------------------------
def plan(
    environ: dict[str, str],
    flags: dict[str, Any] | None = None,
    file: dict[str, Any] | None = None,
    machine: Machine = CPU,
    elastic: ElasticOptions | None = None,
    per_machine: str | None = None,
) -> LaunchPlan:
    settings, elastic = with_cluster(
        Settings(flags or {}), parse(file or {}), elastic or ElasticOptions(), per_machine, machine, environ
    )
    return resolve(settings, elastic, machine, environ)


def test_flags_override_variables_and_variables_the_file() -> None:
    file = {"num_machines": 1, "machine_rank": 0, "main_process_ip": "10.0.0.1", "num_processes": 8}
    found = plan(POD, file={**file, "mixed_precision": "bf16"})
    assert (found.machines, found.machine_rank, found.address, found.per_machine) == (2, 1, POD["PET_MASTER_ADDR"], 1)
    assert found.launched.precision == "bf16-mixed"
    found = plan(POD, {"machine_rank": 2, "num_machines": 3, "main_process_ip": "h", "num_processes": 6}, file)
    assert (found.machines, found.machine_rank, found.address, found.per_machine) == (3, 2, "h", 2)
    assert found.settings.variables == ["PET_MASTER_PORT=29500"]
    # One machine neither meets others nor needs their port.
    found = plan(POD, {"num_machines": 1})
    assert (found.machines, found.port, found.settings.variables) == (1, 0, ["PET_NPROC_PER_NODE=1"])


@pytest.mark.parametrize(
    ("text", "machine", "per_machine", "accelerator"),
    [
        ("3", CPU, 3, "cpu"),
        ("3", GPUS, 3, "cuda"),
        ("auto", GPUS, 4, "cuda"),
        ("gpu", GPUS, 4, "cuda"),
        # As for torchrun: one rank per CPU.
        ("auto", CPU, 3, "cpu"),
        ("cpu", GPUS, 8, "cpu"),
    ],
)
def test_ranks_per_machine_mean_what_they_mean_to_torchrun(
    text: str, machine: Machine, per_machine: int, accelerator: str
) -> None:
    flag = plan(POD, {}, {}, machine, None, text)
    for found in (plan({**POD, "PET_NPROC_PER_NODE": text}, machine=machine), flag):
        assert (found.per_machine, found.accelerator) == (per_machine, accelerator)
    assert not any("proc" in name for name in flag.settings.variables)


def test_ranks_per_machine_on_the_cpu_of_a_machine_with_gpus() -> None:
    for text, per_machine in (("3", 3), ("auto", 8)):
        found = plan({**POD, "PET_NPROC_PER_NODE": text}, {"use_cpu": True}, machine=GPUS)
        assert (found.per_machine, found.accelerator) == (per_machine, "cpu")
    with pytest.raises(ConfigurationError, match="there is no GPU to use"):
        plan({**POD, "PET_NPROC_PER_NODE": "gpu"}, {"use_cpu": True}, machine=GPUS)


def test_a_clusters_number_of_gpus_counts_unless_others_are_chosen() -> None:
    eight = {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "3"}
    assert plan(eight, machine=GPUS).per_machine == 3
    assert plan(eight, {"use_cpu": True}, machine=GPUS).per_machine == 1
    assert plan(eight, file={"use_cpu": True}, machine=GPUS).per_machine == 1
    assert plan(eight, file={"distributed_type": "MULTI_CPU"}, machine=GPUS).per_machine == 1
    assert plan(eight, file={"distributed_type": "XLA"}).accelerator == "xla"
    assert plan(eight, {"gpu_ids": "0,1"}, machine=GPUS).per_machine == 2
    assert plan(DSTACK, machine=GPUS).per_machine == 4
    with pytest.raises(ConfigurationError, match="SKYPILOT_NUM_GPUS_PER_NODE: 3, but there is no GPU"):
        plan(eight)


def test_an_endpoint_numbers_the_machines() -> None:
    elastic = {"PET_RDZV_ENDPOINT": "host:123", "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "2"}
    more = {"PET_NNODES": "2:2", "PET_RDZV_ID": "my digits", "PET_RDZV_CONF": "timeout=9, read_timeout=8"}
    found = plan({**POD, **elastic, **more})
    assert (found.machines, found.machine_rank, found.address, found.port) == (2, None, "host", 123)
    assert (found.backend, found.max_restarts, found.elastic.rdzv_id) == ("c10d", 2, "my digits")
    assert found.elastic.rdzv_conf == {"timeout": "9", "read_timeout": "8"}
    flags = ElasticOptions(endpoint="flag:5", rdzv_id="flag", rdzv_conf={"timeout": "5"})
    for environ in (POD, {**POD, **elastic, **more}):
        found = plan(environ, elastic=flags)
        assert (found.machine_rank, found.address, found.elastic) == (None, "flag", flags)


def test_variables_are_ignored_in_a_rank_and_in_a_task_of_srun() -> None:
    assert plan({**PYTORCHJOB, "LOCAL_RANK": "0"}).machines == 1
    # Scripts for torchrun export RANK and WORLD_SIZE from srun's.
    for environ in ({**POD, **SRUN}, {**SRUN, "RANK": "1", "WORLD_SIZE": "2"}):
        found = plan(environ)
        assert (found.address, found.settings.variables) == ("gpu007", [])
    # A single task is a shell.
    assert plan({**POD, **SRUN, "SLURM_STEP_NUM_TASKS": "1"}).address == POD["PET_MASTER_ADDR"]


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({**POD, "PET_NNODES": "two"}, {}, "PET_NNODES: 'two' is not a whole number"),
        ({**POD, "PET_NODE_RANK": "2"}, {}, "machine_rank: 2 is out of range for 2 machines"),
        ({**POD, "PET_NPROC_PER_NODE": "many"}, {}, "PET_NPROC_PER_NODE: 'many': give a number from 1, auto, cpu or"),
        ({**POD, "PET_NPROC_PER_NODE": "gpu"}, {}, "PET_NPROC_PER_NODE: gpu, but there is no GPU"),
        ({"PET_NNODES": "2"}, {}, "2 machines, but no machine_rank and no main_process_ip"),
        ({**POD, "PET_NPROC_PER_NODE": "0"}, {}, "PET_NPROC_PER_NODE: '0': give a number from 1"),
        ({"PET_RDZV_CONF": "timeout"}, {}, "PET_RDZV_CONF timeout: give KEY=VALUE"),
        ({"PET_RDZV_CONF": "=9"}, {}, "PET_RDZV_CONF =9: give KEY=VALUE"),
        ({}, {"flags": {"num_processes": 2}, "per_machine": "2"}, "give one of them"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "5"},
            {},
            "counts pods.*--num_machines 2 --machine_rank 1 --main_process_ip m --main_process_port 5",
        ),
    ],
)
def test_invalid_variables_name_the_fix(environ: dict[str, str], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan(environ, **arguments)


def test_a_rank_that_counts_machines_is_no_mistake_where_something_says_how_many() -> None:
    one = {**PYTORCHJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "3"}
    assert plan({**one, "RANK": "0", "WORLD_SIZE": "3"}).per_machine == 3
    counts = {"RANK": "1", "WORLD_SIZE": "2"}
    assert plan(counts, {"num_machines": 1}).machines == 1
    assert plan(counts, file={"num_machines": 2, "machine_rank": 1, "main_process_ip": "m"}).machines == 2
    for environ in ({"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "1"}, {**dict.fromkeys(POD, " "), **counts, "RANK": ""}):
        found = plan(environ)
        assert (found.machines, found.settings.variables) == (1, [])
    assert plan({**POD, "PET_NNODES": " 2\n"}).machines == 2


# a script without a launcher ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value"),
    [("PET_NNODES", "2"), ("PET_NNODES", "1:4"), ("SKYPILOT_NUM_NODES", "2"), ("DSTACK_NODES_NUM", "2")],
)
def test_a_script_without_a_launcher_does_not_train_on_each_machine_alone(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for arguments in ({}, {"devices": 2}, {"strategy": "ddp"}, {"strategy": "ddp_spawn", "devices": 2}):
        with pytest.raises(ConfigurationError, match=f"{name}={value}.*`leyden launch`.*torchrun.*single_device"):
            Trainer(accelerator="cpu", logger=False, **arguments)  # type: ignore[arg-type]
    assert Trainer(accelerator="cpu", logger=False, strategy="single_device").world_size == 1
    # The script starts the ranks of both machines, by NODE_RANK.
    assert Trainer(accelerator="cpu", logger=False, num_nodes=2).world_size == 2
    monkeypatch.setenv(name, "1")
    assert Trainer(accelerator="cpu", logger=False).world_size == 1
    check_launched({name: "many"})
    # A trial of Ray Tune.
    check_launched({name: value, "RAY_JOB_ID": "01000000"})


def test_a_rank_that_counts_pods_is_refused_where_a_pod_should_run_several() -> None:
    found = rank_environment(PYTORCHJOB)
    assert found is not None and (found.starter, found.node_rank) == ("hand", 1)
    for text in ("1", "auto"):
        check_one_rank(found, 1, {**PYTORCHJOB, "PET_NPROC_PER_NODE": text})
    launched = rank_environment({**PYTORCHJOB, "LOCAL_RANK": "0"})
    assert launched is not None
    check_one_rank(launched, 8, PYTORCHJOB)
    words = "RANK=1 of WORLD_SIZE=2 without LOCAL_RANK.*should run 8.*`leyden launch` or torchrun"
    with pytest.raises(ConfigurationError, match=words):
        check_one_rank(found, 8, PYTORCHJOB)
    with pytest.raises(ConfigurationError, match=words):
        check_one_rank(found, 1, {**PYTORCHJOB, "PET_NPROC_PER_NODE": "8"})


def test_a_pytorchjob_with_several_ranks_per_pod_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PYTORCHJOB.items():
        monkeypatch.setenv(name, value)
    assert Trainer(accelerator="cpu", logger=False).world_size == 2
    with pytest.raises(ConfigurationError, match="RANK counts pods"):
        Trainer(accelerator="cpu", logger=False, devices=2, num_nodes=2)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    with pytest.raises(ConfigurationError, match="RANK counts pods"):
        Trainer(accelerator="cpu", logger=False)

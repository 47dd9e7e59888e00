"""Cluster environments report the rank of a process; their ranks run like torchrun's."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Regression
from ranks.world import run_world
from samples import pairs
from torch import nn
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.core.environment import rank_environment
from leyden.launch.cluster import publish
from leyden.strategies import (
    ClusterEnvironment,
    DDPStrategy,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Farm(ClusterEnvironment):
    """Reads variables that only this test sets, and records calls."""

    creates_processes_externally = True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ["FARM_PORT"])

    def world_size(self) -> int:
        return int(os.environ["FARM_SIZE"])

    def set_world_size(self, size: int) -> None:
        self.calls.append(("size", size))

    def global_rank(self) -> int:
        return int(os.environ["FARM_RANK"])

    def set_global_rank(self, rank: int) -> None:
        self.calls.append(("rank", rank))

    def local_rank(self) -> int:
        return self.global_rank() % 2

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.calls.append((num_devices, num_nodes))

    def teardown(self) -> None:
        self.calls.append("teardown")


class DuckTypedFarm:
    """The same contract without the base class and without its optional methods."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 5

    def __init__(self, rank: int, local: int, size: int, node: int = 0) -> None:
        self.numbers = rank, local, size, node

    def global_rank(self) -> int:
        return self.numbers[0]

    def local_rank(self) -> int:
        return self.numbers[1]

    def world_size(self) -> int:
        return self.numbers[2]

    def node_rank(self) -> int:
        return self.numbers[3]

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


def trained(**arguments: Any) -> tuple[Trainer, list[Any]]:
    torch.manual_seed(1)
    module = Regression(nn.Linear(4, 1).double())
    trainer = Trainer(**{**QUIET, "max_epochs": 2, **arguments})
    data = [(x.double(), y.double()) for x, y in pairs(16)]
    trainer.fit(module, DataLoader(data, 8 // trainer.world_size))
    return trainer, [parameter.tolist() for parameter in module.parameters()]


def fit_on_a_farm(_: None = None) -> Any:
    """Fits on ranks that only a user's environment recognizes, then on ranks of MPIEnvironment."""
    values = {name: os.environ.pop(name) for name in list(os.environ) if name in TORCHRUN_NAMES}
    for name in ("TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= {"FARM_RANK": values["RANK"], "FARM_SIZE": values["WORLD_SIZE"], "FARM_PORT": values["MASTER_PORT"]}
    farm = Farm()
    trainer, first = trained(plugins=[farm], devices=2)
    assert trainer.strategy.name == "ddp" and rank_environment().starter == "Farm"
    for name in TORCHRUN_NAMES:
        del os.environ[name]
    strategy = DDPStrategy()
    os.environ |= {f"OMPI_COMM_WORLD_{name}": values["RANK"] for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    again, second = trained(plugins=MPIEnvironment(), strategy=strategy)
    return trainer.global_rank, trainer.world_size, farm.calls, first, again.global_rank, second


def test_two_ranks_run_through_a_users_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, alone = trained()
    ranks = run_world(2, fit_on_a_farm, None)
    for rank, (number, size, calls, first, again, second) in enumerate(ranks):
        assert (number, size, again) == (rank, 2, rank)
        assert calls == [("size", 2), ("rank", rank), (2, 1), "teardown"]
        torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(alone[0]), rtol=0, atol=1e-12)
        assert first == second


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*TORCHRUN_NAMES, "LEYDEN_CLUSTER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def read(environment: Any) -> tuple[Any, ...]:
    numbers = (environment.global_rank(), environment.local_rank(), environment.world_size(), environment.node_rank())
    return *numbers, environment.main_address, environment.main_port


def test_lightnings_environments_read_their_launchers_variables(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    here = socket.gethostname()
    hosts.write_text(f"launcher\nfirst\nfirst\n{here}\n{here}\n")
    cases: list[tuple[Any, dict[str, str], tuple[Any, ...]]] = [
        (
            SLURMEnvironment,
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_NODEID": "1",
                "SLURM_STEP_NODELIST": "gpu[07-08]",
                "SLURM_JOB_ID": "123456",
            },
            (3, 1, 4, 1, "gpu07", 18456),
        ),
        (
            MPIEnvironment,
            {
                **{f"OMPI_COMM_WORLD_{name}": text for name, text in (("RANK", "3"), ("SIZE", "4"))},
                **{f"OMPI_COMM_WORLD_LOCAL_{name}": text for name, text in (("RANK", "1"), ("SIZE", "2"))},
                "MASTER_ADDR": "head",
                "PMIX_NAMESPACE": "prterun-head-7@1",
            },
            (3, 1, 4, 1, "head", 15071),
        ),
        (
            MPIEnvironment,
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (1, 1, 2, 0, "127.0.0.1", 15000),
        ),
        (
            LSFEnvironment,
            {
                "JSM_NAMESPACE_RANK": "2",
                "JSM_NAMESPACE_SIZE": "4",
                "JSM_NAMESPACE_LOCAL_RANK": "0",
                "LSB_DJOB_RANKFILE": str(hosts),
                "LSB_JOBID": "42",
            },
            (2, 0, 4, 1, "first", 15042),
        ),
        (
            KubeflowEnvironment,
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "99", "KUBERNETES_PORT": "x"},
            (1, 0, 2, 1, "head", 99),
        ),
        (
            TorchElasticEnvironment,
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_RANK": "0", "MASTER_PORT": "7"},
            (1, 1, 2, 0, "127.0.0.1", 7),
        ),
    ]
    for kind, variables, expected in cases:
        with clean.context() as patch:
            assert not kind.detect()
            for name, text in variables.items():
                patch.setenv(name, text)
            assert kind.detect() and read(kind()) == expected, kind.__name__
    with pytest.raises(ConfigurationError, match="MPIEnvironment needs OMPI_COMM_WORLD_SIZE.*Start the script"):
        Trainer(**QUIET, plugins=MPIEnvironment())
    with pytest.raises(ConfigurationError, match="LSB_DJOB_RANKFILE='.' lists no hosts"):
        LSFEnvironment().node_rank()
    with pytest.raises(ConfigurationError, match=r"Preemption\(signals="):
        SLURMEnvironment(requeue_signal=10)
    with clean.context() as patch:
        for name, text in (("RANK", "2"), ("SIZE", "4"), ("LOCAL_SIZE", "2"), ("LOCAL_RANK", "0")):
            patch.setenv(f"OMPI_COMM_WORLD_{name}", text)
        with pytest.raises(ConfigurationError, match="MASTER_ADDR="):
            _ = MPIEnvironment().main_address


def test_an_environments_ranks_are_published_and_impossible_ones_refused(clean: pytest.MonkeyPatch) -> None:
    publish(DuckTypedFarm(3, 1, 4, 1), "auto", 2)
    place = rank_environment()
    assert place is not None and (place.rank, place.local_rank, place.world_size, place.node_rank) == (3, 1, 4, 1)
    assert (place.local_world_size, os.environ["MASTER_PORT"]) == (2, "5")
    for wrong, nodes in ((DuckTypedFarm(3, 1, 4, 1), 1), (DuckTypedFarm(4, 0, 4), 1), (DuckTypedFarm(0, 0, 3), 2)):
        with pytest.raises(ConfigurationError, match=r"DuckTypedFarm reports rank .*Set Trainer\(num_nodes"):
            publish(wrong, "auto", nodes)
    with pytest.raises(ConfigurationError, match="LightningEnvironment does not start processes on other machines"):
        publish(LightningEnvironment(), 2, 2)
    with pytest.raises(ConfigurationError, match="more than one cluster environment, DuckTypedFarm and Farm"):
        Trainer(**QUIET, plugins=[DuckTypedFarm(0, 0, 1), Farm()])


def test_lightning_environment_leaves_starting_ranks_to_the_trainer(clean: pytest.MonkeyPatch) -> None:
    environment = LightningEnvironment()
    trainer, _ = trained(plugins=environment)
    assert trainer.world_size == 1 and rank_environment() is None
    # Ranks that are recognized without the environment are not published.
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        clean.setenv(name, text)
    clean.setenv("MASTER_ADDR", "127.0.0.1")
    clean.setenv("MASTER_PORT", "1")
    clean.setenv("GROUP_RANK", "0")
    trainer = Trainer(**QUIET, plugins=TorchElasticEnvironment(), num_nodes=2)
    assert trainer.world_size == 2 and "LEYDEN_CLUSTER" not in os.environ

"""A script that starts Ray on this machine, runs one scenario and prints its outcome: driver.py SCENARIO FOLDER."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, Trainer, TrainModule
from leyden.integrations.ray import RayTrainReportCallback, checkpoint_path, prepare_trainer
from leyden.launch.processes import descendants, started


class Line(TrainModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Killed(Callback):
    """Kills the process of rank 1 in its seventh step, once."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6 and trainer.global_rank == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Drained(Callback):
    """Has Ray announce after the third step that the machine is about to be taken away."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        import ray.train

        if trainer.global_step != 3:
            return
        if trainer.is_global_zero:
            context = ray.get_runtime_context()
            where = ["--address", context.gcs_address, "--node-id", context.get_node_id()]
            why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
            when = ["--deadline-remaining-seconds", "3600"]
            command = str(Path(sys.executable).with_name("ray"))
            subprocess.run([command, "drain-node", *where, *why, *when], check=True)
        while ray.train.get_preemption_info() is None:
            pass


class Failing(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            raise KeyError("sample 13 is missing")


def make_trainer(folder: str, *callbacks: Callback, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "default_root_dir": folder, **quiet, **arguments},
        callbacks=list(callbacks),
    )


def loader() -> DataLoader[Any]:
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=4, shuffle=True)


def numbers(module: nn.Module) -> list[float]:
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]


def reference(folder: str) -> list[float]:
    """Returns the weights of the same run on two ranks without Ray."""
    trainer = make_trainer(folder, strategy="ddp_fork", devices=2)
    module = Line()
    trainer.fit(module, loader())
    return numbers(module)


def train(config: dict[str, Any]) -> None:
    folder = config["folder"]
    killed = RayTrainReportCallback(every_n_train_steps=2), Killed(Path(folder, "killed"))
    drained = RayTrainReportCallback(), Drained()
    trainer = prepare_trainer(make_trainer(folder, *(drained if config["drains"] else killed)))
    module, path = Line(), checkpoint_path()
    trainer.fit(module, loader(), ckpt_path=path)
    # Once more, after the function's own reports.
    Path(folder, f"newest-{trainer.global_rank}").write_text(str(checkpoint_path()))
    if trainer.is_global_zero:
        found = {"weights": numbers(module), "resumed": path, "step": trainer.global_step}
        Path(folder, "fitted.json").write_text(json.dumps(found))


def fail(config: dict[str, Any]) -> None:
    """Notes which Trainers and data are refused, then fails in the fit of one that is not."""
    import ray.train
    import torch.distributed as dist

    refused = {}
    for arguments in ({"strategy": "single_device"}, {"preemption": True}, {"resume": "auto"}, {"devices": 4}):
        try:
            prepare_trainer(make_trainer(config["folder"], **arguments))
        except ValueError as error:
            refused[next(iter(arguments))] = str(error)
    trainer = prepare_trainer(make_trainer(config["folder"], Failing()))
    rows = ray.train.get_dataset_shard("rows").iter_torch_batches(batch_size=4)
    try:
        trainer.fit(Line(), rows)
    except ValueError as error:
        refused["rows"] = str(error)
    try:
        trainer.fit(Line(), loader())
    except KeyError as error:
        if trainer.global_rank == 1:
            found = {"refused": refused, "error": error.args[0], "joined": dist.is_initialized()}
            Path(config["folder"], "failed.json").write_text(json.dumps(found))
        raise


class Reading(Line):
    """Reads the rows of Ray Data: numbers from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.read += batch["id"].tolist()
        return super().training_step([batch["id"][:, None].expand(-1, 4) / 40], batch_idx)


def read(config: dict[str, Any]) -> None:
    import ray.train

    trainer = prepare_trainer(make_trainer(config["folder"], RayTrainReportCallback(), use_distributed_sampler=False))
    module, rows = Reading(), ray.train.get_dataset_shard("rows").iter_torch_batches(batch_size=4)
    trainer.fit(module, rows, ckpt_path=checkpoint_path())
    Path(config["folder"], f"read-{trainer.global_rank}").write_text(json.dumps(module.read))


def trial(config: dict[str, Any]) -> None:
    refused = ""
    try:
        prepare_trainer(make_trainer(config["folder"], devices=2))
    except ValueError as error:
        refused = str(error)
    trainer = prepare_trainer(make_trainer(config["folder"], RayTrainReportCallback()))
    trainer.fit(Line(config["lr"]), loader(), ckpt_path=checkpoint_path())
    Path(config["folder"], f"refused-{config['lr']}").write_text(refused)


def on_two_workers(folder: str, drains: bool = False, **run: Any) -> dict[str, Any]:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    result = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "drains": drains},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=None if drains else 2),
            **{"storage_path": f"{folder}/storage", **run},
        ),
    ).fit()
    kept = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
    return {"metrics": result.metrics, "last": result.checkpoint.path, "kept": kept}


def drained(folder: str) -> dict[str, Any]:
    return on_two_workers(folder, drains=True)


def bucket(folder: str) -> dict[str, Any]:
    """Ray's storage is a bucket, which the workers write to as well."""
    from pyarrow.fs import S3FileSystem

    address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    storage = S3FileSystem(access_key="test", secret_key="test", endpoint_override=address, scheme="http")
    return on_two_workers(folder, storage_path="runs/ray", storage_filesystem=storage)


def other(folder: str) -> dict[str, Any]:
    """Ray's storage is a file system that only pyarrow can write to."""
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    Path(folder, "other").mkdir()
    storage = SubTreeFileSystem(f"{folder}/other", LocalFileSystem())
    return on_two_workers(folder, storage_path="runs", storage_filesystem=storage)


def failed(folder: str) -> dict[str, Any]:
    import ray.data
    from ray.train import RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchTrainer

    scaling, run = ScalingConfig(num_workers=2), RunConfig(name="failed", storage_path=f"{folder}/storage")
    settings = {"scaling_config": scaling, "run_config": run, "datasets": {"rows": ray.data.range(40)}}
    try:
        TorchTrainer(fail, train_loop_config={"folder": folder}, **settings).fit()
    except WorkerGroupError as error:
        return {"failures": {rank: repr(failure) for rank, failure in error.worker_failures.items()}}
    return {}


def rows(folder: str) -> dict[str, Any]:
    import ray.data
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling, run = ScalingConfig(num_workers=2), RunConfig(name="rows", storage_path=f"{folder}/storage")
    settings = {"scaling_config": scaling, "run_config": run, "datasets": {"rows": ray.data.range(40)}}
    return dict(TorchTrainer(read, train_loop_config={"folder": folder}, **settings).fit().metrics)


def tuned(folder: str) -> dict[str, Any]:
    from ray import tune

    results = tune.Tuner(
        trial,
        param_space={"lr": tune.grid_search([0.2, 0.1, 0.05, 0.01]), "folder": folder},
        tune_config=tune.TuneConfig(metric="loss_epoch", mode="min"),
        run_config=tune.RunConfig(name="tuned", storage_path=f"{folder}/storage"),
    ).fit()
    trials = [
        {"lr": result.config["lr"], "loss": result.metrics["loss_epoch"], "checkpoint": result.checkpoint.path}
        for result in results
    ]
    return {"trials": trials, "errors": len(results.errors), "best": results.get_best_result().config["lr"]}


SCENARIOS: dict[str, Callable[[str], dict[str, Any]]] = {
    "killed": on_two_workers,
    "drained": drained,
    "bucket": bucket,
    "other": other,
    "failed": failed,
    "rows": rows,
    "tuned": tuned,
}


def main() -> None:
    import ray

    name, folder = sys.argv[1:]
    found = {"reference": reference(folder)} if name in ("killed", "drained", "bucket", "other") else {}
    # The paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20, _temp_dir=short)
        try:
            found |= SCENARIOS[name](folder)
        finally:
            family = {process: started(process) for process in descendants(os.getpid())}
            Path(folder, "family.json").write_text(json.dumps(family))
            ray.shutdown()
    Path(folder, "outcome.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

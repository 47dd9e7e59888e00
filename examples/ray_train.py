# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden[ray]", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains digits.py on two workers of Ray Train, on the CPU. After a kill of a worker, Ray continues the run.

python examples/ray_train.py           one run on two workers
python examples/ray_train.py --tune    four learning rates, as trials of Ray Tune
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from digits import Digits, make_loaders
from ray import tune
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from leyden import Trainer, seed_everything
from leyden.callbacks import CSVLogger
from leyden.integrations.ray import RayTrainReportCallback, checkpoint_path, prepare_trainer


def train(config: dict[str, Any]) -> None:
    """Runs on each worker, and again on new workers after a failure."""
    torch.set_num_threads(1)
    seed_everything(0)
    loader, val, _ = make_loaders(batch_size=16)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=config["epochs"],
        default_root_dir=config["root"],
        logger=CSVLogger(name=f"lr={config['lr']}"),
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(Digits(config["lr"]), loader, val, ckpt_path=checkpoint_path())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="search for a learning rate")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--root", default="out/ray", help="folder of Ray's runs and the logs (default: %(default)s)")
    args = parser.parse_args()
    # Workers start in another folder. On several machines, this must be one that all of them mount.
    root = str(Path(args.root).resolve())
    config = {"epochs": args.epochs, "root": root, "lr": 3e-3}

    if args.tune:
        tuner = tune.Tuner(
            train,
            param_space={**config, "lr": tune.grid_search([1e-4, 1e-3, 3e-3, 1e-2])},
            tune_config=tune.TuneConfig(metric="val_acc", mode="max"),
            run_config=tune.RunConfig(name="tune", storage_path=root),
        )
        best = tuner.fit().get_best_result()
        print(f"accuracy {best.metrics['val_acc']:.3f} with a learning rate of {best.config['lr']}")
        return
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="train",
            storage_path=root,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    module = Digits.load_from_checkpoint(result.checkpoint.path)
    [metrics] = Trainer(accelerator="cpu", logger=False).test(module, make_loaders(batch_size=16)[2], verbose=False)
    print(f"test accuracy {metrics['test_acc']:.3f}, from {result.checkpoint.path}")


if __name__ == "__main__":
    main()

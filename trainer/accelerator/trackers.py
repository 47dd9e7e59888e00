"""Accelerate's tracker classes: Leyden's loggers under their names and arguments."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from leyden.trainer.accelerator.tracking import LoggerTracker, make_logger


class TensorBoardTracker(LoggerTracker):
    """TensorBoard's event files in `logging_dir/run_name`.

    Args:
        run_name: of the run.
        logging_dir: folder of the runs.
        **kwargs: of `TensorBoardLogger`, and of its SummaryWriter.
    """

    name = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(make_logger("tensorboard", run_name, os.fspath(logging_dir), kwargs), "tensorboard")


class WandBTracker(LoggerTracker):
    """Weights & Biases.

    Args:
        run_name: the project.
        **kwargs: of `WandbLogger`, and of `wandb.init`.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(make_logger("wandb", run_name, os.getcwd(), kwargs), "wandb")


class CometMLTracker(LoggerTracker):
    """Comet.

    Args:
        run_name: the project.
        **kwargs: of `CometLogger`.
    """

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(make_logger("comet_ml", run_name, os.getcwd(), kwargs), "comet_ml")


class MLflowTracker(LoggerTracker):
    """MLflow.

    Args:
        experiment_name: of the run.
        logging_dir: folder of its files.
        **kwargs: of `MLFlowLogger`.
    """

    name = "mlflow"

    def __init__(self, experiment_name: str, logging_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        folder = os.getcwd() if logging_dir is None else os.fspath(logging_dir)
        super().__init__(make_logger("mlflow", experiment_name, folder, kwargs), "mlflow")

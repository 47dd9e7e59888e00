"""Ray Train and Ray Tune: checks a Trainer against the worker that runs it, and reports metrics and checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import CLOSING_ORDER, Callback
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.checkpoint.nodes import is_shared
from leyden.core.checks import check_flags, check_whole
from leyden.core.errors import ConfigurationError, needs

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

ASK_EVERY = 10.0
"""Seconds between two questions to Ray for preemptions. One takes about 5 ms."""


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Checks that a Trainer fits the worker of Ray that calls this. Changes nothing.

    Call it in the function that `TorchTrainer` or `Tuner` runs, before `fit`.

    Args:
        trainer: the Trainer of the function.

    Returns:
        The Trainer.

    Raises:
        ConfigurationError: outside of a worker; or if the Trainer would use other ranks or another device than the
            worker's, or end the worker's process.
        MissingExtraError: if Ray is not installed.

    Example:
        >>> def train(config):
        ...     trainer = prepare_trainer(Trainer(max_epochs=3, callbacks=[RayTrainReportCallback()]))
        ...     trainer.fit(MyModule(config["lr"]), make_loader(), ckpt_path=checkpoint_path())
    """
    session = _session("prepare_trainer")
    if trainer.arguments.preemption is not None:
        raise ConfigurationError(
            "Trainer(preemption=…) and Trainer(resume=…) end the process after a preemption, which Ray counts as an "
            "error. Leave them out: RayTrainReportCallback saves when Ray announces a preemption, and Ray restarts the "
            "function, which resumes with ckpt_path=checkpoint_path()."
        )
    if trainer.strategy.ranks.are_planned:
        raise ConfigurationError(
            f"The Trainer would start {trainer.world_size} ranks inside a worker of Ray. Pass devices=1, or have Ray "
            f"start them: TorchTrainer(…, scaling_config=ScalingConfig(num_workers={trainer.world_size}))."
        )
    if _is_tune(session):
        return trainer
    from ray.train.torch import get_device

    workers = session.get_context().get_world_size()
    if trainer.world_size != workers:
        raise ConfigurationError(
            f"Ray runs {workers} workers, but this Trainer trains on {trainer.world_size} rank(s), so that each worker "
            "would train alone. Start the workers with TorchTrainer, and leave out strategy='single_device'."
        )
    given, own = get_device(), trainer.strategy.root_device
    if given != own:
        fix = (
            "pass Trainer(accelerator='cpu'), or ScalingConfig(use_gpu=True) for one GPU per worker"
            if given.type == "cpu"
            else "leave out accelerator= and devices="
        )
        raise ConfigurationError(f"Ray gave this worker the device {given}, but the Trainer uses {own}: {fix}.")
    return trainer


def checkpoint_path() -> str | None:
    """Returns the newest checkpoint that the function has reported to Ray, for `ckpt_path`.

    All workers call it. A checkpoint in a storage that only Ray can read is first downloaded to a temporary folder,
    once per machine.

    Returns:
        The checkpoint's folder, or its URL in a bucket; None if the function has reported none.

    Raises:
        ConfigurationError: outside of a worker of Ray.
        MissingExtraError: if Ray is not installed.

    Example:
        >>> def train(config):
        ...     Trainer(max_epochs=3).fit(MyModule(), make_loader(), ckpt_path=checkpoint_path())
    """
    session = _session("checkpoint_path")
    checkpoint = session.get_checkpoint()
    if not _is_tune(session):
        from ray.train.collective import broadcast_from_rank_zero

        # Rank 0 passes checkpoints to Ray, which tells the other workers only when the function starts again.
        checkpoint = broadcast_from_rank_zero(checkpoint)
    if checkpoint is None:
        return None
    place = _place_of(checkpoint.filesystem, checkpoint.path)
    return str(checkpoint.to_directory() if place is None else place)


class RayTrainReportCallback(Callback):
    """Reports the logged metrics to Ray, with a checkpoint that a restart of the function resumes.

    Use it in a function that Ray Train's `TorchTrainer` runs, or as a trial of Ray Tune. Ray keeps and deletes the
    checkpoints (`ray.train.CheckpointConfig`), so pass `Trainer(enable_checkpointing=False)`: a ModelCheckpoint would
    write a second set.

    In Ray Train, a checkpoint is written once, into the folder of Ray's run, by all workers: on a disk that they share,
    or in a bucket, with `leyden[remote]`. To any other storage, Ray uploads a copy. When Ray announces that a machine
    is about to be taken away, the callback saves and reports at the end of the step, once, and training goes on until
    Ray restarts the function.

    Ray's controller takes one report every 2 seconds by default, and training waits for it to take the previous one.

    Args:
        every_n_train_steps: also report within an epoch, after every n-th optimizer step. None: only after epochs.
        every_n_epochs: report at the end of every n-th epoch, after its validation.
        save: False to report metrics only. Ray Train's `Result` has only metrics that came with a checkpoint.

    Raises:
        ConfigurationError: if a number is not positive; at the start of fit, outside of a worker of Ray, or if workers
            on several machines do not share the folder of Ray's run.
        MissingExtraError: at the start of fit, if Ray is not installed.

    Example:
        >>> callback = RayTrainReportCallback(every_n_train_steps=500)
        >>> # Trainer(callbacks=[callback], enable_checkpointing=False)
    """

    order: ClassVar[int] = 2 * CLOSING_ORDER

    def __init__(self, every_n_train_steps: int | None = None, every_n_epochs: int = 1, save: bool = True) -> None:
        steps = {} if every_n_train_steps is None else {"every_n_train_steps": every_n_train_steps}
        check_whole("RayTrainReportCallback", 1, every_n_epochs=every_n_epochs, **steps)
        check_flags("RayTrainReportCallback", save=save)
        self.every_n_train_steps, self.every_n_epochs, self.save = every_n_train_steps, every_n_epochs, save
        self._folder: Place | None = None
        """The folder of Ray's run, if checkpoints are written there; None if Ray copies them."""
        self._filesystem: Any = None
        """Ray's object for the storage of that folder."""
        self._reported: set[str] = set()
        """Ray's paths of the checkpoints there that it knows."""
        self._asks = False
        """True if Ray is asked for preemptions."""
        self._preemption: Any = None
        """The last preemption that Ray has announced."""
        self._asked = self._asks_at = 0
        self._asked_at: float | None = None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        session = _session()
        self._asks = self.save and not _is_tune(session)
        if not self._asks:
            return
        context = session.get_context()
        storage, has_machines = context.get_storage(), context.get_world_size() > context.get_local_world_size()
        self._filesystem = storage.storage_filesystem
        folder = _place_of(self._filesystem, storage.experiment_fs_path)
        is_everywhere = isinstance(folder, BucketPath) or (
            folder is not None and is_shared(folder, CheckpointRanks(trainer.strategy, folder))
        )
        if has_machines and not is_everywhere:
            raise ConfigurationError(
                "The workers run on several machines, which do not share the folder of Ray's run, "
                f"{storage.experiment_fs_path}. Set RunConfig(storage_path=…) to a folder that every machine mounts, "
                "or to a bucket, and install leyden[remote]."
            )
        self._folder = folder
        self._reported = {reported.checkpoint.path for reported in session.get_all_reported_checkpoints()}

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._asked = self._asks_at = trainer.global_step
        self._asked_at = None

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.window_is_over:
            return
        is_due = self.every_n_train_steps is not None and trainer.global_step % self.every_n_train_steps == 0
        if self._asks and trainer.global_step >= self._asks_at:
            is_due |= self._is_announced(trainer)
        if is_due and not (trainer.is_last_batch and self._is_due_after_epoch(trainer)):
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._is_due_after_epoch(trainer):
            self._report(trainer)

    def _is_due_after_epoch(self, trainer: Trainer) -> bool:
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _is_announced(self, trainer: Trainer) -> bool:
        """Returns True once for each preemption that Ray announces. All ranks ask at the same steps.

        Asking waits for all ranks, so it is done every few seconds: rank 0's clock decides at which step again.
        """
        step, now = trainer.global_step, time.monotonic()
        steps = 1
        if self._asked_at is not None:
            taken = step - self._asked
            # At most doubled, since the first steps may not be typical.
            steps = max(1, min(2 * taken, int(ASK_EVERY * taken / (now - self._asked_at))))
        self._asked, self._asked_at = step, now
        self._asks_at = step + trainer.strategy.ranks.broadcast(steps)
        found = _session().get_preemption_info()
        is_new = found is not None and found != self._preemption
        self._preemption = found
        return is_new

    def _report(self, trainer: Trainer) -> None:
        session = _session()
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        metrics = {**trainer.read_metrics(trainer.callback_metrics), **place}
        if not self.save:
            session.report(metrics)
            return
        with self._target(trainer) as folder:
            path = folder / "-".join(f"{key}={value}" for key, value in place.items())
            # One that Ray knows is there after a rollback, and another one if a kill prevented the report.
            overwrite = _path_of(path) not in self._reported
            written = _path_of(trainer.save_checkpoint(path, overwrite=overwrite, asynchronous=False))
            self._reported.add(written)
            if self._folder is None:
                checkpoint, how = session.Checkpoint.from_directory(written), {}
            else:
                checkpoint = session.Checkpoint(written, self._filesystem)
                how = {"checkpoint_upload_mode": session.CheckpointUploadMode.NO_UPLOAD}
            session.report(metrics, checkpoint=checkpoint if trainer.is_global_zero else None, **how)

    @contextmanager
    def _target(self, trainer: Trainer) -> Iterator[Place]:
        """Yields the folder to save in: that of Ray's run, or a temporary one, from which Ray copies."""
        with ExitStack() as stack:
            folder = self._folder
            if folder is None:
                own = tempfile.TemporaryDirectory(prefix="leyden-") if trainer.is_global_zero else nullcontext("")
                folder = Path(trainer.strategy.ranks.broadcast(stack.enter_context(own)))
            yield folder


def _session(caller: str = "RayTrainReportCallback") -> Any:
    """Returns the module whose functions this process may call: `ray.train`, or `ray.tune` in a trial.

    Raises:
        ConfigurationError: if this process is not a worker of Ray.
        MissingExtraError: if Ray is not installed, or is too old.
    """
    with needs("ray", "ray", caller):
        import ray.train
        import ray.tune
        from ray.train import get_preemption_info  # noqa: F401
    try:
        ray.train.get_context()
    except DeprecationWarning:
        # What the functions of ray.train raise in a trial of Tune.
        return ray.tune
    except RuntimeError as error:
        raise ConfigurationError(
            f"{caller} works only in a worker of Ray: call it in the function passed to ray.train.torch.TorchTrainer "
            "or ray.tune.Tuner."
        ) from error
    return ray.train


def _is_tune(session: Any) -> bool:
    return str(session.__name__) == "ray.tune"


SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "az"}
"""The scheme of a URL, by pyarrow's name of a storage."""


def _place_of(filesystem: Any, path: str) -> Place | None:
    """Returns the folder or URL of a path in Ray's storage; None if only Ray can write there.

    Args:
        filesystem: pyarrow's object for the storage.
        path: the path in it.
    """
    from pyarrow.fs import LocalFileSystem

    if isinstance(filesystem, LocalFileSystem):
        return Path(path)
    scheme = SCHEMES.get(filesystem.type_name)
    if scheme is None or find_spec("obstore") is None:
        return None
    return BucketPath(f"{scheme}://{path}")


def _path_of(place: Place) -> str:
    """Returns the path in Ray's storage of a folder or URL."""
    return str(place).partition("://")[2] if isinstance(place, BucketPath) else str(place)

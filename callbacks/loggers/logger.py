"""Base classes for loggers, which write metrics and hyperparameters with a Trainer or in a custom training loop.

At the end are functions for callbacks that use the loggers of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.plain import STARTS, HParams, as_dict, json_text, json_value, run_files
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.secrets import OWNERS, is_marked
from leyden.checkpoint.status import RUN_FILE
from leyden.core.errors import ConfigurationError, StateError
from leyden.core.paths import check_plain, local_path
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


HPARAMS_FILE = "hparams.json"
YAML_FILE = "hparams.yaml"
SWEPT = 16
"""The number of run folders that a new run clears, the newest ones. A listing takes a millisecond on NFS."""


class Logger(Callback, ABC):
    """Base class for loggers. A subclass must implement `log_metrics`; every other method has a default.

    The Trainer calls `log_hyperparams` at the start of a fit, `log_metrics` with plain numbers (read back from the
    device in one transfer), `save` before a checkpoint is committed, `after_save_checkpoint` after the commit, and
    `finalize` at the end of a run. Only rank 0 writes.

    Example:
        >>> class PrintLogger(Logger):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, dict(metrics))
        >>> PrintLogger().log_metrics({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
    """

    state_per_rank = False
    uses_run_folder = True
    is_writer: bool = True
    """False on ranks that do not write."""
    _stage: str | None = None
    _default_root_dir: str | None = None
    _last_step: int = -1

    @property
    def name(self) -> str | None:
        """The name of the experiment; None if it has none."""
        return None

    @property
    def version(self) -> int | str | None:
        """The run's number or name within the experiment."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The root folder of everything that this logger writes."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder that holds all versions of the experiment; None if there is no such folder."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run."""
        return self.save_dir

    def runs_below(self, root: str) -> str:
        """Returns the folder that holds the run folders of a Trainer with this first logger: `<root>/<name>`.

        Args:
            root: the Trainer's `default_root_dir`, which the logger's `save_dir` overrides.
        """
        # Services allow slashes in the names of experiments.
        name = re.sub(r"[/\\:\0]", "_", self.name or "").strip(". ")
        return os.path.join(self._save_dir_below(root), name)

    def _save_dir_below(self, root: str) -> str:
        return self.save_dir or root

    @property
    def group_separator(self) -> str:
        """The separator between a metric group and a metric name."""
        return "/"

    @property
    def experiment(self) -> Any:
        """The underlying writer, such as a SummaryWriter or a W&B run. Created on first access."""
        return self

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs numbers.

        Args:
            metrics: numbers by name; nan and inf are allowed.
            step: number of optimizer steps done; None for the step after the last one logged.
        """

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        """Logs the hyperparameters of the run, and the metrics for comparing runs."""

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        """Records how a fit was started. Called once at the start of every fit, resumed or not, on rank 0.

        An exception raised here becomes a warning. If no logger overrides this method, the record is never collected.

        Args:
            record: JSON-serializable values: `started` (UTC), the `step` and `ckpt_path` that the fit continues from,
                `command`, `folder`, `host`, `system`, `world_size`, `device`, `device_name`, the resolved `arguments`
                of the Trainer, the names of those `changed` from their defaults, `versions`, and `git` (None outside a
                repository) with `commit`, `branch`, `dirty`, `untracked`, `left_out`, `private` and `masked`. Values
                that look like keys or passwords are masked.
            diff: the uncommitted changes to the code, for `git apply`; `git` lists the files it leaves out.
        """

    def log_graph(self, module: nn.Module, input_array: Any = None) -> None:
        """Logs the graph of a module, if the logger supports graphs."""

    def save(self) -> None:
        """Flushes everything logged so far to disk."""

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Called after a checkpoint is committed, on rank 0, in the training thread.

        The checkpoint is complete, and stays on disk until the callback's next save. After an asynchronous save, this
        runs at the end of the batch that notices the commit, or at the end of the fit. Checkpoints from
        `save_on_exception` are not ranked and not reported.

        Args:
            checkpoint_callback: the callback that saved the checkpoint; its `last_model_path` is the path.
        """

    def finalize(self, status: str) -> None:
        """Closes open files and connections. Later logging reopens them.

        Args:
            status: "success", "failed" or "interrupted".
        """
        self.save()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._stage = stage
        self.is_writer = trainer.is_global_zero
        self._default_root_dir = str(trainer.default_root_dir)

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps the values logged for the steps that are rolled back; those step numbers will be logged again."""

    def _next_step(self, step: int | None) -> int:
        """Returns the given step, or the step after the last one logged."""
        number = self._last_step + 1 if step is None else int(step)
        self._last_step = max(self._last_step, number)
        return number

    def _step_of(self, step: int | None) -> int:
        """Returns the given step, or the last step logged."""
        return max(self._last_step, 0) if step is None else int(step)


class SavingLogger(Logger):
    """Base class for loggers that write to a folder.

    Without a `save_dir` it is the Trainer's `default_root_dir`, or the working directory if there is no Trainer. The
    prefix of metric names is joined with "-".
    """

    def __init__(self, save_dir: str | os.PathLike[str] | None, prefix: str) -> None:
        self._save_dir = None if save_dir is None else local_path(save_dir, f"{type(self).__name__}: save_dir")
        self._prefix = prefix

    @property
    def save_dir(self) -> str:
        return self._save_dir if self._save_dir is not None else (self._default_root_dir or os.getcwd())

    def _save_dir_below(self, root: str) -> str:
        return root if self._save_dir is None else self._save_dir

    def _named(self, key: str) -> str:
        return f"{self._prefix}-{key}" if self._prefix else key


class FolderLogger(SavingLogger):
    """Base class for loggers that write to a run folder `<save_dir>/<name>/version_N`.

    N is the first free number, claimed when the folder is first needed. Two processes that start together get separate
    folders, and a resumed run continues in its own folder. The folder of a Trainer's first such logger is the run's
    folder, with its checkpoints; further loggers with the same `save_dir` and `name` share it. A small `run.json`
    inside identifies the run, so a resume never touches another run's folder.

    A version is N, or a string that is the full name of the folder.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] | None, name: str | None, version: int | str | None, prefix: str
    ) -> None:
        super().__init__(save_dir, prefix)
        self._name = name or ""
        self._given_version = version
        self._version: int | str | None = None
        self._run: str | None = None
        self._claimed: Path | None = None
        self._is_in_run_folder = False
        """True if the Trainer has chosen the folder, and not this logger."""
        self._peers: list[FolderLogger] = []
        self.hparams: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def root_dir(self) -> str:
        """The folder of all versions, `<save_dir>/<name>`."""
        return os.path.join(self.save_dir, self._name)

    def runs_below(self, root: str) -> str:
        return os.path.join(self._save_dir_below(root), self._name)

    def given_folder(self, root: str) -> str | None:
        """Returns the run folder that the user's `version` names; None without one. See `runs_below` for `root`."""
        version = self._given_version
        return None if version is None else str(_folder_below(self.runs_below(root), version))

    def claimed_folder(self, root: str) -> str | None:
        """Returns the run folder that this logger has claimed already; None if it has not."""
        return None if self._version is None else str(_folder_below(self.runs_below(root), self._version))

    @property
    def version(self) -> int | str | None:
        if self._version is None and self.is_writer:
            self._version, self._run = self._open_folder()
        return self._given_version if self._version is None else self._version

    @property
    def log_dir(self) -> str | None:
        version = self.version
        return None if version is None else str(self._folder(version))

    @property
    def state_key(self) -> str:
        parts = {"name": self._name, "save_dir": self._save_dir, "version": self._given_version}
        given = (f"{key}={value!r}" for key, value in parts.items() if value is not None)
        return f"{type(self).__qualname__}({', '.join(given)})"

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._peers = [peer for peer in trainer.loggers if isinstance(peer, FolderLogger) and peer is not self]
        if trainer.run_folder is not None:
            self._enter(Path(trainer.run_folder))
        self._share_folder(trainer)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # A resume may have switched to the folder of the original run.
        self._share_folder(trainer)

    def _enter(self, folder: Path) -> None:
        """Moves to the run's folder, unless it is none of this logger's, or a logger of the same class is there."""
        is_below = os.path.abspath(folder.parent) == os.path.abspath(self.root_dir)
        is_taken = any(type(peer) is type(self) and peer._is_in_run_folder for peer in self._peers)
        self._is_in_run_folder = is_below and not is_taken and self._given_version is None
        version = version_of(folder)
        if not self._is_in_run_folder or not self.is_writer or version == self._version:
            return
        if self._version is not None:
            self.finalize("success")
            self._forget()
        self._discard_claimed_folder(version)
        self._version, self._run = version, read_run_id(folder) or write_run_id(folder)

    def _share_folder(self, trainer: Trainer) -> None:
        """Broadcasts the folder of rank 0, the writer, to the other ranks."""
        if trainer.world_size > 1:
            version, run = trainer.strategy.ranks.broadcast((self.version, self._run))
            if not self.is_writer:
                self._version, self._run = version, run

    def state_dict(self) -> dict[str, Any]:
        if self._version is None:
            return {}
        return {"version": self._version, "run": self._run, "last_step": self._last_step}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        saved = SavedState(state)
        version = saved.value("version")
        # The folder must lie next to the other versions, unless the user chose it.
        if isinstance(version, str) and version != self._given_version:
            if version in ("", ".", "..") or any(sign in version for sign in "/\\:\0"):
                raise StateError("version", "names a folder outside the logger's root folder")
        elif version != self._given_version:
            saved.integer("version", least=0)
        saved.text("run")
        saved.integer("last_step", least=-1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state or not self.is_writer:
            return
        self.check_state_dict(state)
        version, run = state["version"], state["run"]
        if self._is_in_run_folder:
            assert self._version is not None
            version = self._version
        if self._given_version not in (None, version) or read_run_id(self._folder(version)) != run:
            return
        self._discard_claimed_folder(version)
        self._version, self._run = version, run
        _sweep(self._folder(version), staging.clock_of(self._folder(version)))
        if self._stage in (None, "fit"):
            self._last_step = int(state["last_step"])
            self._resume(state)

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        """Adds the hyperparameters to `hparams.json` and `hparams.yaml` in the run folder."""
        self.hparams.update(as_dict(params))
        if self.is_writer and self.hparams:
            write_hparams(Path(self._ensure_folder()), self.hparams)

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        """Writes `starts/<time>/run.json` to the run folder, and `diff.patch` if the code has uncommitted changes."""
        if self.is_writer:
            write_start(Path(self._ensure_folder()), record, diff)

    def _forget(self) -> None:
        """Forgets what was written to another run's folder."""
        self.hparams, self._last_step = {}, -1

    def _resume(self, state: dict[str, Any]) -> None:
        """Removes everything logged after the checkpoint."""

    def _ensure_folder(self) -> str:
        """Returns the run folder, creating it if needed."""
        folder = self.log_dir
        assert folder is not None, "only the writing rank asks for the folder"
        os.makedirs(folder, exist_ok=True)
        return folder

    def _next_step(self, step: int | None) -> int:
        if self._version is None:
            # Open the folder now, so that the next checkpoint records which folder holds the values.
            self._version, self._run = self._open_folder()
        return super()._next_step(step)

    def _folder(self, version: int | str) -> Path:
        return _folder_below(self.root_dir, version)

    def _open_folder(self) -> tuple[int | str, str]:
        if self._given_version is not None:
            folder = self._folder(self._given_version)
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder, staging.clock_of(folder))
            return self._given_version, read_run_id(folder) or write_run_id(folder)
        root = os.path.abspath(self.root_dir)
        for peer in self._peers:
            # Loggers of the same class cannot share a folder: they would write the same files.
            can_share = type(peer) is not type(self) and os.path.abspath(peer.root_dir) == root
            if can_share and peer._version is not None and peer._run is not None:
                return peer._version, peer._run
        version = claim_version(self.root_dir)
        self._claimed = self._folder(version)
        return version, write_run_id(self._claimed)

    def _discard_claimed_folder(self, version: int | str) -> None:
        """Removes the folder claimed before the checkpoint named the original one, if it is empty."""
        claimed, self._claimed = self._claimed, None
        if claimed is None or claimed == self._folder(version):
            return
        with contextlib.suppress(OSError):
            if os.listdir(claimed) == [RUN_FILE]:
                (claimed / RUN_FILE).unlink()
                claimed.rmdir()


def _folder_below(root: str, version: int | str) -> Path:
    return Path(root) / (version if isinstance(version, str) else f"version_{version}")


def claim_version(root: str | os.PathLike[str]) -> int:
    """Creates the folder `version_N`, with N one above the highest existing number, and returns N.

    Creating the folder claims the number: if two processes try the same number, only one succeeds. Clears what killed
    processes left in the newest folders.
    """
    os.makedirs(root, exist_ok=True)
    taken = [int(entry[8:]) for entry in os.listdir(root) if entry.startswith("version_") and entry[8:].isdecimal()]
    version = max(taken, default=-1) + 1
    now = staging.clock_of(Path(root)) if taken else None
    for number in sorted(taken)[-SWEPT:]:
        _sweep(Path(root, f"version_{number}"), now)
    while True:
        try:
            os.mkdir(os.path.join(root, f"version_{version}"))
            return version
        except FileExistsError:
            version += 1


def _sweep(folder: Path, now: float | None) -> None:
    """Clears the temporary files of killed processes from a run's folder."""
    for place in (folder, folder / STARTS):
        staging.sweep(place, now)


def write_start(folder: Path, record: Mapping[str, Any], diff: str) -> None:
    """Writes the record of a start to a run's folder, unless another logger of the run has; see `Logger.log_run`."""
    files = {folder / name: text for name, text in run_files(record, diff).items()}
    start = next(iter(files)).parent
    # After a kill, all files exist or none.
    if start.is_dir():
        return
    target = start if start.parent.is_dir() else start.parent
    with staging.replacing(target) as temporary:
        for path, text in files.items():
            part = temporary / path.relative_to(target)
            part.parent.mkdir(parents=True, exist_ok=True)
            # A command and a diff may hold secrets that no rule finds.
            _replace(part, text, is_private=True)


def write_hparams(folder: Path, hparams: Mapping[str, Any]) -> None:
    """Adds hyperparameters to `hparams.json` and `hparams.yaml` in a run's folder."""
    # Loggers that share the folder each add their own hyperparameters.
    path, before = folder / HPARAMS_FILE, {}
    check_plain(path)
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(path.read_text(encoding="utf-8"))
    text = json_text(before | json_value(hparams))
    _replace(path, text)
    with contextlib.suppress(ImportError):
        import yaml

        _replace(folder / YAML_FILE, yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True))


def _replace(path: Path, text: str, is_private: bool = False) -> None:
    with staging.replacing(path, OWNERS if is_private or is_marked(text) else None) as temporary:
        # newline="" keeps the line endings of a patch as they are.
        temporary.write_text(text, encoding="utf-8", newline="")


def version_of(folder: Path) -> int | str:
    """Returns the version that a run's folder stands for: N for `version_N`, else the name.

    Example:
        >>> version_of(Path("logs/version_3")), version_of(Path("logs/trial-a"))
        (3, 'trial-a')
    """
    number = folder.name.removeprefix("version_")
    is_numbered = number != folder.name and number.isdecimal() and str(int(number)) == number
    return int(number) if is_numbered else folder.name


def read_run_id(folder: Path) -> str | None:
    """Returns the identifier of the run that a folder belongs to; None if it is no run's folder."""
    check_plain(folder / RUN_FILE)
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(run)


def write_run_id(folder: Path) -> str:
    """Makes a folder that of a new run, and returns the run's identifier."""
    run = uuid.uuid4().hex
    _replace(folder / RUN_FILE, json_text({"run": run}))
    return run


def check_has_logger(callback: Callback, trainer: Trainer) -> None:
    """Raises ConfigurationError if a callback that logs has no logger to write to."""
    if not trainer.loggers and not trainer.fast_dev_run:
        raise ConfigurationError(
            f"{type(callback).__name__} needs a logger. Use Trainer(logger=True), or remove the callback."
        )


def is_logged(trainer: Trainer, number: int) -> bool:
    """Returns True for every `log_every_n_steps`-th step or batch; never if `log_every_n_steps` is 0."""
    every = trainer.log_every_n_steps
    return every > 0 and number % every == 0


def log_to_all(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Logs values to every logger, on rank 0, the writer."""
    for logger in trainer.loggers if values and trainer.is_global_zero else ():
        logger.log_metrics(values, step=step)


def folder_of(trainer: Trainer) -> Path:
    """Returns the run's folder; in evaluations that of the first logger that has one, or else `default_root_dir`."""
    if trainer.run_folder is not None:
        return Path(trainer.run_folder)
    if trainer.log_dir is None:
        for logger in trainer.loggers:
            # Start the runs: W&B chooses its folder when its run starts.
            _ = logger.experiment
    return Path(trainer.log_dir or trainer.default_root_dir)

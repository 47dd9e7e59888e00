"""CSVLogger, a logger that writes metrics to a CSV file."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from leyden.callbacks.loggers.logger import FolderLogger
from leyden.callbacks.loggers.plain import plain_numbers
from leyden.checkpoint.format import staging
from leyden.core.errors import ConfigurationError
from leyden.core.paths import check_plain, opener
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState

METRICS_FILE = "metrics.csv"
STEP = "step"
LOGGED_STEP = "logged_step"
"""The column for a metric that is itself named "step"."""


class CSVLogger(FolderLogger):
    """Writes metrics to `<save_dir>/<name>/version_N/metrics.csv`, one row per call.

    Hyperparameters go to `hparams.json` and `hparams.yaml` in the same folder. A metric that first appears later in the
    run gets a new column, empty in earlier rows. A resume removes the rows after the checkpoint, so the final file
    matches that of an uninterrupted run. The column "step" holds the step; a metric named "step" goes to the column
    "logged_step".

    Args:
        save_dir: the root folder; None for the Trainer's `default_root_dir`.
        name: the folder between `save_dir` and the version; "" for none.
        version: a number or a folder name; None for the first free number.
        prefix: a prefix for metric names, joined with "-".
        flush_logs_every_n_steps: number of steps between writes to disk. Rows are also written before each checkpoint.

    Raises:
        ConfigurationError: if `flush_logs_every_n_steps` is below 1.

    Example:
        >>> import tempfile
        >>> logger = CSVLogger(tempfile.mkdtemp())
        >>> logger.log_metrics({"loss": 0.5}, step=1)
        >>> logger.save()
        >>> print(open(logger.metrics_file_path).read())
        step,loss
        1,0.5
        <BLANKLINE>
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if isinstance(flush_logs_every_n_steps, bool) or flush_logs_every_n_steps < 1:
            raise ConfigurationError(f"flush_logs_every_n_steps={flush_logs_every_n_steps}: use 1 or more.")
        self._flush_every = flush_logs_every_n_steps
        self._flushed_at = 0
        self._buffer: list[dict[str, float]] = []
        self._columns: list[str] | None = None
        self._rows = 0
        """Number of rows on disk."""
        self._keep: int | None = None
        """Number of rows to keep of an existing file; None for all."""
        self._is_durable = True

    @property
    def metrics_file_path(self) -> str:
        """The path of the CSV file."""
        return os.path.join(self._ensure_folder(), METRICS_FILE)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.is_writer:
            return
        number = self._next_step(step)
        values = plain_numbers(metrics, self._prefix)
        if STEP in values:
            values[LOGGED_STEP] = values.pop(STEP)
        self._buffer.append({STEP: number, **values})
        if number < self._flushed_at or number - self._flushed_at >= self._flush_every:
            self._flushed_at = number
            self._flush(durable=False)

    def save(self) -> None:
        """Writes all rows to disk."""
        if self._buffer or self._keep is not None or not self._is_durable:
            self._flush(durable=True)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state:
            kept = self._rows if self._keep is None else self._keep
            state["rows"] = kept + len(self._buffer)
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        if state:
            SavedState(state).integer("rows", least=0)

    def _forget(self) -> None:
        super()._forget()
        self._columns, self._rows, self._flushed_at = None, 0, 0

    def _resume(self, state: dict[str, Any]) -> None:
        check_plain(self.metrics_file_path)
        self._buffer.clear()
        self._columns, self._keep = None, int(state["rows"])
        self._flushed_at = self._last_step

    def _flush(self, durable: bool) -> None:
        path = Path(self.metrics_file_path)
        if self._columns is None:
            self._columns = self._adopt(path)
        fresh = dict.fromkeys(name for row in self._buffer for name in row if name not in self._columns)
        if fresh:
            self._columns += fresh
            self._rewrite(path, self._columns, self._rows)
        with open(path, "a", newline="", encoding="utf-8", opener=opener) as file:
            _writer(file).writerows([row.get(name, "") for name in self._columns] for row in self._buffer)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        self._rows += len(self._buffer)
        self._buffer.clear()
        self._is_durable = durable

    def _adopt(self, path: Path) -> list[str]:
        """Takes over an existing file: truncates it to the rows to keep, and returns its columns."""
        keep, self._keep = self._keep, None
        if not os.path.lexists(path):
            return []
        with open(path, "r+b", opener=opener) as partial:
            content = partial.read()
            if not content.endswith(b"\n"):
                # A process killed in the middle of a write leaves a partial row.
                partial.truncate(content.rfind(b"\n") + 1)
        with open(path, newline="", encoding="utf-8", opener=opener) as file:
            reader = csv.reader(file)
            columns = next(reader, [])
            self._rows = sum(1 for _ in reader)
        if keep is None and self._rows and self._given_version is not None:
            warn(f"{path} has {self._rows} rows from an earlier run. New rows are appended.")
        self._rows = self._rows if keep is None else min(keep, self._rows)
        self._rewrite(path, columns, self._rows)
        return columns

    @staticmethod
    def _rewrite(path: Path, columns: list[str], rows: int) -> None:
        """Rewrites the file with only its first rows, and with all columns, of which its current ones come first."""
        with staging.replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = _writer(file)
            writer.writerow(columns)
            if path.exists():
                with open(path, newline="", encoding="utf-8", opener=opener) as source:
                    reader = csv.reader(source)
                    padding = [""] * (len(columns) - len(next(reader, [])))
                    writer.writerows(row + padding for row in itertools.islice(reader, rows))


def _writer(file: TextIO) -> Any:
    return csv.writer(file, lineterminator="\n")

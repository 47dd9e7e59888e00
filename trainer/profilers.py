"""Profilers, which measure how long each hook and step takes. Without one, nothing is measured or wrapped."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.ported import ported
from leyden.trainer.format.text import aligned

T = TypeVar("T")


class Profiler:
    """Base class of profilers: `start` and `stop` measure an action by name; `summary` is printed at the end of the
    run.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = Path(dirpath) if dirpath is not None else None
        self.filename = filename

    def start(self, action: str) -> None:
        """Called when an action begins; actions nest."""

    def stop(self, action: str) -> None:
        """Called when an action ends."""

    def summary(self) -> str:
        """Returns the result as text."""
        return ""

    def begin(self, folder: str) -> None:
        """Called when the run begins; files go to `dirpath`, or to this folder."""
        if self.dirpath is None:
            self.dirpath = Path(folder)

    def step(self) -> None:
        """Called after each training step."""

    def end(self) -> None:
        """Called at the end of the run."""

    @contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Measures the block under a name.

        Example:
            >>> profiler = SimpleProfiler()
            >>> with profiler.profile("sum"):
            ...     _ = sum(range(10))
            >>> "sum" in profiler.summary()
            True
        """
        self.start(action)
        try:
            yield
        finally:
            self.stop(action)

    def wrap(self, action: str, function: Callable[..., T]) -> Callable[..., T]:
        """Returns the function, measured under a name."""

        def measured(*args: Any, **kwargs: Any) -> T:
            with self.profile(action):
                return function(*args, **kwargs)

        return measured

    def finish(self, stage: str) -> str:
        """Ends the run and returns the text to print, or writes it to `filename` if that is set."""
        self.end()
        text = self.summary()
        if self.filename is None or not text:
            return text
        assert self.dirpath is not None
        self.dirpath.mkdir(parents=True, exist_ok=True)
        (self.dirpath / f"{stage}-{self.filename}.txt").write_text(text, encoding="utf-8")
        return ""


class SimpleProfiler(Profiler):
    """Measures calls, total seconds and mean milliseconds of every hook, step and transfer."""

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        super().__init__(dirpath, filename)
        self.durations: dict[str, list[float]] = {}
        self._started: list[tuple[str, float]] = []

    def start(self, action: str) -> None:
        self._started.append((action, time.perf_counter()))

    def stop(self, action: str) -> None:
        name, begin = self._started.pop()
        if name != action:
            raise ConfigurationError(f"profiler.stop({action!r}) while {name!r} runs: end the innermost action first.")
        self.durations.setdefault(action, []).append(time.perf_counter() - begin)

    def summary(self) -> str:
        rows = sorted(((sum(times), len(times), name) for name, times in self.durations.items()), reverse=True)
        cells = [(name, str(n), f"{total:.4f}", f"{1e3 * total / n:.4f}") for total, n, name in rows]
        return "\n".join(aligned([("action", "calls", "total s", "mean ms"), *cells], right=(1, 2, 3)))


class AdvancedProfiler(Profiler):
    """Profiles the function calls inside every action with cProfile.

    Args:
        dirpath: folder of the report.
        filename: name of the report; printed by default.
        line_count_restriction: the number of functions shown for each action (or a fraction of them).
    """

    def __init__(
        self, dirpath: str | Path | None = None, filename: str | None = None, line_count_restriction: float = 20
    ) -> None:
        super().__init__(dirpath, filename)
        self.restriction = line_count_restriction
        self._profiles: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def start(self, action: str) -> None:
        # Only one profile can run at a time, so the outer action pauses for the inner one.
        if self._running:
            self._profiles[self._running[-1]].disable()
        self._running.append(action)
        self._profiles.setdefault(action, cProfile.Profile()).enable()

    def stop(self, action: str) -> None:
        self._profiles[self._running.pop()].disable()
        if self._running:
            self._profiles[self._running[-1]].enable()

    def summary(self) -> str:
        text = io.StringIO()
        for action, profile in self._profiles.items():
            text.write(f"{action}\n")
            pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(self.restriction)
        return text.getvalue()


class PyTorchProfiler(Profiler):
    """Profiles operators and kernels with torch.profiler, and writes a Chrome trace for TensorBoard and Perfetto.

    Args:
        dirpath: folder of the traces; by default the run folder.
        filename: name of the table of operators; printed by default.
        schedule: see `torch.profiler.schedule`; by default skips one step, warms up one and records three.
        row_limit: rows of the printed table.
        **kwargs: passed to `torch.profiler.profile` (record_shapes, profile_memory, with_stack, …).
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        schedule: Callable[[int], Any] | None = None,
        row_limit: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self.row_limit = row_limit
        self._arguments = {"schedule": schedule, **kwargs}
        self._profile: Any = None
        self._spans: list[Any] = []
        self._table = ""

    def begin(self, folder: str) -> None:
        super().begin(folder)
        from torch import profiler

        arguments = dict(self._arguments)
        if arguments["schedule"] is None:
            arguments["schedule"] = profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
        arguments.setdefault("on_trace_ready", self._write)
        self._profile = profiler.profile(**arguments)
        self._profile.start()

    def _write(self, profile: Any) -> None:
        from torch import profiler

        profiler.tensorboard_trace_handler(str(self.dirpath))(profile)
        self._table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=self.row_limit)

    def start(self, action: str) -> None:
        from torch.profiler import record_function

        span = record_function(action)
        span.__enter__()  # type: ignore[no-untyped-call]
        self._spans.append(span)

    def stop(self, action: str) -> None:
        self._spans.pop().__exit__(None, None, None)

    def step(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def summary(self) -> str:
        return self._table


def find_profiler(profiler: str | Profiler | None) -> Profiler | None:
    """Returns the profiler for a name."""
    if profiler is None or isinstance(profiler, Profiler):
        return profiler
    kinds: dict[str, type[Profiler]] = {
        "simple": SimpleProfiler,
        "advanced": AdvancedProfiler,
        "pytorch": PyTorchProfiler,
    }
    if not isinstance(profiler, str) or profiler not in kinds:
        fix = "use 'simple', 'advanced', 'pytorch' or a Profiler"
        raise ConfigurationError(f"profiler={profiler!r}: {ported(profiler, fix)}.")
    return kinds[profiler]()

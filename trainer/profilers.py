"""Profilers, which measure the time of each hook and step. Without a profiler nothing is measured or wrapped."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from leyden.checkpoint.format import staging
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.paths import local_path
from leyden.core.ported import ported
from leyden.core.rank_zero import inform, warn
from leyden.core.text import aligned

T = TypeVar("T")

_END: Any = object()
TRAINING_BATCH = "train_dataloader_next"

SORT_KEYS = (
    *("cpu_time", "cuda_time", "cpu_time_total", "cuda_time_total", "self_cpu_time_total", "self_cuda_time_total"),
    *("cpu_memory_usage", "cuda_memory_usage", "self_cpu_memory_usage", "self_cuda_memory_usage", "count"),
)


class Profiler:
    """Base class of profilers: `start` and `stop` measure an action by name, `summary` returns the result.

    A run calls `setup`, then `start` and `stop` for each action, and `step` after each training step. At its end it
    calls `describe`, which prints `summary` or writes it to `filename`, and `teardown`. Actions are the module's steps
    (`training_step`, …), `backward`, `optimizer_step`, the next batch of each loader (`train_dataloader_next`, …),
    `transfer_batch_to_device`, each hook (`[Callback]ModelCheckpoint.on_train_end`, `[TrainModule]Net.on_fit_start`),
    and your own: `with self.trainer.profiler.profile("attention"):`.

    Args:
        dirpath: the output folder; by default the run's folder, in evaluations that of the logger, or without a logger
            the Trainer's `default_root_dir`.
        filename: name of a summary file `<stage>-<filename>.txt`; with several ranks each writes its own
            `<stage>-<filename>-<rank>.txt`. By default rank 0 prints the summary.

    Example:
        >>> class Counter(Profiler):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.calls = {}
        ...
        ...     def start(self, action_name):
        ...         self.calls[action_name] = self.calls.get(action_name, 0) + 1
        ...
        ...     def summary(self):
        ...         return f"{self.calls}"
        >>> profiler = Counter()
        >>> with profiler.profile("sum"):
        ...     _ = sum(range(10))
        >>> profiler.summary()
        "{'sum': 1}"
    """

    # Defaults on the class, so that a subclass does not have to call __init__.
    dirpath: Path | None = None
    filename: str | None = None
    _folder: Path | None = None
    _stage: str = ""
    _rank: int | None = None
    _handles: tuple[Any, ...] = ()

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = Path(local_path(dirpath, f"{type(self).__name__}: dirpath")) if dirpath is not None else None
        self.filename = filename if filename is None else local_path(filename, f"{type(self).__name__}: filename")

    @property
    def local_rank(self) -> int:
        """The rank in a run with several ranks; otherwise 0."""
        return self._rank or 0

    # measuring
    def start(self, action_name: str) -> None:
        """Called when an action begins; actions nest."""

    def stop(self, action_name: str) -> None:
        """Called when an action ends."""

    def step(self) -> None:
        """Called after each training step, and after each batch of an evaluation outside a fit."""

    def summary(self) -> str:
        """Returns the result as text."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Measures the block as an action.

        Example:
            >>> profiler = SimpleProfiler()
            >>> with profiler.profile("sum"):
            ...     _ = sum(range(10))
            >>> "sum" in profiler.summary()
            True
        """
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    # setup and tear-down
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called when a run begins.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: the rank in a run with several ranks; otherwise None.
            log_dir: the output folder if there is no `dirpath`.
        """
        self._stage, self._rank = stage, local_rank
        self._folder = self.dirpath if self.dirpath is not None else None if log_dir is None else Path(log_dir)

    def write_to(self, folder: str | None) -> None:
        """Called once the folder of the run's loggers is known; None without one. A `dirpath` takes precedence."""
        if self.dirpath is None and folder is not None:
            self._folder = Path(folder)

    def describe(self) -> None:
        """Prints the summary on rank 0, or writes it to `filename` on all ranks."""
        text = self.summary()
        if not text:
            return
        if self.filename is not None:
            with staging.replacing(self._path(".txt")) as temporary:
                temporary.write_text(text, encoding="utf-8")
        elif not self._rank:
            inform(text)

    def teardown(self, stage: str | None) -> None:
        """Called at the end of a run, including a failed one."""

    def _path(self, suffix: str, *parts: str) -> Path:
        """Returns a path in the output folder, which it creates."""
        folder = self._folder or self.dirpath or Path()
        folder.mkdir(parents=True, exist_ok=True)
        names = [self._stage, self.filename, *parts, None if self._rank is None else str(self._rank)]
        return folder / (re.sub(r"[^\w.=-]+", "_", "-".join(name for name in names if name)) + suffix)

    # called by a run to measure its parts
    def wrap(self, action_name: str, function: Callable[..., T]) -> Callable[..., T]:
        """Returns a wrapper that measures each call of the function as an action."""

        def measured(*args: Any, **kwargs: Any) -> T:
            with self.profile(action_name):
                return function(*args, **kwargs)

        return measured

    def drawn(self, action_name: str, iterator: Iterator[T]) -> Iterator[T]:
        """Yields an iterator's items, and measures the drawing of each as an action."""
        while True:
            with self.profile(action_name):
                # A list that is emptied by the yield: a local name would keep the batch while the next one is loaded.
                drawn = [next(iterator, _END)]
            if drawn[0] is _END:
                return
            yield drawn.pop()

    def watch(self, module: nn.Module) -> None:
        """Called with the run's module once it is on its device."""

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Measures all steps of these optimizers until `release`, including steps that the user calls."""
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):
                self._handles += (
                    optimizer.register_step_pre_hook(lambda *args: self.start("optimizer_step")),
                    optimizer.register_step_post_hook(lambda *args: self.stop("optimizer_step")),
                )

    def release(self) -> None:
        """Removes the hooks from module and optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()


class PassThroughProfiler(Profiler):
    """A no-op profiler: the value of `trainer.profiler` in a run without a profiler."""

    def wrap(self, action_name: str, function: Callable[..., T]) -> Callable[..., T]:
        return function


class SimpleProfiler(Profiler):
    """Measures calls, total seconds and mean milliseconds of every hook, step and transfer.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        extended: also show the number of calls, and each action's percentage of the total time.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.recorded_durations: dict[str, list[float]] = {}
        """The seconds of each call, by action."""
        self.current_actions: dict[str, list[float]] = {}
        """The start times of the running actions, in `time.perf_counter` seconds."""
        self.start_time = time.perf_counter()
        self._waited = self._trained = 0.0
        """Seconds spent waiting for training batches, and seconds from one training batch to the next."""
        self._last_draw: tuple[float, float] | None = None
        """When the drawing of the last training batch began, and its duration."""

    @property
    def durations(self) -> dict[str, list[float]]:
        """Same as `recorded_durations`."""
        return self.recorded_durations

    def start(self, action_name: str) -> None:
        self.current_actions.setdefault(action_name, []).append(time.perf_counter())

    def stop(self, action_name: str) -> None:
        end, begun = time.perf_counter(), self.current_actions.get(action_name)
        if not begun:
            raise ConfigurationError(f"profiler.stop({action_name!r}): the action is not running. Call start first.")
        self.recorded_durations.setdefault(action_name, []).append(end - begun.pop())

    def drawn(self, action_name: str, iterator: Iterator[T]) -> Iterator[T]:
        draws = super().drawn(action_name, iterator)
        while True:
            start, last, self._last_draw = time.perf_counter(), self._last_draw, None
            # As in the warning about a slow loader, a batch followed by a validation does not count.
            if last is not None and action_name == TRAINING_BATCH:
                self._waited, self._trained = self._waited + last[1], self._trained + start - last[0]
            drawn: list[Any] = [next(draws, _END)]
            if drawn[0] is _END:
                return
            if action_name == TRAINING_BATCH:
                self._last_draw = start, time.perf_counter() - start
            yield drawn.pop()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if not self.recorded_durations:
            self.start_time = time.perf_counter()

    def teardown(self, stage: str | None) -> None:
        # A run that failed leaves actions open.
        self.current_actions.clear()
        self._last_draw = None

    def summary(self) -> str:
        if not self._trained:
            return self._table()
        return (
            f"{self._table()}\n{TRAINING_BATCH} took {self._waited / self._trained:.0%} of the training time "
            f"({self._waited:.4g} of {self._trained:.4g} s, without validations)"
        )

    def _table(self) -> str:
        elapsed = time.perf_counter() - self.start_time
        rows = sorted(((sum(times), len(times), name) for name, times in self.recorded_durations.items()), reverse=True)
        calls = sum(count for _, count, _ in rows)
        if not self.extended:
            short = [(name, f"{total:.4f}", f"{1e3 * total / n:.4f}") for total, n, name in rows]
            return "\n".join(aligned([("action", "total s", "mean ms"), *short], right=(1, 2)))
        cells = [
            (name, str(n), f"{total:.4f}", f"{1e3 * total / n:.4f}", f"{100 * total / elapsed:.1f}")
            for total, n, name in rows
        ]
        whole = ("(all the time)", str(calls), f"{elapsed:.4f}", "", "100.0")
        return "\n".join(aligned([("action", "calls", "total s", "mean ms", "%"), whole, *cells], right=(1, 2, 3, 4)))


class AdvancedProfiler(Profiler):
    """Profiles the function calls of each action with cProfile, excluding those of nested actions.

    Only one profile can run at a time: the time that `training_step` spends in `profile("attention")` is shown only
    under `attention`.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        line_count_restriction: the number of functions to show per action, or a fraction of them.
        dump_stats: also write each action's statistics to `<stage>-<filename>-<action>.prof`, for tools such as
            snakeviz.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 20,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        """The profile of each action."""
        self._running: list[str] = []
        self._interrupted: list[str] = []
        """Nested actions that were still open when the enclosing action ended."""

    def start(self, action_name: str) -> None:
        # The outer action pauses during the inner one.
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            if action_name not in self._interrupted:
                raise ConfigurationError(
                    f"profiler.stop({action_name!r}): the action is not running. Call start first."
                )
            self._interrupted.remove(action_name)
            return
        self.profiled_actions[self._running[-1]].disable()
        while (last := self._running.pop()) != action_name:
            # Interrupted by an error, such as a backward pass out of memory, which the loop retries.
            self._interrupted.append(last)
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        text = io.StringIO()
        if self.profiled_actions:
            text.write("Each action excludes its nested actions.\n\n")
        for action, profile in self.profiled_actions.items():
            text.write(f"{action}\n")
            pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(self.line_count_restriction)
        return text.getvalue()

    def describe(self) -> None:
        super().describe()
        for action, profile in self.profiled_actions.items() if self.dump_stats else ():
            profile.dump_stats(self._path(".prof", action))

    def teardown(self, stage: str | None) -> None:
        for action in self._running[-1:]:
            self.profiled_actions[action].disable()
        self._running.clear()
        self._interrupted.clear()


class PyTorchProfiler(Profiler):
    """Profiles operators and kernels with torch.profiler, and writes a Chrome trace for TensorBoard and Perfetto.

    Args:
        dirpath: the output folder, also for traces; see `Profiler`.
        filename: file name of the table of operators; by default the table is printed.
        schedule: see `torch.profiler.schedule`; by default skips one step, warms up for one and records three.
        row_limit: number of rows in the table; -1 for all.
        group_by_input_shapes: show a row per shape of an operator's inputs; implies `record_shapes`.
        emit_nvtx: emit NVTX ranges for Nsight Systems (`nsys profile --capture-range cudaProfilerApi python …`)
            instead of recording; needs CUDA.
        export_to_chrome: write a trace after each recording of the schedule.
        sort_by_key: the column to sort the table by, one of `SORT_KEYS`; by default "self_cpu_time_total".
        record_module_names: name each submodule in the trace, except in compiled modules.
        table_kwargs: further arguments of the table, such as `max_name_column_width`.
        record_shapes: record the shapes of operators' inputs.
        export_to_flame_graph: also write the stacks for a flame graph (`….stack`); implies `with_stack`.
        metric: the metric of the flame graph, "self_cpu_time_total" or "self_cuda_time_total".
        on_trace_ready: called with torch's profile after each recording of the schedule, instead of writing files.
        **profiler_kwargs: passed to `torch.profiler.profile` (activities, profile_memory, with_stack, with_flops, …).

    Raises:
        ConfigurationError: if torch's profiler has no such argument, or its value is invalid.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        schedule: Callable[[int], Any] | None = None,
        row_limit: int = 20,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: Mapping[str, Any] | None = None,
        record_shapes: bool = False,
        export_to_flame_graph: bool = False,
        metric: str = "self_cpu_time_total",
        on_trace_ready: Callable[[Any], Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self._table_arguments = {
            "sort_by": sort_by_key or "self_cpu_time_total",
            "row_limit": row_limit,
            **(table_kwargs or {}),
        }
        self._groups_shapes, self._emits_nvtx = group_by_input_shapes, emit_nvtx
        self._exports_trace, self._exports_stacks, self._metric = export_to_chrome, export_to_flame_graph, metric
        self._names_modules = record_module_names
        self._arguments = {
            "schedule": schedule,
            "record_shapes": record_shapes or group_by_input_shapes,
            "on_trace_ready": on_trace_ready,
            **profiler_kwargs,
        }
        if export_to_flame_graph:
            self._arguments["with_stack"] = True
            # Without this setting torch 2 writes an empty file (pytorch issue 100253).
            verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
            self._arguments.setdefault("experimental_config", verbose)
        self._profile: Any = None
        self._outer: Any = None
        self._spans: dict[str, list[Any]] = {}
        self._table = ""
        self._steps = 0
        self._check()

    def _check(self) -> None:
        from torch import profiler

        key, schedule = self._table_arguments["sort_by"], self._arguments["schedule"]
        check_choice("PyTorchProfiler", SORT_KEYS, sort_by_key=key)
        if schedule is not None and not (callable(schedule) and isinstance(schedule(0), profiler.ProfilerAction)):
            raise ConfigurationError(
                f"PyTorchProfiler(schedule={schedule!r}): use torch.profiler.schedule(…), or a function that maps a "
                "step number to a torch.profiler.ProfilerAction."
            )
        if self._emits_nvtx and not torch.cuda.is_available():
            raise ConfigurationError("PyTorchProfiler(emit_nvtx=True) needs a CUDA device, and this machine has none.")
        try:
            profiler.profile(**self._arguments)
        except TypeError as error:
            raise ConfigurationError(f"PyTorchProfiler: torch.profiler.profile raised: {error}.") from None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        from torch import profiler

        self._table, self._steps = "", 0
        if self._emits_nvtx:
            self._outer = torch.cuda.profiler.profile()
            self._profile = torch.autograd.profiler.emit_nvtx()  # type: ignore[no-untyped-call]
            self._outer.__enter__()
            self._profile.__enter__()
            return
        arguments = dict(self._arguments)
        if arguments["schedule"] is None:
            arguments["schedule"] = profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
        arguments["on_trace_ready"] = self._ready
        self._profile = profiler.profile(**arguments)
        self._profile.start()

    def _ready(self, profile: Any) -> None:
        """Writes a recording of the schedule."""
        on_trace_ready = self._arguments["on_trace_ready"]
        try:
            (self._write if on_trace_ready is None else on_trace_ready)(profile)
            averages = profile.key_averages(group_by_input_shape=self._groups_shapes)
            self._table = averages.table(**self._table_arguments)
        except UnicodeDecodeError:
            # torch keeps pointers to the names of functions that may have been freed (pytorch issue 136040).
            warn(
                "torch cannot read the recorded stacks, because some of their functions no longer exist. Record later "
                "steps with schedule=torch.profiler.schedule(wait=…, …), or omit with_stack."
            )

    def _write(self, profile: Any) -> None:
        from torch import profiler

        if self._exports_trace:
            name = None if self._rank is None else f"rank{self._rank}"
            profiler.tensorboard_trace_handler(str(self._path("").parent), worker_name=name)(profile)
        if self._exports_stacks:
            profile.export_stacks(str(self._path(".stack", str(self._steps))), self._metric)

    def start(self, action_name: str) -> None:
        from torch.profiler import record_function

        span = record_function(action_name)
        span.__enter__()  # type: ignore[no-untyped-call]
        self._spans.setdefault(action_name, []).append(span)

    def stop(self, action_name: str) -> None:
        if not self._spans.get(action_name):
            raise ConfigurationError(f"profiler.stop({action_name!r}): the action is not running. Call start first.")
        self._spans[action_name].pop().__exit__(None, None, None)

    def step(self) -> None:
        self._steps += 1
        if self._profile is not None and not self._emits_nvtx:
            self._profile.step()

    def watch(self, module: nn.Module) -> None:
        if not self._names_modules:
            return
        for name, part in module.named_modules():
            if name and not isinstance(part, torch.jit.ScriptModule):
                label = f"{type(part).__name__}: {name}"
                self._handles += (
                    part.register_forward_pre_hook(lambda *args, label=label: self.start(label)),
                    part.register_forward_hook(lambda *args, label=label: self.stop(label), always_call=True),
                )

    def summary(self) -> str:
        self._end()
        if self._table or self._emits_nvtx:
            return self._table
        return (
            f"PyTorchProfiler recorded nothing: its schedule had not completed a recording after {self._steps} steps. "
            "Use schedule=torch.profiler.schedule(wait=0, warmup=0, active=1), or a longer run."
        )

    def teardown(self, stage: str | None) -> None:
        self._end()
        self._spans.clear()

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if self._emits_nvtx:
            profile.__exit__(None, None, None)
            self._outer.__exit__(None, None, None)
        else:
            profile.stop()


def find_profiler(profiler: Any) -> Profiler | None:
    """Returns the profiler for a name; None if it is absent or a no-op, so that nothing is wrapped."""
    if profiler is None or isinstance(profiler, PassThroughProfiler):
        return None
    if isinstance(profiler, Profiler):
        return profiler
    kinds: dict[str, type[Profiler]] = {
        "simple": SimpleProfiler,
        "advanced": AdvancedProfiler,
        "pytorch": PyTorchProfiler,
    }
    if not isinstance(profiler, str):
        fix = "use 'simple', 'advanced', 'pytorch' or a Profiler"
        raise ConfigurationError(f"profiler={profiler!r}: {ported(profiler, fix)}.")
    if profiler.lower() not in kinds:
        raise ConfigurationError(f"profiler={profiler!r} is not known. {nearest(profiler.lower(), kinds)}")
    return kinds[profiler.lower()]()

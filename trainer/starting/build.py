"""Builds the Trainer's parts from its arguments: callbacks, loggers, precision, and torch's global switches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from leyden.callbacks.base import Callback, in_order
from leyden.callbacks.gradient_accumulation import AutoAccumulation, GradientAccumulation
from leyden.callbacks.loggers.logger import Logger
from leyden.checkpoint.checkpoint_io import is_checkpoint_io
from leyden.core.environment import machine_range, rank_environment
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.given import as_list
from leyden.core.ported import ported
from leyden.core.rank_zero import warn
from leyden.core.text import listed
from leyden.launch.cluster import is_cluster, publish
from leyden.strategies.base import Strategy
from leyden.strategies.master_weights import parameters_of
from leyden.strategies.precision import Precision
from leyden.strategies.single import SingleDeviceStrategy
from leyden.trainer.arguments.arguments import Arguments
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.datamodule import DataModule
from leyden.trainer.engine.engine import Engine
from leyden.trainer.events.hooks import overrides
from leyden.trainer.launched import as_launched, with_recipe
from leyden.trainer.module import TrainModule
from leyden.trainer.plugins import checkpoint_io_of, is_async_plugin
from leyden.trainer.starting.callback_list import check_callbacks, holds

if TYPE_CHECKING:
    from leyden.checkpoint.checkpoint_io import CheckpointIO
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.profilers import Profiler
    from leyden.trainer.run import Run

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def engine_of(arguments: Arguments) -> Engine:
    """Returns the engine for the arguments' devices, strategy and precision.

    Raises:
        ConfigurationError: if they do not fit together, or do not support `compile="step"`.
    """
    where = (arguments.devices, arguments.num_nodes)
    engine = Engine(arguments.strategy, arguments.accelerator, precision_of(arguments), *where)
    if arguments.compile is None:
        return engine
    if not isinstance(engine.strategy, SingleDeviceStrategy):
        raise ConfigurationError(
            f"compile='step' does not work with strategy={engine.strategy.name!r}: set devices=1, or leave compile out "
            "and pass torch.compile(module) to fit."
        )
    if engine.precision.may_skip:
        raise ConfigurationError(
            f"compile='step' does not work with the gradient scaler of precision={engine.precision.name!r}: use "
            "'bf16-mixed' or '32-true'."
        )
    return engine


def precision_of(arguments: Arguments) -> Any:
    """Returns the precision from its argument or from the plugins; None keeps that of a given strategy."""
    checkpoint_io(arguments)
    kinds = (is_async_plugin, is_checkpoint_io, is_cluster)
    plugins = [plugin for plugin in as_list(arguments.plugins) if not any(is_one(plugin) for is_one in kinds)]
    for plugin in plugins:
        if not isinstance(plugin, Precision):
            raise ConfigurationError(
                f"plugins holds {kind_of(plugin)}, which this version does not support: "
                f"{ported(plugin, 'pass a Precision, a CheckpointIO or a ClusterEnvironment')}."
            )
    if len(plugins) + (arguments.precision is not None) > 1:
        raise ConfigurationError("the precision is set more than once, by precision and by plugins: set it once.")
    if plugins:
        return plugins[0]
    if arguments.precision is None and not isinstance(arguments.strategy, Strategy):
        return "32-true"
    return with_recipe(arguments.precision)


def saves_asynchronously(arguments: Arguments) -> bool:
    """Returns True if a plugin requests asynchronous saves."""
    return any(is_async_plugin(plugin) for plugin in as_list(arguments.plugins))


def cluster_of(arguments: Arguments) -> Any:
    """Returns the ClusterEnvironment among the plugins; None without one.

    Raises:
        ConfigurationError: if there is more than one.
    """
    found = [plugin for plugin in as_list(arguments.plugins) if is_cluster(plugin)]
    if len(found) > 1:
        kinds = " and ".join(type(plugin).__name__ for plugin in found)
        raise ConfigurationError(f"plugins holds more than one cluster environment, {kinds}: pass one.")
    return found[0] if found else None


def profiler_of(arguments: Arguments) -> Profiler | None:
    """Returns the profiler that the arguments name; None without one."""
    if arguments.profiler is None:
        return None
    from leyden.trainer.profilers import find_profiler

    return find_profiler(arguments.profiler)


def enter_cluster(arguments: Arguments) -> None:
    """Makes this process the rank that a ClusterEnvironment among the plugins assigns to it."""
    plugin = cluster_of(arguments)
    if plugin is None:
        return
    publish(plugin, arguments.devices, arguments.num_nodes)
    if isinstance(arguments.strategy, Strategy):
        # A strategy that was passed as an object read its rank when it was created, before the plugin set it.
        arguments.strategy.ranks.become_rank(rank_environment())


def checkpoint_io(arguments: Arguments) -> CheckpointIO | None:
    """Returns the plugin that stores checkpoints; None if checkpoints are folders.

    Raises:
        ConfigurationError: if there is more than one, or if the run must search for checkpoints, which a plugin cannot
            list.
    """
    plugin = checkpoint_io_of(as_list(arguments.plugins))
    for name, value in (("resume", arguments.resume), ("preemption", arguments.preemption)):
        if plugin is not None and value:
            raise ConfigurationError(
                f"{name}={value!r} searches for the newest checkpoint of the run, but {type(plugin).__name__} cannot "
                "list its checkpoints: leave it out, and pass the path to fit."
            )
    return plugin


def build_callbacks(arguments: Arguments) -> list[Callback]:
    """Returns the given callbacks and those that other arguments request.

    Raises:
        ConfigurationError: if something is not a callback, or is requested twice.
    """
    callbacks, replay = as_list(arguments.callbacks), replay_of(arguments)
    check_callbacks(callbacks, "callbacks")
    if len({id(callback) for callback in callbacks}) < len(callbacks):
        raise ConfigurationError("callbacks holds the same callback twice: pass it once.")
    if replay is not None:
        callbacks = replay.callbacks(callbacks)
    _add_accumulation(callbacks, arguments)
    _add_loggers(callbacks, arguments)
    _add_digests(callbacks, arguments)
    _add_defaults(callbacks, arguments)
    return list(in_order(callbacks))


def _add_accumulation(callbacks: list[Callback], arguments: Arguments) -> None:
    found = [callback for callback in callbacks if isinstance(callback, GradientAccumulation)]
    wanted = arguments.accumulate_grad_batches
    if len(found) > 1 or (found and wanted != 1):
        raise ConfigurationError(
            "gradient accumulation is set more than once: pass accumulate_grad_batches or one GradientAccumulation "
            "callback."
        )
    if isinstance(wanted, str):
        callbacks.append(AutoAccumulation())
    elif wanted > 1:
        callbacks.append(GradientAccumulation(wanted))
    keeps_batch = arguments.global_batch_size is not None or any(callback.counts_samples for callback in found)
    if machine_range() is not None and not keeps_batch:
        warn(
            "machines come and go during this launch, and a step takes batch_size × ranks samples: its batch changes "
            "with them. Trainer(global_batch_size=…) keeps it, and so does BatchSizeScheduler({0: …}), by accumulation."
        )


def _add_digests(callbacks: list[Callback], arguments: Arguments) -> None:
    if arguments.digest_every_n_steps is None:
        return
    from leyden.callbacks.weight_digests import WeightDigests

    if any(isinstance(callback, WeightDigests) for callback in callbacks):
        raise ConfigurationError(
            f"digest_every_n_steps={arguments.digest_every_n_steps}, but callbacks holds a WeightDigests: choose one."
        )
    callbacks.append(WeightDigests(arguments.digest_every_n_steps))


def _add_loggers(callbacks: list[Callback], arguments: Arguments) -> None:
    from leyden.callbacks.loggers.silent import DummyLogger

    wanted = arguments.logger
    loggers = [] if isinstance(wanted, bool) else as_list(wanted)
    check_loggers(loggers, f"logger={wanted!r}")
    loggers = loggers_of(callbacks) + [logger for logger in loggers if not holds(callbacks, logger)]
    if wanted is True and not loggers:
        from leyden.callbacks.loggers.tensorboard import TensorBoardLogger

        loggers = [TensorBoardLogger()]
    if arguments.report:
        from leyden.callbacks.loggers.report_logger import ReportLogger

        if not any(isinstance(logger, ReportLogger) for logger in loggers):
            # Last, so that the files of the others are complete when it draws them.
            loggers = [*loggers, ReportLogger()]
    if arguments.barebones:
        # Trials use DummyLoggers, which write nothing.
        loggers = [logger for logger in loggers if isinstance(logger, DummyLogger)]
    elif arguments.fast_dev_run or replay_of(arguments) is not None:
        loggers = [DummyLogger() for _ in loggers]
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Logger)] + loggers


def check_loggers(loggers: Sequence[Any], where: str) -> None:
    """Checks that every item is a logger.

    Raises:
        ConfigurationError: names the first item that is not.
    """
    for logger in loggers:
        if not isinstance(logger, Logger):
            fix = f"{kind_of(logger)} is not a logger: use True, False, or loggers such as CSVLogger()"
            raise ConfigurationError(f"{where}: {ported(logger, fix)}.")


def with_loggers(callbacks: Sequence[Callback], loggers: Sequence[Logger], silent: bool) -> list[Callback]:
    """Returns the callbacks with their loggers replaced.

    Args:
        callbacks: loggers and other callbacks.
        loggers: the new loggers.
        silent: True if the run writes nothing: DummyLoggers then stand in for the new loggers.
    """
    from leyden.callbacks.loggers.silent import DummyLogger

    check_loggers(loggers, "trainer.logger")
    others = [callback for callback in callbacks if not isinstance(callback, Logger)]
    return list(in_order(others + ([DummyLogger() for _ in loggers] if silent else list(loggers))))


def _add_defaults(callbacks: list[Callback], arguments: Arguments) -> None:
    """Adds checkpoints, progress bar and summary, each imported on demand, so a run without them pays nothing."""
    if arguments.enable_checkpointing or arguments.callbacks:
        from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

        has = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        if arguments.enable_checkpointing and not has:
            callbacks.append(ModelCheckpoint())
        elif has and not arguments.enable_checkpointing and not arguments.fast_dev_run:
            raise ConfigurationError("enable_checkpointing=False, but callbacks holds a ModelCheckpoint: choose one.")
    if arguments.preemption is not None and not arguments.fast_dev_run:
        from leyden.callbacks.checkpointing.preemption_checkpoint import PreemptionCheckpoint

        callbacks.append(PreemptionCheckpoint())
    _add_progress_bar(callbacks, arguments)
    if arguments.enable_model_summary:
        from leyden.callbacks.model_summary import ModelSummary

        if not any(isinstance(callback, ModelSummary) for callback in callbacks):
            callbacks.append(_matching_summary(callbacks))


def _add_progress_bar(callbacks: list[Callback], arguments: Arguments) -> None:
    if not arguments.enable_progress_bar and not callbacks:
        return
    from leyden.callbacks.bars.progress_bar import ProgressBar

    bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        raise ConfigurationError(
            f"callbacks holds {len(bars)} progress bars ({', '.join(type(bar).__name__ for bar in bars)}), which would "
            "overwrite each other: pass one."
        )
    # verbose=False adds no bar, but keeps the user's.
    shown = arguments.enable_progress_bar or not arguments.verbose
    if bars and not (shown or arguments.barebones or replay_of(arguments)):
        raise ConfigurationError(
            f"enable_progress_bar=False, but callbacks holds a {type(bars[0]).__name__}: choose one."
        )
    if not bars and arguments.enable_progress_bar:
        from leyden.callbacks.bars.tqdm_bar import TQDMProgressBar

        callbacks.append(TQDMProgressBar())


def _matching_summary(callbacks: list[Callback]) -> Callback:
    """Returns the model summary in the style of the progress bar."""
    from leyden.callbacks.bars.rich_bar import RichProgressBar
    from leyden.callbacks.model_summary import ModelSummary

    if not any(isinstance(callback, RichProgressBar) for callback in callbacks):
        return ModelSummary()
    from leyden.callbacks.rich_summary import RichModelSummary

    return RichModelSummary()


def unwrapped(model: Any) -> tuple[TrainModule, Any]:
    """Returns the module and the `torch.compile` wrapper around it, if any.

    The options of the wrapper apply to the module's steps, which are compiled in its place.

    Raises:
        ConfigurationError: if the model is not a TrainModule.
    """
    model = as_launched(model)
    inner = getattr(model, "_orig_mod", None)
    compiled, model = (None, model) if inner is None else (model, inner)
    if not isinstance(model, TrainModule):
        fix = f"pass an instance, {model.__name__}()" if isinstance(model, type) else "subclass leyden.TrainModule"
        raise ConfigurationError(f"the Trainer needs a TrainModule, not {kind_of(model)}: {ported(model, fix)}.")
    return model, compiled


def check_datamodule(datamodule: object, stage: str, *loaders: object) -> None:
    """Checks that a DataModule is one, and that no loaders were passed with it, before anything runs.

    Raises:
        ConfigurationError: if not; names the fix.
    """
    if datamodule is None:
        return
    if any(loader is not None for loader in loaders):
        raise ConfigurationError(f"{stage} was given both loaders and a datamodule: pass one of them.")
    if not isinstance(datamodule, DataModule):
        raise ConfigurationError(
            f"datamodule is {kind_of(datamodule)}: {ported(datamodule, 'pass an instance of a leyden.DataModule')}."
        )


def to_evaluate(former: Run, stage: str, model: Any, loaders: Any, datamodule: Any) -> tuple[Any, Any, Any]:
    """Returns the module, loaders and DataModule of an evaluation. Omitted ones default to the former run's."""
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    check_datamodule(datamodule, stage, loaders)
    if model is None:
        if type(former.module) is TrainModule:
            raise ConfigurationError(f"{stage} needs a TrainModule: trainer.{stage}(module, loader).")
        model = former.module
        if datamodule is None and loaders is None:
            datamodule = former.datamodule
    return model, loaders, datamodule


def check_steps(module: TrainModule, stage: str) -> None:
    """Checks that the module defines the methods that a stage needs, before anything runs.

    Raises:
        ConfigurationError: names the missing method.
    """
    name = type(module).__name__
    if stage == "fit":
        for method in ("training_step", "configure_optimizers"):
            if not overrides(module, method, TrainModule):
                from leyden.trainer.starting.uncalled_hooks import misspelled

                hint = misspelled(module, method)
                raise ConfigurationError(f"{name} has no {method}: write it, fit needs it.{hint}")
        if not module.training:
            warn(
                f"{name} is in eval mode, and fit will train it in that mode: if that is not intended, call "
                "module.train() first.",
            )
    own = overrides(module, "predict_step", TrainModule) or overrides(module, "forward", nn.Module)
    if stage == "predict" and not own:
        raise ConfigurationError(f"{name} has no predict_step and no forward: write one of them, predict needs it.")


def prepare_data(datamodule: DataModule | None, module: TrainModule, ranks: Ranks) -> None:
    """Calls `prepare_data` on the first rank of each machine, or of all machines, while the other ranks wait.

    On several ranks it runs with isolated random state, because only some ranks draw random numbers in it.
    """
    owners: list[tuple[DataModule | TrainModule, type]] = [(module, TrainModule)]
    if datamodule is not None:
        owners.insert(0, (datamodule, DataModule))
    for owner, base in owners:
        if ranks.world_size == 1:
            owner.prepare_data()
        elif overrides(owner, "prepare_data", base):
            if (ranks.local_rank if owner.prepare_data_per_node else ranks.global_rank) == 0:
                from leyden.data.rng import isolated_rng

                with isolated_rng():
                    owner.prepare_data()
            ranks.barrier()


def warn_if_untrained(module: TrainModule, optimizers: Sequence[object]) -> None:
    """Warns of a fit without optimizers, which changes no weight. This may be intended."""
    if not optimizers:
        warn(
            f"{type(module).__name__}.configure_optimizers returned no optimizer, so this fit trains nothing: return "
            "an optimizer, such as torch.optim.AdamW(self.parameters(), lr=1e-3).",
        )


def warn_of_parts_in_eval_mode(module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
    """Warns of submodules that are trained in eval mode, as `from_pretrained` returns them: their dropout is off.

    A single layer of dropout or batch norm in eval mode is taken as intended, and so is a submodule without parameters
    in any optimizer.
    """
    trained = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    found: list[str] = []
    parts: list[tuple[str, nn.Module]] = [("", module)] if module.training else []
    while parts:
        name, part = parts.pop()
        for child_name, child in part.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if child.training:
                parts.append((full, child))
                continue
            has_modes = any(child.children()) and any(map(_has_modes, child.modules()))
            if has_modes and any(p.requires_grad and id(p) in trained for p in child.parameters()):
                found.append(full)
    if found:
        warn(
            f"{type(module).__name__} trains {listed(found, 3)} in eval mode: dropout is off and batch norm does not "
            f"update its statistics. If that is not intended, call {_expression_of(found[0])}.train() in __init__ "
            "(from_pretrained returns models in eval mode).",
        )


def _expression_of(name: str) -> str:
    """Returns the expression by which a module's own code refers to its submodule."""
    return f"self.{name}" if all(map(str.isidentifier, name.split("."))) else f"self.get_submodule({name!r})"


def _has_modes(layer: nn.Module) -> bool:
    """Returns True for a layer that behaves differently in training and in eval mode."""
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return layer.dropout > 0
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)


@contextmanager
def runtime_settings(arguments: Arguments) -> Iterator[None]:
    """Sets torch's global switches (deterministic, benchmark, …) within the block, and restores them afterwards."""
    variable = os.environ.get(CUBLAS)
    was = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    if arguments.deterministic:
        # cuBLAS reads this when it creates its first workspace. Without it, torch refuses matrix products on cuBLAS.
        os.environ.setdefault(CUBLAS, ":4096:8")
    if arguments.deterministic is not None:
        torch.use_deterministic_algorithms(bool(arguments.deterministic), warn_only=arguments.deterministic == "warn")
    if arguments.benchmark is not None:
        torch.backends.cudnn.benchmark = arguments.benchmark
    elif arguments.deterministic:
        torch.backends.cudnn.benchmark = False
    try:
        with (
            torch.autograd.set_detect_anomaly(arguments.detect_anomaly or torch.is_anomaly_enabled()),
            nullcontext() if arguments.compile is None else tracing_gradients(),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.backends.cudnn.benchmark = was[2]
        if variable is None:
            os.environ.pop(CUBLAS, None)


def tracing_gradients() -> AbstractContextManager[Any]:
    """Returns a context in which torch.compile traces `torch.autograd.grad`."""
    # Imported here because it takes a second.
    import torch._dynamo

    return torch._dynamo.config.patch(trace_autograd_ops=True)  # type: ignore[no-any-return]


def loggers_of(callbacks: list[Callback]) -> list[Logger]:
    return [callback for callback in callbacks if isinstance(callback, Logger)]


def accumulation_of(callbacks: list[Callback]) -> GradientAccumulation | None:
    return next((callback for callback in callbacks if isinstance(callback, GradientAccumulation)), None)


def seconds_of(value: Any) -> float | None:
    """Returns the seconds of a duration; None for a number or None, which are not durations."""
    if value is None or isinstance(value, (int, float)):
        return None
    from leyden.callbacks.timer import parse_duration

    return parse_duration(value).total_seconds()

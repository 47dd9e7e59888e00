"""Preparation of models, optimizers, schedulers and loaders for `Accelerator.prepare`, in any order."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from leyden.accelerator.loop.staged import StagedModel
from leyden.accelerator.prepared.loader import PreparedLoader
from leyden.accelerator.prepared.rank_loaders import rank_loader
from leyden.accelerator.prepared.scheduler import PreparedScheduler, lengths_of
from leyden.accelerator.settings.deepspeed import DummyOptim, DummyScheduler, complete_config
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.rank_zero import warn
from leyden.core.tree import map_tensors
from leyden.data.limits import length_of
from leyden.data.sources import Composite
from leyden.strategies.master_weights import parameters_of
from leyden.trainer.engine.debugging import is_debugging, loader_facts, model_facts, report
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.logging.metrics import gather_readers

if TYPE_CHECKING:
    from leyden.accelerator.loop.stepping import Stepping
    from leyden.accelerator.settings.options import Options
    from leyden.accelerator.settings.plugins import DataLoaderConfiguration

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class Preparing:
    """Prepares the objects of a loop, each only once: preparing an object again returns the earlier result.

    Attributes:
        data: how loaders are split across ranks.
        schedulers: the prepared schedulers, in order.
        loaders: the prepared loaders, in order.
    """

    def __init__(self, stepping: Stepping, options: Options) -> None:
        self.data = options.data
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self._stepping = stepping
        self._strategy = stepping.strategy
        self._options = options
        self._warned_of_schedules = False

    def prepare(self, objects: Sequence[Any], places: Sequence[bool] | None) -> Any:
        """Prepares objects of all kinds: models first, then optimizers, since sharding replaces parameters.

        `places` has one flag per object, True to move it to the device; see `Accelerator.prepare`.
        """
        moved = [self._options.device_placement] * len(objects) if places is None else list(places)
        if len(moved) != len(objects):
            raise ConfigurationError(
                f"prepare: device_placement has {len(moved)} entries for {len(objects)} objects. Pass one per object."
            )
        done: dict[int, Any] = {}
        pairs = list(zip(objects, moved, strict=True))
        if self._strategy.drives_one:
            self._configure_engine(objects)
        for entry, moves in pairs:
            if isinstance(entry, nn.Module):
                done[id(entry)] = self.model(entry, moves)
        for entry, _ in pairs:
            if isinstance(entry, (Optimizer, DummyOptim)):
                done[id(entry)] = self.optimizer(entry)
        for entry, moves in pairs:
            if id(entry) in done:
                continue
            if is_scheduler(entry) or isinstance(entry, DummyScheduler):
                done[id(entry)] = self.scheduler(entry)
            elif is_loader(entry):
                done[id(entry)] = self.loader(entry, moves)
        results = [done.get(id(entry), entry) for entry in objects]
        if is_debugging():
            for result in results:
                self._report_facts(result)
        return results[0] if len(results) == 1 else tuple(results)

    def configure(self, data: DataLoaderConfiguration) -> None:
        """Changes how loaders that are prepared from now on are split across ranks."""
        self.data = data

    def release(self) -> None:
        """Releases all schedulers and loaders."""
        self.schedulers.clear()
        self.loaders.clear()

    def _configure_engine(self, objects: Sequence[Any]) -> None:
        """Completes the config of DeepSpeed's engine from the objects of one call of `prepare`."""
        steppers = [
            entry
            for entry in objects
            if isinstance(entry, (Optimizer, DummyOptim, DummyScheduler)) or is_scheduler(entry)
        ]
        if not any(isinstance(entry, (Optimizer, DummyOptim)) for entry in steppers):
            return
        if not self._stepping.bare_models and not any(isinstance(entry, nn.Module) for entry in objects):
            raise ConfigurationError(
                f"an optimizer was prepared before its model, and {self._strategy.name} builds its engine from both. "
                "Prepare them in one call, or the model first."
            )
        loaders = [*(entry for entry in objects if is_loader(entry)), *self.loaders]
        accumulation = self._stepping.accumulation.num_steps
        complete_config(self._strategy, accumulation, self._options, steppers, loaders)

    def _report_facts(self, prepared: Any) -> None:
        rank = self._strategy.ranks.global_rank
        if isinstance(prepared, nn.Module):
            report(model_facts(rank, prepared, unwrap(prepared, keep_context=True, keep_compiled=False)))
        elif isinstance(prepared, PreparedLoader):
            report(loader_facts(rank, prepared.loader))

    # models -----------------------------------------------------------------------------------------------------------
    def model(self, module: nn.Module, moves: bool | None, evaluation_mode: bool = False) -> nn.Module:
        """Moves a model to its device and precision, and wraps it for the ranks."""
        stepping, strategy, options = self._stepping, self._strategy, self._options
        moves = options.device_placement if moves is None else moves
        for bare, known in zip(stepping.bare_models, stepping.prepared_models, strict=True):
            if module is bare or module is known:
                return known
        self._check_placement(module, moves)
        if strategy.drives_one and (evaluation_mode or not any(p.requires_grad for p in module.parameters())):
            return self._placed(module, moves)
        if strategy.drives_one and stepping.bare_models:
            raise ConfigurationError(
                f"{type(module).__name__} is a second model, but {strategy.name}'s engine drives one. Combine "
                "them in one module, or use strategy='ddp' or 'fsdp'. For a model that is not trained, call "
                "prepare_model(model, evaluation_mode=True)."
            )
        bare = strategy.add_module(module, moves)
        gather_readers(bare, strategy)
        context = strategy.precision.forward_context
        if context is not None:
            run_in_context(bare, context, options.converts_outputs(strategy))
        if strategy.outputs.are_in_parts:
            prepared: nn.Module = StagedModel(bare, stepping)
        else:
            prepared = bare if evaluation_mode else strategy.own_loop.wrap(bare)
        if options.backend is not None:
            stepping.check_compiled()
            compiled: Any = torch.compile(prepared, backend=options.backend, **options.compile_options)
            prepared = compiled
        prepared._is_accelerate_prepared = True  # type: ignore[assignment]
        if not evaluation_mode:
            stepping.add_model(prepared, bare)
        return prepared

    def _placed(self, module: nn.Module, moves: bool) -> nn.Module:
        """Prepares a model that is not trained, alongside the one that an engine drives; every rank holds it whole."""
        precision = self._strategy.precision
        module = precision.convert_module(module)
        if precision.forward_context is not None:
            run_in_context(module, precision.forward_context)
        return module.to(self._strategy.root_device) if moves else module

    def _check_placement(self, module: nn.Module, moves: bool) -> None:
        root = self._strategy.root_device
        devices = {parameter.device for parameter in module.parameters()}
        wrong = [device for device in devices if device.type not in ("cpu", "meta") and device != root]
        if wrong and moves:
            raise ConfigurationError(
                f"a model is on {wrong[0]}, and this rank's device is {root}. Remove .to(...) before prepare, or use "
                "Accelerator(device_placement=False)."
            )

    # optimizers and schedulers ----------------------------------------------------------------------------------------
    def optimizer(self, given: Optimizer | DummyOptim) -> PreparedOptimizer:
        """Makes an optimizer step through the precision and the strategy."""
        stepping, strategy = self._stepping, self._strategy
        for known in stepping.prepared_optimizers:
            if given is known or given is known.optimizer:
                return known
        if isinstance(given, DummyOptim) and not strategy.drives_one:
            raise ConfigurationError(
                "a DummyOptim stands for the optimizer of a DeepSpeed config. Prepare a real optimizer with "
                f"{strategy.name or 'this strategy'}."
            )
        own = strategy.add_optimizer(stepping.bare_models, None if isinstance(given, DummyOptim) else given)
        prepared = stepping.add_optimizer(own)
        _move_state(own)
        return prepared

    def scheduler(self, given: Any) -> PreparedScheduler:
        """Makes a scheduler step when its optimizer steps."""
        for known in self.schedulers:
            if given is known or given is known.scheduler:
                return known
        if isinstance(given, DummyScheduler):
            given = self._real_scheduler(given)
        owner = getattr(given, "optimizer", None)
        own = [entry for entry in self._stepping.prepared_optimizers if owner is entry or owner is entry.optimizer]
        if owner is not None and not own:
            warn(
                f"{kind_of(given)} was prepared, but its optimizer was not. Prepare the optimizer too, before or in "
                "the same call.",
            )
        prepared = PreparedScheduler(given, own, self._stepping, self._options.step_scheduler_with_optimizer)
        self.schedulers.append(prepared)
        self._warn_of_long_schedules()
        return prepared

    def _real_scheduler(self, given: DummyScheduler) -> Any:
        """The scheduler that replaces a DummyScheduler."""
        if not self._strategy.optimizers:
            raise ConfigurationError(
                "a DummyScheduler was prepared before its optimizer. Prepare the optimizer first, or in the same call."
            )
        if given.lr_scheduler_callable is not None:
            return given.lr_scheduler_callable(self._strategy.optimizers[0])
        made = self._strategy.make_schedulers()
        if not made:
            raise ConfigurationError(
                "a DummyScheduler stands for the scheduler of a DeepSpeed config, and this run has none. Prepare a "
                "real scheduler."
            )
        return made[0]

    # loaders ----------------------------------------------------------------------------------------------------------
    def loader(self, given: Any, moves: bool | None) -> PreparedLoader:
        """Returns a loader of this rank's samples, whose batches are moved to the device."""
        if isinstance(given, PreparedLoader):
            return given
        strategy = self._strategy
        moves = self._options.device_placement if moves is None else moves
        move = None if not moves or strategy.leaves_batches else strategy.to_device
        prepared = PreparedLoader(rank_loader(given, strategy, self.data), self._stepping, move, given)
        self.loaders.append(prepared)
        self._warn_of_long_schedules()
        return prepared

    def _warn_of_long_schedules(self) -> None:
        """Warns once if a schedule is as long as it would be for Accelerate, which counts the steps of all ranks."""
        ranks, window = self._strategy.data_size, self._stepping.accumulation.num_steps
        if ranks == 1 or self._warned_of_schedules or not self._options.step_scheduler_with_optimizer:
            return
        # The longest loader is the training loader; those without a length count as empty.
        own, batches = max(((length_of(one) or 0, length_of(one.given) or 0) for one in self.loaders), default=(0, 0))
        if batches <= own:
            return
        # Steps in an epoch of the loader as it was before `prepare`, and those of the prepared one times the ranks.
        epochs = {-(-batches // window), -(-own // window) * ranks} - {1}
        lengths = {length for prepared in self.schedulers for length in lengths_of(prepared.scheduler)}
        found = [length for length in lengths if any(length % steps == 0 for steps in epochs)]
        if found:
            self._warned_of_schedules = True
            warn(
                f"schedulers count optimizer steps, on {ranks} ranks as on one, and one of {max(found)} steps is "
                f"prepared for a loader of {own} batches. It is too long if its length was multiplied by num_processes "
                "or computed from the len() of a loader that was not prepared yet: remove the factor, or prepare the "
                "loader first.",
            )

    @contextmanager
    def joining(self, models: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
        """Lets ranks have different numbers of batches within the block; see `Accelerator.join_uneven_inputs`."""
        evenly = nullcontext() if even_batches is None else self.even_batches(even_batches)
        with evenly, self._stepping.joining(models):
            yield

    @contextmanager
    def even_batches(self, wanted: bool) -> Iterator[None]:
        """Makes prepared loaders fill up their last batches within the block, or not."""
        before, self.data = self.data, replace(self.data, even_batches=wanted)
        changed = [(entry, entry.loader) for entry in self.loaders]
        for entry, _ in changed:
            entry.replace_loader(rank_loader(entry.given, self._strategy, self.data))
        try:
            yield
        finally:
            self.data = before
            for entry, own in changed:
                entry.replace_loader(own)


def is_scheduler(entry: Any) -> bool:
    """Returns True for torch's schedulers, and for objects with their methods and an optimizer."""
    if isinstance(entry, (LRScheduler, ReduceLROnPlateau, PreparedScheduler)):
        return True
    return all(hasattr(entry, name) for name in ("step", "state_dict", "load_state_dict", "optimizer"))


def is_loader(entry: Any) -> bool:
    """Returns True for DataLoaders, similar iterables and combined loaders; not for lists, which may hold anything."""
    if isinstance(entry, (PreparedLoader, Composite, DataLoader)):
        return True
    return isinstance(entry, Iterable) and hasattr(entry, "dataset")


def _move_state(given: Optimizer) -> None:
    """Moves optimizer state that was created before the model moved to the device of its parameters."""
    for parameter in parameters_of(given):
        for key, value in given.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and key != "step" and value.device != parameter.device:
                given.state[parameter][key] = value.to(parameter.device)


# the forward of a prepared model --------------------------------------------------------------------------------------
def run_in_context(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]], outputs_in_float32: bool = False
) -> None:
    """Makes a module's forward run in a context, whatever calls it. Its class, names and hooks stay unchanged.

    With `outputs_in_float32`, losses outside autocast are computed in float32.
    """
    if getattr(module.forward, "_leyden_context", False):
        return
    plain = module.forward
    own = vars(module).get("forward")
    function = getattr(plain, "__func__", plain)

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            # A copy of the module has its own forward, bound to the copy.
            outputs = own(*args, **kwargs) if own is not None else function(self, *args, **kwargs)
        return map_tensors(outputs, in_float32) if outputs_in_float32 else outputs

    forward._leyden_context = True  # type: ignore[attr-defined]
    forward._leyden_own = own  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def _run_without_context(module: nn.Module) -> None:
    """Undoes `run_in_context`."""
    forward = vars(module).get("forward")
    if isinstance(forward, types.MethodType) and getattr(forward, "_leyden_context", False):
        del module.forward
        own = forward.__func__._leyden_own  # type: ignore[attr-defined]
        if own is not None:
            vars(module)["forward"] = own


def in_float32(tensor: Tensor) -> Tensor:
    """Converts a half-precision tensor to float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def unwrap(module: nn.Module, keep_context: bool, keep_compiled: bool) -> nn.Module:
    """Returns the model without its wrapper, still compiled if it was compiled and `keep_compiled` is True."""
    compiled: Any = module if isinstance(getattr(module, "_orig_mod", None), nn.Module) else None
    outer: Any = module if compiled is None else compiled._orig_mod
    wrapped = isinstance(outer, WRAPPERS) or getattr(type(outer), "wraps_module", False)
    bare: Any = outer.module if wrapped else outer
    inner = getattr(bare, "_orig_mod", None)
    plain = inner if isinstance(inner, nn.Module) else bare
    if not keep_context:
        _run_without_context(plain)
    if not keep_compiled:
        return plain  # type: ignore[no-any-return]
    if compiled is None or not wrapped:
        return bare if compiled is None else compiled  # type: ignore[no-any-return]
    # The compiled module contains the wrapper, and training still needs both, so compile the bare model separately.
    return type(compiled)(bare, compiled.dynamo_ctx)  # type: ignore[no-any-return]

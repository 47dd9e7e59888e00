"""How an Accelerator prepares models, optimizers, loaders and schedulers, in whatever order they come."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.trainer.accelerator.deepspeed import DummyOptim, DummyScheduler, settle
from leyden.trainer.accelerator.forward import run_in_context, run_without_context
from leyden.trainer.accelerator.loader import PreparedLoader
from leyden.trainer.accelerator.scheduler import PreparedScheduler, warn_of_multiplied_schedules
from leyden.trainer.accelerator.sharing import share
from leyden.trainer.data.sources import Composite
from leyden.trainer.engine.debugging import is_debugging, loader_facts, model_facts, tell
from leyden.trainer.engine.prepared import PreparedOptimizer, parameters_of

if TYPE_CHECKING:
    from leyden.trainer.accelerator.accelerator import Accelerator

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def prepare(accelerator: Accelerator, objects: Sequence[Any], places: Sequence[bool]) -> Any:
    """Prepares objects of all kinds: models first, then optimizers, since sharding replaces parameters."""
    done: dict[int, Any] = {}
    pairs = list(zip(objects, places, strict=True))
    if accelerator.strategy.drives_one:
        _settle_engine(accelerator, objects)
    for entry, moves in pairs:
        if isinstance(entry, nn.Module):
            done[id(entry)] = model(accelerator, entry, moves)
    for entry, _ in pairs:
        if isinstance(entry, (Optimizer, DummyOptim)):
            done[id(entry)] = optimizer(accelerator, entry)
    for entry, moves in pairs:
        if id(entry) in done:
            continue
        if is_scheduler(entry) or isinstance(entry, DummyScheduler):
            done[id(entry)] = scheduler(accelerator, entry)
        elif is_loader(entry):
            done[id(entry)] = loader(accelerator, entry, moves)
    results = [done.get(id(entry), entry) for entry in objects]
    if is_debugging():
        for result in results:
            _tell_facts(accelerator, result)
    return results[0] if len(results) == 1 else tuple(results)


def _settle_engine(accelerator: Accelerator, objects: Sequence[Any]) -> None:
    steps = [
        entry for entry in objects if isinstance(entry, (Optimizer, DummyOptim, DummyScheduler)) or is_scheduler(entry)
    ]
    if not any(isinstance(entry, (Optimizer, DummyOptim)) for entry in steps):
        return
    if not accelerator.bare_models and not any(isinstance(entry, nn.Module) for entry in objects):
        raise ConfigurationError(
            f"an optimizer was prepared before its model, and {accelerator.strategy.name} makes its engine of both: prepare them in one "
            "call, or the model first."
        )
    settle(accelerator, steps, [*(entry for entry in objects if is_loader(entry)), *accelerator.prepared_loaders])


def _tell_facts(accelerator: Accelerator, prepared: Any) -> None:
    rank = accelerator.process_index
    if isinstance(prepared, nn.Module):
        tell(model_facts(rank, prepared, unwrap(prepared, keep_context=True, keep_compiled=False)))
    elif isinstance(prepared, PreparedLoader):
        tell(loader_facts(rank, prepared.loader))


def is_scheduler(entry: Any) -> bool:
    """torch's schedulers, and what has their methods and an optimizer."""
    if isinstance(entry, (LRScheduler, ReduceLROnPlateau, PreparedScheduler)):
        return True
    return all(hasattr(entry, name) for name in ("step", "state_dict", "load_state_dict", "optimizer"))


def is_loader(entry: Any) -> bool:
    """torch's loaders and their like, and loaders put together. A list of batches might hold anything, and is left alone."""
    if isinstance(entry, (PreparedLoader, Composite, DataLoader)):
        return True
    return isinstance(entry, Iterable) and hasattr(entry, "dataset")


# models -----------------------------------------------------------------------------------------------------------------
def model(accelerator: Accelerator, module: nn.Module, moves: bool, evaluation_mode: bool = False) -> nn.Module:
    """Brings a model to its device and precision, and wraps it for the ranks."""
    if any(module is known for known in accelerator.prepared_models):
        return module
    for bare, known in zip(accelerator.bare_models, accelerator.prepared_models, strict=True):
        if bare is module:
            return known
    _check_placement(accelerator, module, moves)
    strategy = accelerator.strategy
    before = strategy.modules
    if strategy.drives_one and (evaluation_mode or not any(p.requires_grad for p in module.parameters())):
        return _placed(accelerator, module, moves)
    if strategy.drives_one and accelerator.bare_models:
        raise ConfigurationError(
            f"{type(module).__name__} is a second model, and {strategy.name}'s engine drives one: make them parts of one module, use "
            "strategy='ddp' or 'fsdp', or prepare_model(model, evaluation_mode=True) for one that is not trained."
        )
    bare = strategy.setup_modules([module])[0] if moves else strategy.precision.convert_module(module)
    strategy.modules = [*before, bare]
    context = strategy.precision.forward_context
    if context is not None:
        run_in_context(bare, context, accelerator.options.converts_outputs(strategy))
    prepared = bare if evaluation_mode else strategy.wrap_forward(bare)
    backend = accelerator.options.backend
    if backend is not None:
        strategy.check_compiled()
        prepared = torch.compile(prepared, backend=backend, **accelerator.options.compile_options)  # type: ignore[assignment]
    if not evaluation_mode:
        accelerator.prepared_models.append(prepared)
        accelerator.bare_models.append(bare)
        _repoint(accelerator)
    return prepared


def _placed(accelerator: Accelerator, module: nn.Module, moves: bool) -> nn.Module:
    """A model beside the one that an engine drives: every rank holds it, and calls it as it is."""
    precision = accelerator.strategy.precision
    module = precision.convert_module(module)
    if precision.forward_context is not None:
        run_in_context(module, precision.forward_context)
    return module.to(accelerator.device) if moves else module


def _check_placement(accelerator: Accelerator, module: nn.Module, moves: bool) -> None:
    there = {parameter.device for parameter in module.parameters()}
    wrong = [device for device in there if device.type not in ("cpu", "meta") and device != accelerator.device]
    if wrong and moves:
        raise ConfigurationError(
            f"a model is on {wrong[0]}, and this rank's device is {accelerator.device}: leave out .to(...) before prepare, or give "
            "Accelerator(device_placement=False)."
        )


def _repoint(accelerator: Accelerator) -> None:
    """Optimizers that were prepared before their model: where parameters were replaced, they take the new ones."""
    if accelerator.prepared_optimizers and not accelerator.strategy.replicates:
        strategy = accelerator.strategy
        strategy.setup_optimizers(
            accelerator.bare_models, [entry.optimizer for entry in accelerator.prepared_optimizers]
        )


def unwrap(module: nn.Module, keep_context: bool, keep_compiled: bool) -> nn.Module:
    """The model itself, still compiled if it was and `keep_compiled`."""
    compiled: Any = module if isinstance(getattr(module, "_orig_mod", None), nn.Module) else None
    outer: Any = module if compiled is None else compiled._orig_mod
    wrapped = isinstance(outer, WRAPPERS) or getattr(type(outer), "wraps_module", False)
    bare: Any = outer.module if wrapped else outer
    inner = getattr(bare, "_orig_mod", None)
    plain = inner if isinstance(inner, nn.Module) else bare
    if not keep_context:
        run_without_context(plain)
    if not keep_compiled:
        return plain  # type: ignore[no-any-return]
    if compiled is None or not wrapped:
        return bare if compiled is None else compiled  # type: ignore[no-any-return]
    # What was compiled is the wrapper, which must stay as it is for training.
    return type(compiled)(bare, compiled.dynamo_ctx)  # type: ignore[no-any-return]


# optimizers and schedulers ----------------------------------------------------------------------------------------------
def optimizer(accelerator: Accelerator, given: Optimizer | DummyOptim) -> PreparedOptimizer:
    """Lets an optimizer step through precision and strategy."""
    for known in accelerator.prepared_optimizers:
        if given is known or given is known.optimizer:
            return known
    strategy = accelerator.strategy
    before = strategy.optimizers
    if isinstance(given, DummyOptim) and not strategy.drives_one:
        raise ConfigurationError(
            "a DummyOptim stands for the optimizer of a DeepSpeed config: prepare a real optimizer here."
        )
    [own] = strategy.setup_optimizers(accelerator.bare_models, [] if isinstance(given, DummyOptim) else [given])
    strategy.optimizers = [*before, own]
    prepared = PreparedOptimizer(own, accelerator)
    accelerator.prepared_optimizers.append(prepared)
    _move_state(own)
    return prepared


def _move_state(given: Optimizer) -> None:
    """State that was made before the model was moved follows its parameters."""
    for parameter in parameters_of(given):
        for key, value in given.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and key != "step" and value.device != parameter.device:
                given.state[parameter][key] = value.to(parameter.device)


def scheduler(accelerator: Accelerator, given: Any) -> PreparedScheduler:
    """Lets a scheduler step when its optimizer does."""
    for known in accelerator.prepared_schedulers:
        if given is known or given is known.scheduler:
            return known
    if isinstance(given, DummyScheduler):
        given = _real_scheduler(accelerator, given)
    owner = getattr(given, "optimizer", None)
    own = [entry for entry in accelerator.prepared_optimizers if owner is entry or owner is entry.optimizer]
    if owner is not None and not own:
        warnings.warn(
            f"{kind_of(given)} was prepared whose optimizer is not: prepare the optimizer too, before or in the same call.",
            stacklevel=4,
        )
    with_optimizer = accelerator.options.step_scheduler_with_optimizer
    prepared = PreparedScheduler(given, own, accelerator, with_optimizer)
    if with_optimizer and accelerator.num_processes > 1 and not accelerator.prepared_schedulers:
        warn_of_multiplied_schedules(accelerator.num_processes)
    accelerator.prepared_schedulers.append(prepared)
    return prepared


def _real_scheduler(accelerator: Accelerator, given: DummyScheduler) -> Any:
    """The scheduler that replaces a DummyScheduler."""
    strategy = accelerator.strategy
    if not strategy.optimizers:
        raise ConfigurationError(
            "a DummyScheduler was prepared before its optimizer: prepare the optimizer first, or in one call."
        )
    if given.lr_scheduler_callable is not None:
        return given.lr_scheduler_callable(strategy.optimizers[0])
    made = strategy.make_schedulers()
    if not made:
        raise ConfigurationError(
            "a DummyScheduler stands for the scheduler of a DeepSpeed config: prepare a real one here."
        )
    return made[0]


# loaders ----------------------------------------------------------------------------------------------------------------
def loader(accelerator: Accelerator, given: Any, moves: bool) -> PreparedLoader:
    """A loader on this rank's share, whose batches come on the device."""
    if isinstance(given, PreparedLoader):
        return given
    strategy = accelerator.strategy
    move = None if not moves or strategy.leaves_batches else strategy.to_device
    shared = share(given, strategy, accelerator.dataloader_config)
    prepared = PreparedLoader(shared, accelerator, move, given)
    accelerator.prepared_loaders.append(prepared)
    return prepared


@contextmanager
def even_batches(accelerator: Accelerator, wanted: bool) -> Iterator[None]:
    """Prepared loaders fill their last batches, or do not, within the block."""
    before = accelerator.dataloader_config
    accelerator.dataloader_config = replace(before, even_batches=wanted)
    changed = [(entry, entry.loader) for entry in accelerator.prepared_loaders]
    for entry, _ in changed:
        entry.exchange(share(entry.given, accelerator.strategy, accelerator.dataloader_config))
    try:
        yield
    finally:
        accelerator.dataloader_config = before
        for entry, own in changed:
            entry.exchange(own)

"""What `Accelerator.prepare` does to models, optimizers, schedulers and loaders, in whatever order they come."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.master_weights import parameters_of
from leyden.trainer.accelerator.deepspeed import DummyOptim, DummyScheduler, settle
from leyden.trainer.accelerator.loader import PreparedLoader
from leyden.trainer.accelerator.rank_loaders import rank_loader
from leyden.trainer.accelerator.scheduler import PreparedScheduler
from leyden.trainer.accelerator.staged import StagedModel
from leyden.trainer.data.sources import Composite
from leyden.trainer.engine.debugging import is_debugging, loader_facts, model_facts, report
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.logging.metrics import gather_readers

if TYPE_CHECKING:
    from leyden.trainer.accelerator.options import Options
    from leyden.trainer.accelerator.stepping import Stepping

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class Preparing:
    """Prepares the objects of a loop, each once: the same object again returns what was made of it.

    Args:
        stepping: trains the models and steps the optimizers.
        options: the Accelerator's arguments.

    Attributes:
        data: how loaders are split over the ranks.
        schedulers: the prepared ones, in their order.
        loaders: the prepared ones, in their order.
    """

    def __init__(self, stepping: Stepping, options: Options) -> None:
        self.data = options.data
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self._stepping = stepping
        self._strategy = stepping.strategy
        self._options = options

    def prepare(self, objects: Sequence[Any], places: Sequence[bool] | None) -> Any:
        """Prepares objects of all kinds: models first, then optimizers, since sharding replaces parameters.

        Args:
            objects: those of other kinds are returned as they are.
            places: for each, whether it goes to the device; None for the Accelerator's `device_placement`.

        Returns:
            The same, prepared, in the same order; one alone by itself.
        """
        placed = [self._options.device_placement] * len(objects) if places is None else list(places)
        if len(placed) != len(objects):
            raise ConfigurationError(f"prepare: device_placement has {len(placed)} entries for {len(objects)} objects.")
        done: dict[int, Any] = {}
        pairs = list(zip(objects, placed, strict=True))
        if self._strategy.drives_one:
            self._settle_engine(objects)
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

    def release(self) -> None:
        """Releases schedulers and loaders."""
        self.schedulers.clear()
        self.loaders.clear()

    def _settle_engine(self, objects: Sequence[Any]) -> None:
        steps = [
            entry
            for entry in objects
            if isinstance(entry, (Optimizer, DummyOptim, DummyScheduler)) or is_scheduler(entry)
        ]
        if not any(isinstance(entry, (Optimizer, DummyOptim)) for entry in steps):
            return
        if not self._stepping.bare_models and not any(isinstance(entry, nn.Module) for entry in objects):
            raise ConfigurationError(
                f"an optimizer was prepared before its model, and {self._strategy.name} makes its engine of both: "
                "prepare them in one call, or the model first."
            )
        loaders = [*(entry for entry in objects if is_loader(entry)), *self.loaders]
        settle(self._stepping, self._options, steps, loaders)

    def _report_facts(self, prepared: Any) -> None:
        rank = self._strategy.ranks.global_rank
        if isinstance(prepared, nn.Module):
            report(model_facts(rank, prepared, unwrap(prepared, keep_context=True, keep_compiled=False)))
        elif isinstance(prepared, PreparedLoader):
            report(loader_facts(rank, prepared.loader))

    # models -----------------------------------------------------------------------------------------------------------
    def model(self, module: nn.Module, moves: bool | None, evaluation_mode: bool = False) -> nn.Module:
        """Brings a model to its device and precision, and wraps it for the ranks."""
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
                f"{type(module).__name__} is a second model, and {strategy.name}'s engine drives one: make them parts "
                "of one module, use strategy='ddp' or 'fsdp', or prepare_model(model, evaluation_mode=True) for one "
                "that is not trained."
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
        if not evaluation_mode:
            stepping.add_model(prepared, bare)
        return prepared

    def _placed(self, module: nn.Module, moves: bool) -> nn.Module:
        """Prepares a further model, next to the one that an engine drives: every rank holds it whole."""
        precision = self._strategy.precision
        module = precision.convert_module(module)
        if precision.forward_context is not None:
            run_in_context(module, precision.forward_context)
        return module.to(self._strategy.root_device) if moves else module

    def _check_placement(self, module: nn.Module, moves: bool) -> None:
        here = self._strategy.root_device
        there = {parameter.device for parameter in module.parameters()}
        wrong = [device for device in there if device.type not in ("cpu", "meta") and device != here]
        if wrong and moves:
            raise ConfigurationError(
                f"a model is on {wrong[0]}, and this rank's device is {here}: leave out .to(...) before prepare, or "
                "give Accelerator(device_placement=False)."
            )

    # optimizers and schedulers ----------------------------------------------------------------------------------------
    def optimizer(self, given: Optimizer | DummyOptim) -> PreparedOptimizer:
        """Lets an optimizer step through precision and strategy."""
        stepping, strategy = self._stepping, self._strategy
        for known in stepping.prepared_optimizers:
            if given is known or given is known.optimizer:
                return known
        if isinstance(given, DummyOptim) and not strategy.drives_one:
            raise ConfigurationError(
                "a DummyOptim stands for the optimizer of a DeepSpeed config: prepare a real optimizer here."
            )
        own = strategy.add_optimizer(stepping.bare_models, None if isinstance(given, DummyOptim) else given)
        prepared = stepping.add_optimizer(own)
        _move_state(own)
        return prepared

    def scheduler(self, given: Any) -> PreparedScheduler:
        """Lets a scheduler step when its optimizer does."""
        for known in self.schedulers:
            if given is known or given is known.scheduler:
                return known
        if isinstance(given, DummyScheduler):
            given = self._real_scheduler(given)
        owner = getattr(given, "optimizer", None)
        own = [entry for entry in self._stepping.prepared_optimizers if owner is entry or owner is entry.optimizer]
        if owner is not None and not own:
            warnings.warn(
                f"{kind_of(given)} was prepared, and its optimizer was not: prepare the optimizer too, before or in "
                "the same call.",
                stacklevel=4,
            )
        with_optimizer, ranks = self._options.step_scheduler_with_optimizer, self._strategy.data_size
        prepared = PreparedScheduler(given, own, self._stepping, with_optimizer)
        if with_optimizer and ranks > 1 and not self.schedulers:
            # Elsewhere schedulers count the calls of all ranks.
            warnings.warn(
                f"schedulers count optimizer steps here, on {ranks} ranks as on one: a warm-up or total that was "
                "multiplied by num_processes is now too long, so leave the factor out.",
                stacklevel=3,
            )
        self.schedulers.append(prepared)
        return prepared

    def _real_scheduler(self, given: DummyScheduler) -> Any:
        """The scheduler that replaces a DummyScheduler."""
        if not self._strategy.optimizers:
            raise ConfigurationError(
                "a DummyScheduler was prepared before its optimizer: prepare the optimizer first, or in one call."
            )
        if given.lr_scheduler_callable is not None:
            return given.lr_scheduler_callable(self._strategy.optimizers[0])
        made = self._strategy.make_schedulers()
        if not made:
            raise ConfigurationError(
                "a DummyScheduler stands for the scheduler of a DeepSpeed config: prepare a real one here."
            )
        return made[0]

    # loaders ----------------------------------------------------------------------------------------------------------
    def loader(self, given: Any, moves: bool | None) -> PreparedLoader:
        """A loader of this rank's samples, whose batches come on the device."""
        if isinstance(given, PreparedLoader):
            return given
        strategy = self._strategy
        moves = self._options.device_placement if moves is None else moves
        move = None if not moves or strategy.leaves_batches else strategy.to_device
        prepared = PreparedLoader(rank_loader(given, strategy, self.data), self._stepping, move, given)
        self.loaders.append(prepared)
        return prepared

    @contextmanager
    def joining(self, models: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
        """Ranks take part in the others' exchange of gradients within the block; see
        `Accelerator.join_uneven_inputs`.
        """
        with ExitStack() as stack:
            if even_batches is not None:
                stack.enter_context(self.even_batches(even_batches))
            stack.enter_context(self._stepping.joining(models))
            yield

    @contextmanager
    def even_batches(self, wanted: bool) -> Iterator[None]:
        """Prepared loaders fill their last batches, or do not, within the block."""
        before, self.data = self.data, replace(self.data, even_batches=wanted)
        changed = [(entry, entry.loader) for entry in self.loaders]
        for entry, _ in changed:
            entry.exchange(rank_loader(entry.given, self._strategy, self.data))
        try:
            yield
        finally:
            self.data = before
            for entry, own in changed:
                entry.exchange(own)


def is_scheduler(entry: Any) -> bool:
    """torch's schedulers, and what has their methods and an optimizer."""
    if isinstance(entry, (LRScheduler, ReduceLROnPlateau, PreparedScheduler)):
        return True
    return all(hasattr(entry, name) for name in ("step", "state_dict", "load_state_dict", "optimizer"))


def is_loader(entry: Any) -> bool:
    """torch's loaders and their like, and combined loaders; not a list, which might hold anything."""
    if isinstance(entry, (PreparedLoader, Composite, DataLoader)):
        return True
    return isinstance(entry, Iterable) and hasattr(entry, "dataset")


def _move_state(given: Optimizer) -> None:
    """State that was made before the model was moved follows its parameters."""
    for parameter in parameters_of(given):
        for key, value in given.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and key != "step" and value.device != parameter.device:
                given.state[parameter][key] = value.to(parameter.device)


# the forward of a prepared model --------------------------------------------------------------------------------------
def run_in_context(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]], outputs_in_float32: bool = False
) -> None:
    """Lets a module's forward run in a context, whoever calls it; class, names and hooks stay as they are.

    Args:
        module: whose forward it is.
        context: makes the context of one forward.
        outputs_in_float32: convert outputs in half precision, so that a loss is computed in float32 anywhere.
    """
    if getattr(module.forward, "_leyden_context", False):
        return
    plain = module.forward
    own = vars(module).get("forward")
    function = getattr(plain, "__func__", plain)

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            # A copy of the module has a forward of its own, bound to the copy.
            outputs = own(*args, **kwargs) if own is not None else function(self, *args, **kwargs)
        return map_tensors(outputs, in_float32) if outputs_in_float32 else outputs

    forward._leyden_context = True  # type: ignore[attr-defined]
    forward._leyden_own = own  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def _run_without_context(module: nn.Module) -> None:
    """Undoes what `run_in_context` did."""
    forward = vars(module).get("forward")
    if isinstance(forward, types.MethodType) and getattr(forward, "_leyden_context", False):
        del module.forward
        own = forward.__func__._leyden_own  # type: ignore[attr-defined]
        if own is not None:
            vars(module)["forward"] = own


def in_float32(tensor: Tensor) -> Tensor:
    """Converts a tensor in half precision to float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def unwrap(module: nn.Module, keep_context: bool, keep_compiled: bool) -> nn.Module:
    """The model itself, still compiled if it was and `keep_compiled`."""
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
    # What was compiled is the wrapper, which must stay as it is for training.
    return type(compiled)(bare, compiled.dynamo_ctx)  # type: ignore[no-any-return]

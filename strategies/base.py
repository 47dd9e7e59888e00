"""Strategy: where a model lives, how a batch goes forward and backward, and how ranks communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from leyden.core.errors import ConfigurationError
from leyden.core.tree import move_to_device, widest_float
from leyden.strategies.local_weights import LocalWeights
from leyden.strategies.master_weights import MasterWeights, parameters_of
from leyden.strategies.outputs import StepOutputs
from leyden.strategies.precision import Precision
from leyden.strategies.ranks import Ranks
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights, is_plain, load_weights
from leyden.strategies.window import BackwardHooks, Window, read_loss


class OwnLoop:
    """The part of a strategy that only the Accelerator calls, not the Trainer. Most strategies keep these no-ops."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Returns the wrapper that the loop calls in place of a module, such as DDP's."""
        return module

    def release(self) -> None:
        """Drops the wrappers, and with them their references to the process group."""

    def joining(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Returns a context in which ranks that are out of batches still take part in the others' collectives."""
        return nullcontext()

    def sync_in_backward(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which backward exchanges gradients although the forward pass ran without sync."""
        return nullcontext()

    def in_parts(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: AbstractSet[Tensor]
    ) -> AbstractContextManager[None]:
        """Returns a context in which each rank has a part of the sequences; see `Accelerator.maybe_context_parallel`.

        Args:
            buffers: the tensors that are cut in the block.
            dims: the dimension of the sequence in each of them.
            kept: those of them that stay cut afterwards.
        """
        return nullcontext()

    def clip_each_step(self, value: float) -> None:
        """Sets the norm that an engine clips each step to. Only a launch's configuration can ask for it."""

    def end_turn(self) -> None:
        """Marks the end of one iteration, so that a strategy that records operations can submit them to the device.

        Called before the next batch is drawn, or after an optimizer step if no loader is prepared.
        """


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run. None means not set, or not known yet.

    Attributes:
        accumulation: number of batches per optimizer step. Also None if it changes during the run.
        clip_value: norm or value that gradients are clipped to.
        clip_algorithm: "norm" or "value".
        batch_size: number of samples per batch on one rank.
        manual: True if the module calls backward and steps itself (manual optimization).
        own_backward: True if the module overrides `backward`.
        sync_batchnorm: True if batch norm computes its statistics over all ranks.
        optimizers: number of optimizers.
        schedulers: number of learning-rate schedulers.
    """

    accumulation: int | None = None
    clip_value: float | None = None
    clip_algorithm: str | None = None
    batch_size: int | None = None
    manual: bool | None = None
    own_backward: bool | None = None
    sync_batchnorm: bool | None = None
    optimizers: int | None = None
    schedulers: int | None = None


DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_})
COMPUTED = frozenset({"constant_", "ones_", "zeros_", "eye_", "dirac_"})
IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class EmptyInit(TorchFunctionMode):
    """A context that skips random initialization. Tensors keep uninitialized memory until weights are loaded.

    Example:
        >>> from torch import nn
        >>> with EmptyInit():
        ...     layer = nn.Linear(2, 2)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == IS_META:
            # Functions of torch.nn.init that redraw until all values are valid skip meta tensors.
            return True
        draws = getattr(func, "__module__", None) == "torch.nn.init" and func.__name__ not in COMPUTED
        if func in DRAWS or draws:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


T = TypeVar("T")
ClipAlgorithm: TypeAlias = Literal["norm", "value"]
Refused: TypeAlias = Literal["compiled", "exchange", "asynchronous", "micro_batches", "trainable_only"]

# Members that moved to Ranks: an override on the strategy would silently have no effect.
_MOVED_TO_RANKS = {
    *("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero"),
    *("barrier", "broadcast", "all_gather", "reduce", "all_gather_object", "gather_object"),
}

_REDUCTIONS = ("mean", "avg", "sum", "max", "min")


def _reduction_name(reduce_op: Any) -> str:
    """Returns the name of a ReduceOp, or "" for an unsupported one."""
    known = {"avg": "AVG", "sum": "SUM", "max": "MAX", "min": "MIN"}
    operations = getattr(torch.distributed, "ReduceOp", None)
    return next((name for name, label in known.items() if reduce_op == getattr(operations, label, None)), "")


class Strategy:
    """Decides where a model lives and how a batch goes forward and backward. The base class of all strategies.

    The base class runs the model on one device. A subclass overrides only what it does differently: a strategy that
    replicates the model needs little more than setup and `forward_backward`, and an engine that fuses passes also
    overrides `clip` and `step`. A strategy knows no Trainer, no module hook and no callback. docs/strategies.md shows
    how to write one and describes its five parts: `precision`, `ranks`, `outputs`, `master_weights` and `own_loop`.

    A fit calls these methods in this order. Those in brackets are called only if they apply::

        place_on                once the run's devices are known
        check_settings          several times, as settings become known
        setup_environment       this process joins the other ranks
        model_context           around `configure_model`
        setup_modules
        [load_module]           in a resume
        synchronize
        setup_optimizers
        make_schedulers
        [load_state_dict]       in a resume
        setup_step
        check_trained           in each epoch
        [begin_pass]            for each micro-batch under accumulate_grad_batches="auto"
        forward_backward        for each batch
        [abandon_pass]          if a pass ran out of memory
        [shadow_batch]          instead of forward_backward, on a rank without a sample of the global batch
        [sync_gradients]        for each accumulation window
        [scale_gradients]
        before_step             for each optimizer
        [clip]
        step
        end_step
        synchronize_buffers     for each evaluation
        evaluate                for each batch of an evaluation
        end_evaluation
        save                    for each checkpoint
        state_dict
        [explain]               if an error ended the run
        [report_failure]
        teardown
    """

    name: str = ""
    supports_inference_mode: bool = True
    """False if a later backward uses tensors created in validation (FSDP2). Validation then runs under no_grad."""
    supports_closure: bool = True
    """False if the engine runs the step itself, so an optimizer such as LBFGS cannot re-evaluate the loss."""
    drives_one: bool = False
    """True for an engine that trains one model with one optimizer. Other models are only moved to the device."""
    replicates: bool = True
    """True if every rank holds the whole model. Evaluation calls the bare module, and ranks without samples stop."""
    is_filling: bool = False
    """True while a rank without a sample trains on a batch that counts for nothing."""
    exchanges_late: bool = False
    """True if `sync_gradients` can exchange all gradients of a window, so that no pass waits for another rank."""
    before_forward: Callable[[Window], None] | None = None
    """Called before the forward pass of a training batch. It adds no frame between `fit` and the user's step."""
    check_exchange: Callable[[], None] | None = None
    """Called after each step on several ranks; raises if gradients of the step were not exchanged."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls).keys() & _MOVED_TO_RANKS:
            raise ConfigurationError(
                f"{cls.__name__} overrides {name}, but Leyden calls {name} of the strategy's ranks. Override it in a "
                "subclass of leyden.strategies.ranks.Ranks, and pass that as Strategy(ranks=…)."
            )

    def __init__(self, precision: Precision | None = None, ranks: Ranks | None = None) -> None:
        self.ranks = ranks if ranks is not None else Ranks()
        self.outputs = StepOutputs()
        self.master_weights = MasterWeights()
        self.own_loop = OwnLoop()
        self.precision = precision if precision is not None else Precision()
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []

    # environment ------------------------------------------------------------------------------------------------------
    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self.ranks.device

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks that see different samples, for sampling, weighting and metrics.

        Ranks that share one model (tensor, sequence or pipeline parallel) get the same batch and the same data rank.
        """
        return self.ranks.global_rank

    @property
    def data_size(self) -> int:
        """The number of ranks that see different samples."""
        return self.ranks.world_size

    @property
    def data_ranks(self) -> list[int]:
        """The data rank of every rank. Ranks with the same data rank are adjacent."""
        return [rank * self.data_size // self.ranks.world_size for rank in range(self.ranks.world_size)]

    @property
    def part_ranks(self) -> list[int]:
        """A number for every rank that is equal on ranks which see the same part of the same samples.

        The data ranks, except if ranks that share samples see different parts of their sequences.
        """
        return self.data_ranks

    @property
    def pipeline_rank(self) -> int:
        """This rank's position in its pipeline; 0 without a pipeline."""
        return 0

    @property
    def replicas(self) -> list[list[int]]:
        """All ranks, grouped by the part of the weights that they hold.

        The ranks of a group step the same weights independently, so their copies must stay identical.
        """
        ranks = list(range(self.ranks.world_size))
        return [ranks] if self.replicates else [[rank] for rank in ranks]

    @property
    def refusals(self) -> dict[Refused, str]:
        """The features that this strategy does not support, each with the reason and the alternative.

        - "compiled": a module compiled with `torch.compile`.
        - "exchange": swapping weights for others between two steps.
        - "asynchronous": writing a checkpoint in the background of training.
        - "micro_batches": batches that the loop splits into micro-batches.
        - "trainable_only": checkpoints without frozen weights.
        """
        found: dict[Refused, str] = {}
        if self.drives_one:
            found["exchange"] = (
                "its engine steps copies of the weights, and the copies overwrite new values. Use FSDP or DDP"
            )
        if type(self).forward_backward is not Strategy.forward_backward:
            found["micro_batches"] = (
                "it runs forward and backward itself. Set the size of micro-batches in its own settings"
            )
        return found

    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        """Takes the devices named by the Trainer's arguments. A strategy constructed with devices keeps its own."""

    def check_settings(self, settings: RunSettings) -> None:
        """Takes the run's settings. Called several times, as settings become known.

        Raises:
            ConfigurationError: if one of the strategy's own settings contradicts one of the run's. The message names
                both, and the fix.
        """

    def setup_environment(self) -> None:
        """Makes the device current and joins the other ranks. Raises if the device does not support the precision."""
        self.ranks.join()
        self.precision.check(self.root_device)

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        """Reports an error to the other ranks. Returns False if the error is a consequence of another rank's."""
        return self.ranks.report_failure(error, where)

    def release(self) -> None:
        """Drops modules, optimizers, and the wrappers of a custom loop."""
        self.modules, self.optimizers = [], []
        self.own_loop.release()

    def teardown(self) -> None:
        """Ends a run and drops its modules and optimizers. May be called twice. Ranks stay joined for the next run."""
        self.modules, self.optimizers = [], []
        self.ranks.end_run()

    @property
    def details(self) -> str:
        """A line about the strategy that fit prints once modules are set up; empty to print nothing."""
        return ""

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Returns a context in which modules are built in the precision's dtype, on this rank's device.

        Args:
            empty_init: True skips random initialization, for weights that a checkpoint replaces.
        """
        with self.precision.init_context(), self.root_device, EmptyInit() if empty_init else nullcontext():
            yield

    def model_context(self) -> AbstractContextManager[None]:
        """Returns the context that `configure_model` runs in. A sharding strategy builds on the meta device here."""
        return nullcontext()

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Moves modules to their device. Called before their optimizers exist."""
        self.modules = [self.precision.convert_module(module).to(self.root_device) for module in modules]
        return self.modules

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepares the optimizers. Called after `setup_modules`."""
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            self.precision.register(optimizer)
        return self.optimizers

    def add_module(self, module: nn.Module, moves: bool = True) -> nn.Module:
        """Sets up one more module, for a custom loop.

        Args:
            module: a module in addition to those already set up.
            moves: False leaves it on its current device.
        """
        before = self.modules
        added = self.setup_modules([module])[0] if moves else self.precision.convert_module(module)
        self.modules = [*before, added]
        return added

    def add_optimizer(self, modules: Sequence[nn.Module], optimizer: Optimizer | None) -> Optimizer:
        """Sets up one more optimizer, for a custom loop. With None, the engine creates the optimizer."""
        before = self.optimizers
        [added] = self.setup_optimizers(modules, [] if optimizer is None else [optimizer])
        self.optimizers = [*before, added]
        return added

    def make_schedulers(self) -> list[Any]:
        """Returns the schedulers configured in the strategy's own settings. The caller steps and saves them."""
        return []

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        """Returns the function that runs a step of the module. DDP and FSDP2 wrap it here."""
        return step_fn

    def synchronize(self, module: nn.Module) -> None:
        """Broadcasts weights and buffers from rank 0, after they are restored and before optimizers are created."""

    def synchronize_buffers(self) -> None:
        """Broadcasts buffers from the rank that saves them, before an evaluation within fit."""

    def to_device(self, batch: T) -> T:
        """Moves a batch of any nested structure to this rank's device, and converts it to the inputs' precision."""
        return self.precision.convert_input(move_to_device(batch, self.root_device))

    @property
    def leaves_batches(self) -> bool:
        """True if `to_device` is a no-op for a batch of CPU tensors, so that the loop can skip the call."""
        return self.root_device.type == "cpu" and not self.precision.converts_input

    def check_trained(self) -> None:
        """Adapts to newly frozen or unfrozen parameters, at each epoch's start and end; raises if it cannot."""

    def explain(self, error: BaseException) -> str | None:
        """Returns advice on an error of torch whose own message gives none, or None."""
        return None

    # the step ---------------------------------------------------------------------------------------------------------
    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        """Runs `step_fn(batch, *extra)` and backward in one call, so that an engine may fuse them.

        docs/strategies.md lists what an override must do.

        Returns:
            The step function's return value, unchanged; its loss is not scaled.
        """
        if self.before_forward is not None:
            self.before_forward(window)
        context = self.precision.forward_context
        if context is None:
            outputs = step_fn(batch, *extra)
        else:
            with context():
                outputs = step_fn(batch, *extra)
        loss, num_items = read_loss(outputs)
        for hook in hooks.on_before_backward:
            hook(loss)
        # Most losses need no division, and skipping the no-op call saves time in every step.
        if num_items is not None or window.length > 1 or window.weight != 1.0 or window.idle:
            loss = self.loss_to_backward(loss, num_items, window)
        scaled = self.precision.scale_loss(loss) if self.precision.scales_loss else loss
        if hooks.backward is None:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            hooks.backward(scaled)
        for after in hooks.on_after_backward:
            after()
        return outputs

    def loss_to_backward(self, loss: Tensor, num_items: Tensor | float | None, window: Window) -> Tensor:
        """Divides a loss so that the window's gradient is the mean over its batches, or over its items.

        The total number of items is known only when the window ends. Until then every loss is divided by the first
        batch's item count, which keeps gradients in range; `Engine.close_window` then rescales by first / total. On
        several ranks both counts are averaged over the ranks, like the gradients. `window.weight` weights the loss of
        an uneven batch only if there is no item count.

        Raises:
            ConfigurationError: if only some batches of a window have num_items.
        """
        if (num_items is None) != (window.first_items is None) and window.index > 0:
            raise ConfigurationError(
                "training_step returned num_items for some batches of an accumulation window and not for others. "
                "Return it always or never."
            )
        if window.idle and window.index == 0 and self.ranks.any(num_items is not None) and num_items is None:
            raise ConfigurationError(
                "training_step returned num_items on some ranks of a global batch and not on others. Return it always "
                "or never."
            )
        if num_items is None:
            if window.weight != 1.0:
                loss = loss * window.weight
            return loss / window.length if window.length > 1 else loss
        if window.index == 0:
            if window.alone:
                divisor = num_items if window.divisor is None else window.divisor
            else:
                divisor = mean_items(self, num_items)
            window.begin_items(num_items, not_zero(divisor))
        else:
            window.add_items(num_items)
        return loss / window.first_items  # type: ignore[operator]

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        """Matches the collectives of other ranks' `forward_backward` on a rank without a sample, like torch's Join.

        The rank contributes zero gradients to every exchange of the global batch and calls no hook. User code leaves
        no trace: the caller discards logged values and restores buffers, metrics and random states. An override calls
        `shadow_items` between forward and backward.

        Args:
            step_fn: the step, as for `forward_backward`.
            filler: a batch to run if the other ranks communicate in their forward passes; None if there is none.
            extra: further arguments of the step.
            window: the window, as for `forward_backward`.
        """
        raise ConfigurationError(
            f"A global batch has fewer samples than the {self.data_size} data ranks, and {type(self).__name__} does "
            "not implement shadow_batch. Implement it, or give the loader drop_last=True."
        )

    def forward(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        """Runs the training step under manual optimization: forward only, in the precision's context."""
        context = self.precision.forward_context
        if context is None:
            return step_fn(batch, *extra)
        with context():
            return step_fn(batch, *extra)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        """Runs a validation, test or prediction step on one batch."""
        return self.forward(step_fn, batch, extra)

    def end_evaluation(self) -> None:
        """Ends a pass over evaluation data."""

    def backward(self, loss: Tensor, *args: Any, own: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Runs backward on a loss that the user has already divided (manual optimization, or a custom loop).

        Args:
            loss: the unscaled loss.
            *args: arguments of backward.
            own: the module's own backward, called with the scaled loss in place of `loss.backward`.
            **kwargs: keyword arguments of backward.
        """
        scaled = self.precision.scale_loss(loss)
        if own is None:
            scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        else:
            own(scaled, *args, **kwargs)

    def sync_gradients(self) -> None:
        """Averages gradients over the ranks if no backward of the window has exchanged them.

        The caller needs this after a window that ended unexpectedly, and when it relies on `exchanges_late`.
        """

    def begin_pass(self) -> None:
        """Begins the pass of a micro-batch. If the pass runs out of memory, `abandon_pass` follows."""

    def abandon_pass(self, rest: Callable[[], None]) -> None:
        """Discards the unfinished work of a pass that ran out of memory on this rank.

        Args:
            rest: reruns the pass and the remaining micro-batches, with one sample each. A strategy whose passes
                communicate calls it, since the other ranks finish theirs.
        """

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiplies all gradients by a factor, on the device."""
        multiply([p.grad for p in stepped_parameters(self.modules, self.optimizers) if p.grad is not None], factor)

    def before_step(self, optimizer: Optimizer) -> None:
        """Unscales the optimizer's gradients before hooks and clipping read them."""
        self.precision.unscale(optimizer)

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Unscales and clips the gradients of the optimizer's parameters.

        Returns:
            The total norm before clipping as a 0-d tensor on the device, or None when clipping by value.
        """
        self.before_step(optimizer)
        return self.clip_parameters(parameters_of(optimizer), value, algorithm)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips unscaled gradients of the given parameters; returns the same as `clip`."""
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value, norm_type)

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the parameters that this rank contributes to a norm over all ranks."""
        return list(parameters)

    def held(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns the parameters that this rank holds, in whole or in part: in a pipeline, those of its stages."""
        return list(parameters)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps one optimizer with the keyword arguments. Returns False if the gradient scaler skipped the step."""
        return self.precision.step(optimizer, closure, **kwargs)

    def end_step(self) -> None:
        """Ends the window's step, after all its optimizers: the gradient scaler updates its scale."""
        self.precision.end_step()

    # names that users of Lightning read on trainer.strategy; Leyden itself uses `ranks` -------------------------------
    @property
    def global_rank(self) -> int:
        return self.ranks.global_rank

    @property
    def local_rank(self) -> int:
        return self.ranks.local_rank

    @property
    def node_rank(self) -> int:
        return self.ranks.node_rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def is_global_zero(self) -> bool:
        return self.ranks.is_global_zero

    def barrier(self, name: str | None = None) -> None:
        """Waits for every rank. The name only documents the call."""
        self.ranks.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.ranks.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self.ranks.all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Tensor, group: Any = None, reduction: str = "mean", *, reduce_op: Any = None) -> Tensor:
        """See `Ranks.reduce`. `reduce_op` is Lightning's name for `reduction`, or one of torch's ReduceOps.

        Non-tensors are returned unchanged.
        """
        wanted = reduction if reduce_op is None else reduce_op
        name = wanted.lower() if isinstance(wanted, str) else _reduction_name(wanted)
        if name not in _REDUCTIONS:
            raise ConfigurationError(f"reduce_op={wanted!r} is not known. Use one of {', '.join(_REDUCTIONS)}.")
        return self.ranks.reduce(tensor, group, name) if isinstance(tensor, Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns on every rank whether the decision is true on all ranks, or with `all=False` on any rank."""
        found = self.ranks.any(bool(decision) is not all)
        return found is not all

    # state ------------------------------------------------------------------------------------------------------------
    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        """Writes the module's tensors, and the optimizers' named states unless they are None. Every rank calls it.

        Parameters are assumed to be equal on all ranks. Buffers are saved from rank 0.
        """
        writer.model(module.state_dict(), replicated=[name for name, _ in module.named_parameters()])
        if optimizers is not None:
            writer.optimizers(optimizers)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        """Loads the module's tensors. Each rank reads only its own shards.

        Raises:
            ConfigurationError: if names or shapes do not match. The message lists them.
        """
        if is_plain(module) or any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            fill_weights(module, reader, strict)
        else:
            load_weights(module, reader.model(), strict)

    def state_dict(self) -> dict[str, Any]:
        """Returns the strategy's own state: numbers and small tensors, equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the strategy's own state. Ignores unknown entries, since another strategy may have saved it."""

    def uses_buffer(self, module: nn.Module, name: str) -> bool:
        """Returns True if this rank runs the part of the module that has a buffer; False for another stage's."""
        return True

    def local_weights(self, module: nn.Module) -> LocalWeights:
        """Returns this rank's part of the module's tensors, for reading and writing between two steps."""
        return LocalWeights(module)

    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        """Returns the module's state with whole tensors. If they are sharded, every rank must call it.

        Args:
            module: the module.
            rank0_only: whether a sharding strategy gathers tensors only on rank 0's CPU, one at a time. With False,
                every rank gathers them.
        """
        state = module.state_dict()
        for name, value in state.items():
            if hasattr(value, "full_tensor"):
                state[name] = value.full_tensor()
        return state

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Returns a context in which backward exchanges gradients between ranks only if enabled."""
        return nullcontext()

    def unreduced_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns what backward passes without an exchange left for the next one, beside `.grad`, by parameter name."""
        return {}

    def restore_unreduced(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        """Restores what `unreduced_gradients` returned, after `.grad`. Every rank calls it."""


@torch.no_grad()
def multiply(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiplies gradients in place. They may be on several devices: with CPU offload, on two."""
    by_kind: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype, grad.is_sparse), []).append(grad)
    for (device, dtype, is_sparse), own in by_kind.items():
        by = factor
        if isinstance(by, Tensor):
            # A copy to the CPU must complete before the multiplication reads it.
            by = by.to(device, non_blocking=device.type != "cpu")
            if dtype.itemsize == 2 and not is_sparse:
                # A GPU would round the factor to 8 bits first.
                for grad in own:
                    torch.mul(grad, by.float().expand_as(grad), out=grad)
                continue
            # Of another dtype, a GPU multiplies one gradient at a time.
            by = by if dtype.is_complex else by.to(dtype)
        if is_sparse:
            for grad in own:
                grad.mul_(by)
        else:
            torch._foreach_mul_(own, by)


def mean_items(strategy: Strategy, num_items: Tensor | float) -> Tensor | float:
    """Returns the mean of an item count over the data ranks."""
    if strategy.data_size == 1:
        return num_items
    device = strategy.root_device
    dtype = widest_float(device)
    if isinstance(num_items, Tensor) and (num_items.device.type != "cpu" or device.type == "cpu"):
        items = num_items.detach().to(device, dtype).reshape(())
    else:
        # Filled on the device: copying a number to a GPU would wait for its pending work.
        items = torch.full((), float(num_items), dtype=dtype, device=device)
    return strategy.ranks.reduce(items, reduction="mean")


def shadow_items(strategy: Strategy, window: Window) -> None:
    """Matches the collectives of `Strategy.loss_to_backward` on a rank without a sample, which has no items."""
    if window.index == 0 and not window.alone and strategy.ranks.any(False):
        window.begin_items(0, not_zero(mean_items(strategy, 0)))


def not_zero(num_items: Tensor | float) -> Tensor | float:
    """Replaces 0 items by 1. The first batch of a window may have none, and 0 / 0 would spoil the whole window."""
    return num_items.masked_fill(num_items == 0, 1) if isinstance(num_items, Tensor) else num_items or 1


def stepped_parameters(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterable[Tensor]:
    """Returns the parameters that optimizers step, or all parameters if a custom loop keeps its optimizer."""
    if not optimizers:
        return {id(p): p for module in modules for p in module.parameters()}.values()
    return {id(p): p for optimizer in optimizers for p in parameters_of(optimizer)}.values()

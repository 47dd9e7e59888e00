"""Strategy: where a model lives, how a batch goes forward and backward, and how ranks communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.batch import move_to_device, widest_float
from leyden.strategies.empty_init import EmptyInit
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.local_weights import LocalWeights
from leyden.strategies.master_weights import MasterWeights, parameters_of
from leyden.strategies.outputs import StepOutputs
from leyden.strategies.own_loop import OwnLoop
from leyden.strategies.precision import Precision
from leyden.strategies.ranks import Ranks
from leyden.strategies.settings import RunSettings
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights, is_plain, load_weights
from leyden.strategies.window import BackwardHooks, Window, read_loss

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
ClipAlgorithm: TypeAlias = Literal["norm", "value"]
Refused: TypeAlias = Literal["compiled", "exchange", "asynchronous", "micro_batches"]


# What a strategy once overrode itself, and what would go unheard now.
_OF_RANKS = {
    *("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero"),
    *("barrier", "broadcast", "all_gather", "reduce", "all_gather_object", "gather_object"),
}


_REDUCTIONS = ("mean", "avg", "sum", "max", "min")


def _name_of(reduce_op: Any) -> str:
    """The name of a ReduceOp; "" for what is none of those that a strategy knows."""
    known = {"avg": "AVG", "sum": "SUM", "max": "MAX", "min": "MIN"}
    operations = getattr(torch.distributed, "ReduceOp", None)
    return next((name for name, label in known.items() if reduce_op == getattr(operations, label, None)), "")


class Strategy:
    """Decides where a model lives and how a batch goes forward and backward. The base class of all strategies.

    By itself it runs the model on one device. A strategy overrides what it does differently: one that replicates the
    model little more than set-up and `forward_backward`; an engine that fuses passes also `clip` and `step`. It knows
    no Trainer, no module hook and no callback. docs/strategies.md shows how to write one, and what its five parts are:
    `precision`, `ranks`, `outputs`, `master_weights` and `own_loop`.

    A fit calls these methods in this order, those in brackets only where they apply:

        place_on                the run's devices are known
        check_settings          further settings, in several calls, as they become known
        setup_environment       this process joins its ranks
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
        [abandon_pass]          a pass has run out of memory
        [shadow_batch]          in its place, on a rank without a sample of the global batch
        [sync_gradients]        for each accumulation window
        [scale_gradients]
        before_step             for each optimizer
        [clip]
        step
        end_step
        synchronize_buffers     for each evaluation
        evaluate                for each of its batches
        end_evaluation
        save                    for each checkpoint
        state_dict
        [explain]               an error has ended the run
        [report_failure]
        teardown
    """

    name: str = ""
    supports_inference_mode: bool = True
    """False if tensors made in validation take part in a later backward (FSDP2): validation then runs under no_grad."""
    supports_closure: bool = True
    """False if an engine steps by itself, so that an optimizer such as LBFGS cannot evaluate the loss again."""
    drives_one: bool = False
    """True for an engine that trains one model with one optimizer; other models are only moved to the device."""
    replicates: bool = True
    """True if every rank holds the whole model: evaluation calls the bare module, and ranks without samples stop."""
    exchanges_late: bool = False
    """True if passes can leave all gradients of a window to `sync_gradients`, so that none waits for another rank."""
    before_forward: Callable[[Window], None] | None = None
    """Called before the forward pass of a training batch; it puts no frame between `fit` and the user's step."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls).keys() & _OF_RANKS:
            raise ConfigurationError(
                f"{cls.__name__} overrides {name}, which Leyden asks of the strategy's ranks: override it in a "
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
        """This rank's number among those that see different samples, for sampling, weighting and metrics.

        Ranks that share one model (tensor, sequence or pipeline parallel) get the same batch and have one data rank.
        """
        return self.ranks.global_rank

    @property
    def data_size(self) -> int:
        """The number of ranks that see different samples."""
        return self.ranks.world_size

    @property
    def data_ranks(self) -> list[int]:
        """The data rank of every rank. Where several share one, they are neighbours."""
        return [rank * self.data_size // self.ranks.world_size for rank in range(self.ranks.world_size)]

    @property
    def replicas(self) -> list[list[int]]:
        """All ranks, grouped by the part of the weights that they hold.

        The ranks of a group step the same weights, each by itself, so that theirs must never differ.
        """
        ranks = list(range(self.ranks.world_size))
        return [ranks] if self.replicates else [[rank] for rank in ranks]

    @property
    def refusals(self) -> dict[Refused, str]:
        """What it cannot do for a run: why, and what to do instead; empty if it can do all of it.

        - "compiled": take a module of `torch.compile`.
        - "exchange": have weights exchanged for others between two steps.
        - "asynchronous": have a checkpoint written beside its training.
        - "micro_batches": have its batches cut into micro-batches by the loop.
        """
        found: dict[Refused, str] = {}
        if self.drives_one:
            found["exchange"] = (
                "its engine steps copies of the weights, which overwrite what is written to them. Use FSDP or DDP"
            )
        if type(self).forward_backward is not Strategy.forward_backward:
            found["micro_batches"] = (
                "it runs forward and backward by itself. Set the size of micro-batches in its own settings"
            )
        return found

    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        """Takes the devices that the Trainer's arguments name; a strategy that was given its own keeps them."""

    def check_settings(self, settings: RunSettings) -> None:
        """Takes what the run asks for, in several calls, each as soon as more is known.

        Raises:
            ConfigurationError: if a setting of the strategy's own contradicts one of the run's; names both, and the
                fix.
        """

    def setup_environment(self) -> None:
        """Makes the device current and joins the other ranks; raises if the precision cannot run there."""
        self.ranks.join()
        self.precision.check(self.root_device)

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        """Reports an error to the other ranks; returns False if it only follows from an error of theirs."""
        return self.ranks.report_failure(error, where)

    def release(self) -> None:
        """Drops modules, optimizers, and what the user's own loop had wrapped."""
        self.modules, self.optimizers = [], []
        self.own_loop.release()

    def teardown(self) -> None:
        """Ends a run, and drops its modules and optimizers. May be called twice; ranks stay joined for the next run."""
        self.modules, self.optimizers = [], []
        self.ranks.end_run()

    @property
    def details(self) -> str:
        """What fit prints about the strategy once modules are set up; empty for nothing."""
        return ""

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds modules in the precision's dtype, on this rank's device.

        Args:
            empty_init: skip random initialisation, for weights that a checkpoint replaces.
        """
        with self.precision.init_context(), self.root_device, EmptyInit() if empty_init else nullcontext():
            yield

    def model_context(self) -> AbstractContextManager[None]:
        """Returns the context of `configure_model`, in which a strategy that shards builds on the meta device."""
        return nullcontext()

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Moves modules to where they run, before their optimizers exist."""
        self.modules = [self.precision.convert_module(module).to(self.root_device) for module in modules]
        return self.modules

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepares the optimizers of modules that are set up."""
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            self.precision.register(optimizer)
        return self.optimizers

    def add_module(self, module: nn.Module, moves: bool = True) -> nn.Module:
        """Sets up one more module, for a user-written loop.

        Args:
            module: beside those that are set up already.
            moves: False leaves it on its device.
        """
        before = self.modules
        added = self.setup_modules([module])[0] if moves else self.precision.convert_module(module)
        self.modules = [*before, added]
        return added

    def add_optimizer(self, modules: Sequence[nn.Module], optimizer: Optimizer | None) -> Optimizer:
        """Sets up one more optimizer of a loop of the user's own; None for one that an engine makes."""
        before = self.optimizers
        [added] = self.setup_optimizers(modules, [] if optimizer is None else [optimizer])
        self.optimizers = [*before, added]
        return added

    def make_schedulers(self) -> list[Any]:
        """Returns the schedulers of the strategy's own settings, which the caller steps and saves."""
        return []

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        """Returns the function that runs a step of the module; DDP and FSDP2 wrap it here."""
        return step_fn

    def synchronize(self, module: nn.Module) -> None:
        """Gives every rank the weights and buffers of rank 0, once they are restored and before optimizers are made."""

    def synchronize_buffers(self) -> None:
        """Gives every rank the buffers of rank 0, before an evaluation within fit."""

    def to_device(self, batch: T) -> T:
        """Moves a batch of any nested structure to this rank's device, in the precision of the inputs."""
        return self.precision.convert_input(move_to_device(batch, self.root_device))

    @property
    def leaves_batches(self) -> bool:
        """True if `to_device` would return a batch of CPU tensors as it is, so that the loop need not call it."""
        return self.root_device.type == "cpu" and not self.precision.converts_input

    def check_trained(self) -> None:
        """Follows, at an epoch's start and end, which parameters are trained now; ConfigurationError if it cannot."""

    def explain(self, error: BaseException) -> str | None:
        """What to do about an error of torch's whose message does not say it; None for any other error."""
        return None

    # the step ---------------------------------------------------------------------------------------------------------
    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        """Runs `step_fn(batch, *extra)` and backward, as one call, so that an engine may fuse them.

        docs/strategies.md lists what an override owes.

        Returns:
            What the step function returned: the user's own value, its loss never scaled.
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
        # Most losses go to backward as they are, and two calls that change nothing cost time in every step.
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

        The total number of items is known only when the window ends. So backward divides by that of the first batch,
        which keeps gradients in range, and `Engine.close_window` rescales by first / total. On several ranks both
        counts are averaged over the ranks, like the gradients. `window.weight`, of an uneven batch, weights a rank's
        loss only where items do not.

        Raises:
            ConfigurationError: if only some batches of a window have num_items.
        """
        if (num_items is None) != (window.first_items is None) and window.index > 0:
            raise ConfigurationError(
                "training_step returned num_items for some batches of an accumulation window and not for others: "
                "return it always or never."
            )
        if window.idle and window.index == 0 and self.ranks.any(num_items is not None) and num_items is None:
            raise ConfigurationError(
                "training_step returned num_items on some ranks of a global batch and not on others: return it always "
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
            window.begin_items(num_items, _not_zero(divisor))
        else:
            window.add_items(num_items)
        return loss / window.first_items  # type: ignore[operator]

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        """Shadows the other ranks' `forward_backward` on a rank without a sample in the global batch, as torch's Join.

        It takes part in every exchange of that batch with a gradient of zero, and calls no hook. User code that it
        runs leaves no trace: the caller discards what is logged, and restores buffers, metrics and random numbers. Call
        `shadow_items` between forward and backward.

        Args:
            step_fn: as for `forward_backward`.
            filler: a batch to run if the others exchange something in their forward passes; None if there is none.
            extra: further arguments of the step.
            window: the window, as for `forward_backward`.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has {self.data_size} data ranks and no shadow_batch, and a global batch has fewer "
            "samples than ranks: write it, or give the loader drop_last=True."
        )

    def forward(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        """Runs the training step of manual optimisation: forward only, in the precision's context."""
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
        """Runs backward on a loss that the user has divided already (manual optimisation, the user's own loop).

        Args:
            loss: not scaled yet.
            *args: for backward.
            own: called with the scaled loss in place of `loss.backward`: the module's own method.
            **kwargs: for backward.
        """
        scaled = self.precision.scale_loss(loss)
        if own is None:
            scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        else:
            own(scaled, *args, **kwargs)

    def sync_gradients(self) -> None:
        """Averages gradients over the ranks where no backward of the window has exchanged them.

        That is so in a window that ended unexpectedly, and where `exchanges_late` is made use of.
        """

    def begin_pass(self) -> None:
        """Begins the pass of a micro-batch, which may run out of memory: `abandon_pass` is called then."""

    def abandon_pass(self, rest: Callable[[], None]) -> None:
        """Drops what is left half done by a pass that ran out of memory on this rank.

        Args:
            rest: runs it, and the micro-batches after it, with one sample each. For a strategy whose passes exchange
                something, since the other ranks end theirs.
        """

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiplies all gradients by a factor, on the device."""
        grads = [p.grad for p in stepped_parameters(self.modules, self.optimizers) if p.grad is not None]
        if not grads:
            return
        if isinstance(factor, Tensor):
            device = grads[0].device
            # A copy to the CPU must be complete before it is multiplied by.
            factor = factor.to(device, non_blocking=device.type != "cpu")
        dense = [grad for grad in grads if not grad.is_sparse]
        if dense:
            torch._foreach_mul_(dense, factor)
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor)

    def before_step(self, optimizer: Optimizer) -> None:
        """Unscales the optimizer's gradients, before hooks and clipping see them."""
        self.precision.unscale(optimizer)

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Unscales and clips the gradients of the optimizer's parameters.

        Returns:
            The total norm before clipping, a 0-d tensor on the device, or None for clipping by value.
        """
        self.before_step(optimizer)
        return self.clip_parameters(parameters_of(optimizer), value, algorithm)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips unscaled gradients of some parameters; returns what `clip` does."""
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value, norm_type)

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the parameters of which this rank's part counts in a norm over all ranks."""
        return list(parameters)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps one optimizer, with the keyword arguments; returns False if the gradient scaler skipped the step."""
        return self.precision.step(optimizer, closure, **kwargs)

    def end_step(self) -> None:
        """Ends the step of all optimizers of a window: the gradient scaler updates its scale."""
        self.precision.end_step()

    # names that users of Lightning read on trainer.strategy; all code in Leyden uses `ranks` --------------------------
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
        """Waits for every rank; the name is for the reader of the code."""
        self.ranks.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.ranks.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self.ranks.all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Tensor, group: Any = None, reduction: str = "mean", *, reduce_op: Any = None) -> Tensor:
        """See `Ranks.reduce`; `reduce_op` is Lightning's name of the reduction, or a ReduceOp of torch's. What is no
        tensor is returned as it is.
        """
        wanted = reduction if reduce_op is None else reduce_op
        name = wanted.lower() if isinstance(wanted, str) else _name_of(wanted)
        if name not in _REDUCTIONS:
            raise ConfigurationError(f"reduce_op={wanted!r} is not known: use one of {', '.join(_REDUCTIONS)}.")
        return self.ranks.reduce(tensor, group, name) if isinstance(tensor, Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns on every rank whether the decision is true on all ranks, or with `all=False` on one."""
        found = self.ranks.any(bool(decision) is not all)
        return found is not all

    # state ------------------------------------------------------------------------------------------------------------
    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        """Writes the module's tensors, and the optimizers' named states unless they are None. Every rank calls it.

        Parameters are taken to be equal on all ranks; buffers are those of rank 0.
        """
        writer.model(module.state_dict(), replicated=[name for name, _ in module.named_parameters()])
        if optimizers is not None:
            writer.optimizers(optimizers)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        """Loads the module's tensors; of sharded ones each rank reads its own part.

        Raises:
            ConfigurationError: if names or shapes do not fit; lists them.
        """
        if is_plain(module) or any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            fill_weights(module, reader, strict)
        else:
            load_weights(module, reader.model(), strict)

    def state_dict(self) -> dict[str, Any]:
        """Returns the strategy's own state: numbers and small tensors, equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the strategy's own state. Another strategy may have saved it: unknown entries are ignored."""

    def local_weights(self, module: nn.Module) -> LocalWeights:
        """Returns this rank's part of the module's tensors, to be read and written between two steps."""
        return LocalWeights(module)

    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        """The module's state with whole tensors. If they are sharded, every rank must call it.

        Args:
            module: whose state it is.
            rank0_only: a strategy that shards gathers them on rank 0's CPU alone, one at a time; False gathers them on
                every rank.
        """
        state = module.state_dict()
        for name, value in state.items():
            if hasattr(value, "full_tensor"):
                state[name] = value.full_tensor()
        return state

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Returns a context in which backward exchanges gradients between ranks if enabled, and not otherwise."""
        return nullcontext()


def mean_items(strategy: Strategy, num_items: Tensor | float) -> Tensor | float:
    """The mean of a number of items over the data ranks."""
    if strategy.data_size == 1:
        return num_items
    device = strategy.root_device
    dtype = widest_float(device)
    if isinstance(num_items, Tensor) and (num_items.device.type != "cpu" or device.type == "cpu"):
        items = num_items.detach().to(device, dtype).reshape(())
    else:
        # Filled on the device: copying a number to a GPU waits for all of its pending work.
        items = torch.full((), float(num_items), dtype=dtype, device=device)
    return strategy.ranks.reduce(items, reduction="mean")


def shadow_items(strategy: Strategy, window: Window) -> None:
    """Shadows the exchange of `Strategy.loss_to_backward`, on a rank without a sample: it has no items."""
    if window.index == 0 and not window.alone and strategy.ranks.any(False):
        window.begin_items(0, _not_zero(mean_items(strategy, 0)))


def _not_zero(num_items: Tensor | float) -> Tensor | float:
    """Replaces 0 items by 1: the first batch of a window may have none, and 0 / 0 would spoil the whole window."""
    return num_items.masked_fill(num_items == 0, 1) if isinstance(num_items, Tensor) else num_items or 1


def stepped_parameters(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterable[Tensor]:
    """The parameters that optimizers step; all of the modules' if a loop of the user's own keeps its optimizer."""
    if not optimizers:
        return {id(p): p for module in modules for p in module.parameters()}.values()
    return {id(p): p for optimizer in optimizers for p in parameters_of(optimizer)}.values()

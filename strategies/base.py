"""Strategy: where a model lives, how a batch goes forward and backward, and how ranks talk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.batch import move_to_device
from leyden.strategies.empty_init import EmptyInit
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.masters import Masters
from leyden.strategies.own_loop import OwnLoop
from leyden.strategies.precision import Precision
from leyden.strategies.ranks import Ranks
from leyden.strategies.settings import RunSettings
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights, load_weights
from leyden.strategies.window import BackwardHooks, Window, read_loss

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
ClipAlgorithm: TypeAlias = Literal["norm", "value"]


class Strategy(ABC):
    """Base class of strategies, with everything that they share.

    A strategy owns the device, the process group, the form in which modules and optimizers run, and their state in a
    checkpoint. It knows no Trainer, module hook or callback. A class of your own is a first-class argument of
    `Trainer(strategy=...)`. One that replicates the model needs to override little more than set-up and the collectives;
    an engine that fuses passes overrides `forward_backward`, `clip` and `step`.

    The order of calls: `check_settings` whenever more of the run is known, `setup_environment`, `setup_modules`, weights
    restored (`load_module`), `setup_optimizers`, `make_schedulers`, `load_masters` and the optimizers' state (`state_parts`,
    `saved_form`, `load_state_dict`), then per window `forward_backward` for each batch, `scale_gradients` where items weigh,
    `before_step`, `clip` and `step` for each optimizer, `end_step`; at last `teardown`.
    """

    name: str = ""
    supports_inference_mode: bool = True
    """False where tensors made in validation take part in a later backward (FSDP2): no_grad is used then."""
    supports_closure: bool = True
    """False where an engine steps by itself, so that an optimizer like LBFGS cannot evaluate the loss again."""
    drives_one: bool = False
    """An engine drives one model that is trained, and its one optimizer; others are only placed on the device."""
    replicates: bool = True
    """Every rank holds the whole model: evaluation calls the bare module, and ranks without samples simply stop."""
    before_forward: Callable[[Window], None] | None = None
    """What a strategy does before the forward of a training batch, without a frame on the way to the user's step."""

    def __init__(self, precision: Precision | None = None, ranks: Ranks | None = None) -> None:
        self.ranks = ranks if ranks is not None else Ranks()
        self.masters = Masters()
        self.own_loop = OwnLoop()
        self.precision = precision if precision is not None else Precision()
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []

    # environment ------------------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device of this rank."""

    @property
    def local_devices(self) -> list[torch.device]:
        """The devices of this machine's ranks."""
        return [self.root_device]

    @property
    def data_rank(self) -> int:
        """This rank's place among those that see different samples. Sampling, weighting and metrics use these two."""
        return self.ranks.global_rank

    @property
    def data_size(self) -> int:
        return self.ranks.world_size

    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        """Takes the Trainer's devices, as its arguments name them; a strategy that was given its own keeps them."""

    def check_settings(self, settings: RunSettings) -> None:
        """Is told what the run asks for, as soon as it is known and in several calls; a strategy with settings of its own for the
        same things refuses what contradicts them.

        Raises:
            ConfigurationError: names both sides, and the fix.
        """

    def setup_environment(self) -> None:
        """Makes the device current and joins the other ranks; raises if the precision cannot run there."""
        self.ranks.join()
        self.precision.check(self.root_device)

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        """Reports an error to the other ranks; returns False if it only follows from another rank's, which the user sees."""
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
        """What else fit prints of the strategy, once modules are set up; empty where there is nothing to tell."""
        return ""

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules built in this context come with the precision's dtype, on this rank's device.

        Args:
            empty_init: leave out what is drawn at random, for weights that a checkpoint will bring.
        """
        with self.precision.init_context(), self.root_device, EmptyInit() if empty_init else nullcontext():
            yield

    def model_context(self) -> AbstractContextManager[None]:
        """The context of `configure_model`: a strategy that shards builds on the meta device in it."""
        return nullcontext()

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Brings modules to where they run. Called before their optimizers exist."""
        self.modules = [self.precision.convert_module(module).to(self.root_device) for module in modules]
        return self.modules

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepares optimizers of modules that are set up."""
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            self.precision.register(optimizer)
        return self.optimizers

    def make_schedulers(self) -> list[Any]:
        """Schedulers that the strategy's own settings ask for; called once optimizers are set up. Whoever calls this steps and
        saves them, once per optimizer step.
        """
        return []

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        """The form in which a step function of the module is called; DDP and FSDP2 wrap it here."""
        return step_fn

    def synchronize(self, module: nn.Module) -> None:
        """Gives every rank the weights and buffers of rank 0; called once they are restored, before optimizers are made."""

    def synchronize_buffers(self) -> None:
        """Gives every rank the buffers of rank 0, before an evaluation within fit."""

    def synchronize_batchnorm(self) -> None:
        """Asks for the statistics of batch norm over all ranks, before modules are set up. One device sees every sample anyway."""

    def to_device(self, batch: T) -> T:
        """Brings a batch of any nested structure to this rank's device, in the precision of the inputs."""
        return self.precision.convert_input(move_to_device(batch, self.root_device))

    @property
    def leaves_batches(self) -> bool:
        """True where `to_device` has nothing to do to a batch of CPU tensors, so that the loop need not call it."""
        return self.root_device.type == "cpu" and not self.precision.converts_input

    def check_compiled(self) -> None:
        """A module compiled by torch.compile is to run: raises where it cannot."""

    def check_trained(self) -> None:
        """At the start of an epoch: raises where parameters are trained now that were frozen at set-up, if that would go wrong."""

    # the step ---------------------------------------------------------------------------------------------------------
    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        """Runs `step_fn(batch, *extra)` and backward, as one call, so that an engine may fuse them.

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

        Items are only known when the window ends: backward divides by those of the first batch, which keeps the
        gradients in range, and `Accelerator.close_window` corrects by first / total. On several ranks both are means over
        the ranks, as the gradients are.

        Raises:
            ConfigurationError: if only some batches of a window come with num_items.
        """
        if (num_items is None) != (window.first_items is None) and window.index > 0:
            raise ConfigurationError(
                "training_step returned num_items for some batches of an accumulation window and not for others: "
                "return it always or never."
            )
        if window.idle and window.index == 0 and self.ranks.any(num_items is not None) and num_items is None:
            raise ConfigurationError(
                "training_step returned num_items on some ranks of a global batch and not on others: return it always or never."
            )
        if num_items is None:
            if window.weight != 1.0:
                loss = loss * window.weight
            return loss / window.length if window.length > 1 else loss
        if window.index == 0:
            window.num_items, window.first_items = num_items, _not_zero(self.mean_items(num_items))
        else:
            window.num_items = window.num_items + num_items  # type: ignore[operator]
        return loss / window.first_items  # type: ignore[operator]

    def mean_items(self, num_items: Tensor | float) -> Tensor | float:
        """The mean of a number of items over the data ranks."""
        if self.data_size == 1:
            return num_items
        device = self.root_device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if isinstance(num_items, Tensor) and (num_items.device.type != "cpu" or device.type == "cpu"):
            items = num_items.detach().to(device, dtype).reshape(())
        else:
            # Filled in there: to copy a number to a GPU waits until it has done all that it was given.
            items = torch.full((), float(num_items), dtype=dtype, device=device)
        return self.ranks.reduce(items, reduction="mean")

    def skip_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        """Stands in for `forward_backward` on a rank without a sample in a global batch.

        It takes part in whatever the other ranks exchange for that batch, with a gradient of zero. What it runs of the user's
        code leaves no trace: the caller discards what is logged, and restores buffers, metrics and random numbers. No hook
        is called. `skip_items` belongs between forward and backward.

        Args:
            step_fn: what `forward_backward` would be given.
            filler: a batch that may be run, where the others exchange something in their forward passes; None where there
                is none.
            extra: further arguments of the step.
            window: the window, as for `forward_backward`.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has {self.data_size} data ranks and no skip_batch, and a global batch has fewer samples than "
            "ranks: write it, or give the loader drop_last=True."
        )

    def skip_items(self, window: Window) -> None:
        """The part of a rank without a sample in what `loss_to_backward` exchanges: it has no items."""
        if window.index == 0 and self.ranks.any(False):
            window.num_items, window.first_items = 0, _not_zero(self.mean_items(0))

    def forward(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        """The training step of manual optimisation: forward only, in the precision's context."""
        context = self.precision.forward_context
        if context is None:
            return step_fn(batch, *extra)
        with context():
            return step_fn(batch, *extra)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        """A validation, test or prediction step on one batch."""
        return self.forward(step_fn, batch, extra)

    def end_evaluation(self) -> None:
        """After a pass over evaluation data."""

    def backward(self, loss: Tensor, *args: Any, own: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Backward of a loss that the user has divided already (manual optimisation, the user's own loop).

        Args:
            loss: not scaled yet.
            *args: handed on to backward.
            own: what runs backward on the scaled loss in the place of `loss.backward`: the module's own method.
            **kwargs: handed on to backward.
        """
        scaled = self.precision.scale_loss(loss)
        if own is None:
            scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        else:
            own(scaled, *args, **kwargs)

    def sync_gradients(self) -> None:
        """Averages over the ranks the gradients of a window that ended before its last batch was known to be the last."""

    def _stepped(self) -> Iterable[Tensor]:
        """The parameters that optimizers step; all of the modules', where a loop of one's own steps an optimizer by itself."""
        if not self.optimizers:
            return {id(p): p for module in self.modules for p in module.parameters()}.values()
        return {
            id(p): p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        }.values()

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiplies the gradients of every parameter that is stepped by a factor, on the device."""
        grads = [p.grad for p in self._stepped() if p.grad is not None]
        if not grads:
            return
        if isinstance(factor, Tensor):
            device = grads[0].device
            # Not beside the host on the way to the CPU, which would multiply by what is not there yet.
            factor = factor.to(device, non_blocking=device.type != "cpu")
        dense = [grad for grad in grads if not grad.is_sparse]
        if dense:
            torch._foreach_mul_(dense, factor)
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor)

    def before_step(self, optimizer: Optimizer) -> None:
        """Brings the optimizer's gradients to their true scale, before hooks and clipping see them."""
        self.precision.unscale(optimizer)

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clips the gradients of the optimizer's parameters, after bringing them to their true scale.

        Returns:
            The total norm before clipping, a 0-d tensor on the device, or None for clipping by value.
        """
        self.before_step(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return self.clip_parameters(parameters, value, algorithm)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips the gradients of some parameters, which are at their true scale; returns what `clip` does."""
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value, norm_type)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps one optimizer, which is handed the keyword arguments; False where the gradient scaler skipped the step."""
        return self.precision.step(optimizer, closure, **kwargs)

    def end_step(self) -> None:
        """After all optimizers of a window: the scaler takes its new scale."""
        self.precision.end_step()

    # for users, by Lightning's names: everything in Leyden goes by `ranks` ------------------------------------------------
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

    def barrier(self) -> None:
        self.ranks.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.ranks.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self.ranks.all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Tensor, group: Any = None, reduction: str = "mean") -> Tensor:
        return self.ranks.reduce(tensor, group, reduction)

    # state ------------------------------------------------------------------------------------------------------------
    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        """Writes the module's tensors, and the optimizers' named states unless they are None. All ranks call it.

        Parameters count as alike on all ranks; buffers are those of rank 0.
        """
        writer.model(module.state_dict(), replicated=[name for name, _ in module.named_parameters()])
        if optimizers is not None:
            writer.optimizers(optimizers)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        """Loads the module's tensors; where some of them are sharded, each rank reads its own part.

        Raises:
            ConfigurationError: if names or shapes do not fit; names the first of them.
        """
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            fill_weights(module, reader, strict)
        else:
            load_weights(module, reader.model(), strict)

    def state_dict(self) -> dict[str, Any]:
        """What the strategy itself counts, beside modules and optimizers: numbers and small tensors, the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave. Another strategy may have saved it: what it does not know it leaves alone."""

    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        """The module's state with whole tensors. If they are sharded, every rank must call it.

        Args:
            module: whose state it is.
            rank0_only: a strategy that shards gathers them on rank 0's CPU alone, one at a time; False gathers them on every rank.
        """
        state = module.state_dict()
        for name, value in state.items():
            if hasattr(value, "full_tensor"):
                state[name] = value.full_tensor()
        return state

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Within it, backward sends gradients to the other ranks only if enabled."""
        return nullcontext()

    def sync_in_backward(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within it, backward sends gradients, though the forward pass of a wrapped module was run without sync."""
        return self.gradient_sync(True)


def _not_zero(num_items: Tensor | float) -> Tensor | float:
    """The number of items, but 1 for 0: the first batch of a window may hold no item, and 0 / 0 would spoil the whole window."""
    return num_items.masked_fill(num_items == 0, 1) if isinstance(num_items, Tensor) else num_items or 1

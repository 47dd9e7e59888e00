"""DDP: every rank holds the whole model, and gradients are averaged over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from leyden.core.errors import ConfigurationError, nearest
from leyden.strategies.base import OwnLoop, Refused, shadow_items
from leyden.strategies.comm_hooks import find_comm_hook
from leyden.strategies.local_weights import digest_of
from leyden.strategies.process_group import (
    GROUP_SETTINGS,
    ProcessGroupStrategy,
    backends_in,
    broadcast_all,
    sum_all,
)
from leyden.strategies.window import Window, read_loss, zeroed

T = TypeVar("T")
D = TypeVar("D", bound=DistributedDataParallel)
OWN = ("module", "device_ids", "output_device", "dim", "process_group")
"""Arguments of DistributedDataParallel that the strategy sets itself."""


class DDPStrategy(ProcessGroupStrategy):
    """torch's DistributedDataParallel.

    DDP wraps the training step as its forward; evaluation calls the bare module. Gradients are exchanged only in the
    backward that closes an accumulation window.

    Args:
        ddp_comm_hook: how gradients are sent: "fp16", "bf16", "powersgd", or one of torch's hooks. Checkpoints do not
            include PowerSGD's state.
        ddp_comm_state: the hook's state.
        ddp_comm_wrapper: function that wraps the hook, such as torch's `fp16_compress_wrapper`.
        find_unused_parameters: DistributedDataParallel's. Under manual optimization it defaults to True, since a
            single backward of several seldom reaches every parameter.
        static_graph: DistributedDataParallel's.
        gradient_as_bucket_view: DistributedDataParallel's.
        **kwargs: every argument of `ProcessGroupStrategy` (devices, num_nodes, precision, process_group_backend,
            timeout, start_method) and of DistributedDataParallel (bucket_cap_mb, broadcast_buffers, …).

    Raises:
        ConfigurationError: for an unknown argument.

    Example:
        >>> DDPStrategy(static_graph=True).ddp_arguments
        {'static_graph': True}
    """

    name = "ddp"
    exchanges_late = True

    def __init__(
        self,
        *,
        ddp_comm_hook: str | Callable[..., Any] | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        **kwargs: Any,
    ) -> None:
        ddp_settings = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", *OWN}
        # Named in the signature for jsonargparse's lazy_instance, which knows no other arguments. None is not given.
        named = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        arguments: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        arguments |= {name: kwargs.pop(name) for name in list(kwargs) if name in ddp_settings}
        for name in kwargs:
            if name in OWN:
                raise ConfigurationError(f"DDPStrategy({name}=…): the strategy sets {name} itself. Leave it out.")
            if name not in GROUP_SETTINGS:
                known = sorted(ddp_settings | GROUP_SETTINGS)
                raise ConfigurationError(f"DDPStrategy has no argument {name!r}. {nearest(name, known)}")
        super().__init__(**kwargs)
        self._wrapping = Wrapping(arguments, find_comm_hook(ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper))
        self.own_loop: DDPLoop = DDPLoop(self._wrapping)
        self.ddp: DistributedDataParallel | None = None
        self._exchanged: dict[int, tuple[str, nn.Parameter]] = {}
        """The parameters whose gradients the wrapper exchanges: id -> name and parameter."""
        self._sync_disabled = self._manual = False
        self._has_unreduced = False
        """True under manual optimization if the last backward exchanged nothing."""
        self._in_backward = self._owes_exchange = False
        self._hooks: list[RemovableHandle] = []
        self._owed: list[nn.Parameter] = []
        """After a resume, the parameters whose gradients the first exchange must include."""

    @property
    def ddp_arguments(self) -> dict[str, Any]:
        """The arguments of DistributedDataParallel given by the user."""
        return self._wrapping.arguments

    def configure_ddp(self, arguments: Mapping[str, Any], hook: tuple[Any, Any] | None) -> None:
        """Adds arguments of DistributedDataParallel, and sets a communication hook with its state."""
        self._wrapping.extend(arguments, hook)

    # modules ----------------------------------------------------------------------------------------------------------
    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        if self.sync_batchnorm:
            convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
            modules = [convert(module) for module in modules]
        return super().setup_modules(modules)

    def synchronize(self, module: nn.Module) -> None:
        ignored = _ignored_names(module)
        named = [*module.named_parameters(), *module.named_buffers()]
        broadcast_all(tensor.detach() for name, tensor in named if name not in ignored)

    def synchronize_buffers(self) -> None:
        if self.ddp is None or not self.ddp.broadcast_buffers or not self.ddp.modules_buffers:
            return
        with torch.no_grad():
            self.ddp._sync_buffers()  # type: ignore[no-untyped-call]

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        trains = any(p.requires_grad for p in module.parameters())
        if getattr(step_fn, "__name__", "") != "training_step" or not trains:
            return step_fn
        self._manual = not getattr(module, "automatic_optimization", True)
        if self._manual and self.ddp_arguments.get("static_graph"):
            raise ConfigurationError(
                "static_graph=True does not work under manual optimization, where the graph may change in each step. "
                "Leave it out."
            )
        wrapped = _StepModule(module, step_fn)
        if self._manual:
            wrapped.register_forward_pre_hook(self._disable_backward_sync)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    add_hook: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
                    self._hooks.append(add_hook(self._note_gradient))
        self.ddp = ddp = self._wrapping.wrap(DistributedDataParallel, wrapped, **self._manual_defaults)
        self.before_forward, self.check_exchange = self._set_sync, self._check_finished
        self._exchanged = _trained_parameters(ddp)
        return ddp

    @property
    def refusals(self) -> dict[Refused, str]:
        found, setting = super().refusals, self._wrapping.fixed_by
        if setting is None and self._wrapping.hook is not None:
            setting = "ddp_comm_hook"
        if setting is not None:
            found["micro_batches"] = (
                f"{setting} only affects DDP's own gradient exchange, which micro-batches do not use. Leave it out"
            )
        return found

    @property
    def _manual_defaults(self) -> dict[str, Any]:
        """Defaults for arguments of DistributedDataParallel under manual optimization."""
        return {"find_unused_parameters": True} if self._manual else {}

    def explain(self, error: BaseException) -> str | None:
        if "Expected to have finished reduction in the prior iteration" not in str(error):
            return super().explain(error)
        return (
            "Some parameters did not contribute to the loss, and DDP waits for their gradients. Use "
            "strategy='ddp_find_unused_parameters_true', or freeze them (requires_grad = False)."
        )

    def check_trained(self) -> None:
        ddp = self.ddp
        if ddp is None:
            return
        trained = _trained_parameters(ddp)
        if trained.keys() == self._exchanged.keys():
            return
        unfrozen = {name: parameter for key, (name, parameter) in trained.items() if key not in self._exchanged}
        if unfrozen:
            self._check_unfrozen(unfrozen)
        elif self._wrapping.fixed_by is not None:
            return
        # Loops call this DDP object, so it stays and only gets a new reducer for the trained parameters.
        _drop_reducer(ddp)
        self._wrapping.rewrap(ddp, **self._manual_defaults)
        self._exchanged = trained

    def _check_unfrozen(self, unfrozen: Mapping[str, nn.Parameter]) -> None:
        """Raises if DDP cannot exchange gradients of newly unfrozen parameters, or if these differ between ranks."""
        name, setting = next(iter(unfrozen)), self._wrapping.fixed_by
        if setting is not None:
            raise ConfigurationError(
                f"{name} was frozen when the fit began and is trained now, but with {setting} DDP cannot exchange "
                "gradients of further parameters. Leave the setting out, or keep the parameter trainable with a "
                "learning rate of 0 until then."
            )
        if self.ranks.differing(digest_of(unfrozen.values())):
            raise ConfigurationError(
                f"{name} was unfrozen within an epoch, so DDP did not exchange its gradients and the ranks drifted "
                "apart. Unfreeze parameters in on_train_epoch_start, or between two fits."
            )

    def teardown(self) -> None:
        if self.ddp is not None:
            # The DDP object may outlive the run, but gloo aborts if its reducer outlives the process group.
            _drop_reducer(self.ddp)
        self.ddp = self.before_forward = self.check_exchange = None
        for handle in self._hooks:
            handle.remove()
        self._has_unreduced, self._owed, self._hooks, self._owes_exchange = False, [], [], False
        self.own_loop.release()
        super().teardown()

    # the step ---------------------------------------------------------------------------------------------------------
    def _set_sync(self, window: Window) -> None:
        ddp = self.ddp
        assert ddp is not None
        # torch records a static graph in the first backward, and aborts unless that one is synced.
        records_graph = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued
        ddp.require_backward_grad_sync = (window.closes and not self._sync_disabled) or records_graph

    def _check_finished(self) -> None:
        """Raises torch's error of the next forward pass now: there may be none, and the ranks would differ."""
        assert self.ddp is not None
        self.ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]

    def sync_gradients(self) -> None:
        ignored = set() if self.ddp is None else _ignored_names(self.ddp.module.module)
        parameters = [parameter for name, parameter in self._exchanged.values() if name not in ignored]
        # A parameter that has no gradient on any rank keeps none, as without accumulation.
        has_grad = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(has_grad, dist.ReduceOp.MAX, group=self.ranks.host_group)
        with_grad = [parameter for parameter, found in zip(parameters, has_grad.tolist(), strict=True) if found]
        average(with_grad, self.ranks.world_size)

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        assert self.ddp is not None
        self.ddp.require_backward_grad_sync = window.closes
        if self._depends_on_graph and filler is not None:
            # DDP also exchanges which parameters a batch uses.
            zero = zeroed(read_loss(super().forward(step_fn, filler, extra))[0])
        else:
            with self.ddp.module.without_step():
                zero = self.ddp()
        shadow_items(self, window)
        self.precision.scale_loss(zero).backward()  # type: ignore[no-untyped-call]

    @property
    def _depends_on_graph(self) -> bool:
        arguments = self.ddp_arguments
        return bool(arguments.get("find_unused_parameters") or arguments.get("static_graph"))

    def forward(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        """Runs the step under manual optimization: DDP broadcasts buffers; `backward` later prepares the reducer."""
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = self.ddp.require_forward_param_sync = True
        context = self.precision.forward_context
        if context is None:
            return step_fn(batch, *extra)
        with context():
            return step_fn(batch, *extra)

    def _disable_backward_sync(self, module: nn.Module, args: Any) -> None:
        """Runs between DDP's forward and the step, so that DDP does not prepare for a backward after the step."""
        assert self.ddp is not None
        self.ddp.require_backward_grad_sync = False

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        return super().forward(step_fn, batch, extra)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._manual and self.ddp is not None and not self._sync_disabled:
            # DDP would prepare at the end of its forward, which comes after every backward of the step.
            if self._owed:
                loss = self._including_owed(loss)
            self.ddp.reducer.prepare_for_backward([loss] if self.ddp.find_unused_parameters else [])
        self._in_backward = True
        try:
            super().backward(loss, *args, **kwargs)
        finally:
            self._in_backward = False
        self._has_unreduced = self._sync_disabled

    def _note_gradient(self, parameter: Tensor) -> None:
        """Runs when a parameter has got a gradient: DDP exchanges none of the user's own `loss.backward()`."""
        if not self._in_backward:
            self._has_unreduced = True
            self._owes_exchange = self._owes_exchange or not self._sync_disabled

    def before_step(self, optimizer: Optimizer) -> None:
        if self._owes_exchange:
            # Gradients that are exchanged already are equal on all ranks, and stay so.
            self.sync_gradients()
            self._has_unreduced = self._owes_exchange = False
        super().before_step(optimizer)

    def unreduced_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        # DDP keeps them in `.grad`. It only remembers which these are: it exchanges them even if that pass has no
        # gradient for them.
        waiting = self._exchanged.values() if self._has_unreduced else ()
        return {name: torch.empty(0) for name, parameter in waiting if parameter.grad is not None}

    def restore_unreduced(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        named = dict(module.named_parameters())
        found = torch.tensor([name in gradients for name in named], dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.ranks.host_group)
        self._owed = [p for p, is_owed in zip(named.values(), found.tolist(), strict=True) if is_owed]
        self._has_unreduced = bool(self._owed)

    def _including_owed(self, loss: Tensor) -> Tensor:
        """Makes the first exchange after a resume include gradients that the interrupted run had not exchanged."""
        owed, self._owed = self._owed, []
        average([p for p in owed if not p.requires_grad], self.ranks.world_size)
        # DDP exchanges what the loss depends on. A term with the gradient -0.0 changes no bit of another gradient.
        used = (p for p in owed if p.requires_grad and not (p.grad is not None and p.grad.is_sparse))
        return sum((p.sum() * -0.0 for p in used), loss)

    @contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        before, self._sync_disabled = self._sync_disabled, not enabled
        if self.ddp is not None and not enabled:
            # Forward passes in the block, even the first one, send no buffers either.
            self.ddp.require_forward_param_sync = False
        try:
            with _without_sync([] if enabled else self.own_loop.wrapped):
                yield
        finally:
            self._sync_disabled = before


class Wrapping:
    """Wraps modules in DDP with the user's arguments and communication hook.

    Attributes:
        arguments: arguments of DistributedDataParallel.
        hook: state and communication hook, or None for torch's default all-reduce.
    """

    def __init__(self, arguments: dict[str, Any], hook: tuple[Any, Any] | None) -> None:
        self.arguments, self.hook = arguments, hook

    def extend(self, arguments: Mapping[str, Any], hook: tuple[Any, Any] | None) -> None:
        """Adds arguments, and replaces the hook."""
        self.arguments |= arguments
        self.hook = hook

    def wrap(self, kind: type[D], module: nn.Module, **more: Any) -> D:
        """Wraps a module. The user's arguments override the given ones.

        Raises:
            ConfigurationError: if the module has sparse gradients, and they are on a device whose backend sums none.
        """
        if self.hook is None:
            _check_dense(module)
        wrapped = kind(module, **{**more, **self.arguments})
        if self.hook is not None:
            wrapped.register_comm_hook(*self.hook)
        return wrapped

    @property
    def fixed_by(self) -> str | None:
        """The setting that fixes the set of trained parameters at the first wrapping, or None."""
        if self.arguments.get("static_graph"):
            return "static_graph=True"
        # A state may depend on the buckets' shapes, as PowerSGD's does.
        return "the state of ddp_comm_hook" if self.hook is not None and self.hook[0] is not None else None

    def rewrap(self, wrapped: DistributedDataParallel, **more: Any) -> None:
        """Initializes a wrapper again, in place, for the currently trained parameters. Broadcasts nothing."""
        module = wrapped.module
        type(wrapped).__init__(wrapped, module, **{**more, **self.arguments, "init_sync": False})
        if self.hook is not None:
            wrapped.register_comm_hook(*self.hook)


class DDPLoop(OwnLoop):
    """The modules of a custom loop, each in its DDP wrapper."""

    def __init__(self, wrapping: Wrapping) -> None:
        self._wrapping = wrapping
        self.wrapped: list[DistributedDataParallel] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        self.wrapped.append(self._wrapping.wrap(WrappedModule, module))
        return self.wrapped[-1]

    def release(self) -> None:
        for wrapped in self.wrapped:
            # The user's script may keep the wrapper, whose reducer would keep the process group.
            _drop_reducer(wrapped)
        self.wrapped = []

    @contextmanager
    def sync_in_backward(self, module: nn.Module) -> Iterator[None]:
        if not isinstance(module, DistributedDataParallel):
            yield
            return
        before = module.require_backward_grad_sync, module.require_forward_param_sync
        module.require_backward_grad_sync = module.require_forward_param_sync = True
        # A forward pass with sync would have done this.
        module.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            module.require_backward_grad_sync, module.require_forward_param_sync = before

    def joining(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        from torch.distributed.algorithms.join import Join

        wrapped: list[Any] = [module for module in modules if isinstance(module, DistributedDataParallel)]
        return Join(wrapped) if wrapped else super().joining(modules)


class WrappedModule(DistributedDataParallel):
    """A DDP wrapper that also exposes the attributes of its module."""

    wraps_module = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
        if callable(value) and torch.is_grad_enabled() and name not in WITHOUT_GRADIENTS:
            raise AttributeError(
                f"{name} of a model on several ranks bypasses DDP, so gradients of a loss computed with it would not "
                f"be exchanged. Call the model itself, or accelerator.unwrap_model(model).{name} if you need no "
                "gradients."
            ) from None
        return value


WITHOUT_GRADIENTS = ("save_pretrained", "push_to_hub", "generate", "config")
"""Attributes of transformers' models that are not used to compute a loss."""


@contextmanager
def _without_sync(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in wrapped:
            stack.enter_context(module.no_sync())
        yield


class _StepModule(nn.Module):
    """The module that DDP wraps: its forward is the training step."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        # Assigned directly, so that DDP calls the user's code without a frame in between.
        self.forward = step
        ignored = _ignored_names(module)
        if ignored:
            self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    @contextmanager
    def without_step(self) -> Iterator[None]:
        """Within the block, forward returns a loss of 0 whose backward makes DDP send every bucket."""
        step, self.forward = self.forward, self._zero_loss
        try:
            yield
        finally:
            self.forward = step

    def _zero_loss(self) -> Tensor:
        trainable = (p for p in self.module.parameters() if p.requires_grad)
        return _ZeroLoss.apply(*trainable)  # type: ignore[no-any-return, no-untyped-call]


def average(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Averages gradients over the ranks. A missing gradient counts as zero."""
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad.div_(ranks))
    sum_all(grads)


def _trained_parameters(ddp: DistributedDataParallel) -> dict[int, tuple[str, nn.Parameter]]:
    """Returns the trained parameters of a wrapped module: id -> name and parameter."""
    named = ddp.module.named_parameters()
    return {id(p): (name.removeprefix("module."), p) for name, p in named if p.requires_grad}


def _drop_reducer(wrapped: DistributedDataParallel) -> None:
    """Drops a wrapper's reducer, and with it the gradient hooks."""
    for name in ("reducer", "logger"):
        vars(wrapped).pop(name, None)


def _check_dense(module: nn.Module) -> None:
    """Raises ConfigurationError for an embedding with sparse gradients, which no backend but gloo sums."""
    backends, ignored = backends_in(dist.get_backend()), _ignored_names(module)
    for name, part in module.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or not part.sparse or not part.weight.requires_grad:
            continue
        backend = backends.get(part.weight.device.type)
        if backend != "gloo" and f"{name}.weight" not in ignored:
            raise ConfigurationError(
                f"{name.removeprefix('module.') or 'the model'} has sparse=True, and {backend} sums dense gradients "
                "only. Leave sparse out, or use DDPStrategy(process_group_backend='gloo')."
            )


def _ignored_names(module: nn.Module) -> set[str]:
    """Returns the names that the user has excluded from DDP through torch's attribute."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


class _ZeroLoss(torch.autograd.Function):
    """A loss of 0 whose backward gives every parameter a gradient of exactly 0, so that DDP sends every bucket."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)

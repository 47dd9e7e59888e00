"""ModelPruning, a callback that zeroes the least important weights during training and keeps them at zero."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer

from leyden.callbacks.averaged_weights import ExchangesWeights, fill_part
from leyden.callbacks.base import Callback
from leyden.core.errors import ConfigurationError, StateError, nearest
from leyden.core.rank_zero import rank_zero_info
from leyden.core.saved_state import SavedState
from leyden.strategies.local_weights import is_dtensor, local_part, sharded_like
from leyden.trainer.engine.engine import needs_closure

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

T = TypeVar("T")

Method: TypeAlias = Any
"""A subclass of prune.BasePruningMethod. Any, since torch's annotations lack their attributes, such as PRUNING_TYPE."""

METHODS: dict[str, Method] = {
    "l1_unstructured": prune.L1Unstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ModelPruning(Callback):
    """Zeroes the least important weights at the end of epochs, by the methods of torch.nn.utils.prune.

    Pruned weights stay zero: their gradients are zeroed before clipping, and the weights themselves after each step.
    Each pruning removes a fraction of the remaining weights, as repeated calls of torch's functions do. The module
    keeps its parameters and their names, so every checkpoint loads into the unmodified module. The masks are in the
    callback's state, and a resume continues exactly. Under FSDP and tensor parallelism, importance is computed on whole
    weights.

    Args:
        pruning_fn: "l1_unstructured", "ln_structured", "random_structured" or "random_unstructured", the function of
            that name in torch.nn.utils.prune, or a subclass of `torch.nn.utils.prune.BasePruningMethod`.
        parameters_to_prune: pairs of a module and the name of its parameter. Empty: every parameter named in
            `parameter_names`.
        parameter_names: the names of the parameters to prune in each module. None: `PARAMETER_NAMES`.
        use_global_unstructured: compare weights across all parameters, not within each one.
        amount: the fraction of the remaining weights to prune, from 0.0 to 1.0, or their number, as an int; or a
            function of the epoch. 0 and None prune nothing.
        apply_pruning: whether to prune; or a function of the epoch.
        make_pruning_permanent: False leaves the masks on the module after fit, as torch's pruning does (`weight_orig`
            and `weight_mask`), so further training keeps the zeros.
        use_lottery_ticket_hypothesis: whether to reset the remaining weights, after each pruning, to their values at
            the start of the module's first fit (Frankle and Carbin, https://arxiv.org/abs/1803.03635); or a function of
            the epoch. Checkpoints then include these values.
        resample_parameters: reset the remaining weights to new random values instead, with `reset_parameters`.
        pruning_dim: the dimension whose slices "ln_structured" and "random_structured" prune.
        pruning_norm: the norm by which "ln_structured" compares slices, such as 2 or "fro".
        verbose: 1 logs the number of zeros after each pruning, 2 also that of each parameter.
        prune_on_train_epoch_end: whether to prune at the end of training epochs. False: at the end of validations.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, if there is nothing to prune, for an optimizer
            that evaluates the loss within its step (such as LBFGS), and for a strategy that keeps weights from
            callbacks (DeepSpeed, pipelines).

    Example:
        >>> def twentieths(epoch):
        ...     return 0.05 if epoch >= 2 else 0
        >>> callback = ModelPruning("l1_unstructured", amount=twentieths)
    """

    PARAMETER_NAMES: ClassVar[tuple[str, ...]] = ("weight", "bias")
    changes_weights = True
    state_per_rank = False

    def __init__(
        self,
        pruning_fn: str | Callable[..., Any],
        parameters_to_prune: Sequence[tuple[nn.Module, str]] | None = (),
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: float | Callable[[int], float] | None = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = False,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: float | Literal["fro", "nuc"] | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._method, options = _method_of(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self._new_method = partial(self._method, **options)
        if isinstance(amount, bool) or not (amount is None or callable(amount) or isinstance(amount, (int, float))):
            raise ConfigurationError(
                f"ModelPruning(amount={amount!r}): give a fraction, a number, or a function of the epoch."
            )
        if not callable(amount):
            _check_amount(amount)
        if verbose not in (0, 1, 2):
            raise ConfigurationError(f"ModelPruning(verbose={verbose!r}): give 0, 1 or 2.")
        if resample_parameters and not use_lottery_ticket_hypothesis:
            raise ConfigurationError("ModelPruning(resample_parameters=True) needs use_lottery_ticket_hypothesis=True.")
        self.amount = amount
        self._given = list(parameters_to_prune or ())
        self._parameter_names = tuple(parameter_names or self.PARAMETER_NAMES)
        self._given_names: list[str] = []
        """The names of the parameters in `parameters_to_prune`, once the module is known."""
        self._is_global = use_global_unstructured
        self._applies: bool | Callable[[int], bool] = apply_pruning
        self._is_permanent = make_pruning_permanent
        self._rewinds, self._resamples = use_lottery_ticket_hypothesis, resample_parameters
        self._verbose, self._after_training = verbose, prune_on_train_epoch_end
        self._parameters_to_prune: list[tuple[nn.Module, str]] = []
        self._names: list[str] = []
        """The parameters' names in the whole module."""
        self._masks: list[Tensor] = []
        """This rank's parts of the masks, True for remaining weights. Empty before the first pruning."""
        self._originals: list[Tensor] = []
        """This rank's parts of the weights to rewind to; empty unless needed."""
        self._loaded: dict[str, Any] = {}
        """The state of a checkpoint, until training starts and the parameters are known."""
        self._trainer: Trainer | None = None
        self._module: nn.Module | None = None
        """The module of the last fit, to which the masks belong."""
        self._hooks = ExitStack()
        """Removes the optimizers' hooks when closed."""

    # for subclasses to override or call -------------------------------------------------------------------------------
    def filter_parameters_to_prune(
        self, parameters_to_prune: Sequence[tuple[nn.Module, str]] = ()
    ) -> Sequence[tuple[nn.Module, str]]:
        """Returns the parameters to prune. Override it to remove some of those found, or to add others."""
        return parameters_to_prune

    @torch.no_grad()
    def apply_pruning(self, amount: float) -> None:
        """Prunes once.

        Args:
            amount: the fraction of the remaining weights, or their number (of slices, for structured methods).
        """
        _check_amount(amount)
        weights = [_whole(parameter) for parameter in self._parameters()]
        masks = [_whole(sharded_like(mask, p)) for mask, p in zip(self._masks, self._parameters(), strict=False)]
        masks = masks or [torch.ones_like(weight) for weight in weights]
        method = self._new_method(amount=amount)
        if self._is_global:
            flat_weights, flat_mask = (torch.cat([t.flatten() for t in tensors]) for tensors in (weights, masks))
            parts = torch.split(self._pruned_mask(method, flat_weights, flat_mask), [w.numel() for w in weights])
            masks = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        else:
            masks = [self._pruned_mask(method, weight, mask) for weight, mask in zip(weights, masks, strict=True)]
        masks = self._same_on_all_ranks([mask.bool() for mask in masks])
        self._masks = [_part(mask, p) for mask, p in zip(masks, self._parameters(), strict=True)]
        self._zero_weights()

    def _pruned_mask(self, method: prune.BasePruningMethod, values: Tensor, mask: Tensor) -> Tensor:
        """Returns the mask after another pruning. torch's own container applies the method to remaining weights."""
        container = prune.PruningContainer()
        container._tensor_name = method._tensor_name = "weight"
        container.add_pruning_method(method)  # type: ignore[no-untyped-call]
        try:
            found: Tensor = container.compute_mask(values, mask.to(values.dtype))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigurationError(
                f"{type(method).__name__} cannot prune that many weights: {error}. Set amount to a fraction, such as "
                "0.2, or a function of the epoch."
            ) from error
        return found

    @torch.no_grad()
    def apply_lottery_ticket_hypothesis(self) -> None:
        """Resets the remaining weights to their original values, or to new random ones."""
        if self._resamples:
            values = [_part(value, p) for value, p in zip(self._resampled(), self._parameters(), strict=True)]
        else:
            values = self._originals
        for parameter, value in zip(self._parameters(), values, strict=True):
            local_part(parameter).copy_(value)
        self._zero_weights()

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Removes torch's own pruning from a module and its children, and keeps the zeros."""
        for part in module.modules():
            for hook in list(part._forward_pre_hooks.values()):
                if isinstance(hook, prune.BasePruningMethod):
                    prune.remove(part, hook._tensor_name)  # type: ignore[no-untyped-call]

    # a fit ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        places = {id(part): name for name, part in module.named_modules()}
        self._given_names = [f"{places.get(id(part), '')}.{name}" for part, name in self._given]
        strategy = trainer.strategy
        if strategy.drives_one or strategy.outputs.are_in_parts:
            raise ConfigurationError(
                f"ModelPruning compares all weights of the model, and strategy={strategy.name!r} gives no access to "
                "them: train with ddp, fsdp or on one device."
            )
        if not strategy.replicates and (self._resamples or not self._is_permanent):
            raise ConfigurationError(
                "ModelPruning with resample_parameters or make_pruning_permanent=False needs whole weights, but "
                f"strategy={strategy.name!r} shards them: leave these arguments out, or train with ddp."
            )
        if not self._after_training and any(isinstance(callback, ExchangesWeights) for callback in trainer.callbacks):
            raise ConfigurationError(
                "ModelPruning(prune_on_train_epoch_end=False) prunes at the end of a validation, when averages have "
                "replaced the weights: leave the argument out if a callback averages weights."
            )
        self._loaded = {}
        if self._module is not module:
            self._masks, self._originals, self._parameters_to_prune = [], [], []
        for part, name in self._parameters_to_prune:
            # This callback has its own copy of the masks that an earlier fit left on the module.
            if hasattr(part, f"{name}_mask"):
                prune.remove(part, name)  # type: ignore[no-untyped-call]

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._trainer, self._module = trainer, module
        self._parameters_to_prune = self._find(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        foreign = [name for part, name in self._parameters_to_prune if id(getattr(part, name)) not in names]
        if foreign:
            raise ConfigurationError(
                f"ModelPruning(parameters_to_prune=…) has {foreign[0]!r} of a module that is not part of "
                f"{type(module).__name__}: use its submodules only."
            )
        self._names = [names[id(parameter)] for parameter in self._parameters()]
        self._restore()
        if self._rewinds and not self._resamples and not self._originals:
            self._originals = [local_part(parameter).clone() for parameter in self._parameters()]
        self._hooks.close()
        for optimizer in trainer.optimizers:
            if needs_closure(optimizer):
                raise ConfigurationError(
                    f"ModelPruning zeroes weights after each step, but {type(optimizer).__name__} evaluates the loss "
                    "within a step: use another optimizer."
                )
            self._hooks.callback(optimizer.register_step_post_hook(lambda *_: self._zero_weights()).remove)

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        for parameter, mask in zip(self._parameters(), self._masks, strict=False):
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(mask)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._after_training:
            self._prune_in(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        # Not before the first batch (`validate_at_start`).
        is_due = trainer.state.stage == "fit" and not trainer.sanity_checking and trainer.progress.batches > 0
        if is_due and not self._after_training:
            self._prune_in(trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        # A callback may have replaced the weights by averages, which are not zero where the weights are.
        self._reshard()
        self._zero_weights()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        self._hooks.close()
        self._trainer = None
        if not self._is_permanent:
            # Only after the last checkpoint, since it renames the parameters.
            for (part, name), mask in zip(self._parameters_to_prune, self._masks, strict=False):
                prune.custom_from_mask(part, name, mask.to(getattr(part, name)))  # type: ignore[no-untyped-call]

    # pruning ----------------------------------------------------------------------------------------------------------
    def _find(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        found = self._given or [
            (part, name)
            for part in module.modules()
            if part is not module and not isinstance(part, CONTAINERS)
            for name in self._parameter_names
            if isinstance(getattr(part, name, None), nn.Parameter)
        ]
        found = list(self.filter_parameters_to_prune(found))
        for part, name in found:
            if not isinstance(getattr(part, name, None), nn.Parameter):
                raise ConfigurationError(
                    f"ModelPruning(parameters_to_prune=…): {type(part).__name__} has no parameter {name!r}."
                )
        # A tied weight is pruned once, under the first of its names.
        unique = {id(getattr(part, name)): (part, name) for part, name in reversed(found)}
        if not unique:
            raise ConfigurationError(
                f"ModelPruning found nothing to prune: no module has a parameter named {self._parameter_names}. Set "
                "parameter_names, or pass pairs of modules and names as parameters_to_prune."
            )
        # A tied parameter has several names.
        names = sum(id(parameter) in unique for _, parameter in module.named_parameters(remove_duplicate=False))
        if not self._is_permanent and names > len(unique):
            raise ConfigurationError(
                "ModelPruning(make_pruning_permanent=False) leaves torch's masks on the module, which would untie its "
                "shared weights: leave the argument out."
            )
        return list(reversed(unique.values()))

    def _parameters(self) -> Iterator[Any]:
        return (getattr(part, name) for part, name in self._parameters_to_prune)

    def _prune_in(self, epoch: int) -> None:
        amount = _value_in(epoch, self.amount)
        if not _value_in(epoch, self._applies) or not amount:
            return
        self._reshard()
        before = self._zeros()
        self.apply_pruning(amount)
        if _value_in(epoch, self._rewinds):
            self.apply_lottery_ticket_hypothesis()
        if self._verbose:
            self._log(before, self._zeros(), amount)

    def _reshard(self) -> None:
        """Reshards weights that an evaluation has left unsharded."""
        if self._trainer is not None and not self._trainer.strategy.replicates:
            self._trainer.strategy.local_weights(self._trainer.lightning_module)

    @torch.no_grad()
    def _zero_weights(self) -> None:
        for parameter, mask in zip(self._parameters(), self._masks, strict=False):
            local_part(parameter).mul_(mask)

    def _same_on_all_ranks(self, masks: list[Tensor]) -> list[Tensor]:
        """Returns rank 0's masks if the method draws random numbers, since these differ between ranks."""
        if self._method in _BY_VALUE:
            return masks
        return [mask.to(own.device) for mask, own in zip(self._broadcast(masks), masks, strict=True)]

    def _broadcast(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._trainer is None or self._trainer.world_size == 1:
            return tensors
        return self._trainer.strategy.ranks.broadcast([tensor.cpu() for tensor in tensors])

    def _resampled(self) -> list[Tensor]:
        """Returns new random values for all parameters; a copy of the current ones without `reset_parameters`."""
        new: dict[int, nn.Module] = {}
        for part, _ in self._parameters_to_prune:
            if id(part) not in new:
                new[id(part)] = copy.deepcopy(part)
                reset = getattr(new[id(part)], "reset_parameters", None)
                if callable(reset):
                    reset()
        return self._broadcast([getattr(new[id(part)], name).detach() for part, name in self._parameters_to_prune])

    # logging ----------------------------------------------------------------------------------------------------------
    def _zeros(self) -> list[tuple[int, int]]:
        """Returns (zeros, elements) of each parameter; empty, without reading anything back, unless verbose."""
        if not self._verbose:
            return []
        weights = [_whole(parameter) for parameter in self._parameters()]
        return [(int((weight == 0).sum()), weight.numel()) for weight in weights]

    def _log(self, before: list[tuple[int, int]], after: list[tuple[int, int]], amount: float) -> None:
        total = sum(count for _, count in after)
        old, new = (sum(zeros for zeros, _ in counts) for counts in (before, after))
        rank_zero_info(
            f"ModelPruning: {self._method.__name__} raised the number of zero weights from {_fraction(old, total)} to "
            f"{_fraction(new, total)}."
        )
        if self._verbose > 1:
            for name, (old, count), (new, _) in zip(self._names, before, after, strict=True):
                rank_zero_info(f"  {name}, amount {amount}: {_fraction(old, count)} -> {_fraction(new, count)}")

    # in a checkpoint --------------------------------------------------------------------------------------------------
    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            pruning_fn=self._method.__qualname__,
            parameters_to_prune=self._given_names,
            parameter_names=self._parameter_names,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"masks": self._named(self._masks), "originals": self._named(self._originals)}

    def _named(self, parts: list[Tensor]) -> dict[str, Any]:
        self._reshard()
        found = zip(self._names, parts, self._parameters(), strict=False)
        return {name: sharded_like(part, parameter) for name, part, parameter in found}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        saved.nested("masks", {})
        saved.nested("originals", {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def go_back(self, state: dict[str, Any], step: int) -> None:
        self._loaded, self._masks = state, []
        self._restore()

    def _restore(self) -> None:
        loaded, self._loaded = self._loaded, {}
        self._masks = self._local_parts("masks", loaded, torch.bool) or self._masks
        self._originals = self._local_parts("originals", loaded, None) or self._originals

    def _local_parts(self, kind: str, loaded: dict[str, Any], dtype: torch.dtype | None) -> list[Tensor]:
        """Returns this rank's parts of saved tensors; empty if the state has none of this kind."""
        saved = loaded.get(kind, {})
        if not saved:
            return []
        if set(saved) != set(self._names):
            raise StateError(kind, f"has {sorted(saved)}, but this run prunes {sorted(self._names)}")
        found = []
        for name, parameter in zip(self._names, self._parameters(), strict=True):
            local = local_part(parameter)
            found.append(torch.empty_like(local, dtype=dtype))
            fill_part(name, saved[name], found[-1], sharded_like(found[-1], parameter))
        return found


_BY_VALUE: tuple[Method, ...] = (prune.L1Unstructured, prune.LnStructured)
"""Deterministic methods, which compute the same masks on all ranks."""


def _method_of(pruning_fn: Any, is_global: bool, dim: int | None, norm: Any) -> tuple[Method, dict[str, Any]]:
    """Returns the pruning method and its arguments other than the amount."""
    if inspect.isclass(pruning_fn) and issubclass(pruning_fn, prune.BasePruningMethod):
        method: Method = pruning_fn
    else:
        name = pruning_fn.lower() if isinstance(pruning_fn, str) else getattr(pruning_fn, "__name__", "")
        if name not in METHODS or not (isinstance(pruning_fn, str) or pruning_fn is getattr(prune, name)):
            advice = nearest(name, METHODS) if isinstance(pruning_fn, str) else f"Use one of {', '.join(METHODS)}."
            raise ConfigurationError(
                f"ModelPruning(pruning_fn={pruning_fn!r}): {advice} Or pass a subclass of "
                "torch.nn.utils.prune.BasePruningMethod."
            )
        method = METHODS[name]
    options: dict[str, Any] = {}
    if method.PRUNING_TYPE == "structured" and method in METHODS.values():
        if dim is None:
            raise ConfigurationError(f"ModelPruning with {method.__name__} prunes slices: set pruning_dim.")
        options["dim"] = dim
        if method is prune.LnStructured:
            if norm is None:
                raise ConfigurationError("ModelPruning('ln_structured') compares norms: set pruning_norm, such as 2.")
            options["n"] = norm
    if is_global and method.PRUNING_TYPE != "unstructured":
        raise ConfigurationError(
            f"ModelPruning(use_global_unstructured=True) compares single weights, but {method.__name__} is "
            f"{method.PRUNING_TYPE}: set use_global_unstructured=False."
        )
    return method, options


def _check_amount(amount: Any) -> None:
    is_part = isinstance(amount, float) and 0.0 <= amount <= 1.0
    is_number = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0
    if amount is not None and not is_part and not is_number:
        raise ConfigurationError(
            f"ModelPruning(amount={amount!r}): give a fraction from 0.0 to 1.0, or a number of weights as an int."
        )


def _value_in(epoch: int, value: T | Callable[[int], T]) -> T:
    return value(epoch) if callable(value) else value


def _whole(tensor: Any) -> Tensor:
    if not is_dtensor(tensor):
        return tensor.detach()  # type: ignore[no-any-return]
    from leyden.strategies.fsdp.sharding import whole

    return whole(tensor.detach())


def _part(whole: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's part of a whole tensor, sharded like the parameter."""
    if not is_dtensor(parameter):
        return whole.to(parameter.device)
    from leyden.strategies.fsdp.sharding import shard_like

    return local_part(shard_like(whole, parameter))


def _fraction(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / max(whole, 1):.2%})"

"""BaseFinetuning and BackboneFinetuning, callbacks that freeze layers and unfreeze them at a later epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.rank_zero import inform, warn
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

Modules: TypeAlias = "nn.Module | Iterable[Modules]"
"""A module, or modules in nested lists and tuples."""


def multiplicative(epoch: int) -> float:
    """The default `lambda_func` of BackboneFinetuning, which doubles the learning rate every epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Base class of fine-tuning schedules, which freeze layers at the start and unfreeze them at later epochs.

    Override `freeze_before_training`, which runs before `configure_optimizers`, and `finetune_function`, which runs at
    the start of each epoch, once for each optimizer. Pass the optimizer only trainable parameters,
    `filter(lambda p: p.requires_grad, self.parameters())`; `unfreeze_and_add_param_group` adds the others later.

    A resume restores the added groups before it loads the optimizer, and the frozen state of each layer, so the result
    is bit-identical to that of an uninterrupted run.

    Example:
        >>> class SecondEpoch(BaseFinetuning):
        ...     def freeze_before_training(self, module):
        ...         self.freeze(module.features)
        ...
        ...     def finetune_function(self, module, epoch, optimizer):
        ...         if epoch == 1:
        ...             self.unfreeze_and_add_param_group(module.features, optimizer, lr=1e-4)
    """

    # for subclasses to override ---------------------------------------------------------------------------------------
    def freeze_before_training(self, pl_module: TrainModule) -> None:
        """Freezes the layers that are not trained from the start."""
        raise NotImplementedError(f"{type(self).__name__} must override freeze_before_training(module).")

    def finetune_function(self, pl_module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreezes the layers to train from this epoch on. Called at the start of each epoch for each optimizer."""
        raise NotImplementedError(f"{type(self).__name__} must override finetune_function(module, epoch, optimizer).")

    # a run ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # A fit that continues the previous one in this process keeps the layers' frozen state.
        if stage == "fit" and trainer.global_step == 0:
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        saved_form = trainer.strategy.master_weights.saved_form
        if any(saved_form(optimizer) is not optimizer for optimizer in trainer.optimizers):
            raise ConfigurationError(
                f"{type(self).__name__} adds parameter groups during a fit, which strategy={trainer.strategy.name!r} "
                "does not support: use strategy='ddp' or 'fsdp'."
            )

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        for optimizer in trainer.optimizers:
            self.finetune_function(module, trainer.current_epoch, optimizer)

    def repeat_epoch_start(self, trainer: Trainer, module: TrainModule, epoch: int) -> None:
        for optimizer in trainer.optimizers:
            self.finetune_function(module, epoch, optimizer)

    # tools for subclasses ---------------------------------------------------------------------------------------------
    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Returns the leaf modules, and those with children that also own parameters; each once.

        Example:
            >>> BaseFinetuning.flatten_modules([nn.Sequential(nn.Linear(1, 1), nn.ReLU())])
            [Linear(in_features=1, out_features=1, bias=True), ReLU()]
        """
        found = dict.fromkeys(_parts(modules))
        return [part for part in found if part._parameters or next(part.children(), None) is None]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yields the trainable, or the frozen, parameters of modules.

        Args:
            modules: the modules to search, with all their children.
            train_bn: whether to include batch norms.
            requires_grad: True yields the trainable parameters, False the frozen ones.
        """
        for parameter in _own_parameters(_without_norms(modules, train_bn)):
            if parameter.requires_grad is requires_grad:
                yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreezes modules: their parameters, and the running statistics of batch norms."""
        for part in BaseFinetuning.flatten_modules(modules):
            _set_trainable(part, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freezes a module's own parameters, not its children's; for a batch norm, also its running statistics."""
        _set_trainable(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freezes modules.

        Args:
            modules: the modules to freeze, with all their children.
            train_bn: whether to leave batch norms trainable.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            _set_trainable(part, train_bn and isinstance(part, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters that are not in the optimizer yet. Warns if some already are."""
        existing = _parameter_ids(optimizer)
        candidates = list(params)
        new = [parameter for parameter in candidates if id(parameter) not in existing]
        if len(new) < len(candidates):
            warn(
                f"{len(candidates) - len(new)} of the parameters to unfreeze are already in the optimizer, and keep "
                "the learning rate of their group. Pass the optimizer only parameters with requires_grad.",
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreezes modules and adds their parameters to an optimizer as a new group.

        Args:
            modules: the modules to unfreeze.
            optimizer: the optimizer to extend. Frozen parameters that it already has keep their group, with a warning.
            lr: the learning rate of the new group. None: that of the first group, divided by `initial_denom_lr`.
            initial_denom_lr: the divisor; unused if `lr` is given.
            train_bn: whether to include batch norms.
        """
        parts = _without_norms(modules, train_bn)
        existing = _parameter_ids(optimizer)
        # Batch norms that `freeze` left trainable have been in the optimizer from the start.
        candidates = [p for p in _own_parameters(parts) if not (p.requires_grad and id(p) in existing)]
        for part in parts:
            _set_trainable(part, True)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        new = BaseFinetuning.filter_on_optimizer(optimizer, candidates)
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})


class BackboneFinetuning(BaseFinetuning):
    """Freezes `module.backbone` and unfreezes it at a later epoch, with its own growing learning rate.

    Args:
        unfreeze_backbone_at_epoch: the first epoch that trains the backbone, counted from 0.
        lambda_func: a function of the next epoch's number. At the start of each later epoch, the backbone's learning
            rate is multiplied by its value.
        backbone_initial_ratio_lr: the backbone's initial learning rate, as a fraction of the first group's.
        backbone_initial_lr: the backbone's initial learning rate. Takes precedence over the ratio.
        should_align: whether to cap the backbone's learning rate at the first group's.
        initial_denom_lr: as in `unfreeze_and_add_param_group`; unused here, since the learning rate is known.
        train_bn: whether to train the backbone's batch norms, even while it is frozen. False freezes them throughout.
        verbose: print both learning rates at the start of each epoch.
        rounding: the number of digits to print.

    Raises:
        ConfigurationError: for an invalid value, a module without `backbone`, several optimizers, or an optimizer that
            has frozen parameters of the backbone.

    Example:
        >>> BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5).lambda_func(3)
        1.5
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        at = unfreeze_backbone_at_epoch
        if type(at) is not int or at < 0:
            raise ConfigurationError(
                f"BackboneFinetuning(unfreeze_backbone_at_epoch={at!r}): give the number of an epoch, counted from 0."
            )
        if not callable(lambda_func):
            raise ConfigurationError(
                f"BackboneFinetuning(lambda_func={lambda_func!r}): give a function of the epoch that returns a factor."
            )
        _check_positive("backbone_initial_ratio_lr", backbone_initial_ratio_lr)
        _check_positive("initial_denom_lr", initial_denom_lr)
        if backbone_initial_lr is not None:
            _check_positive("backbone_initial_lr", backbone_initial_lr)
        self.unfreeze_backbone_at_epoch = at
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None
        """The backbone's last learning rate; None while it is frozen."""
        self._group: int | None = None
        """Index of the backbone's parameter group; None before it is added."""

    # a run ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self.previous_backbone_lr = self._group = None
        super().setup(trainer, module, stage)

    def freeze_before_training(self, pl_module: TrainModule) -> None:
        self.freeze(_backbone(pl_module), train_bn=self.train_bn)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_fit_start(trainer, module)
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"BackboneFinetuning supports one optimizer, and there are {len(trainer.optimizers)}: subclass "
                "BaseFinetuning, whose finetune_function is called with each of them."
            )
        existing = _parameter_ids(trainer.optimizers[0])
        frozen = self.filter_params(_backbone(module), requires_grad=False)
        if any(id(parameter) in existing for parameter in frozen):
            raise ConfigurationError(
                "the optimizer already has frozen parameters of the backbone, so they cannot get their own learning "
                "rate: pass it filter(lambda p: p.requires_grad, self.parameters()) in configure_optimizers."
            )

    def finetune_function(self, pl_module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        groups = optimizer.param_groups
        current = float(groups[0]["lr"])
        if self._group is None or self._group >= len(groups):
            rate = self._first_rate(current)
            self._unfreeze(_backbone(pl_module), optimizer, rate)
        elif epoch == self.unfreeze_backbone_at_epoch:
            # The run was saved at the start of this epoch, after this hook.
            return
        else:
            assert self.previous_backbone_lr is not None
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            rate = min(rate, current) if self.should_align else rate
            groups[self._group]["lr"] = rate
        self.previous_backbone_lr = rate
        if self.verbose:
            text = f"learning rate: {round(current, self.rounding)}, backbone: {round(rate, self.rounding)}"
            inform(text, pl_module.print)

    def _first_rate(self, current: float) -> float:
        if self.previous_backbone_lr is not None:
            # A resume without the optimizers' state.
            return self.previous_backbone_lr
        if self.backbone_initial_lr is not None:
            return self.backbone_initial_lr
        return current * self.backbone_initial_ratio_lr

    def _unfreeze(self, backbone: nn.Module, optimizer: Optimizer, rate: float) -> None:
        """Adds the backbone's group, with the parameters that the optimizer does not have yet (see `train_bn`)."""
        group = len(optimizer.param_groups)
        self.unfreeze_and_add_param_group(backbone, optimizer, rate, self.initial_denom_lr, self.train_bn)
        if len(optimizer.param_groups) == group:
            raise ConfigurationError("the backbone has no parameters to unfreeze: remove BackboneFinetuning.")
        self._group = group

    # the state --------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"previous_backbone_lr": self.previous_backbone_lr, "group": self._group}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        if not saved.is_none("previous_backbone_lr"):
            saved.number("previous_backbone_lr")
            saved.integer("group", least=0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.previous_backbone_lr, self._group = state.get("previous_backbone_lr"), state.get("group")


def _parts(modules: Any) -> Iterator[nn.Module]:
    """Yields modules with all their children, in order."""
    if isinstance(modules, nn.Module):
        yield from modules.modules()
    elif isinstance(modules, Iterable) and not isinstance(modules, (str, bytes, Tensor)):
        for entry in modules:
            yield from _parts(entry)
    else:
        raise ConfigurationError(f"{kind_of(modules)} is not a module: give a module or a list of modules.")


def _without_norms(modules: Modules, train_bn: bool) -> list[nn.Module]:
    """Returns the modules of `flatten_modules`; without batch norms if `train_bn` is False."""
    parts = BaseFinetuning.flatten_modules(modules)
    return [part for part in parts if train_bn or not isinstance(part, _BatchNorm)]


def _own_parameters(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters that the modules own directly, each once."""
    return list(dict.fromkeys(parameter for part in parts for parameter in part.parameters(recurse=False)))


def _set_trainable(part: nn.Module, flag: bool) -> None:
    """Unfreezes or freezes a module's own parameters, and a batch norm's running statistics."""
    if isinstance(part, _BatchNorm) and part.running_mean is not None:
        part.track_running_stats = flag
    for parameter in part.parameters(recurse=False):
        parameter.requires_grad_(flag)


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _backbone(module: TrainModule) -> nn.Module:
    backbone = getattr(module, "backbone", None)
    if not isinstance(backbone, nn.Module):
        raise ConfigurationError(
            f"BackboneFinetuning needs {type(module).__name__}.backbone, an nn.Module that exists before "
            "configure_model runs. Add this attribute, or subclass BaseFinetuning."
        )
    return backbone


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigurationError(f"BackboneFinetuning({name}={value!r}): give a number above 0.")

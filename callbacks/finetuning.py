"""BaseFinetuning and BackboneFinetuning, callbacks that freeze layers and train them from some epoch on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

Modules: TypeAlias = "nn.Module | Iterable[Modules]"
"""A module, or modules in lists and tuples of any depth."""


def multiplicative(epoch: int) -> float:
    """The default `lambda_func` of BackboneFinetuning: the learning rate doubles in each epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Base class of fine-tuning schedules: says what is frozen at first, and what each epoch begins to train.

    Override `freeze_before_training`, which runs before `configure_optimizers`, and `finetune_function`, which runs at
    the start of each epoch, once for each optimizer. Give the optimizer only what is trained:
    `filter(lambda p: p.requires_grad, self.parameters())`; later groups are added by `unfreeze_and_add_param_group`.

    A resume adds the same groups before it loads the optimizer, and trains what the run trained: it ends with the bits
    of a run that was not broken off.

    Example:
        >>> class SecondEpoch(BaseFinetuning):
        ...     def freeze_before_training(self, module):
        ...         self.freeze(module.features)
        ...
        ...     def finetune_function(self, module, epoch, optimizer):
        ...         if epoch == 1:
        ...             self.unfreeze_and_add_param_group(module.features, optimizer, lr=1e-4)
    """

    # what subclasses say ----------------------------------------------------------------------------------------------
    def freeze_before_training(self, pl_module: TrainModule) -> None:
        """Freezes what is not trained at first."""
        raise NotImplementedError(f"{type(self).__name__} has no freeze_before_training(module), which freezes layers.")

    def finetune_function(self, pl_module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreezes what is trained from this epoch on; called for each optimizer at each epoch's start."""
        raise NotImplementedError(
            f"{type(self).__name__} has no finetune_function(module, epoch, optimizer), which unfreezes layers."
        )

    # a run ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # A fit that continues from memory goes on with what was trained last.
        if stage == "fit" and trainer.global_step == 0:
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        saved_form = trainer.strategy.master_weights.saved_form
        if any(saved_form(optimizer) is not optimizer for optimizer in trainer.optimizers):
            raise ConfigurationError(
                f"{type(self).__name__} adds parameter groups during a fit, and strategy={trainer.strategy.name!r} "
                "cannot follow: use strategy='ddp' or 'fsdp'."
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
        """Returns each module once: those without children, and those that have parameters of their own beside them.

        Example:
            >>> BaseFinetuning.flatten_modules([nn.Sequential(nn.Linear(1, 1), nn.ReLU())])
            [Linear(in_features=1, out_features=1, bias=True), ReLU()]
        """
        found = dict.fromkeys(_parts(modules))
        return [part for part in found if part._parameters or next(part.children(), None) is None]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters that are trained.

        Args:
            modules: whose parameters.
            train_bn: False leaves out those of batch norms.
            requires_grad: False yields those that are frozen.
        """
        for parameter in _own(_without_norms(modules, train_bn)):
            if parameter.requires_grad is requires_grad:
                yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreezes modules: their parameters are trained, and batch norms among them update their statistics."""
        for part in BaseFinetuning.flatten_modules(modules):
            _train(part, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freezes the parameters that a module itself has, without its children; a batch norm its statistics, too."""
        _train(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freezes modules.

        Args:
            modules: to freeze, with all their children.
            train_bn: batch norms among them are trained all the same.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            _train(part, train_bn and isinstance(part, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters that an optimizer does not have yet; warns of those that it has."""
        taken = _taken(optimizer)
        given = list(params)
        new = [parameter for parameter in given if id(parameter) not in taken]
        if len(new) < len(given):
            warnings.warn(
                f"{len(given) - len(new)} of the parameters to unfreeze are in a group of the optimizer already, and "
                "stay there with its learning rate. Give the optimizer only parameters with requires_grad.",
                stacklevel=2,
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
        """Unfreezes modules, and adds their parameters to an optimizer as a group of their own.

        Args:
            modules: to train from now on.
            optimizer: that steps them. Frozen parameters that it has already stay where they are, with a
                warning.
            lr: learning rate of the group; the first group's, divided by `initial_denom_lr`, if None.
            initial_denom_lr: see lr; not used where lr is given.
            train_bn: False leaves batch norms as they are.
        """
        parts = _without_norms(modules, train_bn)
        taken = _taken(optimizer)
        # `freeze` may have left a batch norm to be trained from the start.
        asked = [p for p in _own(parts) if not (p.requires_grad and id(p) in taken)]
        for part in parts:
            _train(part, True)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        new = BaseFinetuning.filter_on_optimizer(optimizer, asked)
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})


class BackboneFinetuning(BaseFinetuning):
    """Freezes `module.backbone`, and trains it from an epoch on, at a growing learning rate of its own.

    Args:
        unfreeze_backbone_at_epoch: the first epoch that trains it, counted from 0.
        lambda_func: called with the number of the next epoch; what the backbone's learning rate is multiplied by at the
            start of each later epoch.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a part of the first group's.
        backbone_initial_lr: the same as a number; the ratio is not used then.
        should_align: the backbone's learning rate never exceeds the first group's.
        initial_denom_lr: as of `unfreeze_and_add_param_group`; not used here, since the learning rate is known.
        train_bn: batch norms of the backbone are trained, before it is unfrozen, too; False freezes them throughout.
        verbose: prints both learning rates at each epoch's start.
        rounding: digits of what is printed.

    Raises:
        ConfigurationError: for a value that cannot be, a module without `backbone`, several optimizers, and an
            optimizer that has frozen parameters of the backbone.

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
                f"BackboneFinetuning(unfreeze_backbone_at_epoch={at!r}): give an epoch, counted from 0."
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
        """The backbone's learning rate as it was set last; None before the first time."""
        self._group: int | None = None
        """Which group of the optimizer is the backbone's; None before it is added."""

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
                f"BackboneFinetuning adds the backbone to one optimizer, and there are {len(trainer.optimizers)}: "
                "subclass BaseFinetuning, whose finetune_function is called with each."
            )
        taken = _taken(trainer.optimizers[0])
        frozen = self.filter_params(_backbone(module), requires_grad=False)
        if any(id(parameter) in taken for parameter in frozen):
            raise ConfigurationError(
                "the optimizer has frozen parameters of the backbone, so that they would get no learning rate of "
                "their own: give it filter(lambda p: p.requires_grad, self.parameters()) in configure_optimizers."
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
            # A run that was saved in a hook of this epoch's start, after this one.
            return
        else:
            assert self.previous_backbone_lr is not None
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            rate = min(rate, current) if self.should_align else rate
            groups[self._group]["lr"] = rate
        self.previous_backbone_lr = rate
        if self.verbose:
            pl_module.print(
                f"learning rate {round(current, self.rounding)}, of the backbone {round(rate, self.rounding)}"
            )

    def _first_rate(self, current: float) -> float:
        if self.previous_backbone_lr is not None:
            # A resume that left the optimizers out.
            return self.previous_backbone_lr
        if self.backbone_initial_lr is not None:
            return self.backbone_initial_lr
        return current * self.backbone_initial_ratio_lr

    def _unfreeze(self, backbone: nn.Module, optimizer: Optimizer, rate: float) -> None:
        """Adds what of the backbone the optimizer does not have: batch norms may have been trained before."""
        before = len(optimizer.param_groups)
        self.unfreeze_and_add_param_group(backbone, optimizer, rate, self.initial_denom_lr, self.train_bn)
        if len(optimizer.param_groups) == before:
            raise ConfigurationError("the backbone has no parameter that could be unfrozen: leave the callback out.")
        self._group = before

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
    """Yields modules with all their children, in the order given."""
    if isinstance(modules, nn.Module):
        yield from modules.modules()
    elif isinstance(modules, Iterable) and not isinstance(modules, (str, bytes, Tensor)):
        for entry in modules:
            yield from _parts(entry)
    else:
        raise ConfigurationError(f"{kind_of(modules)} is no module: give a module, or a list of modules.")


def _without_norms(modules: Modules, train_bn: bool) -> list[nn.Module]:
    """What `flatten_modules` returns, without batch norms unless they are trained."""
    parts = BaseFinetuning.flatten_modules(modules)
    return [part for part in parts if train_bn or not isinstance(part, _BatchNorm)]


def _own(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that modules themselves have, each once."""
    return list(dict.fromkeys(parameter for part in parts for parameter in part.parameters(recurse=False)))


def _train(part: nn.Module, flag: bool) -> None:
    """Trains or freezes what a module itself has."""
    if isinstance(part, _BatchNorm) and part.running_mean is not None:
        part.track_running_stats = flag
    for parameter in part.parameters(recurse=False):
        parameter.requires_grad_(flag)


def _taken(optimizer: Optimizer) -> set[int]:
    """The identities of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _backbone(module: TrainModule) -> nn.Module:
    backbone = getattr(module, "backbone", None)
    if not isinstance(backbone, nn.Module):
        raise ConfigurationError(
            f"BackboneFinetuning needs {type(module).__name__}.backbone, an nn.Module that is there before "
            "configure_model: name the part to freeze so, or subclass BaseFinetuning."
        )
    return backbone


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigurationError(f"BackboneFinetuning({name}={value!r}): give a number above 0.")

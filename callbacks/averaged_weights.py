"""Averages of a module's weights: how they are updated, exchanged with the weights, saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from leyden.callbacks.base import Callback
from leyden.checkpoint.shards import copy_part
from leyden.core.errors import ConfigurationError, StateError
from leyden.core.saved_state import SavedState, brief
from leyden.strategies.base import Strategy
from leyden.strategies.local_weights import LocalWeights, local_part, sharded_like
from leyden.trainer.engine.toggling import has_modes

if TYPE_CHECKING:
    from torch.optim.swa_utils import AveragedModel

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class AveragedWeights:
    """The averages of one module's weights and buffers, computed as torch's AveragedModel does.

    Each rank averages its own tensors (of a sharded module, its shards; in a pipeline, those of its stages), so no
    collective is needed. The module holds either the current weights or the averages; this object stores the other set.
    `exchange` swaps them in place.

    `make` creates an AveragedModel from a flat module that has the tensors as parameters and buffers. Without a device,
    the averages are on that of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        make: Callable[[nn.Module], AveragedModel],
        device: torch.device | None = None,
    ) -> None:
        self._module, self._strategy, self._make, self._device = module, strategy, make, device
        self._average: AveragedModel | None = None
        self.in_module = False
        """True if the module holds the averages, and this object the current weights."""

    @property
    def count(self) -> int:
        """The number of updates. There are no averages before the first one."""
        return 0 if self._average is None else int(self._average.n_averaged)

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights, which must be in the module, to the averages."""
        flat = _Flat(self._strategy.local_weights(self._module))
        if self._average is None:
            self._average = self._create(flat)
        _add(flat, self._average)
        self._stored_module.copy_others(flat)

    @property
    def _stored_module(self) -> _Flat:
        assert self._average is not None
        flat = self._average.module
        assert isinstance(flat, _Flat)
        return flat

    def _create(self, flat: nn.Module) -> AveragedModel:
        # Moved up front: `AveragedModel.to` would move the counter too, and each update would read it back.
        return self._make(flat if self._device is None else flat.to(self._device))

    @torch.no_grad()
    def exchange(self) -> None:
        """Swaps the module's tensors with the stored ones."""
        tensors = self._strategy.local_weights(self._module).tensors.values()
        for stored, tensor in zip(self._stored_module.tensors(), tensors, strict=True):
            previous = tensor.clone()
            tensor.copy_(stored)
            stored.copy_(previous)
        self.in_module = not self.in_module
        if self.in_module:
            # Each rank has averaged the buffers that its own samples or stages have updated.
            self._strategy.synchronize_buffers()

    # in a checkpoint --------------------------------------------------------------------------------------------------
    def stored(self) -> dict[str, Tensor]:
        """Returns the stored tensors by their names in a checkpoint, sharded as in the module."""
        return self._named(self._stored_module.tensors())

    def of_module(self) -> dict[str, Tensor]:
        """Returns the module's tensors in the same form."""
        return self._named(list(self._strategy.local_weights(self._module).tensors.values()))

    def replacements(self) -> dict[str, Tensor]:
        """Returns the stored tensors by name. A tied weight appears under each of its names."""
        stored, module = self.stored(), self._module
        first = {id(tensor): name for name, tensor in self._module_tensors().items()}
        every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return {name: stored[first[id(tensor)]] for name, tensor in every if first[id(tensor)] in stored}

    def _named(self, local: list[Tensor]) -> dict[str, Tensor]:
        # First, because it reshards parameters that an evaluation has left unsharded.
        weights = self._strategy.local_weights(self._module)
        saved, parts = self._module.state_dict(keep_vars=True), dict(zip(weights.tensors, local, strict=True))
        return {
            # A rank that lacks a tensor, of another stage of a pipeline, saves nothing of it.
            name: weights.to_save(name, tensor, parts.get(name, tensor))
            for name, tensor in self._module_tensors().items()
            if name in saved
        }

    def _module_tensors(self) -> dict[str, Tensor]:
        """The tensors of the whole module, tied ones once."""
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def check_names(self) -> None:
        """Raises ConfigurationError if the module's state_dict lacks the name of a parameter."""
        missing = sorted(dict(self._module.named_parameters()).keys() - self._module.state_dict(keep_vars=True).keys())
        if missing:
            raise ConfigurationError(
                f"the averages of {', '.join(missing[:3])} could not be saved: the state_dict of "
                f"{type(self._module).__name__} lacks these names. Keep torch's names in state_dict."
            )

    def check_dtypes(self) -> None:
        """Raises ConfigurationError if updates of the averages would be lost to rounding."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                raise ConfigurationError(
                    f"{name} is trained in {parameter.dtype}, which rounds updates of its average away. Train with "
                    "precision='bf16-mixed' or '16-mixed', which keep the weights in float32."
                )

    def check(self, saved: SavedState) -> None:
        """Raises StateError for tensors that `stored` cannot have returned."""
        own = self._module_tensors()
        for name, value in saved.entries.items():
            if name in own and (not isinstance(value, Tensor) or value.shape != own[name].shape):
                found = f"of {tuple(value.shape)}" if isinstance(value, Tensor) else brief(value)
                raise StateError(saved.path(name), f"is {found}, and must be a tensor of {tuple(own[name].shape)}")

    def reset(self) -> None:
        """Discards the averages, as before the first update. The module must hold the current weights."""
        self._average, self.in_module = None, False

    @torch.no_grad()
    def restore(self, count: int, stored: Mapping[str, Any], in_module: bool) -> None:
        """Restores the state of a checkpoint, once the module has the checkpoint's weights.

        The tensors that `stored` returned are whole, or this rank's shards.
        """
        weights = self._strategy.local_weights(self._module)
        average = self._average = self._create(_Flat(weights))
        average.n_averaged.fill_(count)
        tensors = self._module_tensors()
        for name, local in zip(weights.tensors, self._stored_module.tensors(), strict=True):
            if name in stored:
                fill_part(name, stored[name], local, tensors[name])
        self.in_module = in_module


def _add(flat: nn.Module, average: AveragedModel) -> None:
    """Adds tensors to averages as `AveragedModel.update_parameters` does, without waiting for the device.

    That moves its counter to the device in each update. A counter on the CPU serves tensors of every device.
    """
    from torch.optim.swa_utils import get_swa_avg_fn, get_swa_multi_avg_fn

    def tensors(module: nn.Module) -> list[Tensor]:
        return [*module.parameters(), *(module.buffers() if average.use_buffers else ())]

    averaged = [tensor.detach() for tensor in tensors(average.module)]
    current = [tensor.detach().to(own.device) for tensor, own in zip(tensors(flat), averaged, strict=True)]
    count, by_kind = average.n_averaged, dict[Any, tuple[list[Tensor], list[Tensor]]]()
    for own, tensor in zip(averaged, current, strict=True):
        owns, others = by_kind.setdefault((own.device, own.dtype), ([], []))
        owns.append(own)
        others.append(tensor)
    for (device, _), (owns, others) in by_kind.items():
        together = average.multi_avg_fn
        if together is None and average.avg_fn is None and device.type != "cpu":
            together = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        if not count:
            torch._foreach_copy_(owns, others)
        elif together is not None:
            together(owns, others, count)
        else:
            one = average.avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
            for own, tensor in zip(owns, others, strict=True):
                own.copy_(one(own, tensor, count))
    if not average.use_buffers:
        for own, tensor in zip(average.module.buffers(), flat.buffers(), strict=True):
            own.detach().copy_(tensor.detach())
    count += 1


class _Flat(nn.Module):
    """Registers tensors as the parameters and buffers of one module, without copying them.

    Tensors that cannot be averaged, such as counters, masks and position ids, are not registered, so AveragedModel
    leaves them alone.
    """

    def __init__(self, weights: LocalWeights) -> None:
        super().__init__()
        self._names: list[str] = []
        self._others: dict[str, Tensor] = {}
        for number, tensor in enumerate(weights.tensors.values()):
            self._names.append(name := f"tensor{number}")
            if not (tensor.is_floating_point() or tensor.is_complex()):
                self._others[name] = tensor
            elif number < len(weights.parameters):
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Flat:
        """Moves the unregistered tensors too."""
        self._others = {name: fn(tensor) for name, tensor in self._others.items()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def tensors(self) -> list[Tensor]:
        """Returns all tensors, in the order of `LocalWeights.tensors`."""
        averaged = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return [self._others[name] if name in self._others else averaged[name].detach() for name in self._names]

    def copy_others(self, current: _Flat) -> None:
        """Copies the tensors that are not averaged."""
        for name, tensor in self._others.items():
            tensor.copy_(current._others[name])


def fill_part(name: str, saved: Any, local: Tensor, like: Tensor) -> None:
    """Copies a saved tensor, whole or a DTensor, or this rank's part of it, into this rank's local tensor.

    `like` is the module's tensor, which is sharded if only a part is local.
    """
    part = getattr(saved, "_local_tensor", None)
    if part is not None:
        local.copy_(part)
    elif like.shape == local.shape:
        local.copy_(saved)
    else:
        target = sharded_like(torch.empty_like(local, device=like.device), like)
        copy_part(name, saved, target)
        # `target` does not share memory with `local`: DTensor.from_local moves offloaded shards to the mesh's device.
        local.copy_(local_part(target))


class ExchangesWeights(Callback):
    """Base class of callbacks that replace the module's weights by averages."""

    # Before other callbacks, which may save or read the weights in the same hooks.
    order: ClassVar[int] = -100
    # Also called on a rank without a sample of the batch; before early stopping and checkpoints.
    closing_hooks = frozenset({"on_train_batch_end"})
    changes_weights = True
    state_per_rank = False

    _device: torch.device | None = None
    """The device of the averages. None: the device of the weights."""
    _weights: AveragedWeights | None = None
    _latest_update_epoch = -1
    _pending_state: SavedState | None = None
    """The averages of a checkpoint, until the module has the checkpoint's weights."""

    def _average(self, flat: nn.Module) -> AveragedModel:
        """Creates the AveragedModel of a flat module."""
        raise NotImplementedError

    @property
    def n_averaged(self) -> int:
        """The number of updates of the averages."""
        return 0 if self._weights is None else self._weights.count

    def _begin(self, trainer: Trainer, module: nn.Module) -> bool:
        """Creates the averages of a fit. Returns False if the fit continues those of the previous one."""
        self.check_exchange(trainer)
        if self._weights is not None and trainer.global_step > 0:
            return False
        self._weights = AveragedWeights(module, trainer.strategy, self._average, self._device)
        self._latest_update_epoch = -1
        return True

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        assert self._weights is not None
        if any(has_modes(optimizer) for optimizer in trainer.optimizers):
            raise ConfigurationError(
                f"{type(self).__name__} averages the weights, and so does the optimizer, which has the methods train "
                "and eval: use only one of them."
            )
        self._weights.check_names()
        self._weights.check_dtypes()
        if self._weights.in_module:
            # This fit continues the previous one, which ended with the averages in the module.
            self._weights.exchange()

    def _has_new_epoch(self, trainer: Trainer) -> bool:
        """Returns True if an epoch has ended that the averages do not include yet.

        `on_train_epoch_end` also runs for an epoch that a limit interrupts, and again once a resume has completed it.
        """
        has_ended = trainer.progress.ended or trainer.progress.cut
        return has_ended and trainer.current_epoch > self._latest_update_epoch

    def check_exchange(self, trainer: Trainer) -> None:
        """Raises ConfigurationError for a strategy without support for it, or a second callback of this kind."""
        name, why = type(self).__name__, trainer.strategy.refusals.get("exchange")
        if why is not None:
            raise ConfigurationError(
                f"{name} replaces the weights by averages, which strategy={trainer.strategy.name!r} does not support: "
                f"{why}."
            )
        for other in trainer.callbacks:
            if isinstance(other, ExchangesWeights) and other is not self:
                raise ConfigurationError(
                    f"{name} and {type(other).__name__} both put averages into the module: use only one of them."
                )


def parse_device(callback: Callback, device: torch.device | str | int | None) -> torch.device | None:
    """Returns the device of the averages; None for that of the weights. Raises ConfigurationError for another name."""
    try:
        return None if device is None else torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{type(callback).__name__}(device={device!r}) names no device: use 'cpu', 'cuda' or None, and pass other "
            "arguments by name, such as decay=0.999."
        ) from error

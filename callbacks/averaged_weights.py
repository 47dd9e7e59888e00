"""Averages of a module's weights, beside the weights themselves: updated, exchanged, saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from leyden.callbacks.base import Callback
from leyden.strategies.base import Strategy
from leyden.strategies.errors import ConfigurationError, StateError
from leyden.strategies.local_weights import LocalWeights, local_part, sharded_like
from leyden.strategies.saved_state import SavedState, brief
from leyden.trainer.checkpoint.shards import copy_part

if TYPE_CHECKING:
    from torch.optim.swa_utils import AveragedModel

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class AveragedWeights:
    """The averages of one module's weights and buffers, made by torch's AveragedModel.

    It averages this rank's tensors: of a sharded module the shards, and no message is sent. One of two sets of values
    is in the module, and the other here; `exchange` swaps them, in place.

    Args:
        module: whose weights they are.
        strategy: of the run.
        average: makes an AveragedModel of a flat module that has the tensors as parameters and buffers.
        device: of the averages; that of the weights if None.

    Attributes:
        in_module: the module has the averages, and the current weights are here.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        average: Callable[[nn.Module], AveragedModel],
        device: torch.device | None = None,
    ) -> None:
        self._module, self._strategy, self._make, self._device = module, strategy, average, device
        self._average: AveragedModel | None = None
        self.in_module = False

    @property
    def count(self) -> int:
        """How often they have been updated. There are none before the first time."""
        return 0 if self._average is None else int(self._average.n_averaged)

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights, which are in the module, to the averages."""
        flat = _Flat(self._strategy.local_weights(self._module))
        if self._average is None:
            self._average = self._begin(flat)
        self._average.update_parameters(flat)
        self._own_copy.take_others(flat)

    @property
    def _own_copy(self) -> _Flat:
        assert self._average is not None
        flat = self._average.module
        assert isinstance(flat, _Flat)
        return flat

    def _begin(self, flat: nn.Module) -> AveragedModel:
        # Moved by itself: AveragedModel would move its counter too, and read it back in every update.
        return self._make(flat if self._device is None else flat.to(self._device))

    @torch.no_grad()
    def exchange(self) -> None:
        """Puts the averages into the module and the current weights here, or the other way round."""
        there = self._strategy.local_weights(self._module).tensors.values()
        for own, other in zip(self._held(), there, strict=True):
            kept = other.clone()
            other.copy_(own)
            own.copy_(kept)
        self.in_module = not self.in_module
        if self.in_module:
            # Averages of batch norm's statistics, which each rank has of its own samples.
            self._strategy.synchronize_buffers()

    def _held(self) -> list[Tensor]:
        """The values that are here, in the order of `LocalWeights.tensors`."""
        return self._own_copy.tensors()

    # in a checkpoint --------------------------------------------------------------------------------------------------
    def held(self) -> dict[str, Tensor]:
        """What is here, by the names that a checkpoint has for them, sharded as the module's are."""
        return self._named(self._held())

    def in_place(self) -> dict[str, Tensor]:
        """What is in the module, under the same names."""
        return self._named(list(self._strategy.local_weights(self._module).tensors.values()))

    def replacing(self) -> dict[str, Tensor]:
        """What is here, also under the further names of tied weights."""
        held, module = self.held(), self._module
        first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        every = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        return {name: held[first[id(tensor)]] for name, tensor in every if first[id(tensor)] in held}

    def _named(self, local: list[Tensor]) -> dict[str, Tensor]:
        own = self._own()
        saved = self._module.state_dict(keep_vars=True)
        pairs = zip(own.items(), local, strict=True)
        return {name: sharded_like(part, tensor) for (name, tensor), part in pairs if name in saved}

    def _own(self) -> dict[str, Tensor]:
        """The module's tensors, tied ones once, in the order of `LocalWeights.tensors`."""
        # Brings sharded ones back to their shards, if an evaluation has left them whole.
        self._strategy.local_weights(self._module)
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def check_names(self) -> None:
        """Raises ConfigurationError if a checkpoint knows a parameter by another name than the module."""
        missing = sorted(dict(self._module.named_parameters()).keys() - self._module.state_dict(keep_vars=True).keys())
        if missing:
            raise ConfigurationError(
                f"the averages of {', '.join(missing[:3])} could not be saved: state_dict of "
                f"{type(self._module).__name__} has no such names. Leave torch's state_dict as it is."
            )

    def check_dtypes(self) -> None:
        """Raises ConfigurationError if averages of what is trained would be rounded to where they were."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                raise ConfigurationError(
                    f"{name} is trained in {parameter.dtype}, which rounds away what an update changes in its average: "
                    "train with precision='bf16-mixed' or '16-mixed', which keeps the weights in float32."
                )

    def check(self, saved: SavedState) -> None:
        """Raises StateError for tensors that `held` cannot have returned."""
        own = self._own()
        for name, value in saved.entries.items():
            if name in own and (not isinstance(value, Tensor) or value.shape != own[name].shape):
                found = f"of {tuple(value.shape)}" if isinstance(value, Tensor) else brief(value)
                raise StateError(saved.path(name), f"is {found}, and must be a tensor of {tuple(own[name].shape)}")

    def forget(self) -> None:
        """Drops the averages, as if there had been no update; the module has the current weights."""
        self._average, self.in_module = None, False

    @torch.no_grad()
    def restore(self, count: int, held: Mapping[str, Any], in_module: bool) -> None:
        """Continues where a checkpoint was saved, once the module has its weights.

        Args:
            count: how often the averages had been updated.
            held: what `held` returned; whole tensors or, sharded as the module's are, this rank's parts.
            in_module: the module has the averages.
        """
        average = self._average = self._begin(_Flat(self._strategy.local_weights(self._module)))
        average.n_averaged.fill_(count)
        for (name, tensor), local in zip(self._own().items(), self._held(), strict=True):
            if name in held:
                fill_part(name, held[name], local, tensor)
        self.in_module = in_module


class _Flat(nn.Module):
    """Some tensors as parameters and buffers of one module, in the memory that they have.

    Those that have no average, such as counters, masks and position ids, are in neither: AveragedModel leaves them.
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
        """Moves all of them, as `to` does."""
        self._others = {name: fn(tensor) for name, tensor in self._others.items()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def tensors(self) -> list[Tensor]:
        """All of them, in the order of `LocalWeights.tensors`."""
        averaged = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return [self._others[name] if name in self._others else averaged[name].detach() for name in self._names]

    def take_others(self, current: _Flat) -> None:
        """Copies what has no average."""
        for name, tensor in self._others.items():
            tensor.copy_(current._others[name])


def fill_part(name: str, saved: Any, local: Tensor, like: Tensor) -> None:
    """Copies a saved tensor, or this rank's part of it, to where this rank has its part."""
    part = getattr(saved, "_local_tensor", None)
    if part is not None:
        local.copy_(part)
    elif like.shape == local.shape:
        local.copy_(saved)
    else:
        target = sharded_like(torch.empty_like(local, device=like.device), like)
        copy_part(name, saved, target)
        # Its own memory: DTensor.from_local moves a shard to the mesh's device, where the weights are offloaded.
        local.copy_(local_part(target))


class ExchangesWeights(Callback):
    """A callback that replaces the weights by averages for a time; `_average` makes these of a flat module."""

    # Before other callbacks, which may save or look at weights in the same hooks.
    order: ClassVar[int] = -100
    # Also after a batch of which this rank has no sample; before early stopping and checkpoints.
    closing_hooks = frozenset({"on_train_batch_end"})
    changes_weights = True
    state_per_rank = False

    _device: torch.device | None = None
    """Of the averages; that of the weights if None."""
    _weights: AveragedWeights | None = None
    _latest_update_epoch = -1
    _restored: SavedState | None = None
    """A checkpoint's averages, until the module has its weights."""

    def _average(self, flat: nn.Module) -> AveragedModel:
        raise NotImplementedError

    @property
    def n_averaged(self) -> int:
        """How often the averages have been updated."""
        return 0 if self._weights is None else self._weights.count

    def _begin(self, trainer: Trainer, module: nn.Module) -> bool:
        """Begins the averages of a fit; returns False if it goes on with those of the last one."""
        self.check_exchange(trainer)
        if self._weights is not None and trainer.global_step > 0:
            return False
        self._weights = AveragedWeights(module, trainer.strategy, self._average, self._device)
        self._latest_update_epoch = -1
        return True

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        assert self._weights is not None
        self._weights.check_names()
        self._weights.check_dtypes()
        if self._weights.in_module:
            # The fit goes on from where the last one ended.
            self._weights.exchange()

    def _has_new_epoch(self, trainer: Trainer) -> bool:
        """True if an epoch has ended that is not in the averages yet.

        The hook of its end runs for an epoch that a limit interrupts, too, and once more when a resume has ended it.
        """
        is_over = trainer.progress.ended or trainer.progress.cut
        return is_over and trainer.current_epoch > self._latest_update_epoch

    def check_exchange(self, trainer: Trainer) -> None:
        """Refuses a strategy that cannot exchange weights, and a second callback that does."""
        name, why = type(self).__name__, trainer.strategy.refusals.get("exchange")
        if why is not None:
            raise ConfigurationError(
                f"{name} puts averages in the place of weights, and strategy={trainer.strategy.name!r} cannot have "
                f"that: {why}."
            )
        for other in trainer.callbacks:
            if isinstance(other, ExchangesWeights) and other is not self:
                raise ConfigurationError(
                    f"{name} and {type(other).__name__} both put averages into the module: give one."
                )


def parse_device(callback: Callback, device: torch.device | str | int | None) -> torch.device | None:
    """Returns the device of averages; None for that of the weights.

    Raises:
        ConfigurationError: if there is no such device, or a number was meant for another argument.
    """
    try:
        return None if device is None else torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{type(callback).__name__}(device={device!r}) names no device: give 'cpu', 'cuda' or None, and other "
            "arguments by name, such as decay=0.999."
        ) from error

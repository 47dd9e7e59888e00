"""WeightAveraging and EMAWeightAveraging, callbacks that evaluate and save running averages of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from leyden.callbacks.averaged_weights import ExchangesWeights, parse_device
from leyden.core.checks import check_whole
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

FUNCTIONS = ("avg_fn", "multi_avg_fn")


class WeightAveraging(ExchangesWeights):
    """Averages the weights after steps or epochs with torch's `AveragedModel`; by default, their plain mean.

    The module holds the averages during each validation in fit and after fit has ended, so test, predict and exports
    use them. A checkpoint's model is the averages; the current weights are in this callback's state, from which a
    resume continues bit for bit. Before the first update, the current weights are evaluated and saved. (Lightning
    evaluates and saves the weights from before the first step until then.)

    Under FSDP and tensor parallelism each rank averages its own shards, and in a pipeline its own stages.

    Args:
        device: the device of the averages, such as "cpu" to save GPU memory. None: the device of the weights.
        use_buffers: also average buffers, such as batch norm's statistics. False copies them at each update instead;
            integer and bool buffers are always copied.
        **kwargs: `avg_fn(average, current, count)` or `multi_avg_fn(averages, currents, count)` of `AveragedModel`.

    Raises:
        ConfigurationError: for an unknown argument; under a strategy that cannot exchange weights (DeepSpeed, XLA); or
            for weights trained in float16 or bfloat16 (precision="bf16-true").

    Example:
        >>> from torch.optim.swa_utils import get_ema_avg_fn
        >>> class FromStep100(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return step_idx is not None and step_idx >= 100
        >>> FromStep100(avg_fn=get_ema_avg_fn(0.999)).should_update(step_idx=99)
        False
    """

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in FUNCTIONS:
                raise ConfigurationError(f"{type(self).__name__}({name}=…): {nearest(name, FUNCTIONS)}")
        if all(kwargs.get(name) is not None for name in FUNCTIONS):
            raise ConfigurationError(f"{type(self).__name__} got both avg_fn and multi_avg_fn: pass only one.")
        self._device = parse_device(self, device)
        self._use_buffers, self._functions = use_buffers, kwargs
        self._latest_update_step = 0
        """The global step of the last update after a step."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Returns True if the averages should be updated now: by default after each step. Override to change this.

        Args:
            step_idx: the index of the step just taken, from 0; None at the end of an epoch.
            epoch_idx: the index of the epoch that has just ended, from 0; None after a step.
        """
        return step_idx is not None

    # a run ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and self._begin(trainer, module):
            self._latest_update_step = 0

    def _average(self, flat: nn.Module) -> AveragedModel:
        return AveragedModel(flat, use_buffers=self._use_buffers, **self._functions)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_fit_start(trainer, module)
        if self._pending_state is not None:
            self._pending_state = None
            warn(
                f"{type(self).__name__} starts new averages: restore= leaves out the weights, and in this checkpoint "
                "they are the averages."
            )

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update()
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if self._has_new_epoch(trainer) and self.should_update(epoch_idx=epoch):
            self._update()
            self._latest_update_epoch = epoch

    def _update(self) -> None:
        assert self._weights is not None
        self._weights.update()

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._place_averages(trainer, in_module=True)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._place_averages(trainer, in_module=False)

    def on_validation_model_train(self, trainer: Trainer, module: TrainModule) -> None:
        # Unlike on_validation_end, this is also called when a signal interrupts a validation.
        self._place_averages(trainer, in_module=False)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._place_averages(trainer, in_module=True)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._place_averages(trainer, in_module=False)

    def _place_averages(self, trainer: Trainer, in_module: bool) -> None:
        """Puts the averages into the module, or takes them out of it; a no-op before the first update."""
        weights = self._weights
        if trainer.state.stage == "fit" and weights is not None and weights.count and weights.in_module != in_module:
            weights.exchange()

    # in a checkpoint --------------------------------------------------------------------------------------------------
    def saved_weights(self) -> Mapping[str, Tensor]:
        weights = self._weights
        return {} if weights is None or not weights.count or weights.in_module else weights.replacements()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
        }
        weights = self._weights
        if weights is None or not weights.count:
            return state
        current = weights.stored() if weights.in_module else weights.of_module()
        return {**state, "n_averaged": weights.count, "current": current}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        saved.integer("latest_update_step", least=0)
        saved.integer("latest_update_epoch", -1, least=-1)
        if saved.integer("n_averaged", 0, least=0) and self._weights is not None:
            self._weights.check(saved.nested("current"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        self._latest_update_step = saved.integer("latest_update_step", least=0)
        self._latest_update_epoch = saved.integer("latest_update_epoch", -1, least=-1)
        self._pending_state = saved if saved.integer("n_averaged", 0) else None

    def go_back(self, state: dict[str, Any], step: int) -> None:
        super().go_back(state, step)
        if self._pending_state is None and self._weights is not None:
            # The checkpoint is from before the first update.
            self._weights.reset()

    def weights_loaded(self) -> None:
        saved, self._pending_state = self._pending_state, None
        if saved is not None and self._weights is not None:
            self._weights.restore(saved.integer("n_averaged"), saved.nested("current").entries, in_module=True)
            self._weights.exchange()


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights: `average = decay * average + (1 - decay) * current`.

    The first update copies the weights. Everything else is as in `WeightAveraging`.

    Args:
        device: the device of the averages. None: the device of the weights.
        use_buffers: also average buffers.
        decay: the weight of the old average in an update, from 0 to 1.
        update_every_n_steps: steps between updates; 0 to update only at the end of epochs.
        update_starting_at_step: the first step, counted from 0, that may be followed by an update.
        update_starting_at_epoch: the first epoch, counted from 0, whose end is also followed by an update; None for
            none.
        **kwargs: accepts no further arguments; an unknown one raises an error that suggests the nearest name.

    Raises:
        ConfigurationError: for a decay outside of 0 to 1, or a number below 0.

    Example:
        >>> ema = EMAWeightAveraging(decay=0.99, update_every_n_steps=2, update_starting_at_step=4)
        >>> [step for step in range(8) if ema.should_update(step_idx=step)]
        [4, 6]
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        given: dict[str, Callable[..., Any]] = {name: kwargs[name] for name in FUNCTIONS if kwargs.get(name)}
        if given:
            raise ConfigurationError(
                f"EMAWeightAveraging({next(iter(given))}=…) is not supported: its decay defines the average. Use "
                "WeightAveraging for a custom function."
            )
        if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ConfigurationError(f"EMAWeightAveraging(decay={decay!r}): give a number from 0 to 1, such as 0.999.")
        check_whole("EMAWeightAveraging", 0, update_every_n_steps=update_every_n_steps)
        if update_starting_at_step is not None:
            check_whole("EMAWeightAveraging", 0, update_starting_at_step=update_starting_at_step)
        if update_starting_at_epoch is not None:
            check_whole("EMAWeightAveraging", 0, update_starting_at_epoch=update_starting_at_epoch)
        super().__init__(device, use_buffers, **kwargs)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def _average(self, flat: nn.Module) -> AveragedModel:
        ema = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return AveragedModel(flat, use_buffers=self._use_buffers, multi_avg_fn=ema)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            every, first = self.update_every_n_steps, self.update_starting_at_step
            return every > 0 and step_idx % every == 0 and (first is None or step_idx >= first)
        start = self.update_starting_at_epoch
        return epoch_idx is not None and start is not None and epoch_idx >= start

"""PreparedOptimizer: an optimizer whose steps go through precision and strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from leyden.trainer.engine.toggling import switch_mode

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine


def unchanged(wrapped: Any) -> Any:
    """Returns its argument; pickles of prepared objects call it."""
    return wrapped


def has_plain_zero_grad(optimizer: Optimizer) -> bool:
    """True if `optimizer.zero_grad` is torch's own method, not overridden or patched."""
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)


def clear_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Clears gradients as torch's `zero_grad()` does, without its profiler label, which costs more than the loop."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class PreparedOptimizer(Optimizer):
    """A wrapper whose `step` goes through precision and strategy. Everything else is forwarded to the optimizer.

    It subclasses torch's Optimizer, so that schedulers accept it.
    """

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        # No super().__init__(): it would create separate groups and state.
        vars(self).update(optimizer=optimizer, _engine=engine, step_was_skipped=False)

    _is_accelerate_prepared = True
    optimizer: Optimizer
    step_was_skipped: bool
    """True if the gradient scaler skipped the last step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. A no-op inside an accumulation window of your own loop."""
        self._engine.zero_grad(self, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Steps the optimizer through precision and strategy. A no-op inside an accumulation window of your own loop.

        Args:
            closure: a function that reevaluates the loss, for optimizers such as LBFGS.
            **kwargs: further arguments for the optimizer's own `step`.
        """
        self.step_was_skipped = not self._engine.step(self, closure, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Disables gradients within the block for the parameters of all other optimizers.

        Args:
            sync_grad: whether ranks exchange gradients in the block. Pass False for all batches but the last of a
                manual accumulation.

        Example:
            A step of a module with `automatic_optimization = False`::

                generator, discriminator = self.optimizers()
                with generator.toggle_model():
                    self.manual_backward(self.generator_loss(batch))
                    generator.step()
                    generator.zero_grad()
        """
        with self._engine.toggles.turned_to(self.optimizer), self._engine.strategy.gradient_sync(sync_grad):
            yield

    # torch's base class defines the following, so `__getattr__` would not forward them.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __copy__(self) -> PreparedOptimizer:
        return PreparedOptimizer(self.optimizer, self._engine)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedOptimizer:
        # The run's engine is shared with the copy.
        return PreparedOptimizer(copy.deepcopy(self.optimizer, memo), self._engine)

    def __reduce__(self) -> Any:
        """Pickles the underlying optimizer, since the engine belongs to this process."""
        return unchanged, (self.optimizer,)

    def train(self) -> None:
        """Switches an optimizer with modes, such as a schedule-free one, to training; a no-op for others."""
        switch_mode(self.optimizer, "train")

    def eval(self) -> None:
        """Switches an optimizer with modes to evaluation; a no-op for others."""
        switch_mode(self.optimizer, "eval")

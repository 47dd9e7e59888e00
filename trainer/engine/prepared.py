"""Optimizers wrapped for the user: their steps go through precision and strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` goes through precision and strategy. Everything else is the optimizer's own.

    It is a torch Optimizer too, so that a scheduler can be made of it.
    """

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        # torch's own __init__ would make groups and state of its own.
        vars(self).update(optimizer=optimizer, _engine=engine, step_was_skipped=False)

    optimizer: Optimizer
    step_was_skipped: bool
    """The gradient scaler skipped the last step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. Inside an accumulation window of the user's own loop it leaves them."""
        self._engine.zero_grad(self, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Steps the optimizer, unscaled and in the strategy's way. Inside an accumulation window it does nothing.

        Args:
            closure: evaluates the loss again, for an optimizer that asks for it.
            **kwargs: further arguments of the optimizer's own `step`.
        """
        self.step_was_skipped = not self._engine.step(self, closure, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only the parameters of this optimizer take gradients within the block, of those that any optimizer has.

        Args:
            sync_grad: False if ranks exchange no gradients in the block, as in all batches of an accumulation by hand
                but the last.

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

    # torch's class has these, so they would not be asked of the optimizer itself.
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

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a prepared optimizer cannot be pickled or copied: use its state_dict().")

    def train(self) -> None:
        """Switches an optimizer with two modes, such as a schedule-free one, to training."""
        self._mode("train")

    def eval(self) -> None:
        """Switches an optimizer with two modes to evaluation."""
        self._mode("eval")

    def _mode(self, name: str) -> None:
        method = getattr(self.optimizer, name, None)
        if callable(method):
            method()

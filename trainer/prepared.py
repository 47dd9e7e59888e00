"""Optimizers, schedulers and modules wrapped for the user: stepping them goes through precision and strategy."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.batch import map_tensors

if TYPE_CHECKING:
    from leyden.trainer.accelerator import Accelerator
    from leyden.trainer.engine import Engine


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
        """For optimizers with two modes (schedule-free ones)."""
        self._mode("train")

    def eval(self) -> None:
        """See `train`."""
        self._mode("eval")

    def _mode(self, name: str) -> None:
        method = getattr(self.optimizer, name, None)
        if callable(method):
            method()


class PreparedScheduler:
    """A scheduler that counts optimizer steps: once each, on any number of ranks, not when a scaler skipped one.

    Args:
        scheduler: any scheduler.
        optimizers: the prepared optimizers that it goes with.
        accelerator: whose windows it follows.
        with_optimizer: False to step whenever `step` is called.
    """

    def __init__(
        self, scheduler: Any, optimizers: Sequence[PreparedOptimizer], accelerator: Accelerator, with_optimizer: bool
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._accelerator = accelerator
        self._with_optimizer = with_optimizer
        self._told_of_end = False

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in vars(self):
            # A copy that is being made asks before it has anything.
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return repr(self.scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps, if the accumulation window closes, no optimizer's step was skipped and its `total_steps` are not done."""
        if self._with_optimizer:
            accelerator = self._accelerator
            if not accelerator.sync_gradients:
                if accelerator.accumulation.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                    # torch's own check of the order of steps counts calls.
                    self.scheduler._step_count += 1
                return
            if any(optimizer.step_was_skipped for optimizer in self.optimizers):
                return
        total = getattr(self.scheduler, "total_steps", None)
        if total is not None and self.scheduler.last_epoch >= total:
            self._tell_of_end(total)
        else:
            self.scheduler.step(*args, **kwargs)

    def _tell_of_end(self, total: int) -> None:
        """torch's own raises an error here, in the last step of a run whose length was rounded down."""
        if not self._told_of_end:
            self._told_of_end = True
            warnings.warn(
                f"{type(self.scheduler).__name__} has done its total_steps={total}; the learning rate stays where it is.",
                stacklevel=4,
            )


def run_in_context(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]], outputs_in_float32: bool = False
) -> None:
    """Lets a module's forward run in a context, whoever calls it; class, names and hooks stay as they are.

    Args:
        module: whose forward it is.
        context: makes the context of one forward.
        outputs_in_float32: convert what comes out in half precision, so that a loss is computed in float32 anywhere.
    """
    if getattr(module.forward, "_leyden_context", False):
        return
    plain = module.forward
    own = vars(module).get("forward")
    function = getattr(plain, "__func__", plain)

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            # A copy of the module has a forward of its own, bound to the copy.
            outputs = own(*args, **kwargs) if own is not None else function(self, *args, **kwargs)
        return map_tensors(outputs, _in_float32) if outputs_in_float32 else outputs

    forward._leyden_context = True  # type: ignore[attr-defined]
    forward._leyden_own = own  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def run_without_context(module: nn.Module) -> None:
    """Takes back what `run_in_context` did."""
    forward = vars(module).get("forward")
    if isinstance(forward, types.MethodType) and getattr(forward, "_leyden_context", False):
        del module.forward
        own = forward.__func__._leyden_own  # type: ignore[attr-defined]
        if own is not None:
            vars(module)["forward"] = own


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def warn_of_multiplied_schedules(ranks: int) -> None:
    """Schedulers of scripts that were written for others count calls of all ranks."""
    warnings.warn(
        f"schedulers count optimizer steps here, on {ranks} ranks as on one: a warm-up or total that was multiplied by "
        "num_processes is now too long, so leave the factor out.",
        stacklevel=4,
    )

"""DeepSpeed in a custom loop: the model that the loop calls, backward, and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import OwnLoop, RunSettings
from leyden.strategies.deepspeed.engine import ZeroEngine


class EngineModel(nn.Module):
    """The model that a custom loop calls: its forward is the engine's, all other attributes are the model's."""

    wraps_module = True

    def __init__(self, module: nn.Module, loop: ZeroLoop) -> None:
        super().__init__()
        self.module = module
        self.__dict__["_loop"] = loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_loop"].call(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class ZeroLoop(OwnLoop):
    """DeepSpeed's part of a custom loop.

    Args:
        zero: the engine.
        moe_layer_cls_names: class names of mixture-of-experts layers. At stage 3 each is gathered as a whole, since
            ranks may use different experts.
    """

    def __init__(self, zero: ZeroEngine, moe_layer_cls_names: Sequence[str] = ()) -> None:
        self._zero = zero
        self.moe_layer_cls_names = moe_layer_cls_names

    # the model --------------------------------------------------------------------------------------------------------
    def wrap(self, module: nn.Module) -> nn.Module:
        self._zero.serve_calls()
        if self.moe_layer_cls_names and self._zero.config.stage == 3:
            self._zero.library.utils.set_z3_leaf_modules(module, list(self.moe_layer_cls_names))
        return EngineModel(module, self)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass through the engine."""
        if self._zero.engine is None:
            if torch.is_grad_enabled():
                raise ConfigurationError(
                    f"{type(module).__name__} was prepared for DeepSpeed without an optimizer, but called with "
                    "gradients enabled. Prepare both with accelerator.prepare(model, optimizer), or call the model "
                    "under torch.no_grad()."
                )
            if self._zero.config.stage < 3:
                return module(*args, **kwargs)
            self._zero.make(module, None)
        return self._zero.engine(*args, **kwargs)

    def release(self) -> None:
        self._zero.close()

    def joining(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        raise ConfigurationError(
            "DeepSpeed does not support join_uneven_inputs, since its ranks reduce gradients in the order of a real "
            "backward. Give all ranks the same number of batches (even_batches=True, the default)."
        )

    # backward and clipping --------------------------------------------------------------------------------------------
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs backward on a loss.

        Raises:
            ConfigurationError: for arguments that the engine's backward does not support, or for a second backward
                before the step.
        """
        if args or kwargs.pop("create_graph", False) or kwargs.pop("inputs", None) is not None:
            raise ConfigurationError(
                "DeepSpeed does not support backward(gradient, create_graph=…, inputs=…): its engine runs its own "
                "backward. Use strategy='ddp'."
            )
        if self._zero.is_reduced:
            raise ConfigurationError(
                "backward was called twice before a step, but DeepSpeed had already reduced the first gradients. Add "
                "the losses and call backward once, or use `with accelerator.accumulate(model)` and "
                "gradient_accumulation_steps. Skip a bad batch before its backward, since a step must follow backward."
            )
        self._zero.backward(loss, **kwargs)

    def clip_each_step(self, value: float) -> None:
        self._zero.config.fill({"gradient_clipping": value})

    def clip(self, parameters: Sequence[Tensor], value: float, algorithm: str, norm_type: float) -> Tensor | None:
        """Clips within the next step. Returns the norm of the reduced gradients now. Every rank must call it.

        Raises:
            ConfigurationError: for a norm other than 2, for a subset of the parameters, or for a call before backward.
        """
        if value == float("inf"):
            return None
        if norm_type != 2.0:
            raise ConfigurationError(
                f"DeepSpeed clips by the norm 2, not by norm_type={norm_type:g}. Leave norm_type out."
            )
        self._zero.config.check(RunSettings(clip_value=value, clip_algorithm=algorithm))
        chosen = {id(parameter) for parameter in parameters}
        if any(id(parameter) not in chosen for group in self._zero.groups for parameter in group):
            raise ConfigurationError(
                "DeepSpeed clips all trained parameters by one norm, but some were left out. Call "
                "clip_grad_norm_(model.parameters(), …)."
            )
        if not self._zero.is_reduced:
            raise ConfigurationError(
                "clip_grad_norm_ was called before backward, when DeepSpeed has no gradients. Call it after backward."
            )
        norm = self._zero.clip(value)
        return norm if self._zero.sharded is None else _norm(self._zero.sharded)


def _norm(sharded: Any) -> Tensor:
    """Returns the norm of the reduced gradients, as the next step will compute it."""
    if hasattr(sharded, "scaled_global_norm"):
        total = sharded.scaled_global_norm()
    elif hasattr(sharded, "_get_norm_groups"):
        total = torch.linalg.vector_norm(torch.stack([torch.as_tensor(norm) for norm in sharded._get_norm_groups()]))
    else:
        raise ConfigurationError(
            f"DeepSpeed's {type(sharded).__name__} computes the gradient norm only in its step. Set gradient_clipping "
            "in its config, and leave clip_grad_norm_ out."
        )
    return torch.as_tensor(total / sharded.loss_scale)

"""DeepSpeed under a loop of one's own: the model that the loop calls, and what it clips, accumulates and gathers by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.strategies.base import ClipAlgorithm
from leyden.strategies.deepspeed.config import ZeroConfig
from leyden.strategies.deepspeed.initialize import Stepped
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.process_group import ProcessGroupStrategy
from leyden.strategies.settings import RunSettings

if TYPE_CHECKING:
    from typing_extensions import Self

OFFLOADS = {"optimizer": "offload_optimizer", "param": "offload_parameters"}


class Called(Stepped):
    """What the engine takes for its model where a loop calls the model itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class EngineModel(nn.Module):
    """The model that a loop of one's own calls: its forward is the engine's. What is not here is the model's own."""

    wraps_module = True

    def __init__(self, module: nn.Module, strategy: OwnLoop) -> None:
        super().__init__()
        self.module = module
        self.__dict__["_strategy"] = strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_strategy"].call(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class OwnLoop(ProcessGroupStrategy):
    """The part of a DeepSpeedStrategy that serves a loop of one's own.

    Attributes:
        moe_layer_cls_names: classes of mixture-of-experts layers: at stage 3 each is gathered as a whole, since ranks may use
            other experts of it.
    """

    drives_one = True
    config: ZeroConfig
    stage: int
    engine: Any
    moe_layer_cls_names: Sequence[str] = ()
    _deepspeed: Any
    _groups: list[list[Tensor]]
    _root: type[Stepped] = Stepped
    """What the engine takes for its model."""
    _closes = True
    """The next backward ends a window: the engine's gradients are complete after it."""
    _reduced = False
    """It has been, and the engine has not stepped yet."""

    @classmethod
    def from_accelerate(cls, config: Mapping[str, Any], **kwargs: Any) -> Self:
        """The strategy that the `deepspeed_config` of an Accelerate YAML file describes.

        Args:
            config: the mapping under `deepspeed_config`, as the file has it.
            **kwargs: further arguments of ours.

        Raises:
            ConfigurationError: where a key contradicts `deepspeed_config_file`.
        """
        left = dict(config)
        clip, steps = left.pop("gradient_clipping", None), left.pop("gradient_accumulation_steps", None)
        given: dict[str, Any] = {
            "config": left.pop("deepspeed_config_file", None),
            "stage": left.pop("zero_stage", None),
            "zero3_init_flag": left.pop("zero3_init_flag", False),
            "stage3_gather_16bit_weights_on_model_save": left.pop("zero3_save_16bit_model", None),
        }
        for part, argument in OFFLOADS.items():
            device, path = left.pop(f"offload_{part}_device", None), left.pop(f"offload_{part}_nvme_path", None)
            if device not in (None, "none"):
                given[argument] = {"device": device, **({"nvme_path": path} if device == "nvme" and path else {})}
        names = left.pop("deepspeed_moe_layer_cls_names", None)
        if left:
            raise ConfigurationError(f"deepspeed_config: {sorted(left)[0]!r} has no meaning here: leave it out.")
        strategy = cls(**{**given, **kwargs})
        strategy.config.fill(
            {
                name: value
                for name, value in (("gradient_clipping", clip), ("gradient_accumulation_steps", steps))
                if value is not None
            }
        )
        strategy.moe_layer_cls_names = [name.strip() for name in names.split(",")] if names else ()
        return strategy

    # the model --------------------------------------------------------------------------------------------------------
    def wrap_forward(self, module: nn.Module) -> nn.Module:
        self._root = Called
        if self.moe_layer_cls_names and self.stage == 3:
            self._deepspeed.utils.set_z3_leaf_modules(module, list(self.moe_layer_cls_names))
        return EngineModel(module, self)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A forward pass of the loop."""
        if self.engine is None:
            if torch.is_grad_enabled():
                raise ConfigurationError(
                    f"{type(module).__name__} was prepared for DeepSpeed without an optimizer, and called to be trained: "
                    "model, optimizer = accelerator.prepare(model, optimizer), or call it under torch.no_grad()."
                )
            if self.stage < 3:
                return module(*args, **kwargs)
            self._make_engine(module, None)
        return self.engine(*args, **kwargs)

    @abstractmethod
    def _make_engine(self, module: nn.Module, optimizer: Any) -> None: ...

    @abstractmethod
    def close_engine(self) -> None: ...

    def forget_wrapped(self) -> None:
        self.close_engine()
        self._reduced = False

    # windows ----------------------------------------------------------------------------------------------------------
    @contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        before, self._closes = self._closes, enabled
        try:
            yield
        finally:
            self._closes = before

    def joining(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        raise ConfigurationError(
            "join_uneven_inputs cannot go with DeepSpeed, whose ranks reduce gradients in the order of a real backward: let all "
            "have as many batches (even_batches=True, the default)."
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if args or kwargs.pop("create_graph", False) or kwargs.pop("inputs", None) is not None:
            raise ConfigurationError(
                "backward(gradient, create_graph=…, inputs=…) cannot go with DeepSpeed, whose engine runs its own backward: use strategy='ddp'."
            )
        if self._reduced:
            raise ConfigurationError(
                "backward was called twice before a step, and DeepSpeed had reduced the gradients of the first one: add the losses "
                "and call it once, or use `with accelerator.accumulate(model)` and gradient_accumulation_steps. A bad batch is left out "
                "before its backward: after it, the step must be made."
            )
        self.engine.set_gradient_accumulation_boundary(self._closes)
        self.engine.backward(loss, **kwargs)
        self._reduced = self._closes

    def clip_each_step(self, value: float) -> None:
        self.config.fill({"gradient_clipping": value})

    # clipping ---------------------------------------------------------------------------------------------------------
    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips in the step that follows, and tells the norm of the reduced gradients now; every rank calls it."""
        if value == float("inf"):
            return None
        if norm_type != 2.0:
            raise ConfigurationError(
                f"DeepSpeed clips by the norm 2, and {norm_type:g} was asked for: leave norm_type out."
            )
        self.config.check(RunSettings(clip_value=value, clip_algorithm=algorithm))
        chosen = {id(parameter) for parameter in parameters}
        if any(id(parameter) not in chosen for group in self._groups for parameter in group):
            raise ConfigurationError(
                "DeepSpeed clips all that it trains by one norm, and some parameters were left out: "
                "clip_grad_norm_(model.parameters(), …)."
            )
        if not self._reduced:
            raise ConfigurationError(
                "clip_grad_norm_ was called before backward, where DeepSpeed has no gradients yet."
            )
        sharded = self.engine.optimizer
        if sharded is self.engine.basic_optimizer:
            return nn.utils.clip_grad_norm_([p for group in self._groups for p in group], value)
        sharded.clip_grad = value
        return self._norm(sharded)

    @staticmethod
    def _norm(sharded: Any) -> Tensor:
        """The norm of the reduced gradients, as the step that follows will find it."""
        if hasattr(sharded, "scaled_global_norm"):
            total = sharded.scaled_global_norm()
        elif hasattr(sharded, "_get_norm_groups"):
            total = torch.linalg.vector_norm(
                torch.stack([torch.as_tensor(norm) for norm in sharded._get_norm_groups()])
            )
        else:
            raise ConfigurationError(
                f"the norm of gradients is not known before the step of DeepSpeed's {type(sharded).__name__}: set "
                "gradient_clipping in its config, and leave clip_grad_norm_ out."
            )
        return torch.as_tensor(total / sharded.loss_scale)

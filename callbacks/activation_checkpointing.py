"""ActivationCheckpointing, a callback that has modules compute their activations again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.fsdp.policy import modules_of_classes
from leyden.strategies.recomputing import keep, recompute
from leyden.trainer.arguments.checks import check_flags, check_whole

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class ActivationCheckpointing(Callback):
    """Saves memory during fit: modules compute their activations again in backward instead of keeping them.

    Works under every strategy and for a module of `torch.compile`. Names of modules, parameters and checkpoints stay as
    they are, and so do the numbers, bit for bit, since a module draws the same random numbers again (dropout). A module
    whose forward pass changes its own buffers changes them twice: batch norm counts each batch twice.

    FSDPStrategy, MeshStrategy and DeepSpeedStrategy have it as `activation_checkpointing_policy`, too.

    Args:
        modules: classes of modules, or their names; or a function of a module that returns True for those that are
            meant. Choose the blocks of a model: what they return is kept, and what they compute inside is not.
        every: only every n-th of the modules found: 2 takes half of the blocks.
        offload: keep the inputs of these modules, all that is left of their activations, in the host's memory until
            backward needs them. Keyword arguments of a module stay on the device.

    Attributes:
        names: of the modules, in a fit.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, for a class that the model does not have.

    Example:
        >>> callback = ActivationCheckpointing({"Block"}, every=2)
        >>> # Trainer(strategy="ddp", callbacks=[callback]).fit(module, loader)
        >>> callback.names
        []
    """

    def __init__(
        self,
        modules: type[nn.Module] | str | Iterable[type[nn.Module] | str] | Callable[[nn.Module], bool],
        every: int = 1,
        offload: bool = False,
    ) -> None:
        if isinstance(modules, (nn.Module, Mapping)):
            raise ConfigurationError(
                f"ActivationCheckpointing({kind_of(modules)}): give classes of modules, such as "
                f"{type(modules).__name__ if isinstance(modules, nn.Module) else 'Block'}, or their names."
            )
        is_function = callable(modules) and not isinstance(modules, type)
        wanted: Any = modules if is_function or isinstance(modules, (str, type)) else _each(modules)
        if isinstance(wanted, (str, tuple)) and not wanted:
            raise ConfigurationError(f"ActivationCheckpointing({modules!r}): give the classes of the model's blocks.")
        check_whole("ActivationCheckpointing", 1, every=every)
        check_flags("ActivationCheckpointing", offload=offload)
        self.modules, self.every, self.offload = wanted, every, offload
        self.names: list[str] = []
        self._changed: list[nn.Module] = []

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.names = self._chosen(module)[:: self.every]
        self._changed += recompute(map(module.get_submodule, self.names), self.offload)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        keep(self._changed)
        self._changed, self.names = [], []

    def _chosen(self, module: nn.Module) -> list[str]:
        if isinstance(self.modules, (str, type, tuple)):
            found = modules_of_classes(module, self.modules, "ActivationCheckpointing")
            order = [name for name, _ in module.named_modules()]
            found.sort(key=order.index)
        else:
            found = [name for name, part in module.named_modules() if name and self.modules(part)]
            if not found:
                raise ConfigurationError("ActivationCheckpointing: the function returned True for no module.")
        if "" in found:
            raise ConfigurationError(
                f"ActivationCheckpointing names {type(module).__name__}, the module that is trained, whose "
                "training_step runs: name the blocks in it."
            )
        return found


def _each(modules: Any) -> tuple[Any, ...]:
    try:
        return tuple(modules)
    except TypeError:
        raise ConfigurationError(
            f"ActivationCheckpointing({modules!r}): give classes of modules, their names, or a function."
        ) from None

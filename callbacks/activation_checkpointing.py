"""ActivationCheckpointing, a callback that recomputes modules' activations in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.callbacks.base import Callback
from leyden.core.checks import check_flags, check_whole
from leyden.core.errors import ConfigurationError, kind_of
from leyden.strategies.fsdp.policy import modules_of_classes
from leyden.strategies.recomputing import keep, recompute

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class ActivationCheckpointing(Callback):
    """Saves memory during fit: modules recompute their activations in backward instead of storing them.

    Works with every strategy and with `torch.compile`. The names of modules, parameters and checkpoint entries do not
    change. Results are bit-identical, since recomputation draws the same random numbers (dropout). A module whose
    forward pass updates its own buffers updates them twice: batch norm counts each batch twice.

    FSDPStrategy, MeshStrategy and DeepSpeedStrategy offer the same as `activation_checkpointing_policy`.

    Args:
        modules: the modules to recompute: their classes, the names of these, or a predicate on modules. Choose the
            blocks of a model: their outputs are stored, their inner activations are not.
        every: recompute only every n-th of these modules; 2 selects half of the blocks.
        offload: keep the inputs of these modules, the only activations still stored, in host memory until backward
            needs them. Keyword arguments of a module stay on the device.

    Attributes:
        names: the names of the modules recomputed in the current fit.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, for a class that is not in the model.

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
        selection: Any = modules if is_function or isinstance(modules, (str, type)) else _as_tuple(modules)
        if isinstance(selection, (str, tuple)) and not selection:
            raise ConfigurationError(f"ActivationCheckpointing({modules!r}): give the classes of the model's blocks.")
        check_whole("ActivationCheckpointing", 1, every=every)
        check_flags("ActivationCheckpointing", offload=offload)
        self.modules, self.every, self.offload = selection, every, offload
        self.names: list[str] = []
        self._recomputing: list[nn.Module] = []

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.names = self._selected_names(module)[:: self.every]
        self._recomputing += recompute(map(module.get_submodule, self.names), self.offload)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        keep(self._recomputing)
        self._recomputing, self.names = [], []

    def _selected_names(self, module: nn.Module) -> list[str]:
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
                f"ActivationCheckpointing cannot recompute {type(module).__name__}, the trained module itself: select "
                "the blocks in it."
            )
        return found


def _as_tuple(modules: Any) -> tuple[Any, ...]:
    try:
        return tuple(modules)
    except TypeError:
        raise ConfigurationError(
            f"ActivationCheckpointing({modules!r}): give classes of modules, their names, or a function."
        ) from None

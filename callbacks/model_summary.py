"""ModelSummary, a callback that prints a module's layers and parameters as a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from leyden.callbacks.base import Callback
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import inform, warn
from leyden.core.text import aligned, size_of

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


@dataclass(frozen=True)
class LayerSummary:
    """A row of the table. Sizes are shapes, lists of shapes, or None if unknown."""

    name: str
    type: str
    num_parameters: int
    num_trainable: int
    training: bool | None
    uninitialized: bool = False
    in_size: Any = None
    out_size: Any = None


@dataclass(frozen=True)
class Summary:
    """The result of `summarize`; `str()` returns it as a table."""

    layers: list[LayerSummary]
    """A row for each submodule, down to the requested depth."""
    total_parameters: int
    """The number of elements of all parameters; shared ones count once."""
    trainable_parameters: int
    model_bytes: int
    """The memory of the parameters in their dtypes."""
    modules_in_train_mode: int
    """Of submodules at any depth."""
    modules_in_eval_mode: int
    uninitialized: int
    """The number of lazy modules' parameters, whose size is unknown before the first batch."""

    def __str__(self) -> str:
        lines: list[str] = []
        if self.layers:
            lines = aligned(self.cells(), gap=" | ")
            rule = "-" * max(map(len, lines))
            lines = [lines[0], rule, *lines[1:], rule]
        return "\n".join([*lines, *self.remarks(), *aligned(self.totals())])

    def cells(self) -> list[list[str]]:
        """Returns the rows of the table; the first one has the titles."""
        modes = {True: "train", False: "eval", None: ""}
        titles = ["", "Name", "Type", "Params", "Trainable", "Mode"]
        rows = [
            [
                str(index),
                layer.name,
                layer.type,
                "?" if layer.uninitialized else _count(layer.num_parameters),
                "?" if layer.uninitialized else _count(layer.num_trainable),
                modes[layer.training],
            ]
            for index, layer in enumerate(self.layers)
        ]
        if any(layer.in_size is not None for layer in self.layers):
            titles += ["In sizes", "Out sizes"]
            for row, layer in zip(rows, self.layers, strict=True):
                row += ["" if size is None else str(size) for size in (layer.in_size, layer.out_size)]
        return [titles, *rows]

    def remarks(self) -> list[str]:
        """Returns remarks on parameters that the numbers omit, one per line."""
        if not self.uninitialized:
            return []
        return [
            f"{self.uninitialized} parameters of lazy modules are not counted: their size is unknown before the "
            "first batch"
        ]

    def totals(self) -> list[tuple[str, str]]:
        """Returns the totals of the whole module as pairs of a number and its label."""
        return [
            (_count(self.trainable_parameters), "trainable parameters"),
            (_count(self.total_parameters - self.trainable_parameters), "frozen parameters"),
            (_count(self.total_parameters), "parameters in total"),
            (size_of(self.model_bytes), "of memory for the parameters"),
            (str(self.modules_in_train_mode), "modules in train mode"),
            (str(self.modules_in_eval_mode), "modules in eval mode"),
        ]


class ModelSummary(Callback):
    """Prints a table of the module's layers and parameters at the start of a fit.

    Args:
        max_depth: levels of submodules to show: 1 for direct submodules, 0 for the totals only, -1 for all.

    Raises:
        ConfigurationError: if `max_depth` is neither -1 nor a whole number from 0.

    Example:
        >>> callback = ModelSummary(max_depth=2)
        >>> # Trainer(callbacks=[callback])
    """

    def __init__(self, max_depth: int = 1) -> None:
        check_depth(max_depth)
        self._max_depth = max_depth

    @property
    def max_depth(self) -> int:
        """The number of submodule levels shown."""
        return self._max_depth

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # On every rank: a sharded module can only run on all ranks together.
        summary = summarize(module, self._max_depth)
        if trainer.is_global_zero:
            self.show(trainer, summary)

    def show(self, trainer: Trainer, summary: Summary) -> None:
        """Prints the summary. Called on rank 0; override it to present the summary differently."""
        inform(str(summary), trainer.print)


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Counts the parameters of each layer of a module.

    If the module has an `example_input_array`, it is run on it once to find the layers' input and output sizes: in eval
    mode, without gradients, and without advancing the run's random numbers.

    Args:
        module: any module.
        max_depth: as in `ModelSummary`.

    Raises:
        ConfigurationError: if `max_depth` is neither -1 nor a whole number from 0.

    Example:
        >>> print(summarize(nn.Sequential(nn.Linear(4, 2), nn.ReLU())))
          | Name | Type   | Params | Trainable | Mode
        ----------------------------------------------
        0 | 0    | Linear | 10     | 10        | train
        1 | 1    | ReLU   | 0      | 0         | train
        ----------------------------------------------
        10    trainable parameters
        0     frozen parameters
        10    parameters in total
        40 B  of memory for the parameters
        2     modules in train mode
        0     modules in eval mode
    """
    check_depth(max_depth)
    shown = [
        (name, layer)
        for name, layer in module.named_modules(remove_duplicate=False)
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]
    sizes = _sizes(module, {layer for _, layer in shown}) if shown else {}
    layers = [_row(name, layer, layer.parameters(), *sizes.get(layer, (None, None))) for name, layer in shown]
    own = list(module.parameters(recurse=False))
    if own and max_depth:
        layers.append(_row("(own)", "parameters", own))
    parameters = list(module.parameters())
    known = [parameter for parameter in parameters if not is_lazy(parameter)]
    modes = [layer.training for layer in module.modules() if layer is not module]
    return Summary(
        layers,
        total_parameters=sum(_numel(parameter) for parameter in known),
        trainable_parameters=sum(_numel(parameter) for parameter in known if parameter.requires_grad),
        model_bytes=sum(_numel(parameter) * parameter.element_size() for parameter in known),
        modules_in_train_mode=sum(modes),
        modules_in_eval_mode=len(modes) - sum(modes),
        uninitialized=len(parameters) - len(known),
    )


@contextlib.contextmanager
def undisturbed(module: nn.Module, inputs: Any) -> Iterator[Any]:
    """Prepares a trial run of a module without side effects: in eval mode, without gradients, with isolated RNG state.

    Yields:
        The inputs on the module's device, with floats in the dtype of its parameters.
    """
    from leyden.core.tree import convert_floats, move_to_device
    from leyden.data.rng import isolated_rng

    modes = [(layer, layer.training) for layer in module.modules()]
    first = next((tensor for tensor in module.parameters() if tensor.is_floating_point()), None)
    if first is not None:
        inputs = convert_floats(move_to_device(inputs, first.device), first.dtype)
    try:
        module.eval()
        with torch.no_grad(), isolated_rng(), getattr(module, "_readable", contextlib.nullcontext)():
            yield inputs
    finally:
        for layer, training in modes:
            layer.training = training


def check_depth(max_depth: int) -> None:
    if isinstance(max_depth, bool) or not isinstance(max_depth, int) or max_depth < -1:
        raise ConfigurationError(
            f"max_depth={max_depth!r}: give the number of levels to show, 0 for totals only, or -1 for all."
        )


def _row(
    name: str, layer: nn.Module | str, parameters: Iterable[nn.Parameter], in_size: Any = None, out_size: Any = None
) -> LayerSummary:
    found = list(parameters)
    known = [parameter for parameter in found if not is_lazy(parameter)]
    return LayerSummary(
        name,
        layer if isinstance(layer, str) else getattr(layer, "original_name", type(layer).__name__),
        sum(_numel(parameter) for parameter in known),
        sum(_numel(parameter) for parameter in known if parameter.requires_grad),
        None if isinstance(layer, str) else layer.training,
        len(known) < len(found),
        in_size,
        out_size,
    )


def _numel(parameter: Tensor) -> int:
    # DeepSpeed's stage 3 leaves an empty tensor in place of a parameter that is on other ranks.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _sizes(module: nn.Module, layers: set[nn.Module]) -> dict[nn.Module, tuple[Any, Any]]:
    example = getattr(module, "example_input_array", None)
    if example is None or any(is_lazy(parameter) for parameter in module.parameters()):
        return {}
    sizes: dict[nn.Module, tuple[Any, Any]] = {}

    def record(layer: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, outputs: Any) -> None:
            sizes.setdefault(layer, (_size(inputs[0] if len(inputs) == 1 else inputs), _size(outputs)))

        return hook

    # TorchScript modules do not support hooks, so their rows have no sizes.
    hookable = [layer for layer in layers if not isinstance(layer, torch.jit.ScriptModule)]
    handles = [layer.register_forward_hook(record(layer)) for layer in hookable]
    try:
        with undisturbed(module, example) as inputs:
            if isinstance(inputs, tuple):
                module(*inputs)
            elif isinstance(inputs, dict):
                module(**inputs)
            else:
                module(inputs)
    except Exception as error:  # A failed trial run must not prevent training.
        warn(f"the summary shows no sizes: forward(example_input_array) raised {error!r}.")
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _size(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, list | tuple):
        return [_size(item) for item in value]
    if isinstance(value, dict):
        return {key: _size(item) for key, item in value.items()}
    return "?"


def _count(number: int) -> str:
    """Formats a count with up to three digits and a unit: 66, 1.2 K, 34.5 M, 7.2 B."""
    size = float(number)
    for unit in ("", " K", " M", " B"):
        if size < 1000 or unit == " B":
            break
        size /= 1000
    return f"{number}" if not unit else f"{size:.0f}{unit}" if size >= 100 else f"{size:.1f}{unit}"

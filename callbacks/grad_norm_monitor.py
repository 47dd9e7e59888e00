"""GradNormMonitor, a callback that logs the norm of the gradients, before they are clipped and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.run_loggers import is_logged
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.local_weights import local_part
from leyden.trainer.arguments.checks import check_choice
from leyden.trainer.engine.engine import needs_closure

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

PER = ("total", "module", "parameter")


class GradNormMonitor(Callback):
    """Logs the norm of the gradients of each step that the Trainer logs: the total, and that of modules or parameters.

    It is the norm before clipping, of unscaled gradients (precision 16-mixed), at the end of an accumulation window. Of
    sharded gradients (FSDP, tensor and pipeline parallelism) it is the norm of the whole, which takes one small
    all-reduce. The step does not wait for the device: the values are read together with what the module has logged.
    Steps between two logged ones have no cost.

    Names are Lightning's: `grad_2.0_norm_total`, and `grad_2.0_norm/layer.weight` for a parameter, or
    `grad_2.0_norm/layer` for the module that has it; after clipping `grad_2.0_norm_clipped_total` and so on. With
    several optimizers the total is that of all of them.

    Args:
        norm_type: p of the p-norm, above 0; `float("inf")` or "inf" for the largest absolute value.
        per: "total", or also the norm of each "module" or "parameter".
        max_depth: modules below this depth count with the one above them; 1 for the module's own children. None for no
            limit.
        after_clipping: also log the norms with which the optimizer steps; none for a step that a gradient scaler skips.
        group_separator: between the kind of norm and a name.
        prog_bar: show the totals in the progress bar.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, for an engine that keeps gradients to itself
            (DeepSpeed), and with `after_clipping` for an optimizer such as LBFGS, which clips within its step.

    Example:
        >>> monitor = GradNormMonitor(norm_type=2, per="module", max_depth=1)
        >>> monitor.kind
        'grad_2.0_norm'
    """

    def __init__(
        self,
        norm_type: float | str = 2.0,
        per: Literal["total", "module", "parameter"] = "total",
        max_depth: int | None = None,
        after_clipping: bool = False,
        group_separator: str = "/",
        prog_bar: bool = False,
    ) -> None:
        self.norm_type = _norm_type("GradNormMonitor", norm_type)
        check_choice("GradNormMonitor", PER, per=per)
        if max_depth is not None and (type(max_depth) is not int or max_depth < 1 or per != "module"):
            raise ConfigurationError(
                f"GradNormMonitor(per={per!r}, max_depth={max_depth!r}): give a depth from 1, with per='module'."
            )
        self.per, self.max_depth, self.after_clipping = per, max_depth, after_clipping
        self.group_separator, self.prog_bar = group_separator, prog_bar
        self._names: dict[int, str] = {}
        self._parts: dict[tuple[int, int], _Parts] = {}
        self._found: dict[tuple[str, int], tuple[list[str], Tensor]] = {}
        """By kind and optimizer: names, and the sums of the p-th powers of their gradients."""
        self._step = -1
        """The step that they are of."""
        self._hooks = ExitStack()
        """Those of the optimizers, which it removes at its end."""

    @property
    def kind(self) -> str:
        """What the names of the norms begin with."""
        return f"grad_{self.norm_type}_norm"

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.strategy.drives_one:
            raise ConfigurationError(
                f"GradNormMonitor reads gradients before a step, and {trainer.strategy.name}'s engine keeps them: "
                "leave the callback out."
            )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._parts, self._found, self._step = {}, {}, -1
        self._hooks.close()
        if not self.after_clipping:
            return
        for optimizer in trainer.optimizers:
            if needs_closure(optimizer):
                raise ConfigurationError(
                    f"GradNormMonitor(after_clipping=True): {type(optimizer).__name__} clips within its step, several "
                    "times. Leave after_clipping out."
                )
            self._hooks.callback(optimizer.register_step_pre_hook(partial(self._note_clipped, trainer)).remove)

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        self._note(self.kind, trainer, optimizer)

    def _note_clipped(self, trainer: Trainer, optimizer: Optimizer, *_: Any) -> None:
        self._note(f"{self.kind}_clipped", trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not in the hook before the step: after that the other optimizers step, and gradients are clipped.
        if not self._found or trainer.global_step != self._step or not trainer.window.closes:
            return
        totals, parts = self._values()
        self._found = {}
        self.log_dict(totals, on_step=True, on_epoch=False, prog_bar=self.prog_bar)
        if parts:
            self.log_dict(parts, on_step=True, on_epoch=False)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._hooks.close()

    # norms ------------------------------------------------------------------------------------------------------------
    def _note(self, kind: str, trainer: Trainer, optimizer: Optimizer) -> None:
        step, strategy = trainer.global_step + 1, trainer.strategy
        if not is_logged(trainer, step):
            return
        if step != self._step:
            self._found, self._step = {}, step
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # A parameter group that a hook adds makes them more.
        key = id(optimizer), len(parameters)
        if key not in self._parts:
            self._parts[key] = _Parts.of(strategy, parameters, self._name)
        parts = self._parts[key]
        self._found[kind, key[0]] = parts.names, parts.powers(strategy, self.norm_type)

    def _name(self, parameter: Tensor, index: int) -> str:
        return self._names.get(id(parameter), f"parameter {index}")

    def _values(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the totals, and the norms of parts, by the names under which they are logged."""
        totals: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for (kind, _), (names, powers) in self._found.items():
            self._add(totals, f"{kind}_total", powers.max() if math.isinf(self.norm_type) else powers.sum())
            for name, power in zip(names, powers, strict=True) if self.per != "total" else ():
                self._add(parts, f"{kind}{self.group_separator}{self._owner(name)}", power)
        return self._rooted(totals), self._rooted(parts)

    def _add(self, sums: dict[str, Tensor], name: str, power: Tensor) -> None:
        if name not in sums:
            sums[name] = power
        else:
            sums[name] = torch.maximum(sums[name], power) if math.isinf(self.norm_type) else sums[name] + power

    def _rooted(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if math.isinf(self.norm_type):
            return sums
        return {name: power ** (1.0 / self.norm_type) for name, power in sums.items()}

    def _owner(self, name: str) -> str:
        if self.per == "parameter":
            return name
        modules = name.split(".")[:-1]
        # A parameter of the module itself keeps its name.
        return ".".join(modules[: self.max_depth]) or name


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parameters of an optimizer, on this rank and on the others.

    Args:
        here: those that count on this rank.
        names: of those on all ranks.
        places: where those of this rank stand in `names`; None if there are no others.
        weights: what this rank's part of each counts for: several ranks may hold the same one.
    """

    here: list[Tensor]
    names: list[str]
    places: Tensor | None
    weights: Tensor | None

    @classmethod
    def of(cls, strategy: Strategy, parameters: Iterable[Tensor], name: Callable[[Tensor, int], str]) -> _Parts:
        named = {id(parameter): name(parameter, index) for index, parameter in enumerate(parameters)}
        here = strategy.counted(list(parameters))
        own = [named[id(parameter)] for parameter in here]
        if strategy.replicates or strategy.ranks.world_size == 1:
            return cls(here, own, None, None)
        sizes = {name: (local_part(p).numel(), p.numel()) for name, p in zip(own, here, strict=True)}
        held: dict[str, int] = {}
        for others in strategy.ranks.all_gather_object(sizes):
            for other, (part, _) in others.items():
                held[other] = held.get(other, 0) + part
        places = {other: place for place, other in enumerate(held)}
        weights = [whole / max(held[own_name], 1) for own_name, (_, whole) in sizes.items()]
        device = strategy.root_device
        return cls(
            here,
            list(held),
            torch.tensor([places[own_name] for own_name in own], dtype=torch.long, device=device),
            torch.tensor(weights, dtype=_wide(device), device=device),
        )

    def powers(self, strategy: Strategy, norm_type: float) -> Tensor:
        """Returns the sum of the p-th powers of each whole gradient, for p = ∞ its largest value; on the device."""
        device = strategy.root_device
        powers = _norms(self.here, norm_type, device)
        is_largest = math.isinf(norm_type)
        if not is_largest:
            powers = powers**norm_type
        if self.places is None or self.weights is None:
            return powers
        everywhere = torch.zeros(len(self.names), dtype=powers.dtype, device=device)
        everywhere[self.places] = powers if is_largest else powers * self.weights
        return strategy.ranks.reduce(everywhere, reduction="max" if is_largest else "sum")


def _norms(parameters: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norms of this rank's gradients, 0 for those that there are not."""
    zero = torch.zeros((), dtype=_wide(device), device=device)
    found = [zero] * len(parameters)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        grad = local_part(_whole_gradient(parameter))
        grad = grad.coalesce().values() if grad.is_sparse else grad
        if grad.numel():
            alike.setdefault((grad.device, grad.dtype), []).append((index, grad))
    for (_, dtype), grads in alike.items():
        own = [grad for _, grad in grads]
        if dtype.is_complex:
            norms = [torch.linalg.vector_norm(grad, norm_type) for grad in own]
        else:
            half = {} if dtype.itemsize > 2 else {"dtype": torch.float32}
            norms = list(torch._foreach_norm(own, norm_type, **half))
        for (index, _), norm in zip(grads, norms, strict=True):
            found[index] = norm.to(device, zero.dtype, non_blocking=True)
    return torch.stack(found) if found else zero.new_zeros(0)


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of each parameter's gradient now, and their total, as in Lightning's `utilities.grad_norm`.

    Of a sharded gradient (FSDP, tensor parallelism) it is the norm of the whole; all ranks must call it together, as
    each gradient takes a message. `GradNormMonitor` takes one for all, and reads nothing in steps that are not logged.
    A stage of a pipeline sees its own parameters alone.

    Args:
        module: whose parameters are read; those without a gradient are left out.
        norm_type: p of the p-norm, above 0; `float("inf")` or "inf" for the largest absolute value.
        group_separator: between the kind of norm and a name.

    Returns:
        `grad_2.0_norm/weight`, … and `grad_2.0_norm_total`, scalars; empty without gradients.

    Raises:
        ConfigurationError: for a norm_type that is not above 0.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer(torch.tensor([3.0, 4.0])).backward()
        >>> {name: norm.item() for name, norm in grad_norm(layer, 2).items()}
        {'grad_2.0_norm/weight': 5.0, 'grad_2.0_norm_total': 5.0}
    """
    p = _norm_type("grad_norm", norm_type)
    found = {
        f"grad_{p}_norm{group_separator}{name}": _norm(_whole_gradient(parameter), p)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if found:
        first = next(iter(found.values()))
        alike = [norm.to(first.device, first.dtype) for norm in found.values()]
        found[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack(alike), p)
    return found


def _norm_type(owner: str, norm_type: Any) -> float:
    try:
        found = math.nan if isinstance(norm_type, bool) else float(norm_type)
    except (TypeError, ValueError):
        found = math.nan
    if not found > 0:
        raise ConfigurationError(f"{owner}(norm_type={norm_type!r}): give a number above 0, or 'inf'.")
    return found


def _norm(grad: Any, p: float) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    if not values.numel():
        return torch.zeros((), device=values.device)
    narrow = values.dtype.itemsize <= 2
    norm: Any = torch.linalg.vector_norm(values, p, dtype=torch.float32 if narrow else None)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def _whole_gradient(parameter: Any) -> Any:
    """A gradient, split as its parameter is: a layer may leave it otherwise, or a partial sum."""
    grad = parameter.grad.detach()
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(grad, "placements", placements) != placements:
        grad = grad.redistribute(placements=placements)
    return grad


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64

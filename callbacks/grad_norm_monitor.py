"""GradNormMonitor, a callback that logs the norm of the gradients before and after clipping."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import is_logged
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError
from leyden.core.tree import widest_float
from leyden.strategies.local_weights import local_part
from leyden.trainer.engine.engine import needs_closure

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

PER = ("total", "module", "parameter")


class GradNormMonitor(Callback):
    """Logs the norm of the gradients at the steps that the Trainer logs: in total, and per module or parameter.

    The norm is that of the unscaled gradients (precision 16-mixed) before clipping, at the end of an accumulation
    window. For sharded gradients (FSDP, tensor and pipeline parallelism) it is the norm of the whole gradient, at the
    cost of one small all-reduce. The step does not wait for the device: the values are read back together with those
    that the module logs. Steps that are not logged cost nothing.

    Names are Lightning's: `grad_2.0_norm_total`, `grad_2.0_norm/layer.weight` for a parameter and `grad_2.0_norm/layer`
    for a module; after clipping, `grad_2.0_norm_clipped_total` and so on. With several optimizers the total covers all
    of them.

    Args:
        norm_type: p of the p-norm, above 0; `float("inf")` or "inf" for the largest absolute value.
        per: "total", or also the norm of each "module" or "parameter".
        max_depth: the depth of the modules to log, from 1 for the module's children. Deeper ones count toward their
            ancestor at this depth. None for no limit.
        after_clipping: also log the norms after clipping; none for a step that a gradient scaler skips.
        group_separator: the separator between the kind of norm and a name.
        prog_bar: show the totals in the progress bar.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, for an engine that gives no access to gradients
            (DeepSpeed), and with `after_clipping` for an optimizer that clips within its step (such as LBFGS).

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
        self._powers: dict[tuple[str, int], tuple[list[str], Tensor]] = {}
        """By kind and optimizer: the parameters' names, and the sums of the p-th powers of their gradients."""
        self._step = -1
        """The step of `_powers`."""
        self._hooks = ExitStack()
        """Removes the optimizers' hooks when closed."""

    @property
    def kind(self) -> str:
        """The prefix of the norms' names."""
        return f"grad_{self.norm_type}_norm"

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.strategy.drives_one:
            raise ConfigurationError(
                f"GradNormMonitor reads gradients before each step, and {trainer.strategy.name} gives no access to "
                "them: remove the callback."
            )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._parts, self._powers, self._step = {}, {}, -1
        self._hooks.close()
        if not self.after_clipping:
            return
        for optimizer in trainer.optimizers:
            if needs_closure(optimizer):
                raise ConfigurationError(
                    f"GradNormMonitor(after_clipping=True) does not support {type(optimizer).__name__}, which clips "
                    "several times within its step: leave after_clipping out."
                )
            measure = partial(self._measure, f"{self.kind}_clipped", trainer)
            self._hooks.callback(optimizer.register_step_pre_hook(measure).remove)

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        self._measure(self.kind, trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Logged only now, once all optimizers have stepped and gradients have been clipped.
        if not self._powers or trainer.global_step != self._step or not trainer.window.closes:
            return
        totals, parts = self._norms()
        self._powers = {}
        self.log_dict(totals, on_step=True, on_epoch=False, prog_bar=self.prog_bar)
        if parts:
            self.log_dict(parts, on_step=True, on_epoch=False)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._hooks.close()

    # norms ------------------------------------------------------------------------------------------------------------
    def _measure(self, kind: str, trainer: Trainer, optimizer: Optimizer, *_: Any) -> None:
        step, strategy = trainer.global_step + 1, trainer.strategy
        if not is_logged(trainer, step):
            return
        if step != self._step:
            self._powers, self._step = {}, step
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # The number changes if a hook adds a parameter group.
        key = id(optimizer), len(parameters)
        if key not in self._parts:
            self._parts[key] = _Parts.of(strategy, parameters, self._names)
        parts = self._parts[key]
        self._powers[kind, id(optimizer)] = parts.names, parts.powers(strategy, self.norm_type)

    def _norms(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the total norms and those of modules or parameters, by the names to log them under."""
        totals: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for (kind, _), (names, powers) in self._powers.items():
            self._add(totals, f"{kind}_total", powers.max() if math.isinf(self.norm_type) else powers.sum())
            for name, power in zip(names, powers, strict=True) if self.per != "total" else ():
                self._add(parts, f"{kind}{self.group_separator}{self._part_name(name)}", power)
        return self._roots(totals), self._roots(parts)

    def _add(self, sums: dict[str, Tensor], name: str, power: Tensor) -> None:
        if name not in sums:
            sums[name] = power
        else:
            sums[name] = torch.maximum(sums[name], power) if math.isinf(self.norm_type) else sums[name] + power

    def _roots(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if math.isinf(self.norm_type):
            return sums
        return {name: power ** (1.0 / self.norm_type) for name, power in sums.items()}

    def _part_name(self, name: str) -> str:
        """Returns the name of the parameter, or of the module that it counts toward."""
        if self.per == "parameter":
            return name
        modules = name.split(".")[:-1]
        # A parameter that the root module owns directly keeps its name.
        return ".".join(modules[: self.max_depth]) or name


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parameters of an optimizer, on this rank and on all ranks."""

    local: list[Tensor]
    """The parameters to measure on this rank."""
    names: list[str]
    """The names of the parameters on all ranks."""
    positions: Tensor | None
    """The positions of this rank's parameters in `names`; None if this rank has all of them."""
    weights: Tensor | None
    """The weight of this rank's part of each parameter, below 1 if several ranks hold the same part."""

    @classmethod
    def of(cls, strategy: Strategy, parameters: list[Tensor], known: dict[int, str]) -> _Parts:
        """Returns the parts of an optimizer's parameters, given the names that are known, by `id`."""
        named = {id(p): known.get(id(p), f"parameter {index}") for index, p in enumerate(parameters)}
        local = strategy.counted(parameters)
        own_names = [named[id(parameter)] for parameter in local]
        if strategy.replicates or strategy.ranks.world_size == 1:
            return cls(local, own_names, None, None)
        sizes = {name: (local_part(p).numel(), p.numel()) for name, p in zip(own_names, local, strict=True)}
        # Elements held by all ranks together, by name: more than the whole if ranks hold the same parts.
        held: dict[str, int] = {}
        for rank_sizes in strategy.ranks.all_gather_object(sizes):
            for rank_name, (part, _) in rank_sizes.items():
                held[rank_name] = held.get(rank_name, 0) + part
        positions = {held_name: position for position, held_name in enumerate(held)}
        weights = [whole / max(held[own_name], 1) for own_name, (_, whole) in sizes.items()]
        device = strategy.root_device
        return cls(
            local,
            list(held),
            torch.tensor([positions[own_name] for own_name in own_names], dtype=torch.long, device=device),
            torch.tensor(weights, dtype=widest_float(device), device=device),
        )

    def powers(self, strategy: Strategy, norm_type: float) -> Tensor:
        """Returns, on the device, the sum of the p-th powers of each whole gradient; for p = ∞ its largest value."""
        device = strategy.root_device
        powers = _local_norms(self.local, norm_type, device)
        is_largest = math.isinf(norm_type)
        if not is_largest:
            powers = powers**norm_type
        if self.positions is None or self.weights is None:
            return powers
        all_powers = torch.zeros(len(self.names), dtype=powers.dtype, device=device)
        all_powers[self.positions] = powers if is_largest else powers * self.weights
        return strategy.ranks.reduce(all_powers, reduction="max" if is_largest else "sum")


def _local_norms(parameters: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the norms of this rank's parts of gradients; 0 for a parameter without a gradient."""
    zero = torch.zeros((), dtype=widest_float(device), device=device)
    result = [zero] * len(parameters)
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        grad = local_part(_sharded_gradient(parameter))
        grad = grad.coalesce().values() if grad.is_sparse else grad
        if grad.numel():
            by_kind.setdefault((grad.device, grad.dtype), []).append((index, grad))
    for (_, dtype), indexed in by_kind.items():
        grads = [grad for _, grad in indexed]
        if dtype.is_complex:
            norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
        else:
            half = {} if dtype.itemsize > 2 else {"dtype": torch.float32}
            norms = list(torch._foreach_norm(grads, norm_type, **half))
        for (index, _), norm in zip(indexed, norms, strict=True):
            result[index] = norm.to(device, zero.dtype, non_blocking=True)
    return torch.stack(result) if result else zero.new_zeros(0)


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Returns the current norm of each parameter's gradient and their total, as Lightning's `utilities.grad_norm` does.

    For a sharded gradient (FSDP, tensor parallelism) this is the norm of the whole gradient. It takes one collective
    per gradient, so all ranks must call this together. `GradNormMonitor` needs one collective for all gradients, and
    reads nothing at steps that are not logged. In a pipeline it is refused: a stage has only its own gradients.

    Args:
        module: the module whose gradients are measured; parameters without a gradient are omitted.
        norm_type: p of the p-norm, above 0; `float("inf")` or "inf" for the largest absolute value.
        group_separator: the separator between the kind of norm and a name.

    Returns:
        `grad_2.0_norm/weight`, … and `grad_2.0_norm_total`, scalars; empty without gradients.

    Raises:
        ConfigurationError: if `norm_type` is not above 0.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer(torch.tensor([3.0, 4.0])).backward()
        >>> {name: norm.item() for name, norm in grad_norm(layer, 2).items()}
        {'grad_2.0_norm/weight': 5.0, 'grad_2.0_norm_total': 5.0}
    """
    p = _norm_type("grad_norm", norm_type)
    norms = {
        f"grad_{p}_norm{group_separator}{name}": _norm(_sharded_gradient(parameter), p)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        first = next(iter(norms.values()))
        converted = [norm.to(first.device, first.dtype) for norm in norms.values()]
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack(converted), p)
    return norms


def _norm_type(owner: str, norm_type: Any) -> float:
    try:
        p = math.nan if isinstance(norm_type, bool) else float(norm_type)
    except (TypeError, ValueError):
        p = math.nan
    if not p > 0:
        raise ConfigurationError(f"{owner}(norm_type={norm_type!r}): give a number above 0, or 'inf'.")
    return p


def _norm(grad: Any, p: float) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    if not values.numel():
        return torch.zeros((), device=values.device)
    narrow = values.dtype.itemsize <= 2
    norm: Any = torch.linalg.vector_norm(values, p, dtype=torch.float32 if narrow else None)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def _sharded_gradient(parameter: Any) -> Any:
    """Returns the gradient with its parameter's placements: a layer may leave others, or a partial sum."""
    grad = parameter.grad.detach()
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(grad, "placements", placements) != placements:
        grad = grad.redistribute(placements=placements)
    return grad

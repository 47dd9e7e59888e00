"""The choice of Linear layers that compute in fp8, and the reasons for leaving out the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import warn

Filter: TypeAlias = "Callable[[nn.Module, str], bool]"
MULTIPLE = 16
"""Both dimensions of a weight must be a multiple of this number, as the hardware's matrix units require."""


@dataclass(frozen=True)
class Layers:
    """Chooses layers. By default every `nn.Linear` with suitable dimensions, except the first and the last.

    Attributes:
        skip: modules to leave out with their submodules: classes, class names, or module names as in `named_modules`.
        first_and_last: whether to include the model's first and last Linear. Low precision harms the input and the
            logits most.
        choose: a function of (module, name) that returns whether to include a Linear, instead of `first_and_last`.
            Called for each Linear with suitable dimensions.
    """

    skip: Sequence[type | str] = ()
    first_and_last: bool = False
    choose: Filter | None = None

    def __post_init__(self) -> None:
        if isinstance(self.skip, (str, type)):
            raise ConfigurationError(f"skip={self.skip!r} is not a list. Pass classes or names, such as skip=['head'].")

    def of(self, module: nn.Module, *, untied: bool = False) -> Chosen:
        """Chooses among the layers of a model.

        Args:
            module: the model.
            untied: whether to leave out tied weights.

        Raises:
            ConfigurationError: if an entry of `skip` matches nothing in the model. The message suggests similar names.
        """
        linears = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        skipped = self._skipped(module)
        uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        ends = {linears[0][0], linears[-1][0]} if linears and not self.first_and_last and self.choose is None else set()
        chosen = Chosen()
        for name, linear in linears:
            reason = _obstacle(linear)
            if reason is None and name in skipped:
                reason = "skipped"
            if reason is None and self.choose is not None and not self.choose(linear, name):
                reason = "left out by the filter"
            if reason is None and name in ends:
                reason = "first or last"
            if reason is None and untied and uses[id(linear.weight)] > 1:
                reason = "tied"
            if reason is None:
                chosen.names.append(name)
            else:
                chosen.left[name] = reason
        return chosen

    def _skipped(self, module: nn.Module) -> set[str]:
        parts = dict(module.named_modules())
        skipped: set[str] = set()
        for entry in self.skip:
            roots = [
                name
                for name, part in parts.items()
                if (isinstance(part, entry) if isinstance(entry, type) else entry in (name, type(part).__name__))
            ]
            if not roots:
                known = [*filter(None, parts), *sorted({type(part).__name__ for part in parts.values()})]
                raise ConfigurationError(
                    f"skip={entry!r}: {type(module).__name__} has no such module. {nearest(str(entry), known)}"
                )
            for root in roots:
                skipped.update(name for name in parts if name == root or not root or name.startswith(f"{root}."))
        return skipped


@dataclass
class Chosen:
    """The layers of a model chosen for fp8.

    Attributes:
        names: names of the layers that compute in fp8.
        left: name of each other Linear -> reason.
    """

    names: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def warn(self, precision: str, module: nn.Module) -> None:
        """Warns that a model has no suitable layer."""
        why = f" ({self.reasons()})" if self.left else ", since it has none"
        warn(
            f"precision={precision!r} converts no Linear of {type(module).__name__}{why}, so it runs in bf16-mixed. "
            "Choose layers with Float8Precision(first_and_last=True, …).",
        )

    def reasons(self) -> str:
        """Summarizes why layers were left out.

        Example:
            >>> Chosen([], {"a": "first or last", "b": "first or last", "c": "tied"}).reasons()
            '2 first or last, 1 tied'
        """
        return ", ".join(f"{count} {reason}" for reason, count in Counter(self.left.values()).items())


def _obstacle(linear: nn.Linear) -> str | None:
    """Returns why a layer cannot compute in fp8, or None if it can."""
    if type(linear) is not nn.Linear:
        # A subclass may compute something else (LoRA, a parametrization), or other code may read its weight directly
        # (attention).
        return f"of the class {type(linear).__name__}"
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"not divisible by {MULTIPLE}"
    return None

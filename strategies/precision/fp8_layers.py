"""Which Linear layers of a model compute in fp8, and why others do not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from leyden.strategies.errors import ConfigurationError, nearest

Filter: TypeAlias = "Callable[[nn.Module, str], bool]"
MULTIPLE = 16
"""Both dimensions of a weight must be a multiple of it: the hardware's matrix units want it so."""


@dataclass(frozen=True)
class Layers:
    """The choice of layers, by default every `nn.Linear` but the first and the last, if its dimensions allow it.

    Attributes:
        skip: classes of modules, their names, or names of modules as `named_modules` gives them: what is within stays
            out.
        first_and_last: take the first and the last Linear of the model too; the input and the logits suffer most from
            few bits.
        choose: in place of all that, a function of (module, name) that says which; it is asked of each Linear whose
            dimensions allow fp8.
    """

    skip: Sequence[type | str] = ()
    first_and_last: bool = False
    choose: Filter | None = None

    def __post_init__(self) -> None:
        if isinstance(self.skip, (str, type)):
            raise ConfigurationError(f"skip={self.skip!r}: give a list of classes or names, as skip=['head'].")

    def of(self, module: nn.Module, *, untied: bool = False) -> Chosen:
        """Chooses among the layers of a model.

        Args:
            module: the model.
            untied: leave out weights that the model has in two places.

        Raises:
            ConfigurationError: if an entry of `skip` is nothing in the model; names the nearest.
        """
        linears = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        skipped = self._skipped(module)
        places = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        ends = {linears[0][0], linears[-1][0]} if linears and not self.first_and_last and self.choose is None else set()
        chosen = Chosen()
        for name, linear in linears:
            reason = _cannot(linear)
            if reason is None and name in skipped:
                reason = "skipped"
            if reason is None and self.choose is not None and not self.choose(linear, name):
                reason = "left out by the filter"
            if reason is None and name in ends:
                reason = "first or last"
            if reason is None and untied and places[id(linear.weight)] > 1:
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
    """The layers that were chosen in a model.

    Attributes:
        names: of the layers that compute in fp8.
        left: name of each other Linear → why.
    """

    names: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def warn(self, precision: str, module: nn.Module) -> None:
        """Says that a model has no layer for fp8."""
        why = f": {self.reasons()}" if self.left else ", since it has none"
        warnings.warn(
            f"precision={precision!r} converts no Linear of {type(module).__name__}{why}. It runs in bf16-mixed; "
            "Float8Precision(first_and_last=True, …) chooses layers.",
            stacklevel=4,
        )

    def reasons(self) -> str:
        """Why layers were left, in a few words.

        Example:
            >>> Chosen([], {"a": "first or last", "b": "first or last", "c": "tied"}).reasons()
            '2 first or last, 1 tied'
        """
        return ", ".join(f"{count} {reason}" for reason, count in Counter(self.left.values()).items())


def _cannot(linear: nn.Linear) -> str | None:
    """Why a layer cannot compute in fp8; None if it can."""
    if type(linear) is not nn.Linear:
        # A subclass may compute something else (LoRA, a parametrization), or its weight is read past it (attention).
        return f"of the class {type(linear).__name__}"
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"not divisible by {MULTIPLE}"
    return None

"""The mesh of a process's devices, and which dimension of which tensor is split over which of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor, nn

from leyden.strategies.errors import ConfigurationError, nearest

Spec: TypeAlias = "tuple[str | tuple[str, ...] | None, ...]"
DATA, FSDP = "data", "fsdp"


class XLALayout:
    """How tensors lie over the devices. With one device there is nothing to lay out.

    Args:
        mesh: names and sizes of the devices' dimensions; one of all devices if left out.
        shard: patterns of parameters' names, and for each which dimension of the mesh splits each of its dimensions.
        batch: the dimensions of the mesh that batches are split over.
        fully: split every parameter that no pattern fits along its longest dimension.
        min_size: but not those with fewer elements.

    Raises:
        ConfigurationError: if names or sizes are not valid.
    """

    def __init__(
        self,
        mesh: Mapping[str, int] | None = None,
        shard: Mapping[str, Spec] | None = None,
        batch: Sequence[str] | None = None,
        fully: bool = False,
        min_size: int = 0,
    ) -> None:
        self.axes: dict[str, int] = dict(mesh or {})
        self.fully, self.min_size = fully, min_size
        self.rules: dict[str, Spec] = {pattern: tuple(spec) for pattern, spec in (shard or {}).items()}
        self._given_batch = None if batch is None else tuple(batch)
        self._mesh: Any = None
        self._fitted: set[str] = set()
        self._names: list[str] = []
        self._whole_axis = FSDP if fully else DATA
        for name, size in self.axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigurationError(f"mesh={dict(self.axes)}: the size of {name!r} must be a whole number from 1.")
        self._check_names(list(self.axes) or [self._whole_axis])

    def _check_names(self, names: list[str]) -> None:
        for axis in self._given_batch or ():
            if axis not in names:
                raise ConfigurationError(f"batch={self._given_batch}: the mesh has no {axis!r}. {nearest(axis, names)}")
        for pattern, spec in self.rules.items():
            used = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
            for axis in used:
                if axis not in names:
                    raise ConfigurationError(
                        f"shard={{{pattern!r}: {spec}}}: the mesh has no {axis!r}. {nearest(axis, names)}"
                    )
            if len(set(used)) < len(used):
                raise ConfigurationError(
                    f"shard={{{pattern!r}: {spec}}}: a dimension of the mesh can split one dimension of a tensor. Name "
                    "each once."
                )

    def check_devices(self, wanted: int | list[int] | None) -> None:
        """Raises where the mesh asks for other devices than the run."""
        if not self.axes or wanted is None:
            return
        count = wanted if isinstance(wanted, int) else len(wanted)
        if math.prod(self.axes.values()) != count:
            raise ConfigurationError(
                f"mesh={self.axes} has {math.prod(self.axes.values())} devices, and devices={wanted}: make them equal, "
                "or leave devices out."
            )

    # at set-up --------------------------------------------------------------------------------------------------------
    @property
    def is_spread(self) -> bool:
        """True if there are several devices."""
        return self._mesh is not None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The dimensions of the mesh that batches are split over."""
        if self._given_batch is not None:
            return self._given_batch
        known = tuple(name for name in (DATA, FSDP) if name in self.axes)
        return known or tuple(self.axes)[:1]

    def begin(self, count: int) -> None:
        """Makes the mesh of so many devices.

        Raises:
            ConfigurationError: if it has another number.
        """
        if not self.axes:
            self.axes = {self._whole_axis: count}
        if math.prod(self.axes.values()) != count:
            raise ConfigurationError(
                f"mesh={self.axes} has {math.prod(self.axes.values())} devices, and XLA has {count} here: their "
                f"product must be {count}."
            )
        if count == 1:
            return
        import numpy as np
        from torch_xla.distributed.spmd import Mesh

        self._mesh = Mesh(np.arange(count), tuple(self.axes.values()), tuple(self.axes))

    def place(self, module: nn.Module) -> None:
        """Lays a module's parameters over the devices.

        Raises:
            ConfigurationError: if a rule has not as many entries as the tensor has dimensions.
        """
        if self._mesh is None:
            return
        for name, parameter in module.named_parameters():
            pattern = next((pattern for pattern in self.rules if fnmatchcase(name, pattern)), None)
            spec = self._fully(parameter) if pattern is None else self.rules[pattern]
            self._fitted |= {pattern for pattern in self.rules if fnmatchcase(name, pattern)}
            self._names.append(name)
            if spec is None:
                continue
            if len(spec) != parameter.dim():
                raise ConfigurationError(
                    f"shard={{{pattern!r}: {spec}}} has {len(spec)} entries, and {name!r} has {parameter.dim()} "
                    f"dimensions {tuple(parameter.shape)}: give one for each, None for a dimension that is not split."
                )
            self._mark(parameter, spec)

    def check_rules(self) -> None:
        """Raises for a rule that fits no parameter, once all modules are placed."""
        for pattern in self.rules if self._mesh is not None else ():
            if pattern not in self._fitted:
                raise ConfigurationError(
                    f"shard has {pattern!r}, which fits no parameter. {nearest(pattern, dict.fromkeys(self._names))}"
                )

    def _fully(self, parameter: Tensor) -> Spec | None:
        """The split of a parameter along its longest dimension; None for one that stays whole."""
        if not self.fully or parameter.numel() < max(self.min_size, 2):
            return None
        count = self.axes[self._whole_axis]
        # One that divides is split without padding.
        longest = max(range(parameter.dim()), key=lambda dim: (parameter.shape[dim] % count == 0, parameter.shape[dim]))
        if parameter.shape[longest] < count:
            return None
        return tuple(self._whole_axis if dim == longest else None for dim in range(parameter.dim()))

    def split(self, tensor: Tensor) -> Tensor:
        """Lays a tensor of a batch over the devices, along its first dimension."""
        if tensor.dim() and self.batch_axes:
            self._mark(tensor, (self.batch_axes, *(None,) * (tensor.dim() - 1)))
        return tensor

    def _mark(self, tensor: Tensor, spec: Spec) -> None:
        from torch_xla.distributed.spmd import mark_sharding

        mark_sharding(tensor, self._mesh, spec)

    def described(self, modules: Sequence[nn.Module]) -> str:
        """What fit prints of the layout; empty for one device."""
        if self._mesh is None:
            return ""
        return f"one process over {' × '.join(f'{name} {size}' for name, size in self.axes.items())} devices"

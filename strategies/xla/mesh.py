"""The device mesh of a process, and how tensors are sharded over its dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor, nn

from leyden.core.errors import ConfigurationError, nearest

Spec: TypeAlias = "tuple[str | tuple[str, ...] | None, ...]"
DATA, FSDP = "data", "fsdp"


class XLALayout:
    """How tensors are sharded over the devices. With one device, nothing is sharded.

    Args:
        mesh: names and sizes of the mesh dimensions. Default: one dimension with all devices.
        shard: pattern of parameter names -> for each dimension of the parameter, the mesh dimension that splits it.
        batch: the mesh dimensions that batches are split over.
        fully: whether to split each parameter that matches no pattern along its longest dimension.
        min_size: minimum number of elements for `fully`. Smaller parameters stay whole.

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
        self._matched: set[str] = set()
        self._names: list[str] = []
        self._default_axis = FSDP if fully else DATA
        for name, size in self.axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigurationError(f"mesh={dict(self.axes)}: the size of {name!r} must be a whole number from 1.")
        self._check_names(list(self.axes) or [self._default_axis])

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
                    f"shard={{{pattern!r}: {spec}}}: a mesh dimension can split only one dimension of a tensor. Name "
                    "each once."
                )

    def check_devices(self, wanted: int | list[int] | None) -> None:
        """Raises ConfigurationError if the mesh has another number of devices than the run."""
        if not self.axes or wanted is None:
            return
        count = wanted if isinstance(wanted, int) else len(wanted)
        if math.prod(self.axes.values()) != count:
            raise ConfigurationError(
                f"mesh={self.axes} has {math.prod(self.axes.values())} devices, but devices={wanted}. Make them equal, "
                "or leave devices out."
            )

    # at setup --------------------------------------------------------------------------------------------------------
    @property
    def is_spread(self) -> bool:
        """True if there are several devices."""
        return self._mesh is not None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh dimensions that batches are split over."""
        if self._given_batch is not None:
            return self._given_batch
        known = tuple(name for name in (DATA, FSDP) if name in self.axes)
        return known or tuple(self.axes)[:1]

    def begin(self, count: int) -> None:
        """Creates the mesh of `count` devices.

        Raises:
            ConfigurationError: if the mesh has another number of devices.
        """
        if not self.axes:
            self.axes = {self._default_axis: count}
        if math.prod(self.axes.values()) != count:
            raise ConfigurationError(
                f"mesh={self.axes} has {math.prod(self.axes.values())} devices, but XLA has {count}. The product of "
                f"its sizes must be {count}."
            )
        if count == 1:
            return
        import numpy as np
        from torch_xla.distributed.spmd import Mesh

        self._mesh = Mesh(np.arange(count), tuple(self.axes.values()), tuple(self.axes))

    def place(self, module: nn.Module) -> None:
        """Shards a module's parameters over the devices.

        Raises:
            ConfigurationError: if a rule's number of entries differs from the parameter's number of dimensions.
        """
        if self._mesh is None:
            return
        for name, parameter in module.named_parameters():
            matching = [pattern for pattern in self.rules if fnmatchcase(name, pattern)]
            self._matched.update(matching)
            self._names.append(name)
            spec = self.rules[matching[0]] if matching else self._fully(parameter)
            if spec is None:
                continue
            if len(spec) != parameter.dim():
                raise ConfigurationError(
                    f"shard={{{matching[0]!r}: {spec}}} has {len(spec)} entries, but {name!r} has {parameter.dim()} "
                    f"dimensions {tuple(parameter.shape)}. List one per dimension, None for one that is not split."
                )
            self._mark(parameter, spec)

    def check_rules(self) -> None:
        """Raises for a rule that matches no parameter. Called once all modules are placed."""
        for pattern in self.rules if self._mesh is not None else ():
            if pattern not in self._matched:
                raise ConfigurationError(
                    f"shard has {pattern!r}, which matches no parameter. {nearest(pattern, dict.fromkeys(self._names))}"
                )

    def _fully(self, parameter: Tensor) -> Spec | None:
        """Returns the split of a parameter along its longest dimension, or None if it stays whole."""
        if not self.fully or parameter.numel() < max(self.min_size, 2):
            return None
        count = self.axes[self._default_axis]
        # Prefers dimensions that divide evenly, which need no padding.
        longest = max(range(parameter.dim()), key=lambda dim: (parameter.shape[dim] % count == 0, parameter.shape[dim]))
        if parameter.shape[longest] < count:
            return None
        return tuple(self._default_axis if dim == longest else None for dim in range(parameter.dim()))

    def split(self, tensor: Tensor) -> Tensor:
        """Shards a tensor of a batch over the devices, along its first dimension."""
        if tensor.dim() and self.batch_axes:
            self._mark(tensor, (self.batch_axes, *(None,) * (tensor.dim() - 1)))
        return tensor

    def _mark(self, tensor: Tensor, spec: Spec) -> None:
        from torch_xla.distributed.spmd import mark_sharding

        mark_sharding(tensor, self._mesh, spec)

    def described(self, modules: Sequence[nn.Module]) -> str:
        """Returns a line about the layout that fit prints; empty for one device."""
        if self._mesh is None:
            return ""
        return f"one process over {' × '.join(f'{name} {size}' for name, size in self.axes.items())} devices"

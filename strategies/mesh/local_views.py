"""LocalViews: in a step a module reads its whole parameters as plain tensors, to mix with its other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


class LocalViews:
    """Which modules read which of their parameters as plain tensors.

    Parameters that no style splits are DTensors all the same, replicated on the mesh of the others, so that one
    optimizer steps all of them together. A forward written for plain tensors could not mix them with its activations.
    So `module.weight` is this rank's tensor while a step runs, with the DTensor's gradient, and the parameter itself
    at any other time.

    Args:
        mesh: the `tp` dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._depth = 0
        self._kinds: dict[tuple[Any, ...], type[nn.Module]] = {}

    @property
    def are_active(self) -> bool:
        """True while a step runs."""
        return self._depth > 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this context modules read plain tensors."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def give(self, module: nn.Module, gradients: dict[str, Placement]) -> None:
        """Lets a module read the named parameters as plain tensors; their gradients are placed as given."""
        kind = type(module)
        key = (kind, *((name, str(placement)) for name, placement in gradients.items()))
        if key not in self._kinds:
            views = {name: property(self._reader(name, placement)) for name, placement in gradients.items()}
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            self._kinds[key] = type(kind.__name__, (kind,), {**names, **views})
        module.__class__ = self._kinds[key]

    def _reader(self, name: str, placement: Placement) -> Any:
        def read(module: nn.Module) -> Any:
            parameter: Any = module._parameters[name]
            # A shard of FSDP's, outside of its group's forward, is left for torch to refuse.
            if self._depth and isinstance(parameter, DTensor) and parameter.device_mesh == self._mesh:
                return parameter.to_local(grad_placements=[placement])
            return parameter

        return read

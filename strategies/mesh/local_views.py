"""LocalViews: within a step, modules read replicated parameters as plain tensors, which mix with their activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


class LocalViews:
    """Lets modules read some of their parameters as plain tensors while a step runs.

    Parameters that no style splits are replicated DTensors on the same mesh as the split ones, so one optimizer can
    step all of them together. A forward written for plain tensors could not mix a DTensor with its activations. So
    while a step runs, `module.weight` is the local tensor, whose gradient flows to the DTensor; at any other time it is
    the parameter itself.

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
        """Makes modules read plain tensors within this context."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def add(self, module: nn.Module, gradients: dict[str, Placement]) -> None:
        """Makes a module read some parameters as plain tensors.

        Args:
            module: the module; its class is replaced by a subclass.
            gradients: parameter name → placement of its gradient.
        """
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
            # An FSDP shard that is read outside its group's forward is on another mesh; torch refuses it.
            if self._depth and isinstance(parameter, DTensor) and parameter.device_mesh == self._mesh:
                return parameter.to_local(grad_placements=[placement])
            return parameter

        return read

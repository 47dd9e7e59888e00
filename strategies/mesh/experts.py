"""Experts: the style that splits the experts of a mixture, stored as weights of one module, over the `tp` dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from leyden.core.errors import ConfigurationError, kind_of, nearest
from leyden.core.tree import map_tensors
from leyden.strategies.mesh.styles import Style

GATE_AND_UP = 2
"""The number of matrices stacked in a packed weight. Each is split separately."""


def split_of(word: str, parameter: Any) -> Placement:
    """Returns the placement of a single weight (…, outputs, inputs), from the plan's word for it."""
    outputs = parameter.ndim - 2
    if word == "packed_colwise":
        return _StridedShard(outputs, split_factor=GATE_AND_UP)
    return Shard(outputs if word == "colwise" else parameter.ndim - 1)


SPLITS = ("colwise", "rowwise", "packed_colwise")
"""Words of a plan for single parameters."""


@dataclass
class Experts(Style):
    """Runs a module on this rank's part of each of its weights. The ranks' outputs are summed.

    Attributes:
        splits: parameter name → the plan's word for it.
    """

    splits: Mapping[str, str] = field(default_factory=dict)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: split_of(word, module._parameters[name]) for name, word in self.splits.items()}

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def enter(tensor: Tensor) -> Tensor:
            # Hidden states and router weights have partial gradients, which are summed over the ranks.
            if not tensor.requires_grad:
                return tensor
            plain: Tensor = self.shared_input.enter(tensor, mesh).to_local(grad_placements=[Partial()])
            return plain

        self.switch_rng(True)
        entered: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors((args, kwargs), enter)
        return entered

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        whole = DTensor.from_local(outputs, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        self.switch_rng(False)
        return whole.to_local()


def check_experts(name: str, module: nn.Module, style: Experts, size: int) -> None:
    """Refuses experts if the plan leaves a parameter whole, or splits one unevenly.

    Raises:
        ConfigurationError: names the parameter.
    """
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    if style.sequence:
        raise ConfigurationError(
            f"the plan makes {name!r} 'experts' and has 'sequence' layers, which this version does not combine: leave "
            "'sequence' out of the plan."
        )
    for key in parameters:
        if key not in style.splits:
            raise ConfigurationError(
                f"the plan makes {name!r} 'experts', whose outputs are summed over the ranks, and does not split "
                f"{name}.{key}, which would count {size} times. Add '{name}.{key}' to the plan with one of "
                f"{', '.join(SPLITS)}."
            )
    for key, word in style.splits.items():
        placement = split_of(word, parameters[key])
        assert isinstance(placement, (Shard, _StridedShard))
        parts = size * (GATE_AND_UP if word == "packed_colwise" else 1)
        count = parameters[key].shape[placement.dim]
        if count % parts:
            raise ConfigurationError(
                f"{name}.{key} has {count} {'inputs' if word == 'rowwise' else 'outputs'}, which tp={size} does not "
                f"divide{' into halves' if parts > size else ''}: choose another tp."
            )


def check_split(name: str, owner: nn.Module, word: object, owner_style: object) -> str:
    """Returns the plan's word for a single parameter, after checking it.

    Args:
        name: full name of the parameter.
        owner: the module that it belongs to.
        word: the plan's word for the parameter.
        owner_style: the plan's style for the module; None if it has none.

    Raises:
        ConfigurationError: for an unknown word, or a module whose style is not 'experts'; names the parameter.
    """
    if not isinstance(word, str) or word not in SPLITS:
        raise ConfigurationError(f"the plan makes the parameter {name!r} {word!r}. {nearest(str(word), SPLITS)}")
    if owner_style not in ("experts", "expert_parallel"):
        module = name.rpartition(".")[0]
        raise ConfigurationError(
            f"the plan splits the parameter {name!r} of {kind_of(owner)}, and nothing sums the ranks' partial outputs: "
            f"add {module!r}: 'experts' to the plan, or name a layer."
        )
    return word

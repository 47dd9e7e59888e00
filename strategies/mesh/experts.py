"""Experts: a mixture's experts, the weights of one module, split over the ranks of the `tp` dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError, kind_of, nearest
from leyden.strategies.mesh.styles import Style

GATE_AND_UP = 2
"""The matrices that a packed weight stacks, each of which is split by itself."""


def split_of(word: str, parameter: Tensor) -> Placement:
    """How a weight (…, outputs, inputs) that a plan names by itself is placed."""
    outputs = parameter.ndim - 2
    if word == "packed_colwise":
        return _StridedShard(outputs, split_factor=GATE_AND_UP)
    return Shard(outputs if word == "colwise" else parameter.ndim - 1)


SPLITS = ("colwise", "rowwise", "packed_colwise")
"""A plan's words for a single parameter."""


@dataclass
class Experts(Style):
    """Runs a module on this rank's part of each of its weights. The ranks' outputs are summed.

    Attributes:
        splits: the plan's word for each parameter.
    """

    splits: Mapping[str, str] = field(default_factory=dict)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: split_of(word, module.get_parameter(name)) for name, word in self.splits.items()}

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def enter(tensor: Tensor) -> Tensor:
            # Hidden states and the router's weights: each rank has a part of their gradients' sum.
            if not tensor.requires_grad:
                return tensor
            plain: Tensor = self.entrance.enter(tensor, mesh).to_local(grad_placements=[Partial()])
            return plain

        self.draws(True)
        entered: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors((args, kwargs), enter)
        return entered

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        whole = DTensor.from_local(outputs, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        self.draws(False)
        return whole.to_local()


def check_experts(name: str, module: nn.Module, style: Experts, size: int) -> None:
    """Refuses experts that a plan splits in part, or not evenly.

    Raises:
        ConfigurationError: names the parameter.
    """
    own = {key: p for key, p in module._parameters.items() if p is not None}
    if style.sequence:
        raise ConfigurationError(
            f"the plan makes {name!r} 'experts' and has 'sequence' layers, which this version does not join: leave "
            "'sequence' out of the plan."
        )
    for key in own:
        if key not in style.splits:
            raise ConfigurationError(
                f"the plan makes {name!r} 'experts', whose outputs are summed over the ranks, and does not split "
                f"{name}.{key}, which would count {size} times: add '{name}.{key}' to it as one of {', '.join(SPLITS)}."
            )
    for key, word in style.splits.items():
        placement = split_of(word, own[key])
        assert isinstance(placement, (Shard, _StridedShard))
        parts = size * (GATE_AND_UP if word == "packed_colwise" else 1)
        count = own[key].shape[placement.dim]
        if count % parts:
            raise ConfigurationError(
                f"{name}.{key} has {count} {'inputs' if word == 'rowwise' else 'outputs'}, which tp={size} does not "
                f"divide{' into halves' if parts > size else ''}: choose another tp."
            )


def check_split(name: str, owner: nn.Module, word: object, owns: object) -> str:
    """The word of a plan for a parameter, which its module must be ready for.

    Raises:
        ConfigurationError: names the parameter.
    """
    if not isinstance(word, str) or word not in SPLITS:
        raise ConfigurationError(f"the plan makes the parameter {name!r} {word!r}. {nearest(str(word), SPLITS)}")
    if owns != "experts":
        module = name.rpartition(".")[0]
        raise ConfigurationError(
            f"the plan splits the parameter {name!r} of {kind_of(owner)}, and nothing sums what the ranks compute with "
            f"it: add {module!r}: 'experts' to the plan, or name a layer."
        )
    return word

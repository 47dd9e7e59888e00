"""Master weights: the tensors that optimizers step, and how a checkpoint names them and their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.weights import WeightReader


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns every parameter of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class MasterWeights:
    """The tensors that optimizers step. Here these are the module's parameters themselves.

    An engine may instead step float32 copies, flat buffers that each span several parameters. It then sets
    `strategy.master_weights` to a subclass, so that all other code still works with the module's parameters.
    """

    def groups(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """Returns the module's parameters that each group of the optimizer steps."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def saved_form(self, optimizer: Optimizer) -> Any:
        """Returns the optimizer as a checkpoint stores it: its groups and state refer to the module's parameters.

        An engine returns an object with torch's `param_groups`, `state_dict` and `load_state_dict`. Its state holds a
        Fragment for each part of the flat buffers. Its `dtypes` lists the dtype of each copy that differs from its
        parameter's.
        """
        return optimizer

    def parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        """Returns the tensors that optimizer state belongs to, by parameter name.

        For DTensors and Fragments only this rank's part is read. Returns None if the tensors are not known until
        `setup_optimizers`; the state is then read afterwards.
        """
        return dict(module.named_parameters())

    def load(self, reader: WeightReader, module: nn.Module) -> None:
        """Reads the copies after `setup_optimizers`. `load_module` has already filled the module in its own dtype."""

"""Master weights: the tensors that optimizers step, and how a checkpoint names them and their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.weights import WeightReader


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class MasterWeights:
    """What optimizers step. Here it is the module's parameters themselves.

    An engine may step copies in their place: flat stretches of several parameters, in float32. It has a subclass of
    this one as `strategy.master_weights`, so that all other code goes on to speak of parameters.
    """

    def groups(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """Returns the module's parameters that each group of the optimizer steps."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def saved_form(self, optimizer: Optimizer) -> Any:
        """Returns the optimizer as a checkpoint knows it: the module's parameters in its groups, and its state by them.

        An engine returns an object with torch's `param_groups`, `state_dict` and `load_state_dict`, whose state holds a
        Fragment for each part of its flat memory; and with `dtypes`, which lists the dtype of each copy that differs
        from its parameter's.
        """
        return optimizer

    def parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        """Returns, by the parameters' names, the tensors that optimizer state belongs to.

        Of DTensors and Fragments only this rank's part is read. None if the tensors are not known before
        `setup_optimizers`: the state is read after it.
        """
        return dict(module.named_parameters())

    def load(self, reader: WeightReader, module: nn.Module) -> None:
        """Reads the copies, once optimizers are set up; `load_module` has filled the module in its own dtype."""

"""Styles: how a layer is split over the ranks of the `tp` dimension, and what its activations exchange.

They build on DTensor, as torch.distributed.tensor.parallel's styles do, whose objects a plan takes too. What differs:
layers that read one activation (query, key and value) share a single exchange of its gradient, as the hand-written
`PrepareModuleInput` around them would; and the sequence dimension is the last but one, with or without a batch.

The exchanges are those of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053); those of sequence parallelism are from
Korthikanti et al., 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fsdp.sharding import whole

SEQUENCE = -2
"""The dimension of an activation that sequence parallelism shards: (…, tokens, features)."""

HEADS = (
    *("n_heads", "n_head", "num_heads", "nhead", "num_attention_heads"),
    *("n_kv_heads", "n_kv_head", "num_kv_heads", "num_key_value_heads"),
)
"""Attributes in which a layer counts its heads, of which each rank has a share."""


class Entrance:
    """The last activation that entered split layers, so that the next layer that reads it shares its exchange.

    An activation enters as a replicated DTensor. In backward the layers' gradients of it, of which each rank has a part
    of the sum, are added up on the rank, and exchanged once.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Tensor], DTensor, bool] | None = None

    def enter(self, activation: Tensor, mesh: DeviceMesh) -> DTensor:
        """The replicated DTensor of an activation that every rank has whole."""
        if isinstance(activation, DTensor):
            return activation.redistribute(placements=[Replicate()])
        if self._known is not None:
            reference, entered, with_grad = self._known
            if reference() is activation and with_grad is torch.is_grad_enabled():
                return entered
        entered = DTensor.from_local(activation, mesh, [Replicate()], run_check=False)
        self.remember(activation, entered)
        return entered

    def remember(self, activation: Tensor, entered: DTensor) -> None:
        self._known = (weakref.ref(activation), entered, torch.is_grad_enabled())

    def clear(self) -> None:
        """Drops what is remembered: a step is over."""
        self._known = None


class Exchange(torch.autograd.Function):
    """Places a split layer's output anew, and gives this rank's plain tensor of it.

    `redistribute` and `to_local` do the same in two steps, of which the second returns a view. FSDP warns of a view
    where it is a group's output, since an operation in place would lose its backward hook.
    """

    @staticmethod
    def forward(ctx: Any, output: DTensor, after: Placement) -> Tensor:
        [before] = output.placements
        ctx.mesh, ctx.after = output.device_mesh, after
        # The gradient of a sum is whole on each rank that has a part of it.
        ctx.before = Replicate() if before.is_partial() else before
        ctx.set_materialize_grads(False)
        return output.redistribute(placements=[after]).to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        if grad is None:
            return None, None
        return DTensor.from_local(grad, ctx.mesh, [ctx.after], run_check=False).redistribute(
            placements=[ctx.before]
        ), None


def gathered(tensor: Tensor) -> Tensor:
    """The whole of an activation that is split over the ranks, or the tensor itself; every rank must call it."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim > 1 or tensor.placements[0].is_replicate():
        return whole(tensor)
    return Exchange.apply(tensor, Replicate())  # type: ignore[no-untyped-call,no-any-return]


@dataclass
class Style(ParallelStyle):
    """The base of Leyden's own styles: how one kind of layer is split.

    Attributes:
        entrance: of the model that the plan is applied to.
        sequence: activations outside of the split layers are sharded along the sequence.
        draws: called with True where activations begin to differ between ranks, False where they are alike again.
    """

    entrance: Entrance = field(default_factory=Entrance)
    sequence: bool = False
    draws: Callable[[bool], None] = lambda differ: None

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """How each of the module's own parameters is placed."""
        return {name: Replicate() for name, p in module._parameters.items() if p is not None}

    def split(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Puts this rank's part in the place of each of the module's parameters."""
        for name, placement in self.placements(module).items():
            parameter = module._parameters[name]
            if parameter is not None and not isinstance(parameter, DTensor):
                module._parameters[name] = placed(parameter, mesh, placement)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.split(module, device_mesh)
        module.register_forward_pre_hook(
            lambda module, args, kwargs: self._enter(module, args, kwargs, device_mesh), with_kwargs=True
        )
        module.register_forward_hook(lambda module, inputs, outputs: self._output(module, outputs, device_mesh))
        return module

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the module's forward takes in place of those it was called with."""
        if args:
            return (self._input(module, args[0], mesh), *args[1:]), kwargs
        first, *_ = kwargs
        return args, {**kwargs, first: self._input(module, kwargs[first], mesh)}

    def _input(self, module: nn.Module, activation: Any, mesh: DeviceMesh) -> Any:
        return activation

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return outputs


@dataclass
class Colwise(Style):
    """Splits a Linear's outputs, or an Embedding's features. Its output stays split, for a rowwise layer.

    Attributes:
        gathers: every rank gets the whole output.
        loss: the output is left a DTensor, for `loss_parallel`.
    """

    gathers: bool = False
    loss: bool = False

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        dim = 1 if isinstance(module, nn.Embedding) else 0
        return {name: Shard(dim) for name, p in module._parameters.items() if p is not None}

    def _input(self, module: nn.Module, activation: Any, mesh: DeviceMesh) -> Any:
        return self.entrance.enter(activation, mesh)

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self.loss:
            return outputs
        self.draws(not self.gathers)
        if self.gathers:
            return Exchange.apply(outputs, Replicate())  # type: ignore[no-untyped-call]
        return outputs.to_local()


@dataclass
class Rowwise(Style):
    """Splits a Linear's inputs, or an Embedding's entries. The ranks' outputs are summed.

    Attributes:
        takes_whole: every rank has the whole input of a Linear, and takes its part.
    """

    takes_whole: bool = False

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        return {"weight": Shard(1)} | ({} if module._parameters.get("bias") is None else {"bias": Replicate()})

    def _input(self, module: nn.Module, activation: Any, mesh: DeviceMesh) -> Any:
        if isinstance(activation, DTensor):
            return activation
        if isinstance(module, nn.Embedding):
            return DTensor.from_local(activation, mesh, [Replicate()], run_check=False)
        split = Shard(activation.ndim - 1)
        if self.takes_whole:
            return self.entrance.enter(activation, mesh).redistribute(placements=[split])
        return DTensor.from_local(activation, mesh, [split], run_check=False)

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        after: Placement = Replicate()
        if self.sequence:
            check_sequence(outputs, mesh)
            after = Shard(outputs.ndim + SEQUENCE)
        self.draws(self.sequence)
        return Exchange.apply(outputs, after)  # type: ignore[no-untyped-call]


@dataclass
class Sequence(Style):
    """Runs a norm or a dropout on this rank's part of the sequence, and gathers its output for split layers."""

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        part = DTensor.from_local(outputs, mesh, [Shard(outputs.ndim + SEQUENCE)], run_check=False)
        whole = part.redistribute(placements=[Replicate()])
        plain = whole.to_local()
        # A split layer takes the DTensor: the parts of its gradient are then summed where they are scattered again.
        self.entrance.remember(plain, whole)
        self.draws(False)
        return plain


@dataclass
class Replicated(Style):
    """Leaves a layer whole on every rank.

    Attributes:
        differs: the layer works on what differs between ranks (a norm of the heads that a rank has), so that its
            gradients are summed over the ranks.
    """

    differs: bool = False


@dataclass
class Heads(Style):
    """Divides the numbers of heads in which a layer counts, of which each rank has a share."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, count in heads_of(module).items():
            setattr(module, name, count // device_mesh.size())
        return module


def heads_of(module: nn.Module) -> dict[str, int]:
    """The attributes in which a module counts its heads."""
    return {name: vars(module)[name] for name in HEADS if type(vars(module).get(name)) is int}


def placed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A parameter that every rank has whole, as a DTensor that holds this rank's part; nothing is exchanged."""
    split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    made = nn.Parameter(split, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def check_sequence(activation: DTensor, mesh: DeviceMesh) -> None:
    """Refuses a sequence that the ranks cannot share evenly.

    Raises:
        ConfigurationError: names its length.
    """
    tokens = activation.shape[SEQUENCE]
    if tokens % mesh.size():
        raise ConfigurationError(
            f"sequence parallelism over tp={mesh.size()} needs sequences whose length it divides, and this one has "
            f"{tokens} tokens: pad them, or leave 'sequence' out of the plan."
        )


def grad_placement(style: Style | None) -> Placement:
    """How the gradient of a whole parameter is placed: what a rank has of it is a part of the sum, or all of it."""
    partial = isinstance(style, Sequence) or (isinstance(style, Replicated) and style.differs)
    return Partial() if partial else Replicate()

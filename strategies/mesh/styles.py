"""Styles: how a layer is split over the `tp` dimension, and which collectives its activations need.

They build on DTensor, like the styles of torch.distributed.tensor.parallel, which a plan accepts too. Two things
differ. Layers that read the same activation (query, key and value) share one all-reduce of its gradient, as under a
hand-written `PrepareModuleInput` around them. And the sequence dimension is the second to last, with or without a batch
dimension.

The collectives are those of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053), and for sequence parallelism those of
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

from leyden.core.errors import ConfigurationError
from leyden.strategies.fsdp.sharding import whole

SEQUENCE = -2
"""The dimension of an activation that sequence parallelism shards: (…, tokens, features)."""

HEADS = (
    *("n_heads", "n_head", "num_heads", "nhead", "num_attention_heads"),
    *("n_kv_heads", "n_kv_head", "num_kv_heads", "num_key_value_heads"),
)
"""Attributes in which a layer stores its number of heads. Each rank has a share of them."""


class SharedInput:
    """The last activation that entered a split layer, cached so that layers with the same input share one DTensor.

    The activation becomes a replicated DTensor. In backward, each layer contributes a partial gradient; the gradients
    of all layers that share the DTensor are added on the rank and reduced over the ranks once.
    """

    def __init__(self) -> None:
        self._cached: tuple[weakref.ref[Tensor], DTensor, bool] | None = None

    def enter(self, activation: Tensor, mesh: DeviceMesh) -> DTensor:
        """Returns the replicated DTensor of an activation that every rank holds whole."""
        if isinstance(activation, DTensor):
            return activation.redistribute(placements=[Replicate()])
        if self._cached is not None:
            reference, entered, with_grad = self._cached
            if reference() is activation and with_grad is torch.is_grad_enabled():
                return entered
        entered = DTensor.from_local(activation, mesh, [Replicate()], run_check=False)
        self.remember(activation, entered)
        return entered

    def remember(self, activation: Tensor, entered: DTensor) -> None:
        """Caches the DTensor of an activation."""
        self._cached = (weakref.ref(activation), entered, torch.is_grad_enabled())

    def clear(self) -> None:
        """Drops the cached activation, at the end of a step."""
        self._cached = None


class Redistribute(torch.autograd.Function):
    """Redistributes a split layer's output, and returns this rank's part as a plain tensor.

    `redistribute` followed by `to_local` would return a view. FSDP warns if a group's output is a view, because an
    in-place operation on it would lose its backward hook.
    """

    @staticmethod
    def forward(ctx: Any, output: DTensor, after: Placement) -> Tensor:
        [before] = output.placements
        ctx.mesh, ctx.after = output.device_mesh, after
        # Every rank receives the whole gradient of a sum, even though it contributed only a partial output.
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
    """Gathers an activation that is split over the ranks; returns any other as it is. Every rank must call it."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim > 1 or tensor.placements[0].is_replicate():
        return whole(tensor)
    return Redistribute.apply(tensor, Replicate())  # type: ignore[no-untyped-call,no-any-return]


@dataclass
class Style(ParallelStyle):
    """The base class of Leyden's own styles. Each splits one kind of layer.

    Attributes:
        shared_input: cache of the last activation, shared by all styles of a model.
        sequence: True if activations between the split layers are sharded along the sequence.
        switch_rng: called with True when activations begin to differ between ranks, and with False when they are
            identical again.
    """

    shared_input: SharedInput = field(default_factory=SharedInput)
    sequence: bool = False
    switch_rng: Callable[[bool], None] = lambda differ: None

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Returns the placement of each of the module's own parameters, by name."""
        return {name: Replicate() for name, p in module._parameters.items() if p is not None}

    def split(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replaces the module's own parameters by DTensors that hold this rank's part."""
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
        """Returns the arguments for the module's forward, with the first one converted by `_input`."""
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
    """Splits a Linear's outputs, or an Embedding's features. By default the output stays split, for a rowwise layer.

    Attributes:
        gathers: gathers the whole output on every rank.
        loss: leaves the output a DTensor, for `loss_parallel`.
    """

    gathers: bool = False
    loss: bool = False

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        dim = 1 if isinstance(module, nn.Embedding) else 0
        return {name: Shard(dim) for name, p in module._parameters.items() if p is not None}

    def _input(self, module: nn.Module, activation: Any, mesh: DeviceMesh) -> Any:
        return self.shared_input.enter(activation, mesh)

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self.loss:
            return outputs
        self.switch_rng(not self.gathers)
        if self.gathers:
            return Redistribute.apply(outputs, Replicate())  # type: ignore[no-untyped-call]
        return outputs.to_local()


@dataclass
class Rowwise(Style):
    """Splits a Linear's inputs, or an Embedding's entries. The ranks' outputs are summed.

    Attributes:
        takes_whole: True if every rank holds the whole input of a Linear, which is then split.
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
            return self.shared_input.enter(activation, mesh).redistribute(placements=[split])
        return DTensor.from_local(activation, mesh, [split], run_check=False)

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        after: Placement = Replicate()
        if self.sequence:
            check_sequence(outputs, mesh)
            after = Shard(outputs.ndim + SEQUENCE)
        self.switch_rng(self.sequence)
        return Redistribute.apply(outputs, after)  # type: ignore[no-untyped-call]


@dataclass
class Sequence(Style):
    """Runs a norm or a dropout on this rank's part of the sequence, and gathers its output for split layers."""

    def _output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        part = DTensor.from_local(outputs, mesh, [Shard(outputs.ndim + SEQUENCE)], run_check=False)
        whole = part.redistribute(placements=[Replicate()])
        plain = whole.to_local()
        # The next split layer reads the cached DTensor, so one reduce-scatter sums and shards its partial gradients.
        self.shared_input.remember(plain, whole)
        self.switch_rng(False)
        return plain


@dataclass
class Replicated(Style):
    """Keeps a layer whole on every rank.

    Attributes:
        differs: True if the layer's inputs differ between ranks, as for a norm over this rank's heads. Its gradients
            are then summed over the ranks.
    """

    differs: bool = False


@dataclass
class Heads(Style):
    """Divides a layer's head counts by the number of ranks, since each rank has a share of the heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, count in heads_of(module).items():
            setattr(module, name, count // device_mesh.size())
        return module


def heads_of(module: nn.Module) -> dict[str, int]:
    """Returns a module's head counts, by attribute name."""
    return {name: vars(module)[name] for name in HEADS if type(vars(module).get(name)) is int}


def placed(parameter: nn.Parameter, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    """Returns a DTensor parameter with this rank's part of a whole parameter, without communication.

    Args:
        parameter: the whole parameter.
        mesh: the ranks over which it is split.
        *placements: one placement for each dimension of the mesh.
    """
    distributed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    new = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def check_sequence(activation: DTensor, mesh: DeviceMesh) -> None:
    """Refuses a sequence whose length is not divisible by the number of ranks.

    Raises:
        ConfigurationError: gives the length.
    """
    tokens = activation.shape[SEQUENCE]
    if tokens % mesh.size():
        raise ConfigurationError(
            f"sequence parallelism over tp={mesh.size()} needs a sequence length divisible by {mesh.size()}, and this "
            f"sequence has {tokens} tokens: pad it, or leave 'sequence' out of the plan."
        )


def grad_placement(style: Style | None) -> Placement:
    """Returns the placement of a whole parameter's gradient: Partial if each rank has a part of the sum."""
    partial = isinstance(style, Sequence) or (isinstance(style, Replicated) and style.differs)
    return Partial() if partial else Replicate()

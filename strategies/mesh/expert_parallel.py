"""Expert parallelism: each rank holds some experts of a mixture whole, and tokens travel to the ranks of their experts.

The exchange is that of GShard (Lepikhin et al., 2020, arXiv:2006.16668), without a capacity: no token is dropped.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from leyden.core.errors import ConfigurationError, kind_of
from leyden.strategies.fsdp.sharding import Apart, local
from leyden.strategies.mesh.styles import placed
from leyden.strategies.recomputing import KEEPS, kept

functional: Any = torch.ops._c10d_functional
WORD = "expert_parallel"
"""The plan's word for a module of experts."""
COUNTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
"""Attributes in which a module of experts stores their number. Each rank has a share of them."""


class ExpertParallel:
    """Divides the experts of one module over the `ep` dimension.

    Args:
        name: full name of the module, for errors.
        module: the module; its parameters have the experts as their first dimension.
        mesh: the `ep` dimension, followed by `tp` if layers are split too.
        shards: the mesh over which each rank's experts are sharded.
        inner: parameter name → placement over `tp`; whole if it has none.

    Raises:
        ConfigurationError: if the module's parameters cannot be divided; names them.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        mesh: DeviceMesh,
        shards: DeviceMesh,
        inner: Mapping[str, Placement] | None = None,
    ) -> None:
        self._name, self._mesh, self._shards = name, mesh, shards
        self._ranks = mesh.size(0)
        self._group = mesh.get_group(0)
        self._inner = inner or {}
        self._experts = check(name, module, self._ranks)
        module.__dict__[KEEPS] = True
        self._local: dict[str, Tensor] | None = None
        """The parameters that the present forward has read, by name; None outside of a forward."""

    def apart(self) -> Apart:
        """Returns how the module is split and sharded."""
        return Apart(self._shards, self.split, self._dimension)

    def _dimension(self, parameter: nn.Parameter) -> Shard:
        """Returns the dimension along which a parameter is sharded: within experts if the ranks do not divide them."""
        # The last dimension of the mesh counts the ranks of one replica.
        ranks, part = self._shards.size(-1), local(parameter)
        return Shard(next((dim for dim in range(part.ndim) if part.shape[dim] % ranks == 0), 0))

    def split(self, module: nn.Module) -> None:
        """Keeps this rank's experts, and makes the module's forward exchange tokens with the other ranks."""
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in names:
            parameter: Any = module._parameters[name]
            placements = [Shard(0), self._inner.get(name, Replicate())][: self._mesh.ndim]
            module._parameters[name] = placed(parameter, self._mesh, *placements)
        for count in COUNTS:
            if vars(module).get(count) == self._experts:
                setattr(module, count, self._experts // self._ranks)
        kind = type(module)
        views = {name: property(functools.partial(self._read, name)) for name in names}
        module.__class__ = type(
            kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **views}
        )
        own = vars(module).get("forward")

        @functools.wraps(kind.forward if own is None else own)
        def forward(self_: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            inner = functools.partial(type(self_).forward, self_) if own is None else own
            with self._reading():
                return self._exchanged(inner, hidden_states, top_k_index, top_k_weights)

        # Compiled, the sizes of the exchange, which the host reads, would break the graph at each line.
        eager = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        # A bound method, so that a deep copy of the model is bound to the copy.
        module.forward = types.MethodType(eager, module)  # type: ignore[method-assign]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._local = {}
        try:
            yield
        finally:
            self._local = None

    def _read(self, name: str, module: nn.Module) -> Any:
        """Returns this rank's experts as a plain tensor, where the module reads a parameter that FSDP has gathered."""
        parameter: Any = module._parameters[name]
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self._mesh:
            return parameter
        found = None if self._local is None else self._local.get(name)
        if found is None:
            found = parameter.to_local()
            if found.requires_grad:
                # Tokens of all ranks of the group add to this gradient, and FSDP averages over the other ranks only.
                found.register_hook(lambda gradient: gradient / self._ranks)  # type: ignore[no-untyped-call]
            if self._local is not None:
                self._local[name] = found
        return found

    def _exchanged(
        self,
        forward: Callable[[Tensor, Tensor, Tensor], Tensor],
        hidden_states: Tensor,  # (T, D)
        top_k_index: Tensor,  # (T, k)
        top_k_weights: Tensor,  # (T, k)
    ) -> Tensor:
        """Runs every (token, expert) pair on the rank of its expert. Returns the sums for this rank's tokens."""
        shapes = [tuple(tensor.shape) for tensor in (hidden_states, top_k_index, top_k_weights)]
        if hidden_states.ndim != 2 or shapes[1] != shapes[2] or shapes[1][:1] != shapes[0][:1]:
            raise ConfigurationError(
                f"{self._name!r} is called with tensors of shapes {', '.join(map(str, shapes))}, and experts over ep "
                "need hidden states (T, D), the experts of each token (T, k) and their weights (T, k): flatten the "
                "batch before the call."
            )
        # A recomputation takes from the forward pass what was sent where, and what arrived.
        order, rows_sent, rows_received, received = kept(lambda: self._routed(top_k_index))
        expert = torch.arange(received.shape[1], device=received.device).repeat(self._ranks)
        expert = expert.repeat_interleave(received.flatten(), output_size=sum(rows_received)).unsqueeze(1)  # (R, 1)
        way = Way(self._group, order, top_k_index.shape[1], rows_sent, rows_received)
        # The module may weight its inputs or its outputs, so the weights travel too.
        rows, weights = Send.apply(hidden_states, top_k_weights, way)  # type: ignore[no-untyped-call]
        if rows.shape[0]:
            outputs = forward(rows, expert, weights)
        else:
            # A row that counts for nothing, so that every parameter has a gradient, and FSDP's collectives run.
            rows, expert, weights = (torch.cat([t, t.new_zeros(1, t.shape[1])]) for t in (rows, expert, weights))
            outputs = forward(rows, expert, weights)[:0]
        summed: Tensor = Return.apply(outputs, way)  # type: ignore[no-untyped-call]
        return summed

    def _routed(self, top_k_index: Tensor) -> tuple[Tensor, list[int], list[int], Tensor]:
        """Returns the order in which pairs are sent, the rows to and from each rank, and from each for each expert."""
        chosen = top_k_index.reshape(-1).long()  # (T·k)
        # Ranks hold contiguous ranges of experts, so pairs in the order of experts are in the order of ranks too.
        order = chosen.argsort(stable=True)
        sent = torch.zeros(self._experts, dtype=torch.long, device=chosen.device)
        sent = sent.scatter_add_(0, chosen, torch.ones_like(chosen)).view(self._ranks, -1)
        received = _all_to_all(sent, [1] * self._ranks, [1] * self._ranks, self._group)  # (ranks, experts of this rank)
        # The only read by the host: collectives need the numbers of rows.
        rows_sent, rows_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        return order, rows_sent, rows_received, received


class Way(NamedTuple):
    """The way of (token, expert) pairs to the ranks of their experts.

    Attributes:
        group: the ranks.
        order: the order in which pairs are sent, (T·k).
        top_k: the experts of each token.
        sent: the number of pairs for each rank.
        received: the number of pairs from each rank.
    """

    group: dist.ProcessGroup
    order: Tensor
    top_k: int
    sent: list[int]
    received: list[int]

    def out(self, tokens: Tensor) -> Tensor:
        """Sends rows of tokens (T, D). Returns those that arrive, (R, D)."""
        return _all_to_all(tokens[self.order // self.top_k], self.received, self.sent, self.group)

    def back(self, rows: Tensor) -> Tensor:
        """Sends rows (R, D) back. Returns them in the order of the pairs, (T, k, D)."""
        returned = _all_to_all(rows, self.sent, self.received, self.group)
        pairs = torch.empty_like(returned).index_copy_(0, self.order, returned)
        return pairs.view(-1, self.top_k, pairs.shape[1])


class Send(torch.autograd.Function):
    """Sends tokens (T, D) and their weights (T, k) to the experts in one message. Returns (R, D) and (R, 1)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, way: Way) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.way = way

        def arrived() -> Tensor:
            pairs = _joined(tokens[way.order // way.top_k], weights.reshape(-1, 1)[way.order])
            return _all_to_all(pairs, way.received, way.sent, way.group)

        return _parted(kept(arrived), tokens, weights)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> Any:  # type: ignore[override]
        pairs = ctx.way.back(_joined(grad_rows, grad_weights))
        tokens, weights = _parted(pairs, grad_rows, grad_weights)
        return tokens.sum(1), weights.squeeze(2), None


class Return(torch.autograd.Function):
    """Sends the experts' outputs (R, D) back, and adds up the k outputs of each token, (T, D).

    One function, so that a recomputation keeps the sums in place of the outputs (T, k, D).
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, way: Way) -> Tensor:  # type: ignore[override]
        ctx.way = way
        return kept(lambda: way.back(outputs).sum(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.way.out(grad), None


def _joined(rows: Tensor, weights: Tensor) -> Tensor:
    """Joins the bytes of rows and weights, which may have different dtypes."""
    return torch.cat([rows.contiguous().view(torch.uint8), weights.contiguous().view(torch.uint8)], -1)


def _parted(joined: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Parts what `_joined` has joined, for rows and weights of these widths and dtypes."""
    width = rows.shape[-1] * rows.itemsize
    # Copies, since a view of another dtype must begin at a multiple of its size.
    first, last = (part.clone(memory_format=torch.contiguous_format) for part in joined.tensor_split([width], -1))
    return first.view(rows.dtype), last.view(weights.dtype)


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends and receives rows, as many as the host says."""
    # torch's functions around these wrap the result in a tensor that waits when it is read, so it would wait twice.
    pending = functional.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    arrived: Tensor = functional.wait_tensor(pending)
    return arrived


def check(name: str, module: nn.Module, ranks: int) -> int:
    """Refuses a module whose experts cannot be divided over that many ranks. Returns the number of experts.

    Raises:
        ConfigurationError: names the module or the parameter.
    """
    found = dict(module.named_parameters())
    inside = [own for own in found if "." in own]
    if inside or not found:
        raise ConfigurationError(
            f"the plan makes {name!r} 'expert_parallel', and {kind_of(module)} has "
            f"{f'parameters in submodules ({inside[0]})' if inside else 'no parameters'}: it needs parameters of its "
            "own with the experts as their first dimension, such as (experts, outputs, inputs)."
        )
    counts = {parameter.shape[0] if parameter.ndim else 0 for parameter in found.values()}
    if len(counts) > 1:
        shapes = ", ".join(f"{own} {tuple(parameter.shape)}" for own, parameter in found.items())
        raise ConfigurationError(
            f"the plan makes {name!r} 'expert_parallel', and {kind_of(module)} has parameters with different first "
            f"dimensions ({shapes}): the first one must be the experts. Move parameters that all experts share to "
            "another module."
        )
    [experts] = counts
    if experts % ranks:
        raise ConfigurationError(
            f"{name!r} has {experts} experts, which ep={ranks} does not divide: choose an ep that divides {experts}."
        )
    try:
        inspect.signature(module.forward).bind(None, None, None)
    except TypeError:
        raise ConfigurationError(
            f"the plan makes {name!r} 'expert_parallel', and {kind_of(module)} has a forward that does not take three "
            "arguments: hidden_states (T, D), top_k_index (T, k) and top_k_weights (T, k). Write it so."
        ) from None
    return experts


def check_router_loss(root: nn.Module) -> None:
    """Refuses the balance loss of a `transformers` model: it is computed from the tokens of one rank.

    Raises:
        ConfigurationError: names the model and what to use instead.
    """
    settled: list[str] = []
    for name, module in root.named_modules():
        # A model keeps the number that its config had when it was built.
        own: Any = getattr(module, "router_aux_loss_coef", None)
        if own == 0 or getattr(module, "balances_over_ranks", False):
            settled.append(name)
        config: Any = getattr(module, "config", None)
        weight = getattr(config, "router_aux_loss_coef", 0) if own is None else own
        is_settled = any(owner in ("", name) or name.startswith(f"{owner}.") for owner in settled)
        if getattr(config, "output_router_logits", False) and weight and not is_settled:
            raise ConfigurationError(
                f"{name or 'the model'!r} has output_router_logits=True, which adds a balance loss of each rank's own "
                "tokens; their mean is not the loss of one process. Set the model's router_aux_loss_coef = 0 and add "
                "balance_loss (from leyden.strategies) in training_step, which counts the tokens of all ranks. An "
                "HFModule (from leyden.hf) does so by itself."
            )

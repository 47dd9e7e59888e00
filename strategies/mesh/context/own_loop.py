"""ContextLoop: context parallelism in a loop of the user's own, which says what is cut and where."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.tree import widest_float
from leyden.strategies.base import OwnLoop
from leyden.strategies.mesh.consistency import check_batch, is_sampled
from leyden.strategies.mesh.context.attention import Method, SequenceAttention, gather
from leyden.strategies.mesh.context.context_parallel import shifts_labels, without_masks
from leyden.strategies.mesh.context.sequence import (
    DIMENSIONS,
    SequenceCut,
    SequencePart,
    SequenceShare,
    find_transformer,
)

if TYPE_CHECKING:
    from leyden.strategies.mesh.mesh_strategy import MeshStrategy


class ContextLoop(OwnLoop):
    """Cuts the tensors that the user names, and divides attention, within a block of the user's loop.

    Args:
        strategy: the strategy, which provides mesh, ranks and device.
        method: how attention reaches the keys of other ranks.
    """

    def __init__(self, strategy: MeshStrategy, method: Method) -> None:
        self._strategy, self._method = strategy, method
        self._has_transformers = False
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._blocks = 0
        self._part: SequencePart | None = None
        """This rank's part, while a block runs."""

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._strategy.context_mesh is not None
        return self._strategy.context_mesh.get_group()

    @contextmanager
    def in_parts(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: AbstractSet[Tensor]) -> Iterator[None]:
        if self._strategy.layout.pp > 1:
            raise ConfigurationError(
                "maybe_context_parallel with pp: a pipeline cuts the sequences of its batches by itself. Leave the "
                "block out, pass whole batches to accelerator.pipeline_step or the model, and name their sequences in "
                "MeshStrategy(sequence_dims=…)."
            )
        if self._part is not None:
            raise ConfigurationError(
                "maybe_context_parallel was entered within itself, and would cut its buffers twice: leave the first "
                "block before the next, and make a new one for each batch."
            )
        share = self._share(buffers, dims, kept)
        self._blocks += 1
        if is_sampled(self._blocks):
            assert self._strategy.context_mesh is not None
            check_batch(self._strategy.ranks, self._strategy.context_mesh, list(buffers))
        # A tensor that is named twice is cut once.
        sequences = {id(buffer): (buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)}
        wholes = [(buffer, buffer.detach()) for buffer, _ in sequences.values() if buffer not in kept]
        for buffer, dim in sequences.values():
            _replace(buffer, share.cut(buffer.detach(), dim))
        self._part = SequencePart(None, share)
        attention = SequenceAttention(self._part, self._method, self._group, self._masks)
        try:
            with ExitStack() as stack:
                stack.enter_context(attention.running())
                if self._has_transformers:
                    stack.enter_context(without_masks(self._part))
                yield
            if self._blocks == 1 and not attention.has_divided:
                raise ConfigurationError(
                    "no attention ran over the whole sequence in the first block of maybe_context_parallel, and the "
                    "model saw parts only: call the model in the block, and attention in it as "
                    "torch.nn.functional.scaled_dot_product_attention, by this name."
                )
        finally:
            self._part = None
            for buffer, whole in wholes:
                _replace(buffer, whole)

    def _share(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: AbstractSet[Tensor]) -> SequenceShare:
        """Returns the positions of this rank.

        Raises:
            ConfigurationError: if the buffers cannot be cut; names the first that cannot.
        """
        if not buffers or len(buffers) != len(dims):
            raise ConfigurationError(
                f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims: pass the tensors "
                "to cut, and the dimension of the sequence in each, such as buffers=[batch['input_ids'], "
                "batch['shift_labels']], buffer_seq_dims=[1, 1]."
            )
        lengths = []
        for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
            if not isinstance(buffer, Tensor) or not -buffer.ndim <= dim < buffer.ndim:
                found = (
                    f"has the shape {tuple(buffer.shape)}" if isinstance(buffer, Tensor) else f"is {kind_of(buffer)}"
                )
                raise ConfigurationError(
                    f"buffers[{index}] {found}, and buffer_seq_dims[{index}] is {dim}: pass tensors, and for each "
                    "the dimension of its sequence."
                )
            if buffer.requires_grad:
                raise ConfigurationError(
                    f"buffers[{index}] requires a gradient, which does not reach back over the cut: pass what it is "
                    "computed from, such as input_ids, and compute it within the block."
                )
            lengths.append(buffer.shape[dim])
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"the buffers of maybe_context_parallel have sequences of the lengths {lengths}: pad them to one "
                "length, or leave out what every rank needs whole."
            )
        layout = self._strategy.layout
        step = 2 * layout.cp * layout.tp
        if lengths[0] % step:
            raise ConfigurationError(
                f"the buffers of maybe_context_parallel have sequences of length {lengths[0]}, which {step} "
                f"(2 · cp{' · tp' if layout.tp > 1 else ''}) does not divide: pad them to a multiple of {step} in the "
                "collate function, labels with -100."
            )
        if any(all(tensor is not buffer for buffer in buffers) for tensor in kept):
            raise ConfigurationError(
                "no_restore_buffers has a tensor that is not among the buffers: add it to buffers, or leave it out."
            )
        return SequenceShare(dist.get_rank(self._group), layout.cp, lengths[0])

    def of_all_parts(self, loss: Tensor, num_items: Tensor | float) -> tuple[Tensor, Tensor]:
        """Returns the loss that backward starts from, and the number of items on all ranks of the group.

        Gradients are averaged over these ranks, so the loss is multiplied by their number.
        """
        device = self._strategy.root_device
        items = torch.as_tensor(num_items, dtype=widest_float(device), device=device).detach().clone()
        dist.all_reduce(items, group=self._group)
        return loss * self._strategy.layout.cp, items

    # models of transformers -------------------------------------------------------------------------------------------
    def follow(self, module: nn.Module) -> None:
        """Has the model of `transformers` in a prepared module see the whole mask and the right positions."""
        transformer = find_transformer(module)
        if transformer is None:
            return
        self._has_transformers = True

        # A function, not a method: a copy of the model must not copy the strategy.
        def enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return None if self._part is None else ((), self._entered(self._part, model, args, kwargs))

        transformer.register_forward_pre_hook(enter, with_kwargs=True)

    def _entered(
        self, part: SequencePart, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the arguments of a model's forward, after checking and completing them."""
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        share, kind = part.share, type(model).__name__
        sequences = {name: given[name] for name in map(str, DIMENSIONS) if isinstance(given.get(name), Tensor)}
        for name, tensor in sequences.items():
            length = tensor.shape[1 if name == "inputs_embeds" else -1]
            if length != share.own_length:
                raise ConfigurationError(
                    f"{kind} got {name} of length {length} within maybe_context_parallel, where this rank's part has "
                    f"{share.own_length} of {share.length} positions: add it to buffers, or call the model outside."
                )
        if given.get("labels") is not None and given.get("shift_labels") is None and shifts_labels(model):
            raise ConfigurationError(
                f"{kind} shifts its labels, and in a part of a sequence the label of the last position is missing: "
                "shift them before the block, shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous(), "
                "and pass shift_labels too, also in buffers."
            )
        whole = {
            name: gather(share, self._group, sequences[name], -1)
            for name in ("attention_mask", "position_ids")
            if name in sequences
        }
        seen = SequenceCut(self._group, {}, {}, is_transformer=True).cut(whole) if whole else SequencePart(None, share)
        part.keys, part.pads_at_end, part.documents = seen.keys, seen.pads_at_end, seen.documents
        tokens = sequences.get("input_ids", sequences.get("inputs_embeds"))
        if tokens is not None and given.get("position_ids") is None:
            if "position_ids" not in names:
                raise ConfigurationError(
                    f"{kind} takes no position_ids, and would number a part of a sequence from 0: use a mesh without "
                    "cp."
                )
            given["position_ids"] = share.positions(tokens.device).expand(tokens.shape[0], -1)
        return given


def _replace(tensor: Tensor, values: Tensor) -> None:
    """Lets a tensor hold other values, of any shape. Tensors that share its memory keep theirs."""
    with torch.no_grad():
        tensor.set_(values)  # type: ignore[call-overload]

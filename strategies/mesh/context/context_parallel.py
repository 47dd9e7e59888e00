"""ContextParallel: runs steps on parts of their sequences, and makes one loss of the parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from leyden.core.errors import ConfigurationError
from leyden.core.tree import map_tensors, widest_float
from leyden.strategies.fsdp.restart import restart
from leyden.strategies.fsdp.sharding import whole as whole_tensor
from leyden.strategies.mesh.context.attention import Method, SequenceAttention, gather
from leyden.strategies.mesh.context.sequence import Key, SequenceCut, SequencePart, find_transformer
from leyden.strategies.window import read_loss

if TYPE_CHECKING:
    from leyden.strategies.mesh.mesh_strategy import MeshStrategy

Step: TypeAlias = Callable[[Any], Any]
"""The user's step, as a function of a batch."""
Rehearsal: TypeAlias = Callable[[Step, Any, Callable[[Any], Any]], Any]
"""Runs a step on a batch. Returns what a function of the step's outputs returns, where the step reaches its end."""
MASKS = {
    *("and_masks", "causal_mask_function", "bidirectional_mask_function", "padding_mask_function"),
    *("sliding_window_overlay", "sliding_window_bidirectional_overlay", "chunked_overlay"),
    *("packed_sequence_mask_function", "remap_positions_for_packed_sequence"),
}
"""What the masks of `transformers` that attention here knows are made of. Windows must hold the whole sequence."""
MANUAL = (
    "context parallelism makes one loss of the parts of a sequence, and in manual optimization the step does that "
    "itself: use automatic optimization, or a mesh without cp."
)

CAUSES = (
    "something besides attention depends on the position or on other positions. Make positions by "
    "leyden.strategies.sequence_positions(length) in place of torch.arange, call attention as "
    "torch.nn.functional.scaled_dot_product_attention (nn.MultiheadAttention does with need_weights=False), and shift "
    "labels before the batch is cut (a model of transformers that shifts them itself takes them as 'shift_labels'). A "
    "convolution or a sum over the sequence cannot be cut, and a mean over labels is nan in a part that has none: sum."
)


class ContextParallel:
    """Runs the steps of one module on parts of their sequences, for a MeshStrategy.

    Args:
        strategy: the strategy, which provides precision, ranks and device.
        module: the whole module.
        group: the ranks that share the sequences of a batch.
        method: how attention reaches the keys of other ranks.
        dimensions: the sequence dimension of each tensor of a batch (see `SequenceCut`).
        padding: what fills sequences up (see `SequenceCut`).
    """

    def __init__(
        self,
        strategy: MeshStrategy,
        module: nn.Module,
        group: dist.ProcessGroup,
        method: Method,
        dimensions: Mapping[Key, int | None],
        padding: Mapping[Key, float],
    ) -> None:
        self._strategy, self._module, self._group, self._method = strategy, module, group, method
        self._size = dist.get_world_size(group)
        self._transformer = find_transformer(module)
        if self._transformer is not None:
            check_model(self._transformer)
        shifts = self._transformer is not None and shifts_labels(self._transformer)
        is_transformer = self._transformer is not None
        counts = any(hasattr(part, "create_position_ids_from_input_ids") for part in module.modules())
        self._cut = SequenceCut(group, dimensions, padding, strategy.layout.tp, is_transformer, shifts, counts)
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._is_rehearsed = self._has_evaluated = False
        self.is_rehearsing = False
        """True during the rehearsal, which leaves no trace."""
        self._total: tuple[Tensor, Tensor] | None = None
        """Loss and number of items of the latest batch, over the whole sequence."""
        self._others: set[int] = set()
        """The lengths of other keys than the sequence's that the rehearsal met, which every rank keeps whole."""
        self._tokens = 1.0
        """The number of tokens in a sequence's part on this rank, in the latest batch."""
        self._items: list[Tensor | float] = []
        """The number of items in each micro-batch of this rank's part of the latest batch, as far as they are known."""

    def cut(self, batch: Any) -> SequencePart:
        """Returns this rank's part of a batch."""
        part = self._cut.cut(batch)
        self._tokens, self._items = float(part.share.count()), []
        return part

    def count(self, num_items: Tensor | float | None) -> None:
        """Takes the number of items in the next micro-batch of this rank's part."""
        self._check_items(num_items)
        assert num_items is not None
        self._items.append(num_items.detach().clone() if isinstance(num_items, Tensor) else num_items)

    def weight_of(self, micro_batch: int) -> Tensor | float:
        """Returns the number of items in a micro-batch of this rank's part, or of tokens if the step counts none."""
        return self._items[micro_batch] if 0 <= micro_batch < len(self._items) else self._tokens

    @contextmanager
    def running(self, part: SequencePart) -> Iterator[None]:
        """The context of a step on a part of a batch, forward and backward."""
        with ExitStack() as stack:
            stack.enter_context(self._attention(part).running())
            if self._transformer is not None:
                stack.enter_context(without_masks(part))
            yield

    def _attention(self, part: SequencePart) -> SequenceAttention:
        length = part.share.own_length
        if not self.is_rehearsing and length in self._others:
            raise ConfigurationError(
                f"each rank's part of the sequences has {length} positions, and so have other keys, which "
                "attention takes whole, such as an encoder's: they cannot be told apart. Pad either to another length."
            )
        return SequenceAttention(
            part, self._method, self._group, self._masks, self._others if self.is_rehearsing else None
        )

    # the loss ---------------------------------------------------------------------------------------------------------
    def of_all_parts(self, loss: Tensor, num_items: Tensor | float | None) -> tuple[Tensor, Tensor]:
        """Returns the loss that backward starts from, and the number of items of the whole sequence.

        The loss is this rank's part, times the number of parts: gradients are averaged over these ranks, and so become
        the sum over the parts.
        """
        self.count(num_items)
        self._total = self._summed(loss, num_items)
        return loss * self._size, self._total[1]

    def _summed(self, loss: Tensor, num_items: Tensor | float | None) -> tuple[Tensor, Tensor]:
        self._check_items(num_items)
        device = self._strategy.root_device
        numbers = torch.zeros(2, dtype=widest_float(device), device=device)
        # A DTensor, if the plan splits logits.
        numbers[0] += whole_tensor(loss.detach()).reshape(())
        items: Any = num_items
        numbers[1] += items.detach().reshape(()) if isinstance(items, Tensor) else items
        dist.all_reduce(numbers, group=self._group)
        return numbers[0].to(loss.dtype), numbers[1]

    def _check_items(self, found: object) -> None:
        if found is None:
            raise ConfigurationError(
                f"context parallelism needs losses by items: each of its {self._size} ranks has other tokens, and the "
                "mean over its own is no part of the mean over all of them. Return {'loss': the sum over the tokens, "
                "'num_items': their number} from training_step."
            )

    def trained(self, outputs: Any) -> Any:
        """Returns the outputs of a training step with the loss and the items that `of_all_parts` has summed."""
        self._check_items(self._total)
        assert self._total is not None
        (loss, items), self._total = self._total, None
        return {**outputs, "loss": loss, "num_items": items}

    def with_totals(self, outputs: Any) -> Any:
        """Returns the outputs of a step with the loss and the items of the whole sequence, if it counts items.

        Every rank of the group calls it.
        """
        if not isinstance(outputs, Mapping) or outputs.get("num_items") is None:
            return outputs
        loss = outputs.get("loss")
        loss, items = self._summed(loss if isinstance(loss, Tensor) else torch.zeros(()), outputs["num_items"])
        return {**outputs, "num_items": items} | ({"loss": loss} if "loss" in outputs else {})

    def evaluated(self, outputs: Any, part: SequencePart) -> Any:
        """Returns the outputs of an evaluation step with whole sequences. Every rank of the group calls it.

        Tensors are joined if they have as many rows as the batch's part, and as many positions as its sequences.
        """
        if isinstance(outputs, Mapping) and outputs.get("num_items") is not None:
            self.count(outputs["num_items"])
        outputs = self.with_totals(outputs)
        share, rows = part.share, {tensor.shape[0] for tensor in _tensors(part.batch) if tensor.ndim > 1}

        def join(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != share.own_length or tensor.shape[0] not in rows:
                return tensor
            return gather(share, self._group, tensor, 1)[:, : share.length - share.filled]

        return map_tensors(outputs, join)

    def gathered(self, numbers: Tensor) -> Tensor:
        """Stacks the numbers of all ranks of the group: (size, *numbers.shape)."""
        parts = [torch.empty_like(numbers) for _ in range(self._size)]
        dist.all_gather(parts, numbers, group=self._group)
        return torch.stack(parts)

    # the rehearsal ----------------------------------------------------------------------------------------------------
    def rehearse(self, step: Step, batch: Any, run: Rehearsal) -> None:
        """Compares a step on the parts of the first positions with the same step on these positions as a whole.

        Every rank of the run must call it at the same batch, with its own. Only the first call does anything.

        Args:
            step: the user's step, called with a batch.
            batch: the whole batch.
            run: runs a step, and a function of its outputs where the step reaches its end.

        Raises:
            ConfigurationError: if their losses differ: something besides attention depends on the whole sequence.
        """
        if self._is_rehearsed:
            return
        self._is_rehearsed = True
        part, narrowed = self._first(batch)
        length = part.share.length - part.share.filled
        with self._prepared():
            with self.running(part):
                parts = run(step, part.batch, lambda outputs: self._summed(*_loss_in(outputs)))
            run(step, narrowed, lambda outputs: self._compare(parts, _loss_in(outputs), length))

    def rehearse_evaluation(self, step: Step, batch: Any, run: Rehearsal) -> None:
        """Like `rehearse`, for an evaluation: compares the tensors that its step and the module's forward return."""
        if self._has_evaluated:
            return
        self._has_evaluated = True
        part, narrowed = self._first(batch)
        seen: list[Any] = []
        hook = self._module.register_forward_hook(lambda module, args, outputs: seen.append(outputs))

        def tensors_in(outputs: Any) -> list[Tensor]:
            found = _tensors(map_tensors([outputs, *seen], whole_tensor))
            seen.clear()
            return found

        def join(outputs: Any) -> tuple[list[Tensor], list[Tensor]]:
            own = tensors_in(outputs)
            return own, _tensors(self.evaluated(own, part))

        try:
            with self._prepared():
                with self.running(part):
                    parts = run(step, part.batch, join)
                run(step, narrowed, lambda outputs: self._compare_tensors(parts, tensors_in(outputs)))
        finally:
            hook.remove()

    def _first(self, batch: Any) -> tuple[SequencePart, Any]:
        """Returns this rank's part of the first positions of a batch, and all of these positions."""
        share, tp = self._cut.cut(batch).share, self._strategy.layout.tp
        limit = min(4 * self._size * tp, share.length - share.filled)
        # Under a plan with 'sequence' layers, tp divides the whole too.
        limit -= limit % tp if limit > tp else 0
        return self._cut.cut(batch, limit), self._cut.narrowed(batch, limit)

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Turns off dropout and compilation, and gives parameters that are zero other values, within the block.

        Behind a layer that begins as zero, such as a head, no loss would depend on what attention sees.
        """
        self._strategy.end_evaluation()
        locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in self._module.parameters())
        zeros = [p for p in locals_ if p.is_floating_point() and p.itemsize > 1 and not p.any()]
        self.is_rehearsing = True
        with torch.no_grad(), ExitStack() as stack:
            # Compiled blocks would otherwise be compiled for these lengths too.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for zero in zeros:
                zero.copy_(torch.arange(zero.numel(), device=zero.device).view(zero.shape).sin().div_(8))
            stack.enter_context(_evaluating(self._module))
            stack.enter_context(self._strategy.step_context())
            try:
                yield
            except BaseException:
                # Within a forward, FSDP would keep parameters gathered, with the other values.
                restart([self._module])
                raise
            finally:
                self.is_rehearsing = False
                for zero in zeros:
                    zero.zero_()
                for shards in (m for m in self._module.modules() if isinstance(m, FSDPModule)):
                    shards.reshard()

    @property
    def _tolerance(self) -> float:
        """The relative difference that rounding may make."""
        precision = self._strategy.precision
        dtypes = {getattr(precision, "dtype", torch.float32), *(p.dtype for p in self._module.parameters())}
        is_short = any(dtype.itemsize <= 2 for dtype in dtypes if dtype.is_floating_point)
        return 3e-2 if precision.form else 1e-2 if is_short else 1e-4

    def _compare(self, parts: tuple[Any, Any], of_whole: tuple[Any, Any], length: int) -> None:
        (loss, items), (whole, whole_items) = map(float, parts), map(float, of_whole)
        if items != whole_items:
            raise ConfigurationError(
                f"num_items of the parts of a sequence add up to {items:g}, and the whole has {whole_items:g} (of its "
                f"first {length} positions). A step that shifts labels loses one at the end of each part: shift them "
                "before the batch is cut, in the data set or the collate function, and return the labels unshifted."
            )
        differs = abs(loss - whole) > self._tolerance * max(abs(whole), 1e-3 * max(items, 1.0))
        if differs or math.isnan(loss) != math.isnan(whole):
            raise ConfigurationError(
                f"the loss of a sequence's parts is {loss:.6g}, and that of the whole {whole:.6g} (the sum over its "
                f"first {length} positions): {CAUSES}"
            )

    def _compare_tensors(self, parts: tuple[list[Tensor], list[Tensor]], whole: list[Tensor]) -> None:
        for one, found, expected in zip(*parts, whole, strict=False):
            if found is one or not one.is_floating_point():
                continue
            limit = 10 * self._tolerance * float(expected.nan_to_num(0, 0, 0).abs().max())
            if found.shape != expected.shape or not torch.allclose(found, expected, 0, limit, equal_nan=True):
                raise ConfigurationError(
                    "what this step computes for the first positions of a sequence in parts is not "
                    f"what it computes for them as a whole: {CAUSES}"
                )


def _loss_in(outputs: Any) -> tuple[Tensor, Any]:
    """Returns the loss and num_items of a step without a graph, whose absence `read_loss` refuses."""
    if isinstance(outputs, Tensor):
        outputs = {"loss": outputs}
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        outputs = {**outputs, "loss": outputs["loss"].detach().clone().requires_grad_()}
    loss, num_items = read_loss(outputs)
    return whole_tensor(loss.detach()), num_items


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Turns dropout off, whose random numbers differ between a part and the whole."""
    trained = [part for part in module.modules() if part.training]
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


# models of transformers ----------------------------------------------------------------------------------------------
def shifts_labels(model: Any) -> bool:
    """Returns True if a model predicts each label from the position before it."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(getattr(model, "loss_type", "")) is ForCausalLMLoss


def check_model(model: Any) -> None:
    """Refuses a model of `transformers` whose attention cannot be divided."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{name} has an encoder and a decoder, whose sequences differ, and context parallelism divides one: use a "
            "mesh without cp."
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigurationError(
            f"{name} adds a loss that balances its experts over all tokens of a batch, and the losses of parts do not "
            "add up to it: set config.output_router_logits=False, or use a mesh without cp."
        )
    chosen = getattr(config, "_attn_implementation", None)
    if chosen != "sdpa":
        raise ConfigurationError(
            f"{name} computes attention by {chosen!r}, and context parallelism divides that of torch: load the model "
            "with attn_implementation='sdpa'."
        )


def _makers(mask: Any) -> Iterator[str]:
    """Yields the names of the functions that have made a mask of `transformers`, and those of the user."""
    if isinstance(mask, tuple):
        for part in mask:
            yield from _makers(part)
    elif callable(mask):
        name = getattr(mask, "__qualname__", type(mask).__qualname__)
        is_known = getattr(mask, "__module__", "") == "transformers.masking_utils"
        yield name.partition(".")[0] if is_known else name
        for cell in (getattr(mask, "__closure__", None) or ()) if is_known else ():
            yield from _makers(cell.cell_contents)


@contextmanager
def without_masks(part: SequencePart) -> Iterator[None]:
    """Models of `transformers` make no masks in the block: attention knows which keys each query sees."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    masks: Any = ALL_MASK_ATTENTION_FUNCTIONS

    def no_mask(*args: Any, local_size: int | None = None, mask_function: Any = None, **kwargs: Any) -> None:
        others = sorted(set(_makers(mask_function)) - MASKS)
        if others:
            raise ConfigurationError(
                f"the model changes which keys attention sees by {', '.join(others)} (such as or_mask_function or "
                "block_sequence_ids of create_causal_mask), and context parallelism divides causal or full attention "
                "only: use a mesh without cp."
            )
        if local_size is not None and local_size < part.share.length:
            raise ConfigurationError(
                f"the model's attention sees {local_size} positions (a sliding window or chunks), and context "
                f"parallelism divides full attention over {part.share.length}: use a mesh without cp."
            )
        part.uses_masks = True

    masks["sdpa"] = no_mask
    try:
        yield
    finally:
        del masks["sdpa"]

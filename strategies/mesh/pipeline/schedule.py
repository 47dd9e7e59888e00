"""Pipeline: runs micro-batches through the stages of a model, in the order of one of torch's schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils._pytree import tree_leaves

from leyden.core.errors import ConfigurationError, LeydenError, add_note, nearest
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.payload import (
    PayloadSpec,
    SpecBook,
    TensorSpec,
    detached,
    enclosing,
    has_nan,
    padded,
)
from leyden.strategies.mesh.pipeline.rng import PipelineRNG
from leyden.strategies.mesh.pipeline.stage_runner import StageRunner
from leyden.strategies.micro_batches import MicroBatch

if TYPE_CHECKING:
    from leyden.strategies.mesh.context.context_parallel import ContextParallel

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that place the first and the last stage on the same rank."""
ZERO_BUBBLE = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute weight gradients in passes of their own, separate from those of activations."""

IS_SUPPORTED = "return_outputs" in inspect.signature(PipelineScheduleSingle.step).parameters
"""False for a torch whose stages start by exchanging numbers of mismatched dtypes, which crashes gloo: 2.9 does."""

NEW_SPEC = -1
"""Announces that the spec of the next payload follows, as an object."""

CACHED_SCHEDULES = 8
"""Number of torch schedules to cache. Each is for certain micro-batch sizes, and holds its stages' receive buffers."""

BEFORE_BLOCKS = (
    "This pipeline stage does not hold the layers before the blocks: on this rank they return nan, in the shape of a "
    "block's output. Move the code that uses their results into a layer of the first stage, or into a block."
)
"""Note for errors that a step raises on a later stage: stand-ins for the layers before the blocks may be the cause."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of a pipeline: the order in which its stages run micro-batches.

    Args:
        name: torch's name, case-insensitive: one of `SINGLE`, `LOOPED` or `V_SHAPED`.
        micro_batches: number of micro-batches per batch.
        ranks: number of ranks in the pipeline.
        stages_per_rank: stages that each rank holds: 1 for `SINGLE`, 2 for `V_SHAPED`; for `LOOPED` 2 if omitted.

    Raises:
        ConfigurationError: for an unknown name, or numbers that the schedule does not support.
    """

    name: str
    micro_batches: int
    ranks: int
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        if self.ranks > 1 and not IS_SUPPORTED:
            raise ConfigurationError(
                f"a pipeline needs a newer torch than {torch.__version__}: install torch 2.13, or shard the model with "
                "strategy='fsdp' or MeshStrategy(dp_shard=…, tp=…)."
            )
        names = {name.lower(): name for name in (*SINGLE, *LOOPED, *V_SHAPED)}
        if str(self.name).lower() not in names:
            raise ConfigurationError(f"schedule={self.name!r} is unknown. {nearest(str(self.name), names.values())}")
        name = names[str(self.name).lower()]
        default = 1 if name in SINGLE else 2
        stages_per_rank = default if self.stages_per_rank is None else self.stages_per_rank
        is_count = type(stages_per_rank) is int and stages_per_rank >= 1
        if not is_count or (name not in LOOPED and stages_per_rank != default):
            allowed = f"{default}" if name not in LOOPED else "a number from 1"
            raise ConfigurationError(f"stages_per_rank={self.stages_per_rank!r}: the schedule {name} needs {allowed}.")
        count = self.micro_batches
        if type(count) is not int or count < 1:
            raise ConfigurationError(f"microbatches={count!r}: use a number from 1.")
        fewest = {"1F1B": self.ranks, "DualPipeV": 2 * self.ranks}.get(name, 1)
        if count < fewest:
            raise ConfigurationError(
                f"microbatches={count}: the schedule {name} over {self.ranks} ranks needs at least {fewest}. Use more "
                f"({4 * fewest} keep the stages busy), or schedule='GPipe'."
            )
        rounds = max(1, count // self.ranks)
        if name in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
            raise ConfigurationError(
                f"microbatches={count}: the schedule {name} runs them in {rounds} rounds over {self.ranks} ranks: use "
                f"a multiple of {rounds}."
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "stages_per_rank", stages_per_rank)

    @property
    def stages(self) -> int:
        """The number of stages."""
        assert self.stages_per_rank is not None
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Returns the pipeline rank that holds a stage."""
        loop, position = divmod(stage, self.ranks)
        return self.ranks - 1 - position if self.name in V_SHAPED and loop % 2 else position

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a pipeline rank holds."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    @property
    def bubble(self) -> float | None:
        """The share of a step in which a rank waits for others, or None for schedules without a formula.

        A step runs m micro-batches through the v stages of each rank, while p - 1 ranks fill and drain the pipeline:
        (p - 1) / (v m + p - 1). From Narayanan et al., 2021, https://arxiv.org/abs/2104.04473, section 2.2, which
        divides by the time without the bubble. All stages take the same time there, and messages take none.

        Example:
            >>> Schedule("1F1B", micro_batches=7, ranks=2).bubble
            0.125
        """
        if self.name in ZERO_BUBBLE:
            return None
        return (self.ranks - 1) / (self.stages // self.ranks * self.micro_batches + self.ranks - 1)

    def __str__(self) -> str:
        return f"{self.name} of {self.micro_batches} micro-batches"


@dataclass(slots=True)
class _RunningBatch:
    """The batch that the schedule currently runs."""

    step: Callable[[Any], Any]
    to_loss: Callable[[Any, MicroBatch], Tensor]
    parts: Sequence[MicroBatch]
    specs: dict[int, tuple[TensorSpec, ...]]
    """Receiving stage → specs of its padded payload."""
    outputs: list[Any]
    backwards_left: int

    def begin_backward(self) -> bool:
        """Counts a backward pass; returns whether it is the last one on this rank."""
        self.backwards_left -= 1
        return self.backwards_left == 0


class Pipeline:
    """Runs the stages that this rank holds, together with the other ranks of the pipeline.

    Args:
        root: the model.
        holdings: the parts of the model that this rank's stages hold.
        schedule: the order in which micro-batches run.
        group: the ranks of the pipeline.
        device: the device of this rank.
        rng: random numbers of this rank's stages.
        before_backward: called before each backward pass, with True if it is the batch's last on this rank, and the
            outputs that it begins from.
        host_group: all ranks of the run, on their CPUs.
        rehearses_with_all: True if all ranks of the run rehearse at the same time; False for those of this pipeline.
        context: runs micro-batches that are parts of sequences; None if they are whole.
    """

    def __init__(
        self,
        root: nn.Module,
        holdings: Holdings,
        schedule: Schedule,
        group: dist.ProcessGroup,
        device: torch.device,
        rng: PipelineRNG,
        before_backward: Callable[[bool, Any], None],
        host_group: dist.ProcessGroup,
        rehearses_with_all: bool,
        context: ContextParallel | None,
    ) -> None:
        self._root, self.cut, self.schedule, self.group, self.device = root, holdings.cut, schedule, group, device
        self._host_group, self._context = host_group, context
        self._rehearses_with_all = rehearses_with_all
        self._rehearsing = (host_group, torch.device("cpu")) if rehearses_with_all else (group, device)
        """The ranks that rehearse together, and the device of the tensors that they exchange."""
        self.rank = dist.get_rank(group)
        self.stages = holdings.stages
        self.rng, self._before_backward = rng, before_backward
        self.runner = StageRunner(root, holdings, rng)
        self._received_specs: dict[tuple[Any, int], PayloadSpec] = {}
        """(signature of a micro-batch, stage) → the payload that the stage receives."""
        self._sent_specs: dict[tuple[Any, int], PayloadSpec] = {}
        """(signature of a micro-batch, stage) → the payload that the stage sends."""
        self._books: dict[int, SpecBook] = {stage: SpecBook() for stage in range(self.cut.stages)}
        """Receiving stage → the specs of the payloads that `relay` has sent to it or received for it."""
        self._rehearsed: set[Any] = set()
        """Signatures of the micro-batches whose payloads are known."""
        self._schedules: dict[Any, _TorchSchedule] = {}
        """Payload specs → the torch schedule for them, least recently used first."""
        self._latest: tuple[frozenset[Any], _TorchSchedule] | None = None
        """Signatures of the previous batch's micro-batches, and their torch schedule."""
        self._running: _RunningBatch | None = None
        self._relay_stage = 0
        """The stage of this rank that `relay` has reached."""
        self.is_rehearsing = False
        """True while a rehearsal runs: a forward pass that only determines the stages' payloads."""
        self.is_filling = False
        """True while a micro-batch without a sample runs, to fill up the schedule."""
        self.on_last = False
        """True while a step runs to its end on this rank, that is, on the last stage."""
        self.nan_stages: set[int] = set()
        """Stages whose output contained nan in the last rehearsal."""

    @property
    def has_last(self) -> bool:
        """True on the rank that holds the last stage."""
        return self.cut.stages - 1 in self.stages

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return self.schedule.rank_of(self.cut.stages - 1)

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """Returns the parameters of a stage of this rank."""
        named = self._root.named_parameters(remove_duplicate=False)
        return (parameter for name, parameter in named if self.cut.stage_of(name) == stage)

    @property
    def payloads(self) -> dict[tuple[Any, int], PayloadSpec]:
        """The payloads that the stages of this rank receive, as far as they are known, by signature and stage."""
        return dict(self._received_specs)

    def expect(self, payloads: Mapping[tuple[Any, int], PayloadSpec]) -> None:
        """Takes the `payloads` of a rank that held all stages: their micro-batches need no rehearsal here."""
        self._received_specs |= payloads
        self._sent_specs |= {(key, stage - 1): spec for (key, stage), spec in payloads.items()}
        self._rehearsed |= {key for key, _ in payloads}

    def kept(self) -> Iterator[Tensor]:
        """Yields the tensors that torch's stages keep in a batch: receive buffers, and outputs until their backward."""
        if self._latest is not None:
            yield from self._latest[1].kept()

    # forward, stage by stage ------------------------------------------------------------------------------------------
    def relay(self, step: Callable[[Any], Any], batch: Any, key: Any = None, switches_rng: bool = False) -> Any:
        """Runs a batch forward through one stage after another.

        Args:
            step: the user's step, called with the batch.
            batch: the whole batch.
            key: signature under which to store the specs of the stages' payloads; None stores none.
            switches_rng: True if stages draw random numbers of their own; False leaves the generators alone.

        Returns:
            What the step returned, on the rank with the last stage; None on the others.
        """
        outputs, local_payload = None, None
        for stage in self.stages:
            self._relay_stage = stage
            received = local_payload if stage and self._holds(stage - 1) else self._receive(stage, key)
            result = self._run_stage(stage, step, batch, received, 0 if switches_rng else None)
            if stage == self.cut.stages - 1:
                outputs = result
                continue
            if key is not None:
                self._sent_specs[key, stage] = PayloadSpec(result)
            if self._holds(stage + 1):
                local_payload = result
                if key is not None:
                    self._received_specs[key, stage + 1] = PayloadSpec(result)
            else:
                self._send(stage, result)
        return outputs

    def _run_stage(
        self, stage: int, step: Callable[[Any], Any], batch: Any, received: Any, micro_batch: int | None
    ) -> Any:
        self.on_last = stage == self.cut.stages - 1
        try:
            result = self.runner.run(stage, lambda: step(batch), received, micro_batch)
        finally:
            self.on_last = False
        if self.is_rehearsing and has_nan(result):
            self.nan_stages.add(stage)
        return result

    def _holds(self, stage: int) -> bool:
        return stage in self.stages

    def _send(self, stage: int, payload: Any) -> None:
        payload, book = detached(payload), self._books[stage + 1]
        place = book.place_of(payload)
        if place is None:
            spec = PayloadSpec(payload)
            self._announce(stage + 1, NEW_SPEC, spec.tree)
            book.add(spec)
        else:
            self._announce(stage + 1, place)
        to = self.schedule.rank_of(stage + 1)
        for leaf in tree_leaves(payload):
            if isinstance(leaf, Tensor):
                dist.send(leaf.contiguous(), group=self.group, group_dst=to)

    def _announce(self, receiver: int, place: int, content: Any = None) -> None:
        """Tells a stage which spec the next payload has: the place in its book, or the spec itself."""
        to = self._global_rank(receiver)
        dist.send(torch.tensor(place), dst=to, group=self._host_group)
        if place == NEW_SPEC:
            dist.send_object_list([content], dst=to, group=self._host_group)

    def _global_rank(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.schedule.rank_of(stage))

    def _receive(self, stage: int, key: Any) -> Any:
        if stage == 0:
            return None
        source, book, place = self._global_rank(stage - 1), self._books[stage], torch.tensor(NEW_SPEC)
        dist.recv(place, src=source, group=self._host_group)
        if int(place) == NEW_SPEC:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=source, group=self._host_group)
            if isinstance(box[0], _PreviousStageFailed):
                raise box[0]
            spec = PayloadSpec(box[0])
            book.add(spec)
        else:
            spec = book.at(int(place))
        tensors = spec.allocate(self.device)
        for tensor in tensors:
            dist.recv(tensor, group=self.group, src=source)
        if key is not None:
            self._received_specs[key, stage] = spec
        return spec.rebuild(tensors)

    # rehearsals -------------------------------------------------------------------------------------------------------
    def unrehearsed(self, parts: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Returns one micro-batch of each size that has not been rehearsed."""
        found = {part.signature: part for part in parts}
        return [part for key, part in found.items() if key not in self._rehearsed]

    def rehearse(self, step: Callable[[Any], Any], part: MicroBatch, inspect_outputs: Callable[[Any], Any]) -> Any:
        """Runs a micro-batch through the stages without gradients, to learn the structure of their payloads.

        Args:
            step: the user's step, called with a micro-batch.
            part: the micro-batch.
            inspect_outputs: called on the last stage with the step's outputs.

        Returns:
            What `inspect_outputs` returned, on the rank with the last stage; None on the others.

        Raises:
            ConfigurationError: if the step cannot be split at the boundaries of the stages. Raised on every rank.
        """
        error: Exception | None = None
        found = None
        self.is_rehearsing, self.nan_stages = True, set()
        try:
            with torch.no_grad(), self.rng.preserved(), self.runner.watching_attributes():
                outputs = self.relay(step, part.batch, part.signature)
            if self.has_last:
                found = inspect_outputs(outputs)
        except Exception as caught:
            error = caught
            self._release_waiting_stages(error)
            if self.runner.stage and not isinstance(error, LeydenError):
                add_note(error, BEFORE_BLOCKS)
            if self._rehearses_with_all and not isinstance(error, LeydenError):
                # Data ranks whose batches raise no error may wait for this one in a collective. It ends them.
                raise
        finally:
            self.is_rehearsing = False
        self._agree(error)
        self._rehearsed.add(part.signature)
        return found

    def _agree(self, error: Exception | None) -> None:
        """Makes the ranks agree on the stages with nan, or raises the first error of a rank on all of them."""
        group, device = self._rehearsing
        flags = [error is not None, *(stage in self.nan_stages for stage in range(self.cut.stages))]
        agreed = torch.tensor(flags, dtype=torch.uint8, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        has_failed, *has_nan_by_stage = agreed.tolist()
        if has_failed:
            self._raise_first(error, group)
        if self._context is not None:
            # A part may have nan of its own, such as padding that sees nothing.
            found = torch.tensor(has_nan_by_stage, dtype=torch.uint8, device=self.device)
            has_nan_by_stage = self._context.gathered(found).amax(0).tolist()
        self.nan_stages = {stage for stage, has_nan in enumerate(has_nan_by_stage) if has_nan}

    def _raise_first(self, error: Exception | None, group: dist.ProcessGroup) -> None:
        own_failure = None
        if error is not None and not isinstance(error, _PreviousStageFailed):
            own_failure = (self.rank, type(error).__name__, str(error))
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, own_failure, group=group)
        place = next(place for place, failure in enumerate(reports) if failure)
        if error is not None and place == dist.get_rank(group):
            raise error
        rank, kind, text = reports[place]
        if kind == ConfigurationError.__name__:
            raise ConfigurationError(text)
        raise LeydenError(f"rank {rank} of the pipeline failed: {kind}: {text}")

    def _release_waiting_stages(self, error: Exception) -> None:
        """Sends the error to the stages that wait for this rank's payloads."""
        for stage in self.stages:
            following = stage + 1
            if following < self.cut.stages and not self._holds(following) and stage >= self._relay_stage:
                self._announce(following, NEW_SPEC, _PreviousStageFailed(str(error)))

    # forward and backward, by the schedule ----------------------------------------------------------------------------
    def train(
        self, step: Callable[[Any], Any], parts: Sequence[MicroBatch], to_loss: Callable[[Any, MicroBatch], Tensor]
    ) -> list[Any]:
        """Runs the micro-batches of a batch forward and backward. All their sizes must have been rehearsed.

        Args:
            step: the user's step, called with a micro-batch.
            parts: the micro-batches.
            to_loss: called on the last stage with the step's outputs; returns the loss for backward.

        Returns:
            The step's outputs for each micro-batch on the rank with the last stage; None for each on other ranks.
        """
        schedule = self._schedule_for(frozenset(part.signature for part in parts))
        count = len(parts)
        self._running = _RunningBatch(step, to_loss, parts, schedule.specs, [None] * count, count * len(self.stages))
        try:
            self.rng.begin_batch()
            schedule.run(count)
            return self._running.outputs
        finally:
            self._running = None

    def _schedule_for(self, signatures: frozenset[Any]) -> _TorchSchedule:
        """Returns the torch schedule for micro-batches of these sizes, whose payloads are padded to a common shape."""
        if self._latest is not None and self._latest[0] == signatures:
            return self._latest[1]
        specs = {}
        for stage in self.stages:
            for receiver, known in ((stage, self._received_specs), (stage + 1, self._sent_specs)):
                payloads = [known[key, stage] for key in signatures if (key, stage) in known]
                if payloads:
                    specs[receiver] = enclosing(payloads)
        key = tuple(sorted(specs.items()))
        schedule = self._schedules.pop(key, None) or _TorchSchedule(self, specs)
        self._schedules[key] = schedule
        if len(self._schedules) > CACHED_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        self._latest = (signatures, schedule)
        return schedule

    def forward(self, stage: int, received: Sequence[Tensor], index: int) -> Any:
        """Runs one micro-batch of the running batch through a stage; called by the schedule."""
        running = self._running
        assert running is not None
        part = running.parts[index]
        spec = self._received_specs.get((part.signature, stage))
        payload = spec.rebuild(received) if spec is not None else None
        is_last = stage == self.cut.stages - 1
        self.on_last, self.is_filling = is_last and part.rows > 0, not part.rows
        try:
            result = self.runner.run(stage, lambda: running.step(part.batch), payload, index)
        finally:
            self.on_last = self.is_filling = False
        if is_last:
            loss = running.to_loss(result, part)
            running.outputs[index] = detached(result)
            return loss
        self._sent_specs[part.signature, stage].check(result)
        leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        specs = running.specs[stage + 1]
        return tuple(padded(tensor, spec.shape).contiguous() for tensor, spec in zip(tensors, specs, strict=True))

    def begin_backward(self, outputs: Any) -> None:
        """Begins the next backward pass, from some outputs; called by the schedule."""
        assert self._running is not None
        self._before_backward(self._running.begin_backward(), outputs)

    def backward_context(self, index: int) -> AbstractContextManager[None]:
        """The context of a micro-batch's backward pass, which may recompute its forward pass."""
        if self._context is None:
            return nullcontext()
        assert self._running is not None
        return self._context.running(self._running.parts[index].batch)


class _PreviousStageFailed(LeydenError):
    """Sent to a waiting stage in place of a payload. The failed stage reports the actual error."""


class _StageModule(nn.Module):
    """One stage of a pipeline, as the module that torch's stage calls."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self._pipeline, self._stage, self._index = pipeline, stage, 0

    def begin(self, index: int) -> None:
        """Begins the forward pass of a micro-batch."""
        self._index = index

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Returns the stage's parameters. Zero-bubble schedules compute their gradients in separate passes."""
        return self._pipeline.parameters_of(self._stage)

    def forward(self, *received: Tensor) -> Any:
        return self._pipeline.forward(self._stage, received if self._stage else (), self._index)


class _Stage(PipelineStage):
    """torch's stage, extended to report which micro-batch runs, and when a backward pass begins."""

    def __init__(self, pipeline: Pipeline, stage: int, inputs: Any, outputs: Any) -> None:
        module = _StageModule(pipeline, stage)
        super().__init__(
            module,
            stage,
            pipeline.cut.stages,
            pipeline.device,
            input_args=inputs,
            output_args=outputs,
            group=pipeline.group,
        )
        self._pipeline, self._module = pipeline, module

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Tensor:
        # The stages vote on exchanging shapes, which all of them know. Only the messages, which connect them, count.
        super()._warmup_backward_result(*args, **kwargs)
        return torch.tensor([1], dtype=torch.int32)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._module.begin(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._pipeline.backward_context(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        self._pipeline.begin_backward(bwd_kwargs["stage_output"])
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class _TorchSchedule:
    """torch's schedule for payloads of certain sizes.

    Args:
        pipeline: the pipeline whose stages it runs.
        specs: receiving stage → specs of the tensors that it receives, for all payloads that this rank receives or
            sends.
    """

    def __init__(self, pipeline: Pipeline, specs: dict[int, tuple[TensorSpec, ...]]) -> None:
        last = pipeline.cut.stages - 1
        self.specs = specs
        self._has_first, self._has_last = 0 in pipeline.stages, last in pipeline.stages
        index = torch.zeros(1, dtype=torch.long)
        self._stages = [
            _Stage(
                pipeline,
                stage,
                tuple(map(_example, specs[stage])) if stage else (index,),
                torch.empty((), device="meta", requires_grad=True)
                if stage == last
                else tuple(map(_example, specs[stage + 1])),
            )
            for stage in pipeline.stages
        ]
        schedule = pipeline.schedule
        kind: Any = get_schedule_class(schedule.name)
        arguments = {"loss_fn": _the_loss, "scale_grads": False}
        single = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(self._stages[0] if single else self._stages, schedule.micro_batches, **arguments)

    def kept(self) -> Iterator[Tensor]:
        """Yields receive buffers, and the outputs of micro-batches that wait for their backward."""
        for stage in self._stages:
            for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                yield from (info.buffer for info in received if info.buffer is not None)
            for outputs, _ in stage.fwd_cache.values():
                yield from outputs

    def run(self, count: int) -> None:
        """Runs a batch of `count` micro-batches forward and backward."""
        indices = torch.arange(count)
        arguments = (indices,) if self._has_first else ()
        target = {"target": indices} if self._has_last else {}
        try:
            self._schedule.step(*arguments, return_outputs=False, **target)
        except RuntimeError as error:
            # torch wraps an error of a stage in a RuntimeError that lists every tensor.
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise


def _the_loss(output: Tensor, target: Any) -> Tensor:
    """Returns the last stage's output, which is already the loss."""
    return output


def _example(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.dtype.is_floating_point)

"""Pipeline: micro-batches pass through the stages of a model, in the order of one of torch's schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils._pytree import tree_leaves

from leyden.strategies.errors import ConfigurationError, LeydenError, add_note, nearest
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.draws import StageDraws
from leyden.strategies.mesh.pipeline.forms import Form, Shape, detached, has_nan, largest, padded
from leyden.strategies.mesh.pipeline.passage import Passages
from leyden.strategies.micro_batches import MicroBatch

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules under which the first and the last stage are on one rank."""
ZERO_BUBBLE = ("InterleavedZeroBubble", *V_SHAPED)
"""These compute the gradients of weights apart from those of activations."""

RUNS_HERE = "return_outputs" in inspect.signature(PipelineScheduleSingle.step).parameters
"""False for a torch whose stages first exchange numbers of two dtypes, which ends gloo's ranks; 2.9 does."""

LINES = 8
"""How many schedules are kept, each for micro-batches of certain sizes, with memory for what its stages receive."""

BEFORE_BLOCKS = (
    "This stage of the pipeline does not hold the layers before its blocks: each of them returns nan here, in the "
    "shape of what blocks return. Let a layer of that stage, or a block, do what this line does with their results."
)
"""What may be behind an error of a step on a later stage."""


@dataclass(frozen=True)
class Schedule:
    """The order in which a pipeline runs its micro-batches.

    Args:
        name: as torch calls it, in any case: one of `SINGLE`, `LOOPED` or `V_SHAPED`.
        micro_batches: into how many a batch is cut.
        ranks: over how many ranks the model is cut.
        stages_per_rank: 1 for GPipe and 1F1B; 2 if left out for the others.

    Raises:
        ConfigurationError: for an unknown name, or numbers that the schedule does not take.
    """

    name: str
    micro_batches: int
    ranks: int
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        if self.ranks > 1 and not RUNS_HERE:
            raise ConfigurationError(
                f"a pipeline needs a newer torch than {torch.__version__}, whose stages cannot be run: install torch "
                "2.13, or shard the model by strategy='fsdp' or MeshStrategy(dp_shard=…, tp=…)."
            )
        names = {name.lower(): name for name in (*SINGLE, *LOOPED, *V_SHAPED)}
        if str(self.name).lower() not in names:
            raise ConfigurationError(f"schedule={self.name!r} is unknown. {nearest(str(self.name), names.values())}")
        name = names[str(self.name).lower()]
        wanted = 1 if name in SINGLE else 2
        given = wanted if self.stages_per_rank is None else self.stages_per_rank
        if type(given) is not int or given < 1 or (name not in LOOPED and given != wanted):
            allowed = f"{wanted}" if name not in LOOPED else "a number from 1"
            raise ConfigurationError(f"stages_per_rank={self.stages_per_rank!r}: the schedule {name} has {allowed}.")
        count = self.micro_batches
        if type(count) is not int or count < 1:
            raise ConfigurationError(f"microbatches={count!r}: give a number from 1.")
        fewest = {"1F1B": self.ranks, "DualPipeV": 2 * self.ranks}.get(name, 1)
        if count < fewest:
            raise ConfigurationError(
                f"microbatches={count}: the schedule {name} over {self.ranks} ranks needs {fewest} at least, and four "
                "times as many waste little time. Give more, or schedule='GPipe'."
            )
        rounds = max(1, count // self.ranks)
        if name in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
            raise ConfigurationError(
                f"microbatches={count}: the schedule {name} runs them in {rounds} rounds over {self.ranks} ranks: give "
                f"a multiple of {rounds}."
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "stages_per_rank", given)

    @property
    def stages(self) -> int:
        """The number of stages."""
        assert self.stages_per_rank is not None
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that holds a stage."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.name in V_SHAPED and turn % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank of the pipeline holds."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def __str__(self) -> str:
        return f"{self.name} of {self.micro_batches} micro-batches"


@dataclass(slots=True)
class _Job:
    """A batch on its way."""

    step: Callable[[Any], Any]
    to_loss: Callable[[Any, MicroBatch], Tensor]
    parts: Sequence[MicroBatch]
    shapes: dict[int, tuple[Shape, ...]]
    outputs: list[Any]
    backwards: int

    def begin_backward(self) -> bool:
        """Counts a backward pass down; returns whether it is the last one on this rank."""
        self.backwards -= 1
        return self.backwards == 0


class Pipeline:
    """The stages of one model on the ranks of a pipeline, seen from one of them.

    Args:
        root: the model.
        holdings: what the stages of this rank hold of it.
        schedule: in which order micro-batches run.
        group: the ranks of the pipeline.
        device: of this rank.
        draws: random numbers of the stages.
        before_backward: called before each backward pass, with whether it is the batch's last on this rank.
    """

    def __init__(
        self,
        root: nn.Module,
        holdings: Holdings,
        schedule: Schedule,
        group: dist.ProcessGroup,
        device: torch.device,
        draws: StageDraws,
        before_backward: Callable[[bool], None],
    ) -> None:
        self._root, self.cut, self.schedule, self.group, self.device = root, holdings.cut, schedule, group, device
        self.rank = dist.get_rank(group)
        self.stages = holdings.stages
        self.draws, self._before_backward = draws, before_backward
        self.passages = Passages(root, holdings, draws)
        self._received: dict[tuple[Any, int], Form] = {}
        """By the signature of a micro-batch and the stage that receives."""
        self._sent: dict[tuple[Any, int], Form] = {}
        self._rehearsed: set[Any] = set()
        self._lines: dict[Any, _Line] = {}
        self._latest: tuple[frozenset[Any], _Line] | None = None
        """The sizes of the last batch's micro-batches, and their schedule."""
        self._job: _Job | None = None
        self._relayed = 0
        """The stage of this rank that `relay` has come to."""
        self.is_rehearsing = False
        """A batch runs only to see what passes between the stages."""
        self.is_filling = False
        """A micro-batch without a sample runs, to fill the schedule."""
        self.on_last = False
        """The step that runs reaches its end on this rank."""
        self.nan_stages: set[int] = set()
        """Stages of this rank whose output was nan in the last rehearsal."""

    @property
    def has_last(self) -> bool:
        """True on the rank that holds the last stage."""
        return self.cut.stages - 1 in self.stages

    @property
    def last_rank(self) -> int:
        """The rank of the pipeline with the last stage."""
        return self.schedule.rank_of(self.cut.stages - 1)

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """The parameters that a stage of this rank runs with."""
        named = self._root.named_parameters(remove_duplicate=False)
        return (parameter for name, parameter in named if self.cut.stage_of(name) == stage)

    # one after the other ----------------------------------------------------------------------------------------------
    def relay(self, step: Callable[[Any], Any], batch: Any, key: Any = None, draws: bool = False) -> Any:
        """Runs a batch forward through one stage after the other.

        Args:
            step: the user's, of a batch.
            batch: the whole of it.
            key: under which to keep what passes between the stages; None keeps nothing.
            draws: random numbers are those of the stages.

        Returns:
            What the step returned, on the rank with the last stage; None on the others.
        """
        outputs, here = None, None
        for stage in self.stages:
            self._relayed = stage
            received = here if stage and self._is_here(stage - 1) else self._receive(stage, key)
            passed = self._pass(stage, step, batch, received, 0 if draws else None)
            if stage == self.cut.stages - 1:
                outputs = passed
            else:
                if key is not None:
                    self._sent[key, stage] = Form(passed)
                if self._is_here(stage + 1):
                    here = passed
                    if key is not None:
                        self._received[key, stage + 1] = Form(passed)
                else:
                    self._send(stage, passed)
        return outputs

    def _pass(self, stage: int, step: Callable[[Any], Any], batch: Any, received: Any, micro_batch: int | None) -> Any:
        self.on_last = stage == self.cut.stages - 1
        try:
            passed = self.passages.run(stage, lambda: step(batch), received, micro_batch)
        finally:
            self.on_last = False
        if self.is_rehearsing and has_nan(passed):
            self.nan_stages.add(stage)
        return passed

    def _is_here(self, stage: int) -> bool:
        return stage in self.stages

    def _send(self, stage: int, passed: Any) -> None:
        passed = detached(passed)
        to = self.schedule.rank_of(stage + 1)
        dist.send_object_list([Form(passed).tree], group=self.group, group_dst=to, device=self.device)
        for leaf in tree_leaves(passed):
            if isinstance(leaf, Tensor):
                dist.send(leaf.contiguous(), group=self.group, group_dst=to)

    def _receive(self, stage: int, key: Any) -> Any:
        if stage == 0:
            return None
        box: list[Any] = [None]
        source = self.schedule.rank_of(stage - 1)
        dist.recv_object_list(box, group=self.group, group_src=source, device=self.device)
        if isinstance(box[0], _Failed):
            raise box[0]
        form = Form(box[0])
        tensors = form.room(self.device)
        for tensor in tensors:
            dist.recv(tensor, group=self.group, group_src=source)
        if key is not None:
            self._received[key, stage] = form
        return form.filled(tensors)

    # what passes between the stages -----------------------------------------------------------------------------------
    def unknown(self, parts: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Picks one micro-batch of each size that has not been rehearsed."""
        found = {part.signature: part for part in parts}
        return [part for key, part in found.items() if key not in self._rehearsed]

    def rehearse(self, step: Callable[[Any], Any], part: MicroBatch, look: Callable[[Any], Any]) -> Any:
        """Runs a micro-batch through the stages, without gradients, to learn what passes between them.

        Args:
            step: the user's, of a micro-batch.
            part: the micro-batch.
            look: called on the last stage with what the step returned.

        Returns:
            What `look` returned, on every rank.

        Raises:
            ConfigurationError: on every rank of the pipeline, if the step cannot be cut where the model is.
        """
        key = part.signature
        found = self._rehearse(step, part, key, look)
        self._rehearsed.add(key)
        return found

    def _rehearse(self, step: Callable[[Any], Any], part: MicroBatch, key: Any, look: Callable[[Any], Any]) -> Any:
        error: Exception | None = None
        found = None
        self.is_rehearsing, self.nan_stages = True, set()
        try:
            with torch.no_grad(), self.draws.undoing(), self.passages.watching():
                outputs = self.relay(step, part.batch, key)
            if self.has_last:
                found = look(outputs)
        except Exception as caught:
            error = caught
            self._fail_after(error)
        finally:
            self.is_rehearsing = False
        everybody: list[Any] = [None] * dist.get_world_size(self.group)
        own = None if error is None or isinstance(error, _Failed) else (type(error).__name__, str(error))
        dist.all_gather_object(everybody, (own, found), group=self.group)
        failed = [(rank, kind, text) for rank, (own, _) in enumerate(everybody) if own for kind, text in [own]]
        if failed:
            rank, kind, text = failed[0]
            if error is not None and rank == self.rank:
                if self.passages.stage and not isinstance(error, LeydenError):
                    add_note(error, BEFORE_BLOCKS)
                raise error
            if kind == ConfigurationError.__name__:
                raise ConfigurationError(text)
            raise LeydenError(f"stage {rank} of the pipeline failed: {kind}: {text}")
        return everybody[self.last_rank][1]

    def _fail_after(self, error: Exception) -> None:
        """Lets the stages that wait for this one's output know that none comes."""
        for stage in self.stages:
            following = stage + 1
            if following < self.cut.stages and not self._is_here(following) and stage >= self._relayed:
                to = self.schedule.rank_of(following)
                dist.send_object_list([_Failed(str(error))], group=self.group, group_dst=to, device=self.device)

    # by the schedule --------------------------------------------------------------------------------------------------
    def train(
        self, step: Callable[[Any], Any], parts: Sequence[MicroBatch], to_loss: Callable[[Any, MicroBatch], Tensor]
    ) -> list[Any]:
        """Runs the micro-batches of a batch forward and backward. Their sizes have been rehearsed.

        Args:
            step: the user's, of a micro-batch.
            parts: the micro-batches.
            to_loss: called on the last stage with what the step returned; gives the loss to go backward from.

        Returns:
            What the step returned for each, on the rank with the last stage; None for each on the others.
        """
        line = self._line_of(frozenset(part.signature for part in parts))
        count = len(parts)
        self._job = _Job(step, to_loss, parts, line.shapes, [None] * count, count * len(self.stages))
        try:
            self.draws.begin_batch()
            line.run(count)
            return self._job.outputs
        finally:
            self._job = None

    def _line_of(self, signatures: frozenset[Any]) -> _Line:
        """The schedule for micro-batches of these sizes."""
        if self._latest is not None and self._latest[0] == signatures:
            return self._latest[1]
        shapes = {}
        for stage in self.stages:
            for at in (stage, stage + 1):
                known = self._received if at == stage else self._sent
                forms = [known[key, stage] for key in signatures if (key, stage) in known]
                if forms:
                    shapes[at] = largest(forms)
        key = tuple(sorted(shapes.items()))
        line = self._lines.pop(key, None) or _Line(self, shapes)
        self._lines[key] = line
        if len(self._lines) > LINES:
            del self._lines[next(iter(self._lines))]
        self._latest = (signatures, line)
        return line

    def forward(self, stage: int, received: Sequence[Tensor], index: int) -> Any:
        """Runs a micro-batch of the batch on its way through a stage; called by the schedule."""
        job = self._job
        assert job is not None
        part = job.parts[index]
        form = self._received.get((part.signature, stage))
        self.on_last, self.is_filling = stage == self.cut.stages - 1 and part.rows > 0, not part.rows
        try:
            passed = self.passages.run(
                stage, lambda: job.step(part.batch), form.filled(received) if form is not None else None, index
            )
        finally:
            self.on_last = self.is_filling = False
        if stage == self.cut.stages - 1:
            loss = job.to_loss(passed, part)
            job.outputs[index] = detached(passed)
            return loss
        self._sent[part.signature, stage].check(passed)
        leaves = (passed,) if isinstance(passed, Tensor) else tree_leaves(passed)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tuple(
            padded(tensor, room.shape).contiguous() for tensor, room in zip(tensors, job.shapes[stage + 1], strict=True)
        )

    def begin_backward(self) -> None:
        """Begins the next backward pass; called by the schedule."""
        assert self._job is not None
        self._before_backward(self._job.begin_backward())


class _Failed(LeydenError):
    """A stage before this one failed: its own error is what counts."""


class _StageModule(nn.Module):
    """What torch's stage calls: one stage of a pipeline."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self._pipeline, self._stage = pipeline, stage

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The stage's parameters, whose gradients zero-bubble schedules compute apart."""
        return self._pipeline.parameters_of(self._stage)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        return self._pipeline.forward(self._stage, received if self._stage else (), int(index))


class _Stage(PipelineStage):
    """torch's stage, which says when a backward pass begins."""

    def __init__(self, pipeline: Pipeline, stage: int, inputs: Any, outputs: Any) -> None:
        super().__init__(
            _StageModule(pipeline, stage),
            stage,
            pipeline.cut.stages,
            pipeline.device,
            input_args=inputs,
            output_args=outputs,
            group=pipeline.group,
        )
        self._pipeline = pipeline

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        self._pipeline.begin_backward()
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class _Line:
    """torch's schedule for micro-batches of certain sizes.

    Args:
        pipeline: whose stages it runs.
        shapes: of what each stage receives, and of what the last one of this rank sends, by the receiving stage.
    """

    def __init__(self, pipeline: Pipeline, shapes: dict[int, tuple[Shape, ...]]) -> None:
        last = pipeline.cut.stages - 1
        self.shapes = shapes
        self._has_first, self._has_last = 0 in pipeline.stages, last in pipeline.stages
        index = torch.zeros(1, dtype=torch.long)
        stages = [
            _Stage(
                pipeline,
                stage,
                tuple(map(_example, shapes[stage])) if stage else (index,),
                torch.empty((), device="meta", requires_grad=True)
                if stage == last
                else tuple(map(_example, shapes[stage + 1])),
            )
            for stage in pipeline.stages
        ]
        schedule = pipeline.schedule
        kind: Any = get_schedule_class(schedule.name)
        arguments = {"loss_fn": _the_loss, "scale_grads": False}
        single = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(stages[0] if single else stages, schedule.micro_batches, **arguments)

    def run(self, count: int) -> None:
        """Runs a batch of so many micro-batches."""
        indices = torch.arange(count)
        arguments = (indices,) if self._has_first else ()
        target = {"target": indices} if self._has_last else {}
        try:
            self._schedule.step(*arguments, index=indices, return_outputs=False, **target)
        except RuntimeError as error:
            # torch wraps what a stage raises, and describes every tensor.
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise


def _the_loss(output: Tensor, target: Any) -> Tensor:
    """Returns the last stage's output, which is the loss itself."""
    return output


def _example(of: Shape) -> Tensor:
    return torch.empty(of.shape, dtype=of.dtype, device="meta", requires_grad=of.dtype.is_floating_point)

"""Evaluation and prediction: one pass over a stage's data without gradients, each sample once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from leyden.core.errors import ConfigurationError
from leyden.core.tree import move_to_device
from leyden.data.cursor import LoaderCursor
from leyden.data.rng import rng_state, undoing
from leyden.data.sharding import NO_SAMPLES
from leyden.launch.heartbeat import EVALUATED, Phase
from leyden.strategies.readers import Readers
from leyden.trainer.engine.toggling import evaluation_weights, keeping_modes
from leyden.trainer.events.hooks import overrides
from leyden.trainer.logging.metric_states import MetricStates
from leyden.trainer.logging.metrics import set_aside
from leyden.trainer.logging.values import Value, in_turns, read_back
from leyden.trainer.loops.agreement import InterruptiblePass
from leyden.trainer.loops.batches import takes_iterator
from leyden.trainer.loops.user_step import BatchParts, step_arguments, without_side_effects
from leyden.trainer.module import TrainModule
from leyden.trainer.reporting.rows import StepRows

if TYPE_CHECKING:
    from leyden.trainer.run import Run

Stage = Literal["validation", "test", "predict"]


class EvaluationLoop:
    """A pass over the loaders of one stage; may be run repeatedly.

    Args:
        run: the run that the pass belongs to.
        stage: the stage whose hooks and step are called.
        loaders: the loaders, each with its number of batches; None for all batches.
    """

    def __init__(self, run: Run, stage: Stage, loaders: list[tuple[LoaderCursor, int | None]]) -> None:
        self._run = run
        self.stage = stage
        self.loaders = loaders
        self.hooks = run.hooks
        self.logs = run.logs
        self.step_name = f"{stage}_step"
        self.step = run.step_function(self.step_name)
        self._evaluate = run.strategy.evaluate
        if run.strategy.outputs.are_in_parts or run.strategy.outputs.are_split:
            parts = BatchParts(run)
            self.step = parts.step(self.step)
            if run.strategy.outputs.are_split:
                self._evaluate = parts.evaluate
        user_step = getattr(run.module, self.step_name)
        self._batches_done = 0
        """Batches done, in fit including earlier passes; loggers receive a batch's values under this step."""
        self._rows: StepRows | None = None
        self._names_by_loader: list[set[str]] = []
        """For each loader the names logged with its batches."""
        if takes_iterator(user_step):
            raise ConfigurationError(
                f"{self.step_name}(dataloader_iter): only training_step may draw its own batches. Take the batch: "
                f"def {self.step_name}(self, batch, batch_idx)."
            )
        self.takes_index, self.takes_loader = step_arguments(user_step, several=len(loaders) > 1)
        if len(loaders) > 1 and not self.takes_loader:
            raise ConfigurationError(
                f"there are {len(loaders)} {stage} loaders: {self.step_name} must take a dataloader_idx "
                f"(def {self.step_name}(self, batch, batch_idx, dataloader_idx=0))."
            )

    def run(self, limit: int | None = None) -> list[dict[str, float]] | None:
        """Runs one pass.

        Args:
            limit: the maximum number of batches per loader, for the sanity check; None for each loader's own limit.

        Returns:
            The logged values of each loader, or an empty list in fit; None if a signal interrupted the pass.
        """
        run = self._run
        in_fit = run.state.stage == "fit"
        self._batches_done = run.progress.validation_batches if in_fit else 0
        if in_fit and not run.state.sanity_checking:
            run.strategy.synchronize_buffers()
        self._rows, self._names_by_loader = self._step_rows(), []
        evaluating, beating = run.state.evaluating(self.stage), run.heartbeat.during(Phase.EVALUATION)
        with evaluating, beating, self._evaluation_mode():
            with self._grad_off():
                self._fire("start")
            # Inside on_…_start and on_…_end, so that a callback which swaps weights there finds those it left.
            with evaluation_weights(run.engine.optimizers), self._without_gradients():
                # A metric that training logs too counts only this pass's samples.
                with set_aside(self.logs.metrics_of("train")):
                    self._fire("epoch_start")
                    for index, (cursor, own_limit) in enumerate(self.loaders):
                        before = self._batches_done
                        if not self._run_loader(index, cursor, _smallest(limit, own_limit)):
                            self.logs.forget(self.stage)
                            return None
                        self._names_by_loader.append(self.logs.names_since(self.stage, before))
                    values = self._end()
                self.hooks.close(f"on_{self.stage}_epoch_end")
            with self._without_gradients():
                self._fire("end")
        return self._values_by_loader(values)

    def _run_loader(self, index: int, cursor: LoaderCursor, limit: int | None) -> bool:
        """Runs the batches of one loader; returns False if a signal interrupted the pass."""
        if limit == 0:
            return True
        run, logs, transfer = self._run, self.logs, self._run.loaders.transfer
        engine, rows, inside_step = run.engine, self._rows, self.hooks.inside(self.step_name)
        loader_idx = (index,) if len(self.loaders) > 1 else ()
        logs.begin_loader(index if loader_idx else None)
        interruptible = InterruptiblePass(run.strategy.ranks, run.signals)
        listens_start, listens_end = (self.hooks.listens(f"on_{self.stage}_batch_{end}") for end in ("start", "end"))
        beat = run.heartbeat.words
        for batch_idx, batch in enumerate(self._batches(cursor, limit)):
            if interruptible.interrupted_before_batch():
                return False
            self._batches_done += 1
            beat[EVALUATED] = self._batches_done
            if cursor.shares:
                batch, share = batch
                engine.begin_batch(share)
            if batch is NO_SAMPLES:
                if not run.strategy.replicates:
                    self._run_without_samples(index, cursor, batch_idx)
                engine.end_batch()
                continue
            if transfer is not None:
                batch = transfer(batch, index)
            logs.begin_batch(batch, self._batches_done, batch_idx)
            if listens_start:
                self.hooks.fire_all(f"on_{self.stage}_batch_start", batch, batch_idx, *loader_idx)
            with inside_step:
                outputs = self._evaluate(self.step, batch, self._step_indices(batch_idx, index))
            if listens_end:
                self.hooks.fire_all(f"on_{self.stage}_batch_end", outputs, batch, batch_idx, *loader_idx)
            self._keep_outputs(index, outputs)
            if rows is not None:
                rows.add(self._batches_done)
            if run.profiler is not None and run.state.stage != "fit":
                run.profiler.step()
            outputs = batch = None
            logs.end_batch()
            engine.end_batch()
        if interruptible.interrupted_at_end():
            return False
        logs.end_loader(self.stage)
        return True

    def _batches(self, cursor: LoaderCursor, limit: int | None) -> Iterator[Any]:
        """Returns an iterator over a loader's batches; a profiler measures the loading time."""
        run = self._run
        batches: Iterator[Any] = itertools.islice(cursor.start(run.progress.epochs_done), limit)
        return batches if run.profiler is None else run.profiler.drawn(f"{self.stage}_dataloader_next", batches)

    def _run_without_samples(self, index: int, cursor: LoaderCursor, batch_idx: int) -> None:
        """Joins the collectives of the other ranks' forward pass with a filler batch, whose results are dropped."""
        run = self._run
        filler = cursor.filler()
        if filler is None:
            raise ConfigurationError(
                f"strategy={run.strategy.name!r} needs every rank in each {self.stage} batch, but this rank has none. "
                "Give the loader a length, or the same number of batches on each rank."
            )
        if run.loaders.transfer is not None:
            filler = run.loaders.transfer(filler, index)
        with self.logs.discarding(), without_side_effects(run.module):
            run.strategy.evaluate(self.step, filler, self._step_indices(batch_idx, index))

    def _step_indices(self, batch_idx: int, index: int) -> tuple[int, ...]:
        """Returns the step's arguments after the batch."""
        return (*((batch_idx,) if self.takes_index else ()), *((index,) if self.takes_loader else ()))

    def snapshot(self) -> dict[str, Any]:
        """Returns the state that a pass changes: loaders, the module's metrics and random states."""
        metrics = MetricStates(self._run.module).state_dict()
        return {"loaders": self.loader_states(), "metrics": metrics, "rng": rng_state()}

    def undoing(self, before: dict[str, Any]) -> Callable[[], None]:
        """Returns a function that restores a `snapshot`, for an interrupted pass that will run again."""
        metrics = MetricStates(self._run.module)
        undo_rng = undoing([cursor.loader for cursor, _ in self.loaders])

        def undo() -> None:
            self.load_loader_states(before["loaders"])
            metrics.load_state_dict(before["metrics"])
            undo_rng()

        return undo

    def loader_states(self) -> list[dict[str, Any]]:
        """Returns the state that loaders keep between passes, such as their own generators."""
        return [cursor.rest_state(ended=limit is None) for cursor, limit in self.loaders]

    def load_loader_states(self, states: list[dict[str, Any]]) -> None:
        """Restores states returned by `loader_states`; ignores them if the number of loaders differs."""
        if len(states) == len(self.loaders):
            for (cursor, _), state in zip(self.loaders, states, strict=True):
                cursor.load_rest_state(state)

    def _keep_outputs(self, index: int, outputs: Any) -> None:
        """Keeps a batch's outputs if the stage returns them."""

    def _step_rows(self) -> StepRows | None:
        """Returns the collector of per-batch rows for the loggers; None if no logger gets rows."""
        run, outputs = self._run, self._run.strategy.outputs
        if run.state.sanity_checking or not run.arguments.log_every_n_steps:
            return None
        loggers = run.loggers if run.strategy.ranks.is_global_zero else []
        # In a pipeline the values are on a different rank than the loggers, so every rank collects them.
        needs_rows = bool(run.loggers if outputs.are_in_parts else loggers)
        return StepRows(loggers, self.logs, run.progress, self.stage, outputs) if needs_rows else None

    def _end(self) -> dict[str, Value]:
        """Ends the pass: reduces its metrics and, in fit, counts it, before closing callbacks see either."""
        run, stage = self._run, self.stage
        # Before the hooks: one that swaps weights must see the shards.
        run.strategy.end_evaluation()
        if self._rows is not None:
            self._rows.end()
        self.hooks.fire(f"on_{stage}_epoch_end")
        values, logged = self.logs.reduce_epoch(stage)
        if not run.state.sanity_checking:
            run.send_epoch(values, logged)
            if run.state.stage == "fit":
                run.progress.count_validation(self._batches_done)
        return values

    def _fire(self, moment: str) -> None:
        self.hooks.fire_all(f"on_{self.stage}_{moment}")

    def _values_by_loader(self, values: dict[str, Value]) -> list[dict[str, float]]:
        """Returns for each loader the values logged with its batches, and those logged outside of batches."""
        if self._run.state.stage == "fit":
            # Reading values back would wait for the device, and a fit does not use them.
            return []
        numbers = read_back(values)
        if len(self.loaders) == 1:
            return [numbers]
        # Names of all ranks, because a rank may have had no batch of some loader.
        names_of_ranks = self._run.strategy.ranks.all_gather_object(self._names_by_loader)
        names_by_loader = [set[str]().union(*names) for names in zip(*names_of_ranks, strict=True)]
        shared = numbers.keys() - set[str]().union(*names_by_loader)
        return [{name: number for name, number in numbers.items() if name in own | shared} for own in names_by_loader]

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Puts the module in eval mode, and afterwards each submodule back in its own mode."""
        module, stage = self._run.module, self.stage
        with keeping_modes(module):
            if stage == "validation" and self._run.state.stage == "fit":
                self.hooks.fire_all("on_validation_model_zero_grad")
            if not overrides(module, f"on_{stage}_model_eval", TrainModule):
                module.eval()
            self._fire("model_eval")
            yield
        self._fire("model_train")

    def _grad_off(self) -> AbstractContextManager[Any]:
        run = self._run
        inference = run.arguments.inference_mode and run.strategy.supports_inference_mode
        return torch.inference_mode() if inference else torch.no_grad()

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        with self._grad_off():
            yield
        self._run.strategy.end_evaluation()


class PredictionLoop(EvaluationLoop):
    """A prediction pass.

    Args:
        run: the run that the pass belongs to.
        loaders: the loaders, each with its number of batches; None for all batches.
        keeps: the ranks that receive the outputs: "all", "main", or "none" if a callback writes them because they would
            not fit in memory.
    """

    def __init__(self, run: Run, loaders: list[tuple[LoaderCursor, int | None]], keeps: str = "all") -> None:
        super().__init__(run, "predict", loaders)
        self.keeps = keeps
        self.outputs: list[list[Any]] = []

    def predict(self) -> list[Any] | list[list[Any]] | None:
        """Runs the pass.

        Returns:
            The outputs of all batches on the CPU, ordered by global batch and data rank; with several loaders a list of
            such lists. None if this rank does not keep them, or if a signal interrupted the pass.
        """
        self.outputs = [[] for _ in self.loaders]
        if self.run() is None or self.keeps == "none":
            return None
        strategy = self._run.strategy
        if strategy.ranks.world_size > 1:
            readers = Readers(strategy)
            gather = readers.all_gather_object if self.keeps == "all" else readers.gather_object
            gathered = gather(self.outputs)
            if gathered is None:
                return None
            self.outputs = [list(in_turns(parts)) for parts in zip(*gathered, strict=True)]
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def _keep_outputs(self, index: int, outputs: Any) -> None:
        if self.keeps != "none":
            self.outputs[index].append(move_to_device(outputs, torch.device("cpu")))


def keeping(return_predictions: bool | None, gather: str) -> str:
    """Returns the ranks that receive the outputs, from the arguments of `Trainer.predict` (see `PredictionLoop`).

    Raises:
        ConfigurationError: if `gather` is unknown.
    """
    if gather not in ("all", "main"):
        raise ConfigurationError(f"predict(gather={gather!r}): use 'all' or 'main'.")
    return "none" if return_predictions is False else gather


def _smallest(*limits: int | None) -> int | None:
    """Returns the smallest limit; None stands for no limit."""
    return min((limit for limit in limits if limit is not None), default=None)

"""Evaluation and prediction: one pass over the data of a stage, each sample once, without gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from leyden.strategies.batch import move_to_device
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.heartbeat import EVALUATED, Phase
from leyden.strategies.readers import Readers
from leyden.trainer.data.cursor import LoaderCursor
from leyden.trainer.data.rng import rng_state, undoing
from leyden.trainer.data.sharding import NOTHING
from leyden.trainer.engine.toggling import keeping_modes
from leyden.trainer.events.hooks import overrides
from leyden.trainer.logging.metric_states import MetricStates
from leyden.trainer.logging.values import Value, in_turns, read_back
from leyden.trainer.loops.agreement import Pass
from leyden.trainer.loops.micro_batches import MicroBatches
from leyden.trainer.loops.user_step import step_arguments, without_trace
from leyden.trainer.module import TrainModule
from leyden.trainer.run.reporting.rows import StepRows

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run

Stage = Literal["validation", "test", "predict"]


class EvaluationLoop:
    """A pass over the loaders of one stage; may be run again and again.

    Args:
        run: of which it is a pass.
        stage: whose hooks and step are called.
        loaders: each with its number of batches, None for all that it has.
    """

    def __init__(self, run: Run, stage: Stage, loaders: list[tuple[LoaderCursor, int | None]]) -> None:
        self._run = run
        self.stage = stage
        self.loaders = loaders
        self.hooks = run.hooks
        self.logs = run.logs
        self.step_name = f"{stage}_step"
        self.step = run.step_function(self.step_name)
        if run.strategy.outputs.are_in_parts:
            self.step = MicroBatches(run).step(self.step)
        own = getattr(run.module, self.step_name)
        self._done = 0
        """Batches done, in fit those of former passes too: the step under which loggers are given the values of one."""
        self._rows: StepRows | None = None
        self._names: list[set[str]] = []
        """By loader, the names that were logged with its batches."""
        self.takes_index, self.takes_loader = step_arguments(own, several=len(loaders) > 1)
        if len(loaders) > 1 and not self.takes_loader:
            raise ConfigurationError(
                f"there are {len(loaders)} {stage} loaders: {self.step_name} must take a dataloader_idx "
                f"(def {self.step_name}(self, batch, batch_idx, dataloader_idx=0))."
            )

    def run(self, limit: int | None = None) -> list[dict[str, float]] | None:
        """Does one pass.

        Args:
            limit: at most so many batches of each loader, for the sanity check.

        Returns:
            For each loader the values that were logged for it, and in fit nothing; None if a signal broke the pass off.
        """
        run = self._run
        in_fit = run.state.stage == "fit"
        self._done = run.progress.validation_batches if in_fit else 0
        if in_fit and not run.state.sanity_checking:
            run.strategy.synchronize_buffers()
        self._rows, self._names = self._step_rows(), []
        evaluating, beating = run.state.evaluating(self.stage), run.heartbeat.during(Phase.EVALUATION)
        with evaluating, beating, self._evaluation_mode(), self._without_gradients():
            self._fire("start")
            self._fire("epoch_start")
            for index, (cursor, own_limit) in enumerate(self.loaders):
                before = self._done
                if not self._loader(index, cursor, own_limit if limit is None else _smaller(limit, own_limit)):
                    self.logs.forget(self.stage)
                    return None
                self._names.append(self.logs.names_since(self.stage, before))
            values = self._end()
        return self._by_loader(values)

    def _loader(self, index: int, cursor: LoaderCursor, limit: int | None) -> bool:
        """One loader's batches; False if a signal came between two."""
        if limit == 0:
            return True
        run, logs, transfer = self._run, self.logs, self._run.transfer
        engine, rows, inside_step = run.engine, self._rows, self.hooks.inside(self.step_name)
        which = (index,) if len(self.loaders) > 1 else ()
        logs.begin_loader(index if which else None)
        ranks = Pass(run.strategy.ranks, run.signals)
        listens_start, listens_end = (self.hooks.listens(f"on_{self.stage}_batch_{end}") for end in ("start", "end"))
        beat = run.heartbeat.words
        for batch_idx, batch in enumerate(self._batches(cursor, limit)):
            if ranks.breaks_off():
                return False
            self._done += 1
            beat[EVALUATED] = self._done
            if cursor.shares:
                batch, share = batch
                engine.begin_batch(share)
            if batch is NOTHING:
                if not run.strategy.replicates:
                    self._shadow(index, cursor, batch_idx)
                engine.end_batch()
                continue
            if transfer is not None:
                batch = transfer(batch, index)
            logs.begin_batch(batch, self._done, batch_idx)
            if listens_start:
                self.hooks.fire_all(f"on_{self.stage}_batch_start", batch, batch_idx, *which)
            with inside_step:
                outputs = run.strategy.evaluate(self.step, batch, self._extra(batch_idx, index))
            if listens_end:
                self.hooks.fire_all(f"on_{self.stage}_batch_end", outputs, batch, batch_idx, *which)
            self._take(index, outputs)
            if rows is not None:
                rows.add(self._done)
            if run.profiler is not None and run.state.stage != "fit":
                run.profiler.step()
            outputs = batch = None
            logs.end_batch()
            engine.end_batch()
        if ranks.ends():
            return False
        logs.end_loader(self.stage)
        return True

    def _batches(self, cursor: LoaderCursor, limit: int | None) -> Iterator[Any]:
        """A loader's batches, whose loading a profiler measures."""
        run = self._run
        batches: Iterator[Any] = itertools.islice(cursor.start(run.progress.epochs_done), limit)
        return batches if run.profiler is None else run.profiler.drawn(f"{self.stage}_dataloader_next", batches)

    def _shadow(self, index: int, cursor: LoaderCursor, batch_idx: int) -> None:
        """Shadows the other ranks' forward pass, which waits for this rank, with a batch that counts for nothing."""
        run = self._run
        filler = cursor.filler()
        if filler is None:
            raise ConfigurationError(
                f"strategy={run.strategy.name!r} needs every rank in each {self.stage} batch, and a rank has none to "
                "run: give the loader a length, or as many batches on each rank."
            )
        if run.transfer is not None:
            filler = run.transfer(filler, index)
        with self.logs.discarding(), without_trace(run.module):
            run.strategy.evaluate(self.step, filler, self._extra(batch_idx, index))

    def _extra(self, batch_idx: int, index: int) -> tuple[int, ...]:
        """The arguments of the step after the batch."""
        return (*((batch_idx,) if self.takes_index else ()), *((index,) if self.takes_loader else ()))

    def snapshot(self) -> dict[str, Any]:
        """Returns what a pass changes: the states of its loaders, of the module's metrics and of random numbers."""
        metrics = MetricStates(self._run.module).state_dict()
        return {"loaders": self.loader_states(), "metrics": metrics, "rng": rng_state()}

    def undoing(self, before: dict[str, Any]) -> Callable[[], None]:
        """Returns what restores all that `snapshot` took, for an interrupted pass that is run again."""
        metrics = MetricStates(self._run.module)
        undo_rng = undoing([cursor.loader for cursor, _ in self.loaders])

        def undo() -> None:
            self.load_loader_states(before["loaders"])
            metrics.load_state_dict(before["metrics"])
            undo_rng()

        return undo

    def loader_states(self) -> list[dict[str, Any]]:
        """What the loaders carry from one pass to the next, such as generators of their own."""
        return [cursor.rest_state(ended=limit is None) for cursor, limit in self.loaders]

    def load_loader_states(self, states: list[dict[str, Any]]) -> None:
        """Restores what `loader_states` returned, if there are as many loaders."""
        if len(states) == len(self.loaders):
            for (cursor, _), state in zip(self.loaders, states, strict=True):
                cursor.load_rest_state(state)

    def _take(self, index: int, outputs: Any) -> None:
        """Keeps a batch's outputs, where the stage returns them."""

    def _step_rows(self) -> StepRows | None:
        """What collects the values of single batches for the loggers; None where they are given none."""
        run, outputs = self._run, self._run.strategy.outputs
        loggers = run.loggers if run.strategy.ranks.is_global_zero and not run.state.sanity_checking else []
        # In a pipeline another rank has the values than the one with the loggers.
        has_some = bool(run.loggers) and not run.state.sanity_checking if outputs.are_in_parts else bool(loggers)
        wanted = has_some and run.arguments.log_every_n_steps
        return StepRows(loggers, self.logs, run.progress, self.stage, outputs) if wanted else None

    def _end(self) -> dict[str, Value]:
        """Ends the pass: closing callbacks see reduced metrics and, in fit, a progress in which the pass is done."""
        run, stage = self._run, self.stage
        # Hooks may put other weights in: they are to see the shards.
        run.strategy.end_evaluation()
        if self._rows is not None:
            self._rows.end()
        self.hooks.fire(f"on_{stage}_epoch_end")
        values, logged = self.logs.reduce_epoch(stage)
        if not run.state.sanity_checking:
            run.send(logged)
            if run.state.stage == "fit":
                run.progress.count_validation(self._done)
        self.hooks.close(f"on_{stage}_epoch_end")
        self._fire("end")
        return values

    def _fire(self, moment: str) -> None:
        self.hooks.fire_all(f"on_{self.stage}_{moment}")

    def _by_loader(self, values: dict[str, Value]) -> list[dict[str, float]]:
        if self._run.state.stage == "fit":
            # Nobody asks for them, and to read them back waits for the device.
            return []
        numbers = read_back(values)
        if len(self.loaders) == 1:
            return [numbers]
        # A rank may have had no batch of a loader.
        of_ranks = self._run.strategy.ranks.all_gather_object(self._names)
        own = [set[str]().union(*names) for names in zip(*of_ranks, strict=True)]
        of_all = numbers.keys() - set[str]().union(*own)
        return [{name: value for name, value in numbers.items() if name in names | of_all} for names in own]

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Puts everything in eval mode, and afterwards each part back in its own mode."""
        module, stage = self._run.module, self.stage
        with keeping_modes(module):
            if stage == "validation" and self._run.state.stage == "fit":
                self.hooks.fire_all("on_validation_model_zero_grad")
            if not overrides(module, f"on_{stage}_model_eval", TrainModule):
                module.eval()
            self._fire("model_eval")
            yield
        self._fire("model_train")

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        run = self._run
        inference = run.arguments.inference_mode and run.strategy.supports_inference_mode
        with torch.inference_mode() if inference else torch.no_grad():
            yield
        run.strategy.end_evaluation()


class PredictionLoop(EvaluationLoop):
    """One pass of prediction.

    Args:
        run: of which it is a pass.
        loaders: each with its number of batches, None for all that it has.
        keeps: who gets the outputs: "all" ranks, the "main" one, or "none", where a callback writes them and they would
            not fit in memory.
    """

    def __init__(self, run: Run, loaders: list[tuple[LoaderCursor, int | None]], keeps: str = "all") -> None:
        super().__init__(run, "predict", loaders)
        self.keeps = keeps
        self.outputs: list[list[Any]] = []

    def predict(self) -> list[Any] | list[list[Any]] | None:
        """Does the pass.

        Returns:
            The outputs of each batch, by global batch and data rank, on the CPU; a list of such lists where there are
            several loaders; None if they are not kept here, or a signal broke the pass off.
        """
        self.outputs = [[] for _ in self.loaders]
        if self.run() is None or self.keeps == "none":
            return None
        strategy = self._run.strategy
        if strategy.ranks.world_size > 1:
            readers = Readers(strategy)
            gather = readers.all_gather_object if self.keeps == "all" else readers.gather_object
            found = gather(self.outputs)
            if found is None:
                return None
            self.outputs = [list(in_turns(parts)) for parts in zip(*found, strict=True)]
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def _take(self, index: int, outputs: Any) -> None:
        if self.keeps != "none":
            self.outputs[index].append(move_to_device(outputs, torch.device("cpu")))


def keeping(return_predictions: bool | None, gather: str) -> str:
    """Who gets the outputs, by the arguments of `Trainer.predict`.

    Raises:
        ConfigurationError: if `gather` is unknown.
    """
    if gather not in ("all", "main"):
        raise ConfigurationError(f"predict(gather={gather!r}): use 'all' or 'main'.")
    return "none" if return_predictions is False else gather


def _smaller(limit: int, other: int | None) -> int:
    return limit if other is None else min(limit, other)

"""self.log: levels, names, weights, reductions and destinations of logged values."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from logged import scalars_in
from models import Logging, Tiny
from samples import numbered
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, ConfigurationError, Trainer, TrainModule
from leyden.callbacks import CSVLogger, ModelCheckpoint, TensorBoardLogger
from leyden.trainer.events.hooks import EVENTS
from leyden.trainer.logging.entries import rule_of


def rows(trainer: Trainer) -> list[dict[str, float]]:
    """Returns the rows that the CSV logger wrote, without empty cells."""
    with Path(str(trainer.log_dir), "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value != ""} for row in csv.DictReader(file)]


def numbers(values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"x": 3.0}),
        ({"on_step": False, "on_epoch": True}, {"x": 2.0}),
        ({"on_epoch": True}, {"x": 2.0, "x_step": 3.0, "x_epoch": 2.0}),
        ({"on_step": False, "on_epoch": True, "reduce_fx": "sum"}, {"x": 6.0}),
        ({"on_step": False, "on_epoch": True, "reduce_fx": "max"}, {"x": 3.0}),
        ({"on_step": False, "on_epoch": True, "reduce_fx": "min"}, {"x": 1.0}),
        ({"on_step": False, "on_epoch": True, "reduce_fx": torch.prod}, {"x": 6.0}),
        ({"on_step": False, "on_epoch": True, "reduce_fx": lambda values: values.median()}, {"x": 2.0}),
    ],
)
@pytest.mark.parametrize(
    "kind", [float, int, torch.tensor, lambda v: torch.tensor([v]), lambda v: torch.tensor(int(v))]
)
def test_names_and_values_follow_from_level_and_reduction(fit: Any, options: Any, expected: Any, kind: Any) -> None:
    module = Logging(lambda module, batch: module.log("x", kind(batch.mean().item()), **options))
    trainer = fit(module, numbered(3, start=1))
    assert numbers(trainer.callback_metrics) == expected
    # Only callbacks see the bare name of a value logged by step and by epoch.
    assert set(trainer.logged_metrics) == set(expected) - ({"x"} if len(expected) > 1 else set())
    assert trainer.progress_bar_metrics == {}


def test_reduce_fx_may_be_an_inline_lambda(fit: Any) -> None:
    def log(module: Any, batch: Any) -> None:
        module.log("x", batch.mean(), on_step=False, on_epoch=True, reduce_fx=lambda values: values.sum())

    assert numbers(fit(Logging(log), numbered(3)).callback_metrics) == {"x": 3.0}


def test_means_are_weighted_by_samples(fit: Any) -> None:
    def log(module: Any, batch: Any) -> None:
        module.log("by batch size", batch.mean(), on_step=False, on_epoch=True)
        module.log("unweighted", batch.mean(), on_step=False, on_epoch=True, batch_size=1)
        module.log("flag", batch.mean() > 1, on_step=False, on_epoch=True)

    trainer = fit(Logging(log), [torch.full((3, 2), 1.0), torch.full((1, 2), 5.0)])
    assert numbers(trainer.callback_metrics) == {"by batch size": 2.0, "unweighted": 3.0, "flag": 0.25}


def test_a_mean_weighted_by_tensors_is_exact_and_continues_after_a_resume(quiet: Any, tmp_path: Path) -> None:
    """float32 would count 2²⁴ items for 2²⁴ and one."""

    def log(module: Any, batch: Any) -> None:
        count = torch.tensor([2**24, 1, 1][int(batch.mean())])
        module.log("x", batch.mean() == 2, on_step=False, on_epoch=True, batch_size=count)
        module.log("none", batch.mean(), on_step=False, on_epoch=True, batch_size=0 * count)

    def fit(**resumed: Any) -> dict[str, float]:
        saves = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
        trainer = Trainer(**{**quiet, "enable_checkpointing": None}, max_epochs=1, callbacks=[saves])
        trainer.fit(Logging(log), numbered(3), **resumed)
        return numbers(trainer.callback_metrics)

    whole = fit()
    assert whole["x"] == pytest.approx(1 / (2**24 + 2), rel=1e-9) and math.isnan(whole["none"])
    assert fit(ckpt_path=next(tmp_path.rglob("*step=2"))) == pytest.approx(whole, nan_ok=True, abs=0)


def test_in_place_changes_after_logging_do_not_affect_the_value(fit: Any) -> None:
    def log(module: Any, batch: Any) -> None:
        value = torch.tensor(1.0)
        module.log("x", value)
        value += 9

    assert fit(Logging(log), numbered(1)).callback_metrics["x"] == 1.0


def test_a_logged_value_keeps_its_graph_only_with_enable_graph(fit: Any) -> None:
    graphs: list[bool] = []

    def log(module: Any, batch: Any) -> None:
        module.log("graph", module.net.weight.sum(), enable_graph=True)
        module.log("no graph", module.net.weight.sum())
        graphs.extend(module.trainer.callback_metrics[name].requires_grad for name in ("graph", "no graph"))

    fit(Logging(log), numbered(1))
    assert graphs == [True, False]


def test_the_mean_of_an_epoch_covers_only_its_own_batches(fit: Any) -> None:
    seen: list[dict[str, float]] = []

    class RecordsEpochValues(Callback):
        order = 100

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(numbers(trainer.callback_metrics))

    def log(module: Any, batch: Any) -> None:
        module.log("x", batch.mean() + module.current_epoch, on_step=False, on_epoch=True)

    fit(Logging(log), numbered(3), max_epochs=3, callbacks=RecordsEpochValues())
    assert seen == [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]


HOOKS = {
    # Hook: (may log by step, may log by epoch); None: it may not.
    "on_train_start": (None, True),
    "on_train_epoch_start": (None, True),
    "on_train_batch_start": (True, True),
    "on_before_zero_grad": (True, True),
    "on_before_backward": (True, True),
    "on_after_backward": (True, True),
    "on_before_optimizer_step": (True, True),
    "on_train_batch_end": (True, True),
    "on_train_epoch_end": (None, True),
    "on_validation_start": (None, True),
    "on_validation_epoch_start": (None, True),
    "on_validation_batch_start": (True, True),
    "on_validation_batch_end": (True, True),
    "on_validation_epoch_end": (None, True),
}
REFUSED = (
    *("setup", "on_fit_start", "on_train_end", "on_fit_end", "teardown", "on_save_checkpoint", "on_sanity_check_start"),
    *("on_sanity_check_end", "on_validation_model_eval", "on_validation_model_train", "on_validation_end"),
)
# A successful fit without a checkpoint never calls these.
REFUSED_ELSEWHERE = ("on_exception", "on_load_checkpoint", "on_validation_model_zero_grad")


def test_every_hook_is_a_method_of_callbacks_and_of_modules_with_few_exceptions() -> None:
    of_modules_alone = {event for event in EVENTS if not hasattr(Callback, event)}
    of_callbacks_alone = {event for event in EVENTS if not hasattr(TrainModule, event)}
    # They switch the module between training and evaluation.
    assert all("_model_" in event for event in of_modules_alone)
    assert of_callbacks_alone == {"on_sanity_check_start", "on_sanity_check_end", "on_exception"}


def test_the_lists_of_hooks_that_allow_or_refuse_self_log_are_complete() -> None:
    for event in EVENTS:
        like = event.replace("_test_", "_validation_")
        if like in HOOKS:
            assert rule_of(event)
            continue
        assert like in (*REFUSED, *REFUSED_ELSEWHERE) or "_predict_" in event, f"{event}: add it to HOOKS or to REFUSED"
        with pytest.raises(ConfigurationError, match=rf"self\.log cannot be called in {event}"):
            rule_of(event)


@pytest.mark.parametrize("owner", ["module", "callback"])
@pytest.mark.parametrize("hook", [*HOOKS, *REFUSED])
def test_each_hook_allows_self_log_by_step_by_epoch_or_not_at_all(fit: Any, hook: str, owner: str) -> None:
    options: dict[str, Any] = {}

    def from_module(self: Any, *args: Any) -> None:
        self.log("x", 2.0, **options)

    def from_callback(self: Any, trainer: Any, module: Any, *args: Any) -> None:
        module.log("x", 2.0, **options)

    def run() -> Trainer:
        on_module = owner == "module" and hook != "on_sanity_check_start"
        module = type("Logging", (Tiny,), {hook: from_module} if on_module else {})()
        callback = type("Watching", (Callback,), {} if on_module else {hook: from_callback})()
        return fit(module, numbered(2), numbered(2), callbacks=callback)  # type: ignore[no-any-return]

    if hook in REFUSED:
        with pytest.raises(ConfigurationError, match=rf"self\.log cannot be called in {hook}"):
            run()
        return
    by_step, by_epoch = HOOKS[hook]
    assert numbers(run().callback_metrics) == {"x": 2.0}
    options.update(on_step=False, on_epoch=by_epoch)
    assert numbers(run().callback_metrics) == {"x": 2.0}
    options.update(on_step=True)
    if by_step is None:
        with pytest.raises(ConfigurationError, match=r"this hook runs outside of steps\. Use on_epoch=True"):
            run()
    else:
        trainer, both = run(), {"x_step": 2.0, "x_epoch": 2.0}
        assert numbers(trainer.logged_metrics) == both
        # Callbacks do not see the step values of an evaluation.
        shown = {"x": 2.0, **both} if rule_of(hook).group == "train" else {"x": 2.0, "x_epoch": 2.0}
        assert numbers(trainer.callback_metrics) == shown


def test_values_go_to_the_progress_bar_the_logger_or_both(quiet: Any) -> None:
    class Validated(Logging):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", batch.mean())

    def log(module: Any, batch: Any) -> None:
        module.log("bar", batch.mean(), prog_bar=True, logger=False)
        module.log("both", batch.mean(), prog_bar=True, on_epoch=True)
        module.log("file", batch.mean())
        if batch.mean() == 1:
            module.log("once", 1.0)

    trainer = Trainer(**{**quiet, "logger": CSVLogger()}, max_epochs=1, log_every_n_steps=2)
    trainer.fit(Validated(log), numbered(5), numbered(3))
    assert numbers(trainer.progress_bar_metrics) == {"bar": 4.0, "both_step": 4.0, "both_epoch": 2.0}
    common = [{key: value for key, value in row.items() if key not in ("step", "epoch")} for row in rows(trainer)]
    assert common == [
        {"both_step": 1.0, "file": 1.0, "once": 1.0},
        {"both_step": 3.0, "file": 3.0},
        {"val": 1.0},
        {"both_epoch": 2.0},
    ]
    assert [row["step"] for row in rows(trainer)] == [2, 4, 5, 5]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3]), (50, [])])
def test_log_every_n_steps_decides_which_rows_a_logger_gets(quiet: Any, every: int, steps: list[int]) -> None:
    class Validated(Logging):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", batch.mean(), on_step=True, on_epoch=True)

    trainer = Trainer(**{**quiet, "logger": CSVLogger()}, max_epochs=1, log_every_n_steps=every)
    trainer.fit(Validated(lambda module, batch: module.log("x", batch.mean())), numbered(3), numbered(1))
    assert [row["step"] for row in rows(trainer) if "x" in row] == steps


def test_validation_steps_are_counted_across_passes(quiet: Any, tmp_path: Path) -> None:
    class Validated(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", batch.mean(), on_step=True, on_epoch=False)

    def run(epochs: int, **options: Any) -> Trainer:
        trainer = Trainer(**{**quiet, "logger": CSVLogger(tmp_path)}, max_epochs=epochs, log_every_n_steps=1)
        trainer.fit(Validated(), numbered(2), numbered(3), **options)
        return trainer

    path = run(1).save_checkpoint(tmp_path / "one")
    assert [row["step"] for row in rows(run(3, ckpt_path=path)) if "val" in row] == [*range(1, 10)]


@pytest.mark.parametrize("count", [3, 250])
def test_every_step_of_an_evaluation_is_logged(count: int, quiet: Any) -> None:
    class Evaluated(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", batch.mean(), on_step=True, on_epoch=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", batch.mean(), on_step=True)

    trainer = Trainer(**{**quiet, "logger": CSVLogger()}, max_epochs=1)
    trainer.fit(Evaluated(), numbered(1), numbered(count))
    found = [(row["step"], row["val_step"]) for row in rows(trainer) if "val_step" in row]
    assert found == [(number + 1, number) for number in range(count)]
    assert rows(trainer)[-1]["val_epoch"] == (count - 1) / 2
    trainer.test(dataloaders=numbered(count), verbose=False)
    assert [row["test_step"] for row in rows(trainer) if "test_step" in row] == [*range(count)]


def test_a_loaders_rows_hold_no_values_of_another_loader(quiet: Any) -> None:
    class Validated(Tiny):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", batch.mean(), on_step=True, on_epoch=False)

    trainer = Trainer(**{**quiet, "logger": CSVLogger()}, max_epochs=1)
    loaders = [DataLoader(part, None) for part in (numbered(1), numbered(2, start=5))]
    trainer.validate(Validated(), loaders, verbose=False)
    names = ("val/dataloader_idx_0", "val/dataloader_idx_1")
    assert [[row.get(name) for name in names] for row in rows(trainer)] == [[0.0, None], [None, 5.0], [None, 6.0]]


def test_a_value_logged_as_step_is_the_loggers_step(quiet: Any, tmp_path: Path) -> None:
    class LogsStepAtEpochEnd(Logging):
        def on_train_epoch_end(self) -> None:
            self.log_dict({"whole": 7.0, "step": 3.0, "epoch": 9.0})

    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    trainer = Trainer(**{**quiet, "logger": loggers}, max_epochs=1, log_every_n_steps=1)
    module = LogsStepAtEpochEnd(lambda module, batch: module.log_dict({"x": batch.mean(), "step": 10.0 * batch.mean()}))
    trainer.fit(module, numbered(2))
    assert rows(trainer) == [
        {"step": 0.0, "epoch": 0.0, "x": 0.0},
        {"step": 10.0, "epoch": 0.0, "x": 1.0},
        {"step": 3.0, "epoch": 9.0, "whole": 7.0},
    ]
    events = scalars_in(loggers[1].log_dir)
    assert [step for step, _ in events["x"]] == [0, 10]
    assert events["epoch"][-1] == (3, 9.0)
    assert "step" not in events


def test_a_step_that_is_not_a_number_is_refused(quiet: Any) -> None:
    trainer = Trainer(**{**quiet, "logger": CSVLogger()}, max_epochs=1, log_every_n_steps=1)
    with pytest.raises(ConfigurationError, match=r"self.log\('step', nan\): .* Log a finite number"):
        trainer.fit(Logging(lambda module, batch: module.log("step", float("nan"))), numbered(1))


@pytest.mark.parametrize("late", [False, True])
def test_a_save_in_on_train_batch_end_includes_the_row_of_its_step(late: bool, quiet: Any, tmp_path: Path) -> None:
    """Values that the hook logs after its save get a separate row, so none is written twice or lost."""

    class Saving(Logging):
        saves = False

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.saves and batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "two")
            if late:
                self.log("late", 10.0 * batch_idx)

    def run(saves: bool, **options: Any) -> list[dict[str, float]]:
        module = Saving(lambda module, batch: module.log("x", batch.mean()))
        module.saves = saves
        trainer = Trainer(**{**quiet, "logger": CSVLogger(tmp_path)}, max_epochs=1, log_every_n_steps=1)
        trainer.fit(module, numbered(4), **options)
        return rows(trainer)

    def values(found: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
        return [(row["step"], row[name]) for row in found if name in row]

    assert values(run(False), "x") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    whole, resumed = run(True), run(False, ckpt_path=tmp_path / "two")
    for found in (whole, resumed):
        assert values(found, "x") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    if late:
        assert values(whole, "late") == [(1, 0.0), (2, 10.0), (3, 20.0), (4, 30.0)]
        # The second step logged its value after the checkpoint, and the resume does not repeat that step.
        assert values(resumed, "late") == [(1, 0.0), (3, 20.0), (4, 30.0)]


def test_manual_optimization_logs_each_step_once(quiet: Any) -> None:
    class Manual(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", batch.mean())
            self.manual_backward(self(batch).mean())
            if batch_idx % 3 == 2:
                self.optimizers().step()

    trainer = Trainer(**{**quiet, "logger": CSVLogger()}, max_epochs=1, log_every_n_steps=1)
    trainer.fit(Manual(), numbered(6))
    assert [(row["step"], row["x"]) for row in rows(trainer)] == [(1, 2.0), (2, 5.0)]


# metrics --------------------------------------------------------------------------------------------------------------
def test_metric_objects_are_computed_and_reset_by_epoch(fit: Any) -> None:
    from torchmetrics import MeanMetric, MetricCollection, SumMetric

    class Measuring(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.sum = MeanMetric(), SumMetric()
            self.several = MetricCollection({"a": SumMetric(), "b": MeanMetric()})
            self.counts: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(batch)
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            self.sum.update(batch)
            self.log("sum", self.sum, on_step=False, on_epoch=True)
            return self(batch).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.several.update(batch)
            self.log_dict(self.several)

        def on_train_epoch_start(self) -> None:
            self.counts.append(self.sum._update_count + self.several["a"]._update_count)

    module = Measuring()
    trainer = fit(module, numbered(3), numbered(4), max_epochs=2)
    # Metrics are reset between epochs, so these values cover only the second epoch.
    assert module.counts == [0, 0]
    assert numbers(trainer.callback_metrics) == {
        "mean": 1.0,
        "mean_step": 2.0,
        "mean_epoch": 1.0,
        "sum": 6.0,
        "a": 12.0,
        "b": 1.5,
    }


@pytest.mark.parametrize("kind", ["PearsonCorrCoef", "SpearmanCorrCoef"])  # tensors as states, and lists
def test_training_and_validation_may_log_one_metric_object(kind: str, quiet: Any, tmp_path: Path) -> None:
    import torchmetrics

    points = torch.tensor([1.0, 2.0, 3.0])

    class Shared(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.metric = getattr(torchmetrics, kind)()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric.update(points, points)
            self.log("train", self.metric, on_step=False, on_epoch=True)
            return self(batch).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(points, -points)
            self.log("val", self.metric)

    def rows_of(folder: str, **options: Any) -> list[dict[str, float]]:
        saver = ModelCheckpoint(tmp_path / folder, save_top_k=-1)
        arguments = {**quiet, "enable_checkpointing": True, "val_check_interval": 2, "callbacks": saver}
        trainer = Trainer(max_epochs=2, **arguments)
        trainer.fit(Shared(), numbered(4), numbered(3), **options)
        return [{key: row[key] for key in ("step", "train", "val") if key in row} for row in trainer.history]

    whole = rows_of("whole")
    assert [row["val"] for row in whole] == pytest.approx([-1.0] * 4)
    assert [row["train"] for row in whole if "train" in row] == pytest.approx([1.0] * 2)
    # The checkpoint of a validation within the epoch holds the training epoch's state.
    assert rows_of("resumed", ckpt_path=tmp_path / "whole" / "epoch=0-step=2") == whole


def test_a_collection_with_shared_states_is_correct_in_every_run(quiet: Any) -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryAccuracy, BinaryF1Score, BinaryPrecision

    class Measuring(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.scores = MetricCollection([BinaryAccuracy(), BinaryPrecision(), BinaryF1Score()], prefix="test_")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.scores.update(*batch)
            self.log_dict(self.scores, on_epoch=True)

    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 2, (2, 7), generator=generator) for _ in range(4)]
    trainer, module = Trainer(**quiet), Measuring()
    expected = numbers(Measuring().scores(*torch.cat(data, 1)))
    for _ in range(2):
        [values] = trainer.test(module, [tuple(part) for part in data], verbose=False)
        assert values == pytest.approx(expected) and len(values) == 3


def test_a_metric_with_several_numbers_is_refused(quiet: Any) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    class Measuring(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.score = MulticlassAccuracy(3, average=None)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.score.update(batch, batch)
            self.log("score", self.score)

    with pytest.raises(ConfigurationError, match=r"'score' was reduced .* shape \(3,\), not to one number"):
        Trainer(**quiet).test(Measuring(), [torch.arange(3)])


@pytest.mark.parametrize("one_per_loader", [True, False])
def test_each_loader_may_have_its_own_metric_or_all_may_share_one(quiet: Any, one_per_loader: bool) -> None:
    from torchmetrics import MeanMetric

    class Measuring(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.means = nn.ModuleList(MeanMetric() for _ in range(2))

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            mean = self.means[dataloader_idx if one_per_loader else 0]
            mean.update(batch)
            self.log("mean", mean, add_dataloader_idx=one_per_loader)

    trainer = Trainer(**quiet)
    loaders = [DataLoader(numbered(2, start=start), batch_size=None) for start in (0, 8)]  # type: ignore[arg-type]
    values = trainer.test(Measuring(), loaders, verbose=False)
    assert values == (
        [{"mean/dataloader_idx_0": 0.5}, {"mean/dataloader_idx_1": 8.5}]
        if one_per_loader
        else [{"mean": 4.5}, {"mean": 4.5}]
    )


def test_one_metric_for_separate_values_of_several_loaders_is_refused(quiet: Any) -> None:
    from torchmetrics import MeanMetric

    class Measuring(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.mean.update(batch)
            self.log("mean", self.mean)

    loader: Any = DataLoader(numbered(2), batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="which would mix their samples. Create one metric per loader"):
        Trainer(**quiet).test(Measuring(), [loader, loader])


def test_step_and_epoch_suffixes_precede_the_loader_index(quiet: Any) -> None:
    class Validated(Tiny):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", batch.mean(), on_step=True, on_epoch=True)

    loaders = [DataLoader(numbered(1, start=start), batch_size=None) for start in (1, 2)]  # type: ignore[arg-type]
    assert Trainer(**quiet).validate(Validated(), loaders, verbose=False) == [
        {"loss_epoch/dataloader_idx_0": 1.0},
        {"loss_epoch/dataloader_idx_1": 2.0},
    ]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_batches_without_samples_do_not_count_in_the_mean(fit: Any, kind: Any) -> None:
    def log(module: Any, batch: Any) -> None:
        module.log("none", kind(3.0), on_step=False, on_epoch=True, batch_size=0)
        module.log("some", kind(3.0), on_step=False, on_epoch=True, batch_size=int(batch.mean()))

    values = numbers(fit(Logging(log), numbered(2)).callback_metrics)
    assert math.isnan(values["none"]) and values["some"] == 3.0


@pytest.mark.parametrize("size", [-1, "2", (2,)])
def test_an_invalid_batch_size_is_refused(fit: Any, size: Any) -> None:
    with pytest.raises(ConfigurationError, match="use the number of samples, 0 or more"):
        fit(Logging(lambda module, batch: module.log("x", 3.0, on_epoch=True, batch_size=size)), numbered(2))


def test_log_dict_logs_each_value(fit: Any) -> None:
    module = Logging(lambda module, batch: module.log_dict({"a": 1.0, "b": torch.tensor(2)}, prog_bar=True))
    assert numbers(fit(module, numbered(1)).progress_bar_metrics) == {"a": 1.0, "b": 2.0}


def test_logging_without_a_running_trainer_does_nothing(fit: Any) -> None:
    module = Tiny()
    module.log("x", 1.0)
    trainer = fit(module, numbered(1))
    module.log("x", 1.0)
    assert trainer.callback_metrics == {}


def test_numpy_numbers_are_accepted(fit: Any) -> None:
    np = pytest.importorskip("numpy")

    values = {"a": np.float32(1.5), "b": np.array(2), "c": np.array([3.0])}
    trainer = fit(Logging(lambda module, batch: module.log_dict(values)), numbered(1))
    assert numbers(trainer.callback_metrics) == {"a": 1.5, "b": 2.0, "c": 3.0}


def test_values_keep_the_order_in_which_they_were_logged_whatever_the_hash_seed(fit: Any) -> None:
    names = list("hgfedcba")
    module = Logging(lambda module, batch: [module.log(name, 1.0, on_epoch=True) for name in names])
    found = list(fit(module, numbered(2)).logs.state_dict()["epoch_values"])
    assert found == [*(full for name in names for full in (f"{name}_epoch", name)), *(f"{name}_step" for name in names)]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("AVG", 2.25), ("Mean", 2.25), (torch.mean, 2.25), ("SUM", 3.0), (max, 3.0), (torch.min, 0.0), ("Max", 3.0)],
)
def test_reductions_have_lightnings_names_and_functions(fit: Any, reduction: Any, expected: float) -> None:
    def log(module: Any, batch: Any) -> None:
        # The mean is weighted by batch size, whatever its name.
        module.log("x", batch.mean(), on_step=False, on_epoch=True, reduce_fx=reduction)

    trainer = fit(Logging(log), [torch.zeros(1, 2), torch.full((3, 2), 3.0)])
    assert numbers(trainer.callback_metrics) == {"x": expected}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "max"])
def test_epoch_values_are_float32_unless_the_values_are_float64(fit: Any, dtype: Any, reduction: str) -> None:
    def log(module: Any, batch: Any) -> None:
        value = float(batch.mean()) if dtype is None else batch.mean().to(dtype)
        module.log("x", value, on_step=False, on_epoch=True, reduce_fx=reduction)

    found = fit(Logging(log), numbered(4)).callback_metrics["x"]
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(found) == {"mean": 1.5, "sum": 6.0, "max": 3.0}[reduction]


def test_epoch_sums_of_float32_values_are_exact_in_float64(fit: Any) -> None:
    trainer = fit(
        Logging(lambda module, batch: module.log("x", torch.tensor(0.1), on_step=False, on_epoch=True)), numbered(3000)
    )
    assert float(trainer.callback_metrics["x"]) == float(torch.tensor(0.1))


def test_callbacks_do_not_see_the_step_values_of_validation(fit: Any) -> None:
    seen: list[dict[str, float]] = []

    class Validated(Logging):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", batch.mean(), on_step=True, on_epoch=True, prog_bar=True)
            self.log("only", batch.mean(), on_step=True, on_epoch=False)
            seen.append(numbers(self.trainer.callback_metrics))

    trainer = fit(Validated(lambda *_: None), numbered(2), numbered(3), num_sanity_val_steps=0, max_epochs=2)
    assert numbers(trainer.callback_metrics) == {"val": 1.0, "val_epoch": 1.0}
    assert seen == [{}] * 3 + [{"val": 1.0, "val_epoch": 1.0}] * 3
    assert numbers(trainer.logged_metrics) == {"val_step": 2.0, "val_epoch": 1.0, "only": 2.0}
    assert trainer.progress_bar_metrics == {"val_step": 2.0, "val_epoch": 1.0}


def test_progress_bar_metrics_are_floats(fit: Any) -> None:
    trainer = fit(Logging(lambda module, batch: module.log("x", batch.mean(), prog_bar=True)), numbered(3))
    assert trainer.progress_bar_metrics == {"x": 2.0} and type(trainer.progress_bar_metrics["x"]) is float

"""Loaders in fit: with and without a length, of a wrong length, combined, and from a DataModule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Tiny
from samples import Stream, Unsized, numbered
from torch.utils.data import DataLoader

from leyden import Callback, CombinedLoader, ConfigurationError, DataModule, Trainer


class SizedStream(Stream):
    """An iterable dataset with a length."""

    def __len__(self) -> int:
        return len(self.samples)


class WrongLength(Unsized):
    """A loader whose length is wrong."""

    def __init__(self, batches: list[Any], length: int) -> None:
        super().__init__(batches)
        self.length = length

    def __len__(self) -> int:
        return self.length


def rows(count: int) -> torch.Tensor:
    """Returns samples whose values are their indices."""
    return torch.arange(float(count)).repeat_interleave(2).view(count, 2)


def scheduled(module: Any) -> Any:
    """Returns an optimizer, and a scheduler that counts epochs."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 9)]


def weights_of_plain_loop(batches: list[Any], accumulate: int, epochs: int = 1) -> Any:
    """Returns Tiny's weights after plain SGD, whose last window of an epoch averages over its own batches."""
    weight = torch.ones(1, 2)
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            weight -= 0.1 * torch.stack([batch.reshape(-1, 2).mean(0) for batch in window]).mean(0)
    return weight


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", [Stream, SizedStream, list])
def test_the_last_window_of_an_epoch_averages_over_its_own_batches(fit: Any, kind: Any, accumulate: int) -> None:
    data = numbered(10) if kind is list else DataLoader(kind(rows(10)), batch_size=1)
    lengths: list[int] = []

    class RecordsWindows(Tiny):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            lengths.append(self.trainer.window.index + 1)

    module = RecordsWindows()
    trainer = fit(module, data, max_epochs=2, accumulate_grad_batches=accumulate)
    assert trainer.num_training_batches == (10 if kind is not Stream else float("inf"))
    assert trainer.global_step == 2 * -(-10 // accumulate)
    assert lengths == ([4, 4, 2] if accumulate == 4 else [1] * 10) * 2
    assert torch.allclose(module.net.weight, weights_of_plain_loop(numbered(10), accumulate, epochs=2))


@pytest.mark.parametrize("limit", [3, 1.0])
def test_a_limit_applies_to_a_loader_without_a_length(fit: Any, limit: Any) -> None:
    module = Tiny()
    trainer = fit(
        module, DataLoader(Stream(rows(5))), limit_train_batches=limit, max_epochs=2, accumulate_grad_batches=2
    )
    assert module.trained == [*range(3 if limit == 3 else 5)] * 2
    assert trainer.global_step == (4 if limit == 3 else 6)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_an_epoch_whose_loader_ends_early_completes_normally(fit: Any, accumulate: int) -> None:
    module = Tiny(scheduled)
    with pytest.warns(UserWarning, match="reports 8 batches but ended after 6: fix its length"):
        trainer = fit(
            module, WrongLength(numbered(6), 8), numbered(1), max_epochs=2, accumulate_grad_batches=accumulate
        )
    assert trainer.global_step == 2 * -(-6 // accumulate)
    assert torch.allclose(module.net.weight, weights_of_plain_loop(numbered(6), accumulate, epochs=2))
    # Such epochs end as others do: with a validation, and a step of each scheduler.
    assert module.validated_at == [6, 12]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


def test_a_short_window_scales_parameters_outside_the_module_too(fit: Any) -> None:
    """The single batch of a window announced as 2 counts fully."""
    outside = torch.nn.Parameter(torch.zeros(2))

    class AddsOutsideParameter(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch + outside).sum()

    module = AddsOutsideParameter(lambda module: torch.optim.SGD([*module.parameters(), outside], 1.0))
    with pytest.warns(UserWarning, match="ended after 1"):
        fit(module, WrongLength(numbered(1), 4), accumulate_grad_batches=2)
    assert outside.tolist() == [-1.0, -1.0]


def test_a_loader_longer_than_its_length_is_cut_off(fit: Any) -> None:
    module = Tiny()
    fit(module, WrongLength(numbered(6), 4), numbered(1), max_epochs=2)
    assert module.trained == [0, 1, 2, 3] * 2 and module.validated_at == [4, 8]


MODES = {
    "min_size": [(0, 0), (1, 1)],
    "max_size_cycle": [(0, 0), (1, 1), (2, 0)],
    "max_size": [(0, 0), (1, 1), (2, None)],
}


def first(batch: Any) -> Any:
    return None if batch is None else int(batch.flatten()[0])


@pytest.mark.parametrize("mode", [*MODES, "sequential", "plain dict"])
def test_combined_loaders_train_in_every_mode(fit: Any, mode: Any) -> None:
    seen: list[Any] = []

    class Combined(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if mode == "sequential":
                batch, inner, loader = batch
                seen.append((first(batch), inner, loader))
                return self(batch).mean()
            seen.append((first(batch["a"]), first(batch["b"])))
            return self(batch["a"]).mean()

    parts = {name: DataLoader(numbered(count), batch_size=None) for name, count in (("a", 3), ("b", 2))}
    trainer = fit(Combined(), parts if mode == "plain dict" else CombinedLoader(parts, mode), max_epochs=2)
    if mode == "sequential":
        expected: Any = [(0, 0, 0), (1, 1, 0), (2, 2, 0), (0, 0, 1), (1, 1, 1)]
    else:
        expected = MODES["max_size_cycle" if mode == "plain dict" else mode]
    assert seen == expected * 2
    assert trainer.num_training_batches == len(expected)


@pytest.mark.parametrize("mode", MODES)
def test_combined_loaders_evaluate_in_every_mode(quiet: Any, mode: Any) -> None:
    seen: list[Any] = []

    class Combined(Tiny):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((first(batch[0]), first(batch[1])))

    parts = [DataLoader(numbered(count), batch_size=None) for count in (3, 2)]
    Trainer(**quiet).test(Combined(), CombinedLoader(parts, mode))
    assert seen == MODES[mode]


def test_a_sequential_loader_in_evaluation_keeps_its_limits(quiet: Any) -> None:
    seen: list[Any] = []

    class Combined(Tiny):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append((first(batch), dataloader_idx))

    parts = [DataLoader(numbered(count), batch_size=None) for count in (3, 2)]
    trainer = Trainer(**quiet)
    trainer.test(Combined(), CombinedLoader(parts, "sequential", limits=[1, None]))
    assert seen == [(0, 0), (0, 1), (1, 1)]
    assert trainer.num_test_batches == [1, 2]


# -1 -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("accumulate", "end_at", "trained"),
    [(1, 0, 0), (1, 3, 3), (2, 2, 2), (2, 3, 4), (4, 5, 6), (4, 4, 4), (1, 5, 5), (2, 5, 6)],
)
@pytest.mark.parametrize("sized", [True, False])
def test_returning_minus_one_ends_the_epoch_after_its_window(
    fit: Any, accumulate: int, end_at: int, trained: int, sized: bool
) -> None:
    class EndsEpoch(Tiny):
        ends = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == end_at else None

        def on_train_epoch_end(self) -> None:
            self.ends += 1

    module, data = EndsEpoch(scheduled), numbered(6)
    train = data if sized else DataLoader(Stream(rows(6)))
    trainer = fit(module, train, numbered(1), max_epochs=2, accumulate_grad_batches=accumulate)
    assert module.trained == [*range(trained)] * 2
    assert (module.ends, trainer.current_epoch) == (2, 2)
    assert torch.allclose(module.net.weight, weights_of_plain_loop(data[:trained], accumulate, epochs=2))
    # Such an epoch ends as others do: with a validation, and a step of each scheduler.
    assert module.validated_at == [trained, 2 * trained]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


def test_returning_minus_one_validates_once(fit: Any) -> None:
    class EndsEpoch(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

    module = EndsEpoch()
    fit(module, numbered(6), numbered(1), max_epochs=2, val_check_interval=2)
    assert module.validated_at == [2, 4, 6, 8]


# a step that draws its own batches ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "steps"), [(4, 2), (5, 2)])
def test_a_step_may_draw_two_batches(fit: Any, count: int, steps: int) -> None:
    class DrawsBatches(Tiny):
        def training_step(self, dataloader_iter: Any) -> Any:
            (one, _, _), (two, _, _) = next(dataloader_iter), next(dataloader_iter)
            self.trained.append((first(one), first(two)))
            return self(one).mean() + self(two).mean()

    module = DrawsBatches(scheduled)
    trainer = fit(module, numbered(count), numbered(1), max_epochs=2)
    assert module.trained == [(0, 1), (2, 3)] * 2 and trainer.global_step == 2 * steps
    assert len(module.validated_at) == 2
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


def test_a_step_that_draws_its_batches_gets_the_global_batch_size(fit: Any) -> None:
    class DrawsBatches(Tiny):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            self.trained.append(len(batch))
            return self(batch).mean()

    module = DrawsBatches()
    trainer = fit(module, DataLoader(torch.ones(10, 2), batch_size=2), global_batch_size=4)
    assert module.trained == [4, 4, 2] and trainer.progress.samples == 10


# DataModule -----------------------------------------------------------------------------------------------------------
class Numbers(DataModule):
    """A DataModule that records its hooks."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[Any] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(("setup", stage))
        self.data = [torch.full((1, 2), float(number)) for number in range(self.hparams.count)]

    def teardown(self, stage: str) -> None:
        self.calls.append(("teardown", stage))

    def train_dataloader(self) -> Any:
        return self.data

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(type(exception))


def test_a_datamodule_serves_every_stage(quiet: Any) -> None:
    trainer, module, data = Trainer(**quiet, max_epochs=1), Tiny(), Numbers(2)
    trainer.fit(module, datamodule=data)
    assert module.trained == [0, 1] and trainer.datamodule is data and data.trainer is trainer
    trainer.fit(module, data)
    assert trainer.test(datamodule=data, verbose=False) == [{"seen": 0.5}]
    assert trainer.validate(verbose=False) == [{}]
    assert len(trainer.predict(module, data) or []) == 2
    stages = ["fit", "fit", "test", "validate", "predict"]
    assert data.calls == [call for stage in stages for call in ("prepare_data", ("setup", stage), ("teardown", stage))]
    assert data.hparams == {"count": 2}


def test_an_error_reaches_the_datamodules_on_exception(quiet: Any) -> None:
    class Failing(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("x")

    data = Numbers()
    with pytest.raises(KeyError):
        Trainer(**quiet, max_epochs=1).fit(Failing(), datamodule=data)
    assert data.calls[-2:] == [KeyError, ("teardown", "fit")]


def test_from_datasets_builds_a_datamodule(quiet: Any) -> None:
    every: Any = rows(12)
    train, val, more = every[:8], every[8:10], every[10:]
    data = DataModule.from_datasets(train, val_dataset=[val, more], test_dataset=every[8:], batch_size=2)

    class Several(Tiny):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.validated.append((first(batch), dataloader_idx))

    trainer, module = Trainer(**quiet, max_epochs=1, num_sanity_val_steps=0), Several()
    torch.manual_seed(0)
    trainer.fit(module, datamodule=data)
    assert trainer.num_training_batches == 4 and module.validated == [(8, 0), (10, 1)]
    assert module.trained != sorted(module.trained), "the training set is shuffled"
    assert trainer.test(module, datamodule=data, verbose=False) == [{"seen": 9.0}]
    stream = DataModule.from_datasets(Stream(rows(3)), batch_size=2)
    trainer.fit(module, datamodule=stream)
    assert trainer.global_step == 2


def test_a_datamodules_state_is_saved_and_loaded(quiet: Any, tmp_path: Any) -> None:
    class Stateful(Numbers):
        position = 0

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: Any) -> None:
            self.position = state["position"]

    data, trainer = Stateful(), Trainer(**quiet, max_epochs=1)
    trainer.fit(Tiny(), datamodule=data)
    data.position = 7
    path = trainer.save_checkpoint(tmp_path / "saved")
    other = Stateful()
    Trainer(**quiet, max_epochs=2).fit(Tiny(), datamodule=other, ckpt_path=path)
    assert other.position == 7


# transfer -------------------------------------------------------------------------------------------------------------
class RecordsTransfers(Tiny):
    """Changes a batch before and after its transfer, and records the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", dataloader_idx))
        return batch + 1

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append(("move", device.type))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("after", dataloader_idx))
        return batch * 10

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append(first(batch))


def test_a_batch_passes_through_the_transfer_hooks_in_order(fit: Any) -> None:
    module, loaders = RecordsTransfers(), [DataLoader(numbered(1), batch_size=None) for _ in range(2)]
    fit(module, numbered(2), loaders, num_sanity_val_steps=0)
    assert module.trained == [10, 20] and module.validated == [10, 10]
    each = [[("before", index), ("move", "cpu"), ("after", index)] for index in (0, 0, 0, 1)]
    assert module.calls == [call for part in each for call in part]


def test_a_datamodules_transfer_hook_replaces_the_modules(fit: Any) -> None:
    class Adds100(Numbers):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + 100

    module = RecordsTransfers()
    fit(module, Adds100(1), num_sanity_val_steps=0)
    assert module.trained == [1000]


def test_precision_converts_batches_of_any_structure(fit: Any) -> None:
    seen: list[Any] = []

    class Nested(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((batch["x"][0].dtype, batch["n"].dtype, batch["s"]))
            return self(batch["x"][0]).mean()

    fit(Nested(), [{"x": [torch.ones(1, 2)], "n": torch.arange(2), "s": "a"}], precision="64-true")
    assert seen == [(torch.float64, torch.int64, "a")]


def test_no_batch_is_drawn_beyond_a_limit(fit: Any) -> None:
    """Not even a look-ahead for the last batch draws one: it would be lost to the loader's next reader."""
    drawn: list[float] = []

    class UnsizedBatches:
        def __iter__(self) -> Iterator[Any]:
            for batch in numbered(5):
                drawn.append(float(batch[0, 0]))
                yield batch

    module = Tiny()
    fit(module, UnsizedBatches(), limit_train_batches=3, max_epochs=2)
    assert drawn == module.trained == [0.0, 1.0, 2.0] * 2


@pytest.mark.parametrize("at", [0, 1, 2, 5, 8, 9])
def test_a_resume_that_repeats_a_window_counts_its_samples_once(fit: Any, quiet: Any, tmp_path: Path, at: int) -> None:
    """Saved after any batch of windows of 4, 4 and 2: the final counters equal those of an uninterrupted run."""
    batches = [torch.full((size, 2), 1.0) for size in (3, 1, 2, 2, 3, 1, 1, 2, 3, 2)]

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == at:
                trainer.save_checkpoint(tmp_path / "saved", exact=False)

    options = {"max_epochs": 2, "accumulate_grad_batches": 4}
    first = fit(Tiny(), batches, max_epochs=1, accumulate_grad_batches=4, callbacks=Saves())
    assert first.progress.samples == 20
    resumed = Trainer(**quiet, **options)
    resumed.fit(Tiny(), batches, ckpt_path=tmp_path / "saved")
    whole = fit(Tiny(), batches, **options)
    assert whole.progress.samples == 40
    assert resumed.progress == dataclasses.replace(whole.progress, seconds=resumed.progress.seconds)


def test_only_training_steps_draw_their_own_batches(quiet: Any) -> None:
    class Drawing(Tiny):
        def validation_step(self, dataloader_iter: Any) -> None:
            next(dataloader_iter)

    with pytest.raises(ConfigurationError, match=r"validation_step\(dataloader_iter\)"):
        Trainer(**quiet, max_epochs=1).fit(Drawing(), numbered(2), numbered(2))


def test_a_printed_datamodule_shows_its_numbers_of_samples() -> None:
    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return {"a": DataLoader(rows(6), 2), "b": DataLoader(Stream(rows(3)), 2)}

        def val_dataloader(self) -> Any:
            return CombinedLoader([DataLoader(rows(4), 2), DataLoader(rows(2), 2)], "sequential")

        def test_dataloader(self) -> Any:
            return self.trainer.missing  # type: ignore[union-attr]

    assert str(Data()).splitlines() == [
        "Data",
        "  train_dataloader: 6 + ? samples",
        "  val_dataloader: 4 + 2 samples",
        "  test_dataloader: not ready (AttributeError)",
    ]

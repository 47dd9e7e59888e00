"""Validation in fit: its times, its loaders, and the names of its values."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from models import Line, Tiny
from samples import Unsized, numbered
from torch.utils.data import DataLoader, Sampler

from leyden import Callback, Trainer
from leyden.callbacks import ModelCheckpoint

# For 3 epochs of 6 batches: the batches after which the run validates.
INTERVALS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [6, 12, 18]),
    ({"val_check_interval": 0.5}, [3, 6, 9, 12, 15, 18]),
    ({"val_check_interval": 0.4}, [2, 4, 6, 8, 10, 12, 14, 16, 18]),
    ({"val_check_interval": 1}, [*range(1, 19)]),
    ({"val_check_interval": 4}, [4, 10, 16]),
    ({"val_check_interval": 6}, [6, 12, 18]),
    ({"check_val_every_n_epoch": 2}, [12]),
    ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, [9, 12]),
    ({"check_val_every_n_epoch": 4}, []),
    ({"check_val_every_n_epoch": None, "val_check_interval": 4}, [4, 8, 12, 16]),
    ({"check_val_every_n_epoch": None, "val_check_interval": 10}, [10]),
    ({"val_check_interval": "00:00:00:00"}, [*range(1, 19)]),
    ({"val_check_interval": timedelta(days=1)}, []),
    ({"val_check_interval": {"days": 1}}, []),
    ({"check_val_every_n_epoch": None, "val_check_interval": timedelta(0)}, [*range(1, 19)]),
    ({"check_val_every_n_epoch": 3, "val_check_interval": timedelta(0)}, [*range(13, 19)]),
    ({"accumulate_grad_batches": 4}, [6, 12, 18]),
    # In windows of 4 and 2 batches, a validation due inside a window runs at its end.
    ({"accumulate_grad_batches": 4, "val_check_interval": 3}, [4, 6, 10, 12, 16, 18]),
    ({"accumulate_grad_batches": 4, "val_check_interval": 1}, [4, 6, 10, 12, 16, 18]),
    ({"accumulate_grad_batches": 4, "val_check_interval": 5, "check_val_every_n_epoch": None}, [6, 10, 16]),
    ({"max_steps": 9}, [6]),
    ({"limit_train_batches": 4, "val_check_interval": 0.5}, [2, 4, 6, 8, 10, 12]),
]


CASES = [
    pytest.param(arguments, at, sized, id=f"{arguments} {'sized' if sized else 'unsized'}")
    for arguments, at in INTERVALS
    for sized in (True, False)
    # A fraction of an epoch whose length is unknown is refused.
    if sized or not isinstance(arguments.get("val_check_interval"), float)
]


@pytest.mark.parametrize(("arguments", "at", "sized"), CASES)
def test_fit_validates_at_its_intervals(fit: Any, arguments: Any, at: list[int], sized: bool) -> None:
    module, train = Tiny(), numbered(6)
    trainer = fit(module, train if sized else Unsized(train), numbered(2), **{"max_epochs": 3, **arguments})
    assert module.validated_at == at
    # Two batches of the sanity check, and two of each validation.
    assert module.validated == [0, 1] * (len(at) + 1)
    assert trainer.progress.validations == len(at)


def test_epochs_end_after_their_validation(fit: Any) -> None:
    class Recording(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def on_validation_end(self) -> None:
            self.calls.append("validated")

        def on_train_epoch_end(self) -> None:
            self.calls.append("epoch over")

    module = Recording()
    fit(module, numbered(2), numbered(1), max_epochs=2, num_sanity_val_steps=0)
    assert module.calls == ["validated", "epoch over"] * 2


def loaders_of_sizes(*sizes: int, value: float = 1.0) -> list[DataLoader[Any]]:
    return [
        DataLoader(torch.full((size, 2), value * (number + 1)), batch_size=2)  # type: ignore[arg-type]
        for number, size in enumerate(sizes)
    ]


def test_several_loaders_are_read_one_after_another_and_suffixed_by_index(fit: Any) -> None:
    class Several(Tiny):
        seen: list[tuple[int, int]]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("value", batch.mean())
            self.log("both", batch.mean(), add_dataloader_idx=False) if dataloader_idx == 1 else None

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append((batch_idx, dataloader_idx))

        def on_validation_epoch_end(self) -> None:
            self.log("whole", 7.0)

    class RecordsBatchEnds(Callback):
        ends: ClassVar[list[tuple[int, int]]] = []

        def on_validation_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.ends.append((batch_idx, dataloader_idx))

    module, recorder = Several(), RecordsBatchEnds()
    module.seen = []
    trainer = fit(module, numbered(1), loaders_of_sizes(4, 2, 3), num_sanity_val_steps=0, callbacks=recorder)
    assert module.seen == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 2)] == recorder.ends
    assert trainer.num_val_batches == [2, 1, 2]
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        **{f"value/dataloader_idx_{index}": index + 1.0 for index in range(3)},
        "both": 2.0,
        "whole": 7.0,
    }


def test_each_loaders_results_hold_the_values_its_batches_logged(quiet: Any) -> None:
    class Several(Tiny):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"own{dataloader_idx}", batch.mean(), add_dataloader_idx=False)
            self.log("suffixed", batch.mean())
            self.log("pooled", batch.mean(), add_dataloader_idx=False)

        def on_validation_epoch_start(self) -> None:
            self.log("start", 1.0)

        def on_validation_epoch_end(self) -> None:
            self.log("end", 2.0)

    of_all = {"pooled": 1.5, "start": 1.0, "end": 2.0}
    trainer = Trainer(**quiet)
    for _ in range(2):
        assert trainer.validate(Several(), loaders_of_sizes(4, 4), verbose=False) == [
            {"own0": 1.0, "suffixed/dataloader_idx_0": 1.0, **of_all},
            {"own1": 2.0, "suffixed/dataloader_idx_1": 2.0, **of_all},
        ]


def test_a_dict_of_loaders_is_read_one_after_another(fit: Any) -> None:
    class Several(Tiny):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.validated.append((float(batch[0, 0]), dataloader_idx))

    module, (first, second) = Several(), loaders_of_sizes(2, 2)
    fit(module, numbered(1), {"a": first, "b": [second]}, num_sanity_val_steps=0)
    assert module.validated == [(1.0, 0), (2.0, 1)]


def test_a_shuffled_validation_loader_warns(fit: Any) -> None:
    with pytest.warns(UserWarning, match="validation loader shuffles: .* shuffle=False"):
        fit(Tiny(), numbered(1), DataLoader(torch.zeros(2, 2), shuffle=True))  # type: ignore[arg-type]


def test_a_validation_loader_without_a_validation_step_warns(fit: Any) -> None:
    with pytest.warns(UserWarning, match="there is a val loader, but Line has no validation_step"):
        trainer = fit(Line(), numbered(2), numbered(1))
    assert trainer.global_step == 2 and trainer.num_val_batches == []


class OwnLoader:
    """Records that its loader was requested."""

    was_requested = False

    def val_dataloader(self) -> Any:
        self.was_requested = True
        return loaders_of_sizes(2, 2)


def test_a_limit_of_0_never_requests_a_loader(fit: Any, quiet: Any) -> None:
    class WithOwnLoaders(OwnLoader, Tiny):
        test_dataloader = predict_dataloader = OwnLoader.val_dataloader

    module = WithOwnLoaders()
    trainer = fit(module, numbered(1), limit_val_batches=0)
    assert (trainer.num_val_batches, module.validated) == ([], [])
    none = Trainer(**quiet, limit_val_batches=0.0, limit_test_batches=0, limit_predict_batches=0)
    assert none.validate(module) == none.test(module) == none.predict(module) == []
    assert not module.was_requested


@pytest.mark.parametrize("none", [[], (), {}])
def test_an_empty_collection_of_loaders_means_no_loader(none: Any, fit: Any, quiet: Any) -> None:
    class WithOwnLoader(OwnLoader, Tiny):
        pass

    class Empty(Tiny):
        def val_dataloader(self) -> Any:
            return none

    for module, given in ((WithOwnLoader(), none), (Empty(), None)):
        trainer = fit(module, numbered(2), given, val_check_interval=1)
        assert (trainer.global_step, trainer.num_val_batches, module.validated) == (2, [], [])
        with pytest.warns(UserWarning, match=r"Trainer\.validate got no loader, so it runs nothing"):
            assert Trainer(**quiet).validate(module, given) == []


def test_a_method_set_to_none_is_disabled(fit: Any, recwarn: pytest.WarningsRecorder) -> None:
    class WithOwnLoader(OwnLoader, Tiny):
        pass

    module = WithOwnLoader()
    module.validation_step = module.on_train_start = None
    fit(module, numbered(1))
    other = WithOwnLoader()
    other.val_dataloader = None
    assert fit(other, numbered(1)).num_val_batches == []
    assert not module.was_requested and not other.was_requested and other.validated == []
    assert "validation_step" not in " ".join(str(warning.message) for warning in recwarn)


def test_with_a_limit_of_0_training_batches_fit_runs_only_the_sanity_check(fit: Any) -> None:
    calls: list[Any] = []

    class RecordsFit(Tiny):
        def train_dataloader(self) -> Any:
            raise AssertionError("a limit of 0 requested the training loader")

        def configure_optimizers(self) -> Any:
            calls.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

        def on_train_start(self) -> None:
            calls.append("train")

        def on_fit_end(self) -> None:
            calls.append("end")

    module = RecordsFit()
    trainer = fit(module, None, numbered(4), limit_train_batches=0, enable_progress_bar=True, enable_checkpointing=True)
    assert (module.validated, module.trained, calls) == ([0, 1], [], [0, "end"])
    assert (trainer.num_training_batches, trainer.global_step, trainer.current_epoch) == (0, 0, 0)
    trainer.fit(module, None, numbered(4), ckpt_path="current")


@pytest.mark.parametrize("arguments", [{}, {"limit_val_batches": 0}])
def test_a_resume_without_validation_skips_the_validation_that_was_due(
    fit: Any, quiet: Any, tmp_path: Path, arguments: Any
) -> None:
    class Killed(Tiny):
        def on_validation_start(self) -> None:
            raise KeyboardInterrupt

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    with pytest.raises(KeyboardInterrupt):
        options = {"val_check_interval": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
        fit(Killed(), numbered(4), numbered(1), callbacks=saves, **options)
    module = Tiny()
    trainer = Trainer(**quiet, max_epochs=1, **arguments)
    trainer.fit(module, numbered(4), numbered(1) if arguments else None, ckpt_path=saves.best_model_path)
    assert (trainer.global_step, module.validated) == (4, [])


@pytest.mark.parametrize(("every", "loaded"), [(0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2])])
def test_loaders_are_reloaded_every_n_epochs(fit: Any, every: int, loaded: list[int]) -> None:
    class Reloading(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.trains: list[int] = []
            self.vals: list[int] = []

        def train_dataloader(self) -> Any:
            self.trains.append(self.current_epoch)
            return numbered(2, start=10 * self.current_epoch)

        def val_dataloader(self) -> Any:
            self.vals.append(self.current_epoch)
            return numbered(1, start=10 * self.current_epoch)

    module = Reloading()
    fit(module, None, max_epochs=4, reload_dataloaders_every_n_epochs=every, num_sanity_val_steps=0)
    assert module.trains == loaded == module.vals
    latest = [max(epoch for epoch in loaded if epoch <= number) for number in range(4)]
    assert module.validated == [10.0 * epoch for epoch in latest]
    assert module.trained == [10.0 * epoch + batch for epoch in latest for batch in (0, 1)]


@pytest.mark.parametrize(
    ("every", "check", "loaded"),
    [(2, 2, [0, 3, 5]), (1, 2, [0, 1, 3, 5]), (3, 2, [0, 3]), (2, 3, [0, 2, 5]), (2, None, [0, 2, 4])],
)
def test_validation_loaders_are_reloaded_only_in_epochs_that_validate(
    fit: Any, every: int, check: int | None, loaded: list[int]
) -> None:
    class Reloading(Tiny):
        vals: tuple[int, ...] = ()

        def val_dataloader(self) -> Any:
            self.vals += (self.current_epoch,)
            return numbered(1)

    module = Reloading()
    options = {"reload_dataloaders_every_n_epochs": every, "check_val_every_n_epoch": check, "val_check_interval": 2}
    fit(module, numbered(2), max_epochs=6, **options)
    assert list(module.vals) == loaded


def test_the_sanity_check_changes_no_random_number_of_the_loaders(fit: Any) -> None:
    class Draws(Tiny):
        def train_dataloader(self) -> Any:
            return list(torch.rand(2, 1, 2))

        def val_dataloader(self) -> Any:
            return list(torch.rand(1, 1, 2))

    found = []
    for steps in (0, 2):
        torch.manual_seed(0)
        module = Draws()
        fit(module, None, num_sanity_val_steps=steps, max_epochs=2)
        found.append((module.trained, module.validated[-1], float(torch.rand(()))))
    assert found[0] == found[1]


def test_a_checkpoint_monitors_values_of_validations_inside_an_epoch(fit: Any) -> None:
    class Validated(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", float(self.global_step))

    checkpoint = ModelCheckpoint(monitor="value", mode="max")
    options = {"val_check_interval": 2, "callbacks": checkpoint, "enable_checkpointing": True}
    fit(Validated(), numbered(4), numbered(1), **options)
    assert checkpoint.best_model_score == 4.0


def test_set_epoch_is_called_on_samplers_of_every_evaluation(quiet: Any) -> None:
    class RecordingSampler(Sampler[int]):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            return 4

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler = RecordingSampler()
    loader = DataLoader(torch.ones(4, 2), sampler=sampler)  # type: ignore[arg-type]
    trainer = Trainer(**quiet, max_epochs=3)
    trainer.fit(Tiny(), numbered(2), loader)
    # The sanity check, and one pass an epoch.
    assert sampler.epochs == [0, 0, 1, 2]
    trainer.test(Tiny(), loader, verbose=False)
    trainer.predict(Tiny(), loader)
    assert sampler.epochs[4:] == [trainer.current_epoch] * 2


@pytest.mark.parametrize("interval", [9, 0.01])
def test_a_fit_that_does_not_validate_takes_any_interval(fit: Any, interval: Any) -> None:
    module = Tiny()
    fit(module, numbered(4), numbered(1), limit_val_batches=0, val_check_interval=interval)
    assert module.trained == [0.0, 1.0, 2.0, 3.0] and module.validated == []

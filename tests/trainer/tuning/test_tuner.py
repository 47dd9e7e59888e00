"""Learning rate and batch size searches: their results, and that they leave the run unchanged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares, input_of
from ranks.world import run_world
from same import differences
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from leyden import ConfigurationError, DataModule, Trainer, TrainModule, Tuner
from leyden.callbacks import (
    AutoAccumulation,
    BatchSizeFinder,
    CSVLogger,
    GradientAccumulation,
    LearningRateFinder,
    ModelCheckpoint,
)
from leyden.strategies import FSDPStrategy, SingleDeviceStrategy
from leyden.trainer.tuning.learning_rate import LRFinder


class NoisySamples(Dataset[Tensor]):
    """Samples with random noise from torch and `random`."""

    def __init__(self, size: int = 64) -> None:
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index] + 0.1 * torch.randn(4) + random.random()


class Net(Squares):
    """A net with dropout, batch norm, and attributes that a run changes."""

    def __init__(self, lr: float = 0.01, batch_size: int = 4) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)))
        self.lr, self.batch_size = lr, batch_size
        self.configure = lambda m: torch.optim.AdamW(m.parameters(), lr=m.lr)
        self.order: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.order.append(float(input_of(batch).sum()))
        return super().training_step(batch, batch_idx)


class MemoryLimited(Net):
    """Creates loaders of its batch size, and runs out of memory beyond a limit."""

    def __init__(self, limit: int = 24, size: int = 64) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.limit, self.samples = limit, NoisySamples(size)

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, self.batch_size, shuffle=True)

    predict_dataloader = test_dataloader = val_dataloader = train_dataloader

    def loss(self, batch: Any) -> Any:
        if len(batch) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def make_seeded(make: Any = Net) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    return make()


def loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(NoisySamples(), 4, shuffle=True, **arguments)


def trainer(folder: Path, **arguments: Any) -> Trainer:
    parts = [ModelCheckpoint(folder / "saved"), *arguments.pop("callbacks", [])]
    logger = CSVLogger(folder / "logs")
    settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 2, "logger": logger, "log_every_n_steps": 1}
    return Trainer(callbacks=parts, default_root_dir=folder, **{**settings, **arguments})


def final_state(module: Net, run: Trainer) -> Any:
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizer: Any = run.optimizers[0].state_dict()
    drawn = (torch.rand(3), random.random())
    return tensors, optimizer, module.order, drawn, run.global_step, module.hparams


def csv_sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*.csv"))}


@pytest.mark.parametrize("own_generator", [False, True])
def test_lr_find_leaves_the_next_fit_unchanged(tmp_path: Path, own_generator: bool) -> None:
    found = []
    for searches in (True, False):
        folder = tmp_path / str(searches)
        folder.mkdir()
        module, run = make_seeded(), trainer(folder)
        data = loader(generator=torch.Generator().manual_seed(5)) if own_generator else loader()
        if searches:
            before = (list(folder.rglob("*")), torch.get_rng_state(), random.getstate(), dict(vars(module)))
            result = Tuner(run).lr_find(module, data, data, num_training=30, update_attr=False)
            assert result is not None and len(result.results["lr"]) == 30
            after = (list(folder.rglob("*")), torch.get_rng_state(), random.getstate(), dict(vars(module)))
            assert before[0] == after[0] and torch.equal(before[1], after[1]) and before[2:] == after[2:]
            assert run.global_step == 0 and not module.order and module.training
        run.fit(module, data, data)
        found.append((*final_state(module, run), csv_sizes(folder)))
    assert not differences(*found)


def test_learning_rate_finder_sets_the_rate_before_the_optimizer_is_created(tmp_path: Path) -> None:
    finder = LearningRateFinder(num_training_steps=40, min_lr=1e-4)
    module, run = make_seeded(), trainer(tmp_path / "searched", callbacks=[finder])
    run.fit(module, loader(), loader())
    assert finder.optimal_lr is not None and module.lr == finder.optimal_lr.suggestion() != 0.01
    searched = final_state(module, run)
    plain, other = make_seeded(), trainer(tmp_path / "plain")
    plain.lr = module.lr
    other.fit(plain, loader(), loader())
    assert not differences(searched, final_state(plain, other))


def test_a_resumed_fit_does_not_search_again(tmp_path: Path) -> None:
    finder = LearningRateFinder(num_training_steps=20)
    module, run = make_seeded(), trainer(tmp_path, callbacks=[finder])
    run.fit(module, loader(), loader())
    again, resumed = LearningRateFinder(num_training_steps=20), Net(lr=0.5)
    other = trainer(tmp_path / "resumed", callbacks=[again], max_epochs=3)
    other.fit(resumed, loader(), loader(), ckpt_path=run.last_checkpoint)
    assert again.optimal_lr is None and other.optimizers[0].param_groups[0]["lr"] == module.lr


class LogsInEveryStep(MemoryLimited):
    """Calls its loggers in each step, with methods of TensorBoard and W&B."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_image("first", batch, batch_idx)
        self.logger.experiment.config["batch"] = batch_idx
        self.logger.log_metrics({"index": batch_idx})
        self.loggers[1].log_image("first", [batch])
        return super().training_step(batch, batch_idx)


def test_logger_calls_in_a_trial_write_nothing(tmp_path: Path) -> None:
    run = Trainer(**{**QUIET, "logger": [CSVLogger(tmp_path / "one"), CSVLogger(tmp_path / "other")]})
    assert Tuner(run).lr_find(LogsInEveryStep(), num_training=12, update_attr=False) is not None
    assert Tuner(run).scale_batch_size(LogsInEveryStep(), max_val=4) == 4
    assert not list(tmp_path.iterdir()) and [type(logger) for logger in run.loggers] == [CSVLogger, CSVLogger]


def test_searches_run_when_validation_counts_batches_across_epochs() -> None:
    run = Trainer(check_val_every_n_epoch=None, val_check_interval=5, **QUIET)
    found = Tuner(run).lr_find(Net(), loader(), num_training=12, update_attr=False)
    assert found is not None and len(found.results["lr"]) == 12
    assert Tuner(run).scale_batch_size(MemoryLimited(), max_val=4) == 4


class SearchAtEpochs(LearningRateFinder):
    """Searches at chosen epochs, like the example in Lightning's documentation."""

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


def test_a_search_during_fit_changes_only_the_learning_rate(tmp_path: Path) -> None:
    finder = SearchAtEpochs(num_training_steps=20, update_attr=False)
    found = []
    for name, callbacks in {"with": [finder], "without": []}.items():
        module, run = make_seeded(), trainer(tmp_path / name, callbacks=callbacks)
        run.fit(module, loader(), loader())
        found.append(final_state(module, run))
    assert finder.optimal_lr is not None and not differences(*found)
    finder = SearchAtEpochs(num_training_steps=100)
    module, run = make_seeded(), trainer(tmp_path / "rate", callbacks=[finder])
    run.fit(module, loader(), loader())
    assert run.optimizers[0].param_groups[0]["lr"] == module.lr != 0.01


class Parabola(Squares):
    """A parabola, whose loss falls until the learning rate is too large."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1))
        self.learning_rate = 1.0
        self.configure = lambda m: torch.optim.SGD(m.parameters(), lr=m.learning_rate)


@pytest.mark.parametrize(("mode", "second"), [("linear", 0.01 + 0.99 / 9), ("exponential", 0.01 * 100 ** (1 / 9))])
def test_lr_find_sweeps_from_min_lr_to_max_lr(mode: str, second: float) -> None:
    data = torch.ones(20, 3, 2)
    found = Tuner(Trainer(**QUIET)).lr_find(
        Parabola(), data, min_lr=0.01, num_training=10, mode=mode, early_stop_threshold=None, update_attr=False
    )
    assert found is not None
    rates = found.results["lr"]
    assert rates[1] == pytest.approx(second) and (rates[0], rates[-1]) == (0.01, pytest.approx(1.0))


def test_lr_find_stops_when_the_loss_diverges_and_suggests_a_lower_rate() -> None:
    module = Parabola()
    found = Tuner(Trainer(**QUIET)).lr_find(module, torch.ones(4, 3, 2), min_lr=1e-5, max_lr=1e4)
    assert found is not None and len(found.results["lr"]) < 100
    assert module.learning_rate == found.suggestion() and 1e-5 < module.learning_rate < 1


def test_trials_accumulate_and_clip_gradients_like_the_run() -> None:
    found = Tuner(Trainer(accumulate_grad_batches=2, gradient_clip_val=0.5, **QUIET)).lr_find(
        make_seeded(Parabola), torch.ones(8, 3, 2), num_training=6, update_attr=False
    )
    same = Tuner(Trainer(callbacks=GradientAccumulation(2), gradient_clip_val=0.5, **QUIET)).lr_find(
        make_seeded(Parabola), torch.ones(8, 3, 2), num_training=6, update_attr=False
    )
    data, losses = torch.ones(8, 3, 2), []
    module = make_seeded(Parabola)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-8 * 1e8 ** (step / 5)
        optimizer.zero_grad()
        parts = [module.loss(data[(2 * step + part) % 8]) / 2 for part in range(2)]
        for part in parts:
            part.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(float(sum(part.detach() for part in parts)))
    average, smoothed = 0.0, []
    for number, loss in enumerate(losses, start=1):
        average = 0.98 * average + 0.02 * loss
        smoothed.append(average / (1 - 0.98**number))
    assert found is not None and same is not None
    assert found.results["loss"] == same.results["loss"] == pytest.approx(smoothed, rel=1e-6)


class WithCallbacks(Net):
    """A net with the callbacks that the given function returns."""

    def __init__(self, make_callbacks: Any) -> None:
        super().__init__()
        self.make_callbacks = make_callbacks

    def configure_callbacks(self) -> Any:
        return self.make_callbacks()


def test_of_the_modules_callbacks_only_accumulation_runs_in_trials(tmp_path: Path) -> None:
    finders: list[LearningRateFinder] = []

    def make_callbacks() -> list[Any]:
        finders.append(LearningRateFinder(num_training_steps=12))
        return [finders[-1], ModelCheckpoint(tmp_path / "saved"), GradientAccumulation(4)]

    module = WithCallbacks(make_callbacks)
    found = Tuner(Trainer(**QUIET)).lr_find(module, loader(), num_training=12, update_attr=False)
    assert found is not None and len(found.results["lr"]) == 12 and not list(tmp_path.iterdir())
    alone = Tuner(Trainer(accumulate_grad_batches=4, **QUIET)).lr_find(
        WithCallbacks(list), loader(), num_training=12, update_attr=False
    )
    assert alone is not None and alone.results["lr"] == found.results["lr"]
    Trainer(max_epochs=1, **QUIET).fit(module, loader())
    # Only the finder of the fit has searched, not those of the trials.
    assert sum(finder.optimal_lr is not None for finder in finders) == 1


class SearchAtStart(LearningRateFinder):
    """Searches in on_fit_start, after the optimizer is created."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.lr_find(trainer, module)


def test_a_search_in_on_fit_start_updates_the_existing_optimizer(tmp_path: Path) -> None:
    module, run = make_seeded(), trainer(tmp_path, callbacks=[SearchAtStart(num_training_steps=100)])
    run.fit(module, loader(), loader())
    assert run.optimizers[0].param_groups[0]["lr"] == module.lr != 0.01


@pytest.mark.parametrize(
    ("method", "arguments", "search"),
    [
        ("fit", {"limit_train_batches": 1}, {}),
        ("fit", {"overfit_batches": 1}, {}),
        ("fit", {"limit_val_batches": 0}, {}),
        ("validate", {"limit_val_batches": 1}, {}),
        ("test", {}, {"steps_per_trial": 1}),
        ("predict", {}, {"steps_per_trial": 1}),
    ],
    ids=str,
)
def test_batch_limits_do_not_end_a_batch_size_search(
    method: Any, arguments: dict[str, Any], search: dict[str, Any]
) -> None:
    run = Trainer(**{**QUIET, **arguments})
    assert Tuner(run).scale_batch_size(MemoryLimited(), method=method, **search) == 16
    # From 16 on, one batch holds all 12 samples.
    assert Tuner(run).scale_batch_size(MemoryLimited(size=12), method=method, **search) == 16


def test_too_few_finite_losses_give_no_suggestion() -> None:
    found = LRFinder("linear", 0.0, 1.0, 3, {"lr": [0.1, 0.2, 0.3], "loss": [3.0, float("nan"), 1.0]})
    with pytest.warns(UserWarning, match="too few finite losses"):
        assert found.suggestion() is None


def smoothed(losses: list[float]) -> LRFinder:
    """Returns the result of a search with these losses, at rates from 1e-8 to 1."""
    average, found, last = 0.0, [], len(losses) - 1
    for number, loss in enumerate(losses, start=1):
        average = 0.98 * average + 0.02 * loss
        found.append(average / (1 - 0.98**number))
    rates = [1e-8 ** (1 - place / last) for place in range(len(losses))]
    return LRFinder("exponential", 1e-8, 1.0, len(losses), {"lr": rates, "loss": found})


def test_the_suggestion_is_in_the_fall_of_a_noisy_curve() -> None:
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).mul(0.1).tolist()
    # Flat up to the rate 1e-4, then falling.
    found = smoothed([2.3 + noise[step] - 0.04 * max(0, step - 50) for step in range(100)])
    for method in ("valley", "steepest"):
        rate = found.suggestion(method=method)  # type: ignore[arg-type]
        assert rate is not None and 1e-4 < rate < 1


@pytest.mark.parametrize("slope", [0.0, 0.01], ids=["flat", "rising"])
def test_a_curve_without_a_fall_gives_no_suggestion(slope: float) -> None:
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).mul(0.1).tolist()
    found = smoothed([2.3 + noise[step] + slope * max(0, step - 50) for step in range(100)])
    with pytest.warns(UserWarning, match=r"the loss falls by .* noise"):
        assert found.suggestion() is None


def test_an_unknown_method_of_suggestion_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="steepest"):
        smoothed([3.0, 2.0, 1.0]).suggestion(method="steep")  # type: ignore[arg-type]


class Classifier(TrainModule):
    """A small network on scikit-learn's digits."""

    lr = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def test_lr_find_suggests_a_usable_rate_for_digits() -> None:
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
    torch.manual_seed(0)
    module = Classifier()
    Tuner(Trainer(**QUIET)).lr_find(module, DataLoader(data, 16, shuffle=True))
    assert 1e-3 < module.lr < 3e-2


def test_plot_draws_the_curve_or_names_the_missing_package() -> None:
    found = LRFinder("linear", 0.0, 1.0, 3, {"lr": [0.1, 0.2, 0.3], "loss": [3.0, 2.0, 1.0]})
    try:
        import matplotlib as mpl
    except ImportError:
        with pytest.raises(ConfigurationError, match="pip install matplotlib"):
            found.plot()
        return
    mpl.use("agg")
    assert found.plot(suggest=True).axes[0].get_xlabel() == "Learning rate"


def test_lr_find_updates_the_hyperparameter() -> None:
    class HparamsParabola(Parabola):
        def __init__(self, learning_rate: float = 1.0) -> None:
            super().__init__()
            del self.learning_rate
            self.save_hyperparameters()
            self.configure = lambda m: torch.optim.SGD(m.parameters(), lr=m.hparams.learning_rate)

    module = HparamsParabola()
    found = Tuner(Trainer(**QUIET)).lr_find(module, torch.ones(4, 3, 2), min_lr=1e-5, max_lr=1e4)
    assert found is not None and module.hparams["learning_rate"] == found.suggestion() != 1.0


@pytest.mark.parametrize(
    ("mode", "limit", "size", "expected"),
    [
        ("power", 24, 64, 16),
        ("power", 3, 64, 2),
        ("power", 1, 64, 1),
        ("binsearch", 24, 64, 22),
        ("binsearch", 3, 64, 2),
        ("power", 1000, 64, 64),
        ("binsearch", 1000, 50, 60),
    ],
)
def test_scale_batch_size_finds_the_largest_batch_that_fits(mode: str, limit: int, size: int, expected: int) -> None:
    module = make_seeded(lambda: MemoryLimited(limit, size))
    before = torch.get_rng_state()
    assert Tuner(Trainer(**QUIET)).scale_batch_size(module, mode=mode) == module.batch_size == expected
    assert torch.equal(before, torch.get_rng_state()) and not module.order


@pytest.mark.parametrize(
    "more", [{"accumulate_grad_batches": "auto"}, {"callbacks": [AutoAccumulation(micro_batches=2)]}]
)
def test_auto_accumulation_does_not_split_batches_during_the_search(more: dict[str, Any]) -> None:
    module = make_seeded(lambda: MemoryLimited(24, 64))
    assert Tuner(Trainer(**QUIET, **more)).scale_batch_size(module) == 16


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_scale_batch_size_works_for_evaluation(method: Any) -> None:
    module = MemoryLimited()
    assert Tuner(Trainer(**QUIET)).scale_batch_size(module, method=method, max_val=8) == 8


def test_batch_size_finder_fits_with_loaders_of_the_found_size(tmp_path: Path) -> None:
    finder = BatchSizeFinder()
    module, run = make_seeded(MemoryLimited), trainer(tmp_path / "searched", callbacks=[finder], max_epochs=1)
    run.fit(module)
    assert finder.optimal_batch_size == module.batch_size == 16 and run.global_step == 4
    searched = final_state(module, run)
    plain, other = make_seeded(MemoryLimited), trainer(tmp_path / "plain", max_epochs=1)
    plain.batch_size = 16
    other.fit(plain)
    assert not differences(searched, final_state(plain, other))


class SizedData(DataModule):
    """Holds the batch size, and counts calls of setup."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.setups = 2, 0
        self.samples = NoisySamples()

    def setup(self, stage: str) -> None:
        self.setups += 1

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, self.batch_size, shuffle=True)


def test_searches_set_up_a_copy_of_the_datamodule() -> None:
    data, module = SizedData(), Net()
    del module.batch_size
    assert Tuner(Trainer(**QUIET)).scale_batch_size(module, datamodule=data, max_val=8) == data.batch_size == 8
    assert data.setups == 0 and data.trainer is None
    assert Tuner(Trainer(**QUIET)).lr_find(module, data, num_training=12) is not None and data.setups == 0


def raises(message: str) -> Any:
    return pytest.raises(ConfigurationError, match=message)


def test_impossible_searches_raise() -> None:
    tuner, data = Tuner(Trainer(**QUIET)), torch.ones(4, 3, 4)
    with raises("train_dataloaders=DataLoader, whose batch size is fixed"):
        tuner.scale_batch_size(Net(), loader())
    with raises("cannot be searched on 2 ranks"):
        Tuner(Trainer(strategy="ddp", devices=2, **QUIET)).scale_batch_size(MemoryLimited())
    with raises("have batch: set self.batch"):
        tuner.scale_batch_size(MemoryLimited(), batch_arg_name="batch")
    with raises("a batch of 1 does not fit"):
        tuner.scale_batch_size(MemoryLimited(limit=0))
    with raises("have no rate to set"):
        tuner.lr_find(Net(), data, attr_name="rate")
    with raises("needs method='fit'"):
        tuner.lr_find(Net(), data, method="test")
    with raises("dataloaders is for validate"):
        tuner.lr_find(Net(), dataloaders=data)
    with raises("are for fit: use dataloaders for test"):
        tuner.scale_batch_size(Net(), loader(), method="test")
    with raises("returned 2: return one"):
        two = Net()
        two.configure = lambda m: [torch.optim.SGD([p], lr=0.1) for p in list(m.parameters())[:2]]
        tuner.lr_find(two, data)
    with raises("needs its own strategy"):
        Trainer(strategy=SingleDeviceStrategy(), callbacks=LearningRateFinder(), **QUIET).fit(Net(), data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearningRateFinder(mode="log"), "exponential"),
        (lambda: LearningRateFinder(min_lr=1.0, max_lr=0.1), "0 < min_lr < max_lr"),
        (lambda: LearningRateFinder(num_training_steps=1), "from 2"),
        (lambda: BatchSizeFinder(mode="linear"), "binsearch"),
        (lambda: BatchSizeFinder(init_val=0), "from 1"),
        (lambda: BatchSizeFinder(margin=1.0), "a fraction from 0"),
        (lambda: BatchSizeFinder(max_val=1), "less than init_val"),
    ],
)
def test_invalid_finder_arguments_raise(make: Any, message: str) -> None:
    with raises(message):
        make()


def test_fast_dev_run_skips_searches() -> None:
    tuner = Tuner(Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False))
    with pytest.warns(UserWarning, match="skips the search for a learning rate"):
        assert tuner.lr_find(Net(), loader()) is None
    with pytest.warns(UserWarning, match="skips the search for a batch size"):
        assert tuner.scale_batch_size(MemoryLimited()) is None


# several ranks --------------------------------------------------------------------------------------------------------
def search_then_fit() -> list[Any]:
    found = []
    for make in (lambda: "ddp", FSDPStrategy):
        results = []
        for searches in (True, False):
            torch.manual_seed(0)
            module = Parabola()
            run = Trainer(strategy=make(), devices=2, max_epochs=1, **QUIET)
            numbers: Any = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
            data = DataLoader(numbers, 3, shuffle=True)
            if searches:
                result = Tuner(run).lr_find(module, data, num_training=15, update_attr=False)
                assert result is not None
                found.append(result.results)
            run.fit(module, data)
            state = run.strategy.full_state_dict(module, rank0_only=False)
            results.append([tensor.flatten().tolist() for tensor in state.values()])
        assert results[0] == results[1]
    return found


def test_lr_find_on_two_ranks_leaves_the_next_fit_unchanged() -> None:
    one, other = run_world(2, search_then_fit)
    assert one == other
    assert one[0]["loss"] == pytest.approx(one[1]["loss"], rel=1e-4)


def sweep(strategy: str, devices: int, batch_size: int) -> Any:
    torch.manual_seed(0)
    samples = torch.randn(25, 2, generator=torch.Generator().manual_seed(1))
    run = Trainer(strategy=strategy, devices=devices, **QUIET)
    data = DataLoader(samples, batch_size)  # type: ignore[arg-type]
    found = Tuner(run).lr_find(Parabola(), data, num_training=15, min_lr=1e-3, update_attr=False)
    assert found is not None
    return found.results


def test_a_rank_without_samples_joins_the_search() -> None:
    one, other = run_world(2, sweep, "ddp", 2, 3)
    alone = sweep("auto", 1, 6)
    assert one == other and len(alone["lr"]) == 15 and one["lr"] == alone["lr"]
    assert one["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_results_of_forked_ranks_are_returned() -> None:
    forked, alone = sweep("ddp_fork", 2, 3), sweep("auto", 1, 6)
    assert forked["lr"] == alone["lr"] and forked["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_the_trainer_exposes_the_loaders_of_a_search() -> None:
    trainer, loader = Trainer(**QUIET), DataLoader(NoisySamples(), 4)
    Tuner(trainer).lr_find(Net(), loader, num_training=5, update_attr=False)
    assert trainer.train_dataloader is loader
    Tuner(trainer).scale_batch_size(MemoryLimited(), max_trials=3)
    assert trainer.train_dataloader.batch_size == 8

"""Weight averaging: equality with torch, validation, checkpoints, resumes, and sharded ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from ranks.world import run_world
from same import differences, numbers_of, weights_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from leyden.callbacks.averaged_weights import AveragedWeights
from leyden.checkpoint.reader import CheckpointReader
from leyden.strategies import DeepSpeedStrategy, FSDPStrategy, MeshStrategy, SingleDeviceStrategy, XLAStrategy


class Net(Squares):
    """Batch norm, tied weights and AdamW. Records the weights after each step and during each validation."""

    def __init__(self, norm: bool = True, dtype: torch.dtype = torch.float32) -> None:
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4)]
        super().__init__(nn.Sequential(*layers).to(dtype), lambda m: torch.optim.AdamW(m.parameters(), lr=0.05))
        self.net.tied = self.net[3]
        self.after: list[dict[str, Tensor]] = []
        self.seen: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(weights_of(self))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.losses.append(self.loss(batch).detach())
        if not self.trainer.sanity_checking:
            self.seen.append(weights_of(self) if self.trainer.world_size == 1 else {})


def data(dtype: torch.dtype = torch.float32, samples: int = 24, shuffle: bool = False) -> DataLoader[Any]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return DataLoader(x, 4, shuffle=shuffle)  # type: ignore[arg-type]


def fit(callbacks: Any, module: Net | None = None, ckpt_path: Any = None, **arguments: Any) -> Net:
    if module is None:
        torch.manual_seed(0)
        module = Net()
    trainer = Trainer(callbacks=callbacks, **{**QUIET, "max_epochs": 2, **arguments})
    trainer.fit(module, data(shuffle=True), data(), ckpt_path=ckpt_path)
    return module


def torch_average(steps: list[dict[str, Tensor]], **arguments: Any) -> dict[str, Tensor]:
    """Returns the weights of torch's AveragedModel, updated with the recorded weights of some steps."""
    model = Net().net
    average = AveragedModel(model, use_buffers=True, **arguments)
    for step in steps:
        model.load_state_dict({name.removeprefix("net."): tensor for name, tensor in step.items()})
        average.update_parameters(model)
    # torch also averages the count of batches, and rounds it.
    average.module[1].num_batches_tracked.copy_(model[1].num_batches_tracked)
    return {f"net.{name}": tensor for name, tensor in average.module.state_dict().items()}


@pytest.mark.parametrize(
    ("callback", "chosen", "arguments"),
    [
        (WeightAveraging(), slice(None), {}),
        (WeightAveraging(device="cpu", avg_fn=get_ema_avg_fn(0.9)), slice(None), {"avg_fn": get_ema_avg_fn(0.9)}),
        (EMAWeightAveraging(decay=0.9), slice(None), {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
        (
            EMAWeightAveraging(decay=0.5, update_every_n_steps=3, update_starting_at_step=2),
            slice(3, None, 3),
            {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        ),
        (
            EMAWeightAveraging(decay=0.5, update_every_n_steps=0, update_starting_at_epoch=0),
            slice(5, None, 6),
            {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        ),
    ],
)
def test_averages_equal_torchs_averaged_model(callback: WeightAveraging, chosen: slice, arguments: Any) -> None:
    module = fit(callback)
    assert len(module.after) == 12
    assert not differences(weights_of(module), torch_average(module.after[chosen], **arguments))
    assert callback.n_averaged == len(module.after[chosen])


def test_averaging_does_not_change_training() -> None:
    assert not differences(fit(EMAWeightAveraging(decay=0.9)).after, fit([]).after)


def test_validation_uses_the_averages_after_the_first_update() -> None:
    module = fit(EMAWeightAveraging(decay=0.9, update_starting_at_step=8), val_check_interval=3)
    *before, last = module.seen[::6]
    assert [len(module.seen), len(before)] == [24, 3]
    for seen, step in zip(before, (2, 5, 8), strict=True):
        assert not differences(seen, module.after[step])
    assert not differences(last, torch_average(module.after[8:], multi_avg_fn=get_ema_multi_avg_fn(0.9)))


def test_use_buffers_false_copies_the_buffers_of_the_last_update() -> None:
    module = fit(WeightAveraging(use_buffers=False))
    assert not differences(dict(module.named_buffers()), {n: module.after[-1][n] for n, _ in module.named_buffers()})


class ChangingBuffers(Net):
    """Has integer, boolean and complex buffers that change at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(512))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor(1j))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.position_ids.add_(1)
        self.mask.logical_not_()
        self.phase.mul_(1j)


@pytest.mark.parametrize("callback", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.9999)])
def test_integer_and_boolean_buffers_are_copied_and_not_averaged(callback: Any) -> None:
    averages = callback()
    module = fit(averages, ChangingBuffers())
    last = module.after[-1]
    names = {name for name, tensor in last.items() if not tensor.is_floating_point() and not tensor.is_complex()}
    assert names == {"position_ids", "mask", "net.1.num_batches_tracked"}
    assert not differences({n: weights_of(module)[n] for n in names}, {n: last[n] for n in names})
    assert averages.n_averaged == 12 and not torch.equal(module.phase, last["phase"])


def test_an_accumulation_window_counts_as_one_step() -> None:
    callback = WeightAveraging()
    fit(callback, accumulate_grad_batches=4)
    assert callback.n_averaged == 4


def test_the_module_holds_the_averages_after_fit(tmp_path: Path) -> None:
    callback = EMAWeightAveraging(decay=0.9)
    module = fit(callback)
    expected = weights_of(module)
    module.trainer.validate(module, data(), verbose=False)
    assert not differences(module.seen[-1], expected) and not differences(weights_of(module), expected)
    path = module.trainer.save_checkpoint(tmp_path / "end")
    assert not differences(CheckpointReader(path).model(), expected)


def test_a_continued_fit_starts_from_the_current_weights() -> None:
    straight = fit(EMAWeightAveraging(decay=0.9), max_epochs=4)
    module = fit(EMAWeightAveraging(decay=0.9))
    module.trainer.fit(module, data(shuffle=True), data(), ckpt_path="current", max_epochs=4)
    assert not differences(weights_of(module), weights_of(straight)) and not differences(module.after, straight.after)


def test_a_second_fit_starts_from_the_averages_and_resets_them() -> None:
    callback = EMAWeightAveraging(decay=0.9)
    module = fit(callback)
    start, module.after = copy.deepcopy(module), []
    module.trainer.fit(module, data(shuffle=True), max_epochs=1)
    assert callback.n_averaged == 6
    assert not differences(weights_of(module), torch_average(module.after, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    assert (start.net[0].weight != module.after[0]["net.0.weight"]).any()


class FailsAtStep(Callback):
    """Raises after a training step, or in the validation at a step."""

    def __init__(self, step: int = -1, validation: int = -1) -> None:
        self.step, self.validation = step, validation

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("end")

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self.validation:
            raise RuntimeError("end")


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("at", [2, 7, 9])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, at: int, every: int) -> None:
    def callbacks(folder: str) -> list[Callback]:
        checkpoint = ModelCheckpoint(tmp_path / folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        return [EMAWeightAveraging(decay=0.9, update_every_n_steps=every), checkpoint]

    straight = fit(callbacks("straight"), enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="end"):
        fit([*callbacks("interrupted"), FailsAtStep(step=at + 1)], enable_checkpointing=True)
    resumed = fit(callbacks("interrupted"), Net(), tmp_path / "interrupted" / f"step={at}", enable_checkpointing=True)
    assert not differences(weights_of(resumed), weights_of(straight))
    assert not differences(resumed.after, straight.after[at:])
    assert not differences(resumed.seen[-6:], straight.seen[-6:])
    ends = [CheckpointReader(tmp_path / folder / "step=12") for folder in ("straight", "interrupted")]
    assert not differences(*(reader.model() for reader in ends))
    assert not differences(*(reader.state("callbacks")["EMAWeightAveraging"] for reader in ends))


def test_checkpoints_hold_the_averages_and_callback_states_the_current_weights(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    module = fit([EMAWeightAveraging(decay=0.9), checkpoint], enable_checkpointing=True)
    reader = CheckpointReader(tmp_path / "step=5")
    state = reader.state("callbacks")["EMAWeightAveraging"]
    averages = torch_average(module.after[:5], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert not differences(reader.model(), averages)
    current = {name: tensor for name, tensor in module.after[4].items() if "tied" not in name}
    assert state["n_averaged"] == 5 and not differences(
        dict(sorted(state["current"].items())), dict(sorted(current.items()))
    )
    assert not differences(weights_of(Net.load_from_checkpoint(tmp_path / "step=5")), averages)


def test_asynchronous_checkpoints_equal_synchronous_ones(tmp_path: Path) -> None:
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        saves = ModelCheckpoint(
            folder, every_n_train_steps=2, save_top_k=-1, filename="{step}", asynchronous=asynchronous
        )
        fit([EMAWeightAveraging(decay=0.9), saves], enable_checkpointing=True, val_check_interval=2)
    for step in (2, 6, 10, 12):
        one, other = (CheckpointReader(tmp_path / name / f"step={step}") for name in ("False", "True"))
        assert not differences(one.model(), other.model())
        states = [reader.state("callbacks")["EMAWeightAveraging"] for reader in (one, other)]
        assert not differences(*states)


class SavesDuringValidation(Callback):
    """Saves during a validation, while the module holds the averages."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and not trainer.sanity_checking and batch_idx == 2:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_saved_during_validation_resumes_exactly(tmp_path: Path) -> None:
    straight = fit([EMAWeightAveraging(decay=0.9), SavesDuringValidation(tmp_path / "inside")])
    averages = torch_average(straight.after[:6], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert not differences(CheckpointReader(tmp_path / "inside").model(), averages)
    resumed = fit([EMAWeightAveraging(decay=0.9)], Net(), tmp_path / "inside")
    assert not differences(weights_of(resumed), weights_of(straight))
    assert not differences(resumed.after, straight.after[6:])


def test_an_error_in_validation_restores_the_current_weights() -> None:
    torch.manual_seed(0)
    module = Net()
    with pytest.raises(RuntimeError, match="end"):
        fit([EMAWeightAveraging(decay=0.9), FailsAtStep(validation=6)], module)
    assert differences(weights_of(module), module.seen[0]) and not differences(weights_of(module), module.after[5])


def test_max_steps_within_an_epoch_is_not_its_end(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=0, decay=0.5)]

    straight = fit(callbacks())
    first = fit(callbacks(), max_steps=8)
    assert first.trainer.callbacks[0].n_averaged == 1  # type: ignore[attr-defined]
    path = first.trainer.save_checkpoint(tmp_path / "eight")
    assert not differences(weights_of(fit(callbacks(), Net(), path)), weights_of(straight))


def test_restoring_only_weights_starts_new_averages(tmp_path: Path) -> None:
    path = fit(EMAWeightAveraging(decay=0.9)).trainer.save_checkpoint(tmp_path / "one")
    module, callback = Net(), EMAWeightAveraging(decay=0.9)
    trainer = Trainer(callbacks=callback, max_epochs=1, **QUIET)
    trainer.fit(module, data(), ckpt_path=path, restore="weights")
    assert callback.n_averaged == 6
    parts = ("optimizers", "progress", "rng", "callbacks", "loaders")
    trainer = Trainer(callbacks=EMAWeightAveraging(), max_epochs=3, **QUIET)
    with pytest.warns(UserWarning, match="starts new averages"):
        trainer.fit(Net(), data(), ckpt_path=path, restore=parts)


def test_resuming_a_checkpoint_without_averages_starts_them(tmp_path: Path) -> None:
    path = fit([], max_epochs=1).trainer.save_checkpoint(tmp_path / "one")
    callback = WeightAveraging()
    module = fit(callback, Net(), path)
    assert callback.n_averaged == 6 and not differences(weights_of(module), torch_average(module.after))


def test_damaged_states_raise_before_anything_changes(tmp_path: Path) -> None:
    callback = EMAWeightAveraging(decay=0.9)
    module = fit(callback)
    state = callback.state_dict()
    state["current"]["net.0.weight"] = torch.zeros(2)
    with pytest.raises(Exception, match=r"current\.net\.0\.weight is of \(2,\), and must be a tensor of \(6, 4\)"):
        callback.check_state_dict(state)
    with pytest.raises(Exception, match="n_averaged is -1"):
        callback.check_state_dict({**callback.state_dict(), "n_averaged": -1})
    assert module.trainer.global_step == 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMAWeightAveraging(decay=1.5), r"decay=1.5\): give a number from 0 to 1"),
        (lambda: EMAWeightAveraging(update_every_n_steps=-1), "give a whole number from 0"),
        (lambda: EMAWeightAveraging(update_starting_at_step=0.5), "give a whole number from 0"),
        (lambda: EMAWeightAveraging(avg_fn=max), "Use WeightAveraging for a custom function"),
        (lambda: EMAWeightAveraging(decays=0.9), r"EMAWeightAveraging\(decays=…\)"),
        (lambda: EMAWeightAveraging(0.999), "arguments by name, such as decay=0.999"),
        (lambda: WeightAveraging(avg_fn=max, multi_avg_fn=max), "pass only one"),
    ],
)
def test_invalid_arguments_raise_with_the_fix(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(0.1, 1)])
def test_averaging_low_precision_weights_raises(callback: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"net\.0\.weight is trained in torch\.bfloat16.*'bf16-mixed'"):
        fit(callback, precision="bf16-true")
    module = Net()
    module.net[3].bfloat16().requires_grad_(False)
    AveragedWeights(module, SingleDeviceStrategy(), AveragedModel).check_dtypes()


def test_two_averaging_callbacks_raise() -> None:
    with pytest.raises(ConfigurationError, match="both put averages into the module"):
        fit([WeightAveraging(), EMAWeightAveraging()])


# several ranks --------------------------------------------------------------------------------------------------------
def exact(dtype: torch.dtype = torch.float64) -> Net:
    """A net whose results are the same on any number of ranks, except for rounding."""
    torch.manual_seed(0)
    return Net(norm=False, dtype=dtype)


def with_sgd(module: Net) -> Net:
    module.configure = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    return module


def run_on_ranks(folder: str, strategy: Any, ckpt: str | None = None) -> Any:
    module = with_sgd(exact())
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    callbacks = [EMAWeightAveraging(decay=0.8), checkpoint]
    ranks = {} if strategy is None else {"strategy": strategy, "devices": 2, "global_batch_size": 4}
    arguments = {**QUIET, "enable_checkpointing": True, "precision": "64-true", **ranks}
    trainer = Trainer(callbacks=callbacks, max_epochs=2, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The last batch of an epoch has one sample, so the second rank has none.
        trainer.fit(module, data(torch.float64, samples=25), data(torch.float64), ckpt_path=ckpt)
    assert callbacks[0].n_averaged == 14  # type: ignore[attr-defined]
    return numbers_of(module), float(trainer.callback_metrics["val_loss"])


def on_two_ranks(folder: str) -> list[Any]:
    found = []
    for name, strategy in {"ddp": "ddp", "fsdp": FSDPStrategy, "tp": lambda: MeshStrategy(tp=2, plan=PLAN)}.items():
        make = strategy if callable(strategy) else lambda s=strategy: s
        straight = run_on_ranks(f"{folder}/{name}", make())
        resumed = run_on_ranks(f"{folder}/{name}-resumed", make(), ckpt=f"{folder}/{name}/step=8")
        elsewhere = run_on_ranks(f"{folder}/{name}-elsewhere", make(), ckpt=f"{folder}/one/step=8")
        found.append((name, straight, resumed, elsewhere))
    return found


PLAN = {"net.0": "colwise", "net.2": "rowwise"}


def test_replicated_and_sharded_ranks_average_like_one_process(tmp_path: Path) -> None:
    expected, loss = run_on_ranks(str(tmp_path / "one"), None)
    for results in run_world(2, on_two_ranks, str(tmp_path)):
        for name, straight, resumed, elsewhere in results:
            assert not differences(resumed, straight), name
            for averages, value in (straight, elsewhere):
                for key, tensor in expected.items():
                    assert averages[key] == pytest.approx(tensor, rel=0, abs=1e-12), (name, key)
                assert value == pytest.approx(loss, abs=1e-12)
    # One process resumes from a sharded checkpoint.
    for name in ("ddp", "fsdp", "tp"):
        averages, value = run_on_ranks(str(tmp_path / f"{name}-one"), None, ckpt=str(tmp_path / name / "step=8"))
        for key, tensor in expected.items():
            assert averages[key] == pytest.approx(tensor, rel=0, abs=1e-12), (name, key)
        model = CheckpointReader(tmp_path / name / "step=8").model()
        one = CheckpointReader(tmp_path / "one" / "step=8").model()
        for key, tensor in one.items():
            torch.testing.assert_close(model[key], tensor, rtol=0, atol=1e-12)
    files = {path.name for path in (tmp_path / "fsdp" / "step=8").iterdir()}
    assert "callbacks-00002-of-00002.safetensors" in files
    assert not any(path.name.startswith("callbacks-0") for path in (tmp_path / "ddp" / "step=8").iterdir())


def batch_norm_on_ranks(folder: str) -> Any:
    """Statistics differ between ranks. Rank 0's averages are saved; a resume restores each rank's own statistics."""
    found = []
    for name in ("ddp", "fsdp"):

        def train(folder: str, ckpt: str | None = None, name: str = name) -> Any:
            torch.manual_seed(0)
            module = Net()
            checkpoint = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
            callbacks = [EMAWeightAveraging(decay=0.8), checkpoint]
            arguments = {**QUIET, "enable_checkpointing": True, "strategy": name, "devices": 2}
            trainer = Trainer(callbacks=callbacks, max_epochs=2, **arguments)
            trainer.fit(module, data(samples=48), data(), ckpt_path=ckpt)
            return numbers_of(module), [float(loss) for loss in module.losses[-3:]]

        straight = train(f"{folder}/{name}")
        found.append((straight, train(f"{folder}/{name}-resumed", f"{folder}/{name}/step=8")))
    return found


@pytest.mark.full
def test_batch_norm_resumes_exactly_on_ranks(tmp_path: Path) -> None:
    for results in run_world(2, batch_norm_on_ranks, str(tmp_path)):
        for straight, resumed in results:
            assert not differences(resumed, straight)


def test_engines_that_step_copies_of_the_weights_raise() -> None:
    class Engine(SingleDeviceStrategy):
        drives_one = True

    with pytest.raises(ConfigurationError, match="its engine steps copies of the weights"):
        fit(EMAWeightAveraging(), strategy=Engine())
    assert DeepSpeedStrategy.drives_one
    # Works without torch_xla installed.
    assert "untested" in XLAStrategy.__new__(XLAStrategy).refusals["exchange"]

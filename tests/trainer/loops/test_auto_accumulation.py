"""`accumulate_grad_batches="auto"` in one process: memory really runs out, and the results stay the same."""

from __future__ import annotations

import re
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hungry import (
    Hungry,
    HungrySequences,
    loss_of,
    micro_batches_of,
    pad_collate,
    plain_loop,
    samples,
    sequences_of,
    split_batch,
)
from models import QUIET, Line
from samples import Unsized
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.callbacks import AutoAccumulation, GradientAccumulation
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.strategies import DDPStrategy, FSDPStrategy, MeshStrategy
from leyden.trainer.loops.auto_step import waiting_part

AUTO: dict[str, Any] = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": "auto"}


def loader(count: int = 20, size: int = 8, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    return DataLoader(TensorDataset(*samples(count, dtype)), size, **more)


def fitted(module: TrainModule, data: Any, **arguments: Any) -> Trainer:
    torch.manual_seed(7)
    trainer = Trainer(**{**AUTO, **arguments})
    trainer.fit(module, data)
    return trainer


def micro_batch_windows(numbers: list[int], size: int = 8, dtype: torch.dtype = torch.float64) -> Any:
    """Returns the windows of a plain loop whose batches are split into the given numbers of parts."""
    x, y = samples(20, dtype)
    starts = range(0, 20, size)
    return [[split_batch(x[i : i + size], y[i : i + size], count)] for i, count in zip(starts, numbers, strict=True)]


def same_weights(one: Hungry, other: Hungry) -> bool:
    states = one.net.state_dict(), other.net.state_dict()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_batch_that_fits_runs_in_one_pass_with_unchanged_results(capsys: Any) -> None:
    auto, plain = Hungry(dropout=0.3), Hungry(dropout=0.3)
    logged = fitted(auto, loader()).callback_metrics
    drawn = torch.rand(())
    assert logged == fitted(plain, loader(), accumulate_grad_batches=1).callback_metrics
    assert same_weights(auto, plain) and torch.equal(drawn, torch.rand(())) and auto.rows == [8, 8, 4]
    assert "out of memory" not in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_running_out_of_memory_weights_equal_a_plain_micro_batch_loop_bit_for_bit(
    phase: str, dtype: torch.dtype, capsys: Any
) -> None:
    module, plain = Hungry({(1, phase): 2}, dropout=0.3, dtype=dtype), Hungry(dropout=0.3, dtype=dtype)
    trainer = fitted(module, loader(dtype=dtype))
    drawn = torch.rand(())
    torch.manual_seed(7)
    # A DataLoader draws its workers' seed.
    torch.empty((), dtype=torch.int64).random_()
    plain_loop(plain, micro_batch_windows([1, 4, 4], dtype=dtype))
    assert same_weights(module, plain) and torch.equal(drawn, torch.rand(()))
    assert trainer.global_step == 3 and micro_batches_of(trainer) == 4
    assert module.rows[:3] == [8, 8, 4] and module.rows[-8:] == [2, 2, 2, 2, 1, 1, 1, 1]
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("leyden: out of memory"))
    assert f"in {phase} with 8 of the batch's 8 samples; peak memory: forward" in first
    assert "at step 1 (epoch 0, batch 1)" in first and "2 micro-batches instead of 1" in first
    assert "with 4 of the batch's 8 samples" in second and "4 micro-batches instead of 2" in second


@pytest.mark.parametrize("items", [False, True])
def test_micro_batches_give_the_result_of_whole_batches(items: bool) -> None:
    module, plain = Hungry({(0, "forward"): 3}, items=items), Hungry()
    trainer = fitted(module, loader(21))
    x, y = samples(21)
    optimizer = torch.optim.AdamW(plain.net.parameters(), lr=0.01)
    losses = []
    for start in (0, 8, 16):
        optimizer.zero_grad()
        found = loss_of((plain.net(x[start : start + 8]) - y[start : start + 8]).square(), x[start : start + 8], items)
        loss = found["loss"] / found["num_items"] if items else found
        loss.backward()
        optimizer.step()
        losses.append(found)
    for name, value in plain.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], value, rtol=0, atol=1e-12)
    assert module.rows[-4:] == [2, 1, 1, 1]
    if not items:
        expected = (losses[0] * 8 + losses[1] * 8 + losses[2] * 5) / 21
        torch.testing.assert_close(trainer.callback_metrics["loss_epoch"], expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(trainer.callback_metrics["loss_step"], losses[2].detach(), rtol=0, atol=1e-12)


class RecordsHooks(Hungry):
    """Records the arguments of hooks, and returns more than a loss."""

    def __init__(self, **more: Any) -> None:
        super().__init__({(0, "forward"): 4}, **more)
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "outputs": self.net(batch[0])[:, 0].detach(), "note": batch_idx}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("start", len(batch[0]), batch_idx))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("clear")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(("end", len(batch[0]), batch_idx, tuple(outputs["outputs"].shape), outputs["note"]))
        torch.testing.assert_close(self.trainer.callback_metrics["loss_step"], outputs["loss"], rtol=0, atol=1e-12)


def test_batch_hooks_see_whole_batches_and_backward_hooks_run_per_micro_batch() -> None:
    module = RecordsHooks()
    trainer = fitted(module, loader(16))
    window = ["clear", "backward", "backward", "step"]
    expected = [[("start", 8, number), *window, ("end", 8, number, (8,), float(number))] for number in range(2)]
    assert module.calls == [*expected[0], *expected[1]]
    assert trainer.progress.samples == 16 and trainer.progress.batches == 2


def test_metrics_and_buffers_count_each_sample_once() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class WithMetric(Hungry):
        def __init__(self, **more: Any) -> None:
            super().__init__(**more)
            self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean.update(batch[1])
            self.log("mean", self.mean, on_epoch=True)
            return super().training_step(batch, batch_idx)

    module = WithMetric(limits={(1, "backward"): 2})
    found = fitted(module, loader()).callback_metrics["mean"]
    x, y = samples(20)
    torch.testing.assert_close(found, y.mean(), rtol=0, atol=1e-6)
    torch.testing.assert_close(module.net.seen, x.sum(0), rtol=0, atol=1e-12)


def test_a_large_buffer_that_changes_is_restored() -> None:
    class CountsSamples(Hungry):
        def __init__(self, **more: Any) -> None:
            super().__init__(**more)
            self.register_buffer("large", torch.zeros(2**18 + 1, dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.large += len(batch[0])  # type: ignore[operator]
            return super().training_step(batch, batch_idx)

    module = CountsSamples(limits={(1, "backward"): 2})
    fitted(module, loader())
    assert set(module.large.tolist()) == {20.0}


class Averaging(Hungry):
    """Assigns its small buffer a new tensor in each pass, and changes a large one in every second batch."""

    def __init__(self, first_change: int = 0, **more: Any) -> None:
        super().__init__(**more)
        self.first_change = first_change
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", None)
        self.register_buffer("large", torch.zeros(2**18 + 1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        self.count = torch.ones(()) if self.count is None else self.count + 1
        if self.global_step >= self.first_change and self.global_step % 2 == 0:
            self.large += len(batch[0])  # type: ignore[operator]
        return super().training_step(batch, batch_idx)


def test_reassigned_and_occasionally_changed_buffers_are_restored() -> None:
    module = Averaging(limits={(4, "backward"): 4})
    fitted(module, loader(40))
    x, _ = samples(40)
    mean = torch.zeros(3, dtype=torch.float64)
    for part in (*x[:32].split(8), x[32:36], x[36:]):
        mean = 0.9 * mean + 0.1 * part.mean(0)
    assert torch.equal(module.mean, mean)
    assert set(module.large.tolist()) == {24.0} and float(module.count) == 6


def test_a_large_buffer_first_changed_in_a_failed_pass_raises() -> None:
    with pytest.raises(LeydenError, match=r"the buffer large \(2\.0 MiB\) changed for the first time"):
        fitted(Averaging(first_change=4, limits={(4, "backward"): 4}), loader(40))


def test_a_resume_keeps_the_number_of_micro_batches_and_every_bit(tmp_path: Path) -> None:
    limits = {(1, "forward"): 4}
    whole = Hungry(limits, dropout=0.3)
    fitted(whole, loader(shuffle=True), max_epochs=2)
    first = Hungry(limits, dropout=0.3)
    fitted(first, loader(shuffle=True), max_steps=2).save_checkpoint(tmp_path / "saved")
    again, trainer = Hungry(limits, dropout=0.3, seed=5), Trainer(**{**AUTO, "max_epochs": 2})
    trainer.fit(again, loader(shuffle=True), ckpt_path=tmp_path / "saved")
    assert same_weights(again, whole) and micro_batches_of(trainer) == 2
    assert again.rows == whole.rows[-len(again.rows) :] and len(again.rows) == 8


def test_a_second_fit_starts_with_whole_batches() -> None:
    trainer = fitted(Hungry({(0, "forward"): 4}), loader())
    assert micro_batches_of(trainer) == 2
    module = Hungry()
    trainer.fit(module, loader())
    assert module.rows == [8, 8, 4] and micro_batches_of(trainer) == 1


def test_the_callback_starts_with_a_given_number_and_validates_it() -> None:
    module = Hungry()
    fitted(module, loader(), accumulate_grad_batches=1, callbacks=[AutoAccumulation(micro_batches=4)])
    assert module.rows == [2] * 8 + [1] * 4
    for wrong in (0, 1.5, True, None):
        with pytest.raises(ConfigurationError, match="give a whole number from 1"):
            AutoAccumulation(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="accumulation is set more than once"):
        Trainer(**AUTO, callbacks=[GradientAccumulation(2)])
    with pytest.raises(ConfigurationError, match="use a whole number from 1, or 'auto'"):
        Trainer(**{**AUTO, "accumulate_grad_batches": "Auto"})


def test_a_single_sample_that_does_not_fit_raises_with_each_phases_peak() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="in backward with 1 of the batch's 8 samples; peak memory:") as e:
        fitted(Hungry({(0, "backward"): 0}), loader())
    text = str(e.value)
    assert re.search(r"forward [\d.]+ [MG]iB, backward", text) and "activation checkpointing" in text
    assert "at step 0 (epoch 0, batch 0)" in text and "can't allocate memory" in text


def test_running_out_of_memory_in_the_optimizers_step_names_the_step() -> None:
    class Huge(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    class WithHugeOptimizer(Hungry):
        def configure_optimizers(self) -> Any:
            return Huge(self.parameters(), lr=0.1)

    with pytest.raises(torch.OutOfMemoryError, match=r"in the optimizer's step of batch 0.*forward .*, step .*fsdp"):
        fitted(WithHugeOptimizer(), loader())


def test_other_errors_of_a_pass_propagate_unchanged() -> None:
    class Failing(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("the user's own error")

    with pytest.raises(ValueError, match="the user's own error"):
        fitted(Failing(), loader())


@dataclass
class Pair:
    x: Tensor
    names: list[str]


class RecordsSamples(Line):
    """Records the samples of each pass; runs out of memory above two."""

    def __init__(self) -> None:
        super().__init__(inputs=1)
        self.passes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, names = (batch["x"], batch["names"]) if isinstance(batch, (dict, UserDict)) else (batch.x, batch.names)
        if len(x) > 2:
            raise MemoryError
        self.passes.append((x[:, 0].tolist(), list(names)))
        return self(x).mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda x, names: {"x": x, "names": names, "scale": torch.tensor(1.0)},
        lambda x, names: UserDict(x=x, names=names, shared=torch.ones(2, 7)),
        lambda x, names: Pair(x, names),
    ],
)
def test_only_values_with_an_entry_per_sample_are_split(make: Any) -> None:
    module = RecordsSamples()
    batch = make(torch.arange(3.0)[:, None], ["a", "b", "c"])
    fitted(module, Unsized([batch]))
    assert module.passes == [([0.0, 1.0], ["a", "b"]), ([2.0], ["c"])]


class Opaque:
    def to(self, device: Any) -> Opaque:
        return self


class AlwaysOutOfMemory(Line):
    """Runs out of memory with every whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise MemoryError


CANNOT_SPLIT: list[tuple[Any, str]] = [
    ([{"x": torch.ones(4, 2), "graph": Opaque()}], "A batch has an Opaque, which may hold samples"),
    ([Opaque()], "A batch that is an Opaque cannot be split into micro-batches"),
    (
        Unsized([{"samples": [torch.ones(4, 2), torch.ones(5, 2)]}]),
        "A batch has a list of " r"tensors of different lengths, \[4, 5\]",
    ),
    (
        DataLoader([torch.ones(3, 8, 8)] * 8, 4, collate_fn=tuple),  # type: ignore[arg-type]
        "a batch of 4 samples cannot be split into micro-batches: its first tensor has 3 rows",
    ),
    (
        DataLoader(
            [torch.ones(10, 3)] * 8, 4, collate_fn=lambda parts: {"x": torch.stack(parts, 1), "y": torch.ones(4)}
        ),
        "a batch of 4 samples cannot be split .* has 10 rows. .* in training_step if needed",
    ),
    (
        DataLoader([torch.ones(4), torch.ones(10)], 2, collate_fn=tuple),  # type: ignore[arg-type]
        r"A batch has a tuple of tensors of different lengths, \[4, 10\]",
    ),
]


@pytest.mark.parametrize(("data", "reason"), CANNOT_SPLIT)
def test_a_batch_that_cannot_be_split_raises_with_the_reason(data: Any, reason: str) -> None:
    match = f"out of memory on rank 0.*cannot split it further: {reason}"
    with pytest.raises(torch.OutOfMemoryError, match=match) as raised:
        fitted(AlwaysOutOfMemory(), data)
    assert ".." not in str(raised.value)


class Manual(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class DrawsBatches(Line):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise AssertionError("not reached")


class WithClosure(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "manual optimization: split the batch in training_step"),
        (DrawsBatches, "draws its own batches: take the batch as an argument"),
        (WithClosure, r"an optimizer that evaluates the loss several times \(LBFGS\)"),
    ],
)
def test_modules_that_cannot_use_micro_batches_are_refused_before_training(module: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"accumulate_grad_batches='auto' does not work with .*{message}"):
        fitted(module(), [torch.ones(4, 2)])


def test_synchronized_batch_norm_is_refused_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    assert str(waiting_part(module)).startswith("the SyncBatchNorm 1 on several ranks, which waits in each pass")
    assert waiting_part(torch.nn.BatchNorm1d(2)) is None


def test_a_key_returned_by_only_some_micro_batches_raises() -> None:
    class ReturnsKeyOnce(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "early": 1} if len(self.rows) == 2 else {"loss": loss}

    with pytest.raises(ConfigurationError, match="did not return 'early' for 1 of the batch's 2 micro-batches"):
        fitted(ReturnsKeyOnce(), loader(8), accumulate_grad_batches=1, callbacks=[AutoAccumulation(micro_batches=2)])


def test_strategies_name_the_alternative_to_micro_batches() -> None:
    assert DDPStrategy().refusals == {} and FSDPStrategy().refusals == {}
    for strategy, words in (
        (DDPStrategy(static_graph=True), "static_graph=True only affects DDP's own gradient exchange"),
        (DDPStrategy(ddp_comm_hook="fp16"), "ddp_comm_hook only affects DDP's own gradient exchange"),
        (MeshStrategy(pp=2), "MeshStrategy(microbatches=…)"),
        (MeshStrategy(tp=2, plan={"a": "colwise"}), "strategy='fsdp' or 'ddp'"),
    ):
        assert words in strategy.refusals["micro_batches"]


def with_trial() -> dict[str, Any]:
    return {"accumulate_grad_batches": 1, "callbacks": [AutoAccumulation(try_largest=True)]}


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_trial_of_a_large_batch_comes_first_and_leaves_no_trace(shuffle: bool, capsys: Any) -> None:
    def data() -> Any:
        return DataLoader(sequences_of(20, 50), 4, shuffle=shuffle, collate_fn=pad_collate)

    module, plain = HungrySequences(100, dropout=0.3), HungrySequences(dropout=0.3)
    logged = fitted(module, data(), **with_trial()).callback_metrics
    drawn = torch.rand(())
    [line] = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert "in a trial of a large batch at step 0" in line and "with 4 of the batch's 4 samples" in line
    begun = fitted(plain, data(), accumulate_grad_batches=1, callbacks=[AutoAccumulation(micro_batches=2)])
    assert same_weights(module, plain) and torch.equal(drawn, torch.rand(())) and logged == begun.callback_metrics
    assert module.lengths[:3] == [50, 50, 50] and len(module.lengths) == 3 + 10


class CountingReads(list[Any]):
    """A dataset that counts its reads."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.count = 0

    def __getitem__(self, index: Any) -> Any:
        self.count += 1
        return super().__getitem__(index)


def test_batches_of_one_size_are_not_tried_and_only_two_are_loaded_twice() -> None:
    found = CountingReads(zip(*samples(20), strict=True))
    module = Hungry()
    fitted(module, DataLoader(found, 4), **with_trial())
    assert module.rows == [4] * 5 and found.count == 20 + 8


def test_without_try_largest_no_batch_is_tried_and_no_sample_is_read_twice() -> None:
    found = CountingReads(sequences_of(20, 50))
    module = HungrySequences()
    fitted(module, DataLoader(found, 4, collate_fn=pad_collate))
    assert len(module.lengths) == 5 and found.count == 20
    with pytest.raises(ConfigurationError, match="try_largest=1.*use True or False"):
        AutoAccumulation(try_largest=1)  # type: ignore[arg-type]


def test_going_back_never_lowers_the_number_of_micro_batches() -> None:
    accumulation = AutoAccumulation(8)
    accumulation.go_back({"micro_batches": 2}, step=4)
    assert accumulation.micro_batches == 8
    accumulation.go_back({"micro_batches": 16}, step=4)
    assert accumulation.micro_batches == 16


def test_an_unreadable_sample_raises_in_training_and_not_in_the_trial() -> None:
    class Broken(CountingReads):
        def __getitem__(self, index: Any) -> Any:
            if index == 19:
                raise ValueError("the last one")
            return super().__getitem__(index)

    data = DataLoader(Broken(zip(*samples(20), strict=True)), 4)
    assert fitted(Hungry(), data, max_steps=3, **with_trial()).global_step == 3
    with pytest.raises(ValueError, match="the last one"):
        fitted(Hungry(), data, **with_trial())

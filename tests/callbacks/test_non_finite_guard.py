"""NonFiniteGuard: nan never reaches the weights, in one process and on ranks with different batches."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import run_world
from same import whole
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from leyden import ConfigurationError, Trainer
from leyden.callbacks import ModelCheckpoint, NonFiniteError, NonFiniteGuard


class Net(Line):
    """Two layers, of which only the first gets nan. AdamW would decay weights even in a step with zero gradients."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.last = torch.nn.Linear(4, 1)
        self.after: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, scale = batch
        return (self.last(torch.tanh(self(x))).squeeze(1) * scale).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(whole(self.last.weight).detach().clone())


class OneRow(Net):
    """Has nan in a single row of one gradient, which under FSDP only one of two ranks holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, scale = batch
        hidden = self(x)
        if not scale.isfinite().all():
            hidden.register_hook(lambda grad: torch.cat([torch.full_like(grad[:, :1], math.nan), grad[:, 1:]], 1))
        return self.last(torch.tanh(hidden)).square().mean()


def loader(bad: dict[int, float], samples: int = 12) -> DataLoader[Any]:
    """Returns batches of two; the loss of some samples is multiplied by a factor."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    scale = torch.ones(samples)
    for sample, value in bad.items():
        scale[sample] = value
    return DataLoader(TensorDataset(x, scale), 2)


def train(
    guard: NonFiniteGuard | None,
    bad: dict[int, float],
    extra: Sequence[Any] = (),
    kind: type[Net] = Net,
    **arguments: Any,
) -> Net:
    torch.manual_seed(0)
    module = kind()
    callbacks = [*([] if guard is None else [guard]), *extra]
    trainer = Trainer(max_epochs=1, callbacks=callbacks, **{**QUIET, **arguments})
    trainer.fit(module, loader(bad))
    return module


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_stop_raises_with_the_step_and_keeps_the_weights(value: float) -> None:
    guard = NonFiniteGuard()
    module = Net()
    with pytest.raises(
        NonFiniteError, match=r"gradients of step 3 \(epoch 0, batch 2\) were not finite: layer\.weight"
    ):
        trainer = Trainer(max_epochs=1, callbacks=[guard], **QUIET)
        trainer.fit(module, loader({5: value}))
    before = module.after[-1]
    assert len(module.after) == 2 and (module.last.weight == before).all()
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_weights_become_nan_without_the_guard() -> None:
    assert train(None, {5: float("nan")}).last.weight.isnan().all()


def test_a_skipped_step_changes_neither_weights_nor_optimizer_state() -> None:
    guard = NonFiniteGuard("skip")
    with pytest.warns(UserWarning, match=r"step 3 \(epoch 0, batch 2\) was skipped"):
        module = train(guard, {5: float("nan")})
    assert guard.skipped == [3] and len(module.after) == 6
    assert (module.after[2] == module.after[1]).all() and (module.after[3] != module.after[2]).any()
    optimizer: Any = module.trainer.optimizers[0]
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
    assert module.trainer.global_step == 6


def test_skipping_a_step_equals_training_without_its_batches() -> None:
    with pytest.warns(UserWarning, match="skipped"):
        module = train(NonFiniteGuard("skip"), {4: float("inf")}, accumulate_grad_batches=2, gradient_clip_val=0.1)
    torch.manual_seed(0)
    other = Net()
    rows: Any = loader({}).dataset
    without = TensorDataset(*(column[[0, 1, 2, 3, 8, 9, 10, 11]] for column in rows.tensors))
    Trainer(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1, **QUIET).fit(other, DataLoader(without, 2))
    assert all((one == two).all() for one, two in zip(module.parameters(), other.parameters(), strict=True))


def test_patience_ends_a_run_that_does_not_recover() -> None:
    nan = dict.fromkeys(range(4, 12), float("nan"))
    guard = NonFiniteGuard("skip", patience=2)
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(NonFiniteError, match=r"step 5 .* for 3 steps in a row"),
    ):
        train(guard, nan)
    assert guard.skipped == [3, 4]


def test_skipped_steps_survive_a_resume(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    with pytest.warns(UserWarning, match="skipped"):
        train(NonFiniteGuard("skip"), {5: float("nan")}, extra=[keeper], enable_checkpointing=True)
    guard = NonFiniteGuard("skip")
    trainer = Trainer(max_epochs=1, callbacks=[guard], **QUIET)
    trainer.fit(Net(), loader({5: float("nan")}), ckpt_path=str(tmp_path / "step=4"))
    assert guard.skipped == [3]


def test_patience_limits_the_steps_skipped_by_a_gradient_scaler() -> None:
    guard = NonFiniteGuard("stop", patience=3)
    with pytest.raises(NonFiniteError, match="for 4 steps in a row"):
        train(guard, dict.fromkeys(range(2, 12), float("nan")), precision="16-mixed")
    assert train(NonFiniteGuard("stop"), {5: float("nan")}, precision="16-mixed").last.weight.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "words"), [(("stpo",), "Did you mean 'stop'"), (("skip", 0), r"patience=0.: give a number from 1")]
)
def test_invalid_arguments_raise(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        NonFiniteGuard(*arguments)


def run_ranks() -> dict[str, Any]:
    """Only the samples of the second rank's second step are bad."""
    found: dict[str, Any] = {}
    for name, kind in {"ddp": Net, "fsdp": Net, "fsdp, one row": OneRow}.items():
        guard = NonFiniteGuard("skip")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = train(guard, {6: float("nan")}, kind=kind, strategy=name.partition(",")[0])
        found[name] = (guard.skipped, [weight.tolist() for weight in module.after])
    return found


def stop() -> None:
    train(NonFiniteGuard(), {6: float("nan")}, strategy="fsdp")


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(2, run_ranks)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp, one row"])
def test_all_ranks_skip_a_step_with_nan_on_one_rank(world: list[dict[str, Any]], strategy: str) -> None:
    first, second = (rank[strategy] for rank in world)
    assert first == second
    skipped, after = first
    assert skipped == [2] and after[1] == after[0] != after[2]


def test_all_ranks_name_parameters_with_nan_on_one_rank() -> None:
    ended = [str(end) for end in run_world(2, stop, may_fail=True)]
    words = r"NonFiniteError: the gradients of step 2 .* were not finite: layer\.weight"
    # The first rank to raise reports the error; it ends the others.
    assert all(re.match(rf"{words}|1$", end) for end in ended) and any(re.match(words, end) for end in ended)

"""HFModule trains like transformers' Trainer: the same losses and weights, for 50 steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_model, rows
from models import QUIET
from ranks.world import run_world
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from leyden import Trainer
from leyden.hf import HFModule

transformers = pytest.importorskip("transformers", minversion="5")

STEPS, BATCH = 50, 4


class Recorded(HFModule):
    """Records the mean loss and the number of labels of each training batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[float, int]] = []

    def compute_loss(self, batch: Mapping[str, Any], num_items: Tensor | None = None) -> tuple[Tensor, Any]:
        loss, outputs = super().compute_loss(batch, num_items)
        self.seen.append((loss.item(), 1 if num_items is None else int(num_items)))
        return loss, outputs


def by_leyden(kind: str, accumulation: int, smoothing: float, data: list[Any], ranks: int, config: Any) -> Any:
    """Returns each step's loss per label on this rank, and the final weights."""
    module = Recorded(make_model(kind, **config), lr=1e-3, weight_decay=0.1, warmup_steps=5, label_smoothing=smoothing)
    strategy = "ddp" if ranks > 1 else "single_device"
    limits: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": accumulation, "gradient_clip_val": 1.0}
    Trainer(strategy=strategy, verbose=False, **limits, **QUIET).fit(module, DataLoader(data, BATCH))
    per_epoch = -(-len(data) // (BATCH * ranks))
    windows: list[list[tuple[float, int]]] = [[]]
    for number, entry in enumerate(module.seen, start=1):
        windows[-1].append(entry)
        if len(windows[-1]) == accumulation or number % per_epoch == 0:
            windows.append([])
    losses = [sum(loss * items for loss, items in w) / sum(items for _, items in w) for w in windows[:-1]]
    return losses, plain(module.model)


def by_transformers(
    kind: str, accumulation: int, smoothing: float, data: list[Any], folder: str, scaled: bool | None, config: Any
) -> Any:
    """Returns each step's loss, averaged over the ranks, and the final weights."""

    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "logging_steps": 1}
    schedule = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 5, "max_steps": STEPS}
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
        label_smoothing_factor=smoothing,
        optim="adamw_torch",
        **quiet,
        **schedule,
    )
    trainer = InOrder(make_model(kind, **config), arguments, train_dataset=data)
    trainer.loss_is_scaled_for_ga = scaled
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], plain(trainer.model)


def plain(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# kind, batches per step, label smoothing, whether transformers divides by the batches of a step, configuration
CASES: dict[str, tuple[str, int, float, bool | None, dict[str, Any]]] = {
    "llama": ("llama", 1, 0.0, None, {}),
    "llama, accumulated over uneven lengths": ("llama", 4, 0.0, None, {}),
    "llama, accumulated with label smoothing": ("llama", 4, 0.1, None, {}),
    "a classifier": ("bert", 1, 0.0, None, {}),
    # This model's loss is a mean, which transformers would sum up over the step unless told not to.
    "a classifier, accumulated": ("bert", 4, 0.0, False, {}),
    "t5": ("t5", 1, 0.0, None, {}),
    "t5, accumulated with label smoothing": ("t5", 4, 0.1, None, {}),
    "mixtral with its auxiliary loss": ("mixtral", 1, 0.0, None, {}),
    "mixtral, accumulated": ("mixtral", 4, 0.0, None, {"router_aux_loss_coef": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_transformers_trainer(case: str, tmp_path: Path) -> None:
    kind, accumulation, smoothing, scaled, config = CASES[case]
    # The last step of an epoch has two batches instead of four.
    data = rows(kind, BATCH * (22 if accumulation > 1 else 25))
    expected, weights = by_transformers(kind, accumulation, smoothing, data, str(tmp_path), scaled, config)
    found, own = by_leyden(kind, accumulation, smoothing, data, 1, config)
    assert len(found) == len(expected) == STEPS
    # Of losses above 1, float32 has six digits; which way the last one is rounded depends on the processor.
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert expected[0] - expected[-1] > 0.01, "the model did not learn"
    for name, value in weights.items():
        assert torch.allclose(own[name], value, rtol=0, atol=1e-6), name


def both_on_ranks(kind: str, accumulation: int, folder: str) -> Any:
    data = rows(kind, BATCH * 2 * (22 if accumulation > 1 else 25))
    theirs = by_transformers(kind, accumulation, 0.0, data, folder, None, {})
    ours = by_leyden(kind, accumulation, 0.0, data, 2, {})
    differences = [(ours[1][name] - value).abs().max().item() for name, value in theirs[1].items()]
    return theirs[0], ours[0], max(differences)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_ranks_train_like_transformers_trainer_on_two(accumulation: int, tmp_path: Path) -> None:
    answers = run_world(2, both_on_ranks, "llama", accumulation, str(tmp_path))
    assert max(difference for _, _, difference in answers) < 1e-5

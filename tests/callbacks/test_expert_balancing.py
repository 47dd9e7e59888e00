"""ExpertBalancing in one process; tests/ranks/test_expert_parallel.py has it on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mixture import TOKENS, TOP_K, WIDTH, Experts, Mixture, data
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback, ExpertBalancing, TensorBoardLogger
from leyden.core.errors import ConfigurationError

RATE = 0.25
"""Without rounding in float32."""


class Seen(Callback):
    """Records the experts that the first block chooses in each training batch, and its bias after the batch."""

    # After ExpertBalancing.
    order = 200

    def __init__(self) -> None:
        self.chosen: list[Tensor] = []
        self.biases: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        module.blocks[0].experts.register_forward_pre_hook(self._see)

    def _see(self, experts: Any, args: Any) -> None:
        if experts.training:
            self.chosen.append(args[1].clone())

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.biases.append(module.blocks[0].expert_bias.clone())


def fit(module: TrainModule, *callbacks: Callback, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**QUIET, "max_epochs": 1, **arguments}, callbacks=list(callbacks))
    loader = DataLoader(data(16), 4)
    trainer.fit(module, loader, loader if "limit_val_batches" in arguments else None)
    return trainer


def test_the_bias_moves_at_the_end_of_a_window_against_the_load() -> None:
    torch.manual_seed(0)
    module, seen, balancing = Mixture(), Seen(), ExpertBalancing(RATE)
    # Evaluation, also within a window's epoch, does not count.
    fit(module, balancing, seen, accumulate_grad_batches=2, log_every_n_steps=2, limit_val_batches=1)
    bias, windows = torch.zeros(4), [torch.cat(seen.chosen[:2]), torch.cat(seen.chosen[2:])]
    assert len(seen.chosen) == 4 and not seen.biases[0].any()
    for window, found in zip(windows, seen.biases[1::2], strict=True):
        counts = window.flatten().bincount(minlength=4)
        bias += RATE * (8 * TOKENS * TOP_K / 4 - counts).sign()
        assert torch.equal(found, bias)
    assert bias.any() and balancing.counts["blocks.0.experts"] == counts.tolist()


def test_loads_and_entropy_reach_a_logger(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    torch.manual_seed(0)
    logger, balancing = TensorBoardLogger(tmp_path), ExpertBalancing(per_expert=True)
    fit(Mixture(), balancing, logger=logger, log_every_n_steps=4)
    events = accumulator.EventAccumulator(str(logger.log_dir))
    events.Reload()
    for name, counts in balancing.counts.items():
        value = {
            kind: events.Scalars(f"experts/{name}/{kind}")[-1].value
            for kind in ("max", "min", "violation", "entropy", *range(4))
        }
        loads = [count / sum(counts) for count in counts]
        assert sum(counts) == 4 * TOKENS * TOP_K
        assert [value[number] for number in range(4)] == pytest.approx(loads)
        expected = (max(loads), min(loads), 4 * max(loads) - 1)
        assert (value["max"], value["min"], value["violation"]) == pytest.approx(expected)
        assert 0.5 < value["entropy"] < torch.tensor(4.0).log()
    assert not any(buffer.any() for buffer in Mixture().buffers())


class Overflowing(Mixture):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * 1e38


def test_the_bias_moves_though_a_scaler_skips_the_step() -> None:
    torch.manual_seed(0)
    module = Overflowing()
    before = module.head.weight.detach().clone()
    fit(module, ExpertBalancing(RATE), precision="16-mixed", max_steps=1)
    assert torch.equal(module.head.weight, before), "the step was not skipped"
    assert module.blocks[0].expert_bias.any()


class Reentrant(Mixture):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, probabilities = self.tokens(tokens), tokens.new_zeros(1)
        for block in self.blocks:
            x, probabilities = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x)), probabilities


class Unbiased(Mixture):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            bias = block.expert_bias
            del block.expert_bias
            block.own_bias = bias
            block.expert_bias = torch.nn.Parameter(bias.clone())


class Named(TrainModule):
    """Calls its experts with a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Renamed(4, has_bias=False, scales_inputs=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = torch.nn.functional.one_hot(batch[0].flatten() % WIDTH, WIDTH).float()
        index = batch[0].flatten()[:, None] % 4
        outputs: Tensor = self.experts(tokens, weights=torch.ones_like(tokens[:, :1]), chosen=index)
        return outputs.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Renamed(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights)


MISTAKES: dict[str, Any] = {
    "ExpertBalancing(rate=-1): give a number from 0": lambda: ExpertBalancing(-1),
    "ExpertBalancing(rate=True): give a number from 0": lambda: ExpertBalancing(True),
    "found no module named 'moe'": lambda: fit(Mixture(), ExpertBalancing(experts="moe")),
    "next to 'blocks.0.experts', and there is none": lambda: fit(Unbiased(), ExpertBalancing(RATE)),
    "is torch.bfloat16, which rounds": lambda: fit(Mixture(), ExpertBalancing(RATE), precision="bf16-true"),
    "ran in training without gradients": lambda: fit(Reentrant(), ExpertBalancing(RATE)),
    "gets the experts of each token neither": lambda: fit(Named(), ExpertBalancing()),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        MISTAKES[message]()
    assert message in str(raised.value)

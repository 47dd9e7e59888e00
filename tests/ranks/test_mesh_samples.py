"""On a mesh each sample counts once: ranks of a tp group read the same samples and count as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, SEQUENCE_PLAN, data
from ranks.world import run_world
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from leyden import Accelerator, Trainer
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.strategies import MeshStrategy

# Over two data ranks the last global batch of each loader leaves one of them without a sample.
SAMPLES, GLOBAL_BATCH = 21, 4


def gather_nothing(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Gathers nothing, in place of torchmetrics' own function."""
    return [state]


class Counting(GPT):
    """Counts the samples that it sees, in every way that a module can."""

    def __init__(self) -> None:
        super().__init__(counts_items=True)
        self.samples, self.own, self.alone = SumMetric(), SumMetric(), SumMetric(dist_sync_fn=gather_nothing)
        self.gathered: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        *batch, index = batch
        self.log("trained", float(len(index)), reduce_fx="sum", on_step=False, on_epoch=True, batch_size=len(index))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.gathered.append(self.all_gather(torch.tensor(self.trainer.strategy.data_rank)).tolist())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels, index = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.log("val_loss", loss, batch_size=len(index))
        self.samples(torch.ones(len(index)))
        self.log("samples", self.samples)
        self.own.update(len(index))
        self.log("numbers", index.sum().float(), reduce_fx="sum", batch_size=len(index))

    def on_validation_epoch_end(self) -> None:
        self.computed = float(self.own.compute())
        self.own.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[2], self(batch[0])


def numbered() -> TensorDataset:
    return TensorDataset(*data(SAMPLES).tensors, torch.arange(SAMPLES))


def train_and_evaluate(folder: str, sizes: dict[str, int] | None) -> dict[str, Any]:
    """Trains, evaluates and predicts, on one process if `sizes` is None."""
    torch.manual_seed(0)
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes, plan=SEQUENCE_PLAN)
    checkpoint = ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=1, filename="{epoch}")
    early_stopping = EarlyStopping(monitor="val_loss", mode="max", patience=1)
    quiet = {**QUIET, "enable_checkpointing": True, "logger": CSVLogger(folder)}
    trainer = Trainer(
        strategy=strategy, max_epochs=6, callbacks=[checkpoint, early_stopping], default_root_dir=folder, **quiet
    )
    module, readers = Counting(), trainer.strategy.data_size

    def loader(shuffle: bool = False) -> Any:
        return DataLoader(numbered(), GLOBAL_BATCH // readers, shuffle=shuffle)

    trainer.fit(module, loader(shuffle=True), loader())
    trained = float(trainer.callback_metrics["trained"])
    values = trainer.validate(module, loader())
    predictions = trainer.predict(module, loader())
    main = trainer.predict(module, loader(), gather="main")
    return {
        "trained": trained,
        "gathered": module.gathered,
        "epochs": trainer.current_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "values": values,
        "computed": module.computed,
        "keeps": module.alone.dist_sync_fn is gather_nothing,
        "order": [number for index, _ in predictions for number in index.tolist()],
        "logits": torch.cat([logits for _, logits in predictions]).numpy(),
        "kinds": {type(logits) for _, logits in predictions},
        "main": main is not None,
    }


def test_samples_count_once_on_a_mesh(tmp_path: Path) -> None:
    single = train_and_evaluate(str(tmp_path / "single"), None)
    ranks = run_world(4, train_and_evaluate, str(tmp_path / "mesh"), {"dp_shard": 2, "tp": 2})
    assert single["epochs"] == 2 and single["best"] == "epoch=0", "the run did not stop early, although the loss falls"
    for number, rank in enumerate(ranks):
        assert (rank["epochs"], rank["best"]) == (single["epochs"], single["best"])
        assert rank["trained"] == rank["values"][0]["samples"] == SAMPLES
        assert rank["computed"] == SAMPLES and rank["keeps"]
        assert rank["values"][0]["numbers"] == sum(range(SAMPLES))
        assert rank["values"][0] == pytest.approx(single["values"][0], abs=1e-5)
        assert rank["gathered"] == [[0, 1]] * 2
        assert rank["order"] == single["order"] == list(range(SAMPLES))
        # Logits are as large as 20, where the rounding errors of 12 steps show.
        assert abs(rank["logits"] - single["logits"]).max() < 1e-4
        assert rank["kinds"] == {torch.Tensor}
        assert rank["main"] is (number == 0)
    [table] = (tmp_path / "mesh").rglob("metrics.csv")
    [single_table] = (tmp_path / "single").rglob("metrics.csv")
    assert len(table.read_text().splitlines()) == len(single_table.read_text().splitlines())


def own_loop() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, strategy=MeshStrategy(dp_shard=2, tp=2, plan=SEQUENCE_PLAN))
    _, loader = accelerator.prepare(GPT(), DataLoader(numbered(), 2))
    seen: list[int] = []
    for _, _, index in loader:
        seen += accelerator.gather_for_metrics(index).tolist()
    rank = torch.tensor(float(accelerator.process_index))
    with accelerator.split_between_processes(list(range(5))) as part:
        return {
            "seen": seen,
            "objects": accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True),
            "gathered": accelerator.gather(rank).tolist(),
            "sum": float(accelerator.reduce(torch.tensor(3.0), "sum")),
            "mean": float(accelerator.reduce(torch.tensor(3.0), "mean")),
            "part": part,
        }


def test_the_accelerator_gathers_from_one_rank_of_each_tp_group() -> None:
    ranks = run_world(4, own_loop)
    for number, rank in enumerate(ranks):
        assert rank["seen"] == list(range(SAMPLES))
        assert rank["objects"] == rank["gathered"] == [number % 2, 2 + number % 2]
        assert (rank["sum"], rank["mean"]) == (6.0, 3.0)
        assert rank["part"] == ([0, 1, 2] if number < 2 else [3, 4])

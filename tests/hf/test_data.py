"""Packed rows, mixtures and length-grouped orders: what a model learns from them, and that each position is reached."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import make_model
from models import QUIET
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.callbacks import CSVLogger, ModelCheckpoint
from leyden.hf import HFModule, LengthGroupedSampler, MixedDataset, MixtureMonitor, PackedDataset

transformers = pytest.importorskip("transformers", minversion="5")


def documents(count: int, most: int = 11, seed: int = 0) -> list[dict[str, list[int]]]:
    """Returns documents of 2 to `most` tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, most + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 64, (size,), generator=generator).tolist()} for size in sizes]


# packing --------------------------------------------------------------------------------------------------------------
def test_every_token_is_in_one_row_and_rows_are_nearly_full() -> None:
    texts = documents(200, most=30)
    packed = PackedDataset(texts, length=32)
    found = []
    for i in range(len(packed)):
        row = packed[i]
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        for start, end in itertools.pairwise([*starts, 32]):
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
            assert row["labels"][start] == -100
            if row["labels"][start + 1 : end].ne(-100).any():
                found.append(row["input_ids"][start:end].tolist())
    assert sorted(found) == sorted(text["input_ids"] for text in texts)
    assert packed.fill > 0.94
    assert packed.fill == pytest.approx(sum(len(text["input_ids"]) for text in texts) / (len(packed) * 32))


def test_long_documents_are_cut_and_labels_are_kept() -> None:
    packed = PackedDataset([{"input_ids": list(range(1, 8)), "labels": [-100, -100, *range(3, 8)]}], length=4, pad=9)
    assert [row["input_ids"].tolist() for row in packed] == [[1, 2, 3, 4], [5, 6, 7, 9]]
    assert [row["labels"].tolist() for row in packed] == [[-100, -100, 3, 4], [-100, 6, 7, -100]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_in_a_row_do_not_see_each_other(attention: str) -> None:
    model = make_model("llama", attn_implementation=attention).eval()
    texts = documents(6)
    packed = PackedDataset(texts, length=24)
    batch = torch.utils.data.default_collate(list(packed))
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    for row, positions, out in zip(batch["input_ids"], batch["position_ids"], logits, strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in itertools.pairwise([*starts, 24]):
            alone = model(input_ids=row[None, start:end]).logits[0]
            assert torch.allclose(out[start:end], alone, rtol=0, atol=1e-6)


class Noting(HFModule):
    """Notes the mean loss over all labels after each epoch."""

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen = [*getattr(self, "seen", []), float(self.trainer.callback_metrics["val_loss"])]


def train(data: Any, batch_size: int) -> Noting:
    """Trains five steps, each over all the data."""
    module = Noting(make_model("llama"), lr=1e-2, scheduler=None)
    trainer = Trainer(max_epochs=5, verbose=False, accumulate_grad_batches=100, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size), DataLoader(data, batch_size))
    return module


def test_the_packed_loss_and_weights_are_those_of_padded_documents() -> None:
    texts = documents(12)
    padded = [
        {
            "input_ids": torch.tensor(ids + [0] * (11 - len(ids))),
            "attention_mask": (torch.arange(11) < len(ids)).long(),
            "labels": torch.tensor(ids + [-100] * (11 - len(ids))),
        }
        for ids in (text["input_ids"] for text in texts)
    ]
    packed, apart = train(PackedDataset(texts, length=24), 2), train(padded, 3)
    assert packed.seen == pytest.approx(apart.seen, abs=1e-6)
    assert len(set(packed.seen)) == 5
    for name, value in apart.state_dict().items():
        assert torch.allclose(packed.state_dict()[name], value, rtol=0, atol=1e-5), name


def test_lengths_and_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 lengths for 2 documents"):
        PackedDataset(documents(2), length=8, lengths=[3])
    packed = PackedDataset([{"input_ids": [1, 2, 3]}], length=8, lengths=[2])
    with pytest.raises(ConfigurationError, match="3 tokens and 3 labels, and its length is given as 2"):
        packed[0]
    with pytest.raises(ConfigurationError, match="3 tokens and 2 labels"):
        PackedDataset([{"input_ids": [1, 2, 3], "labels": [1, 2]}], length=8)[0]


def test_a_model_that_ignores_positions_is_refused_before_it_trains() -> None:
    sizes: Any = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=64, word_embed_proj_dim=16, **sizes))
    trainer = Trainer(max_steps=1, verbose=False, **QUIET)
    with pytest.raises(ConfigurationError, match="OPTForCausalLM"):
        trainer.fit(HFModule(model), DataLoader(PackedDataset(documents(4), length=24), 1))
    assert trainer.global_step == 0


def test_documents_without_tokens_and_rows_without_room_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no tokens"):
        PackedDataset([], length=8)
    with pytest.raises(ConfigurationError, match="length=1"):
        PackedDataset(documents(2), length=1)


# mixtures -------------------------------------------------------------------------------------------------------------
def test_each_block_has_the_same_shares_and_a_source_is_read_through_before_it_starts_over() -> None:
    mixed = MixedDataset([range(70), range(1000, 1500)], weights=[0.2, 0.8], block_size=50, length=1000)
    samples = [mixed[i] for i in range(1000)]
    for block in range(20):
        own = samples[50 * block : 50 * block + 50]
        assert sum(sample < 1000 for sample in own) == 10
    small = [sample for sample in samples if sample < 1000]
    assert sorted(small[:70]) == list(range(70)) == sorted(small[70:140])
    assert small[:70] != small[70:140] != sorted(small[70:140])
    assert mixed.counts(1000) == {"0": 200, "1": 800}
    assert mixed.counts(75) == {name: sum(mixed.source_of(i) == name for i in range(75)) for name in ("0", "1")}


def test_positions_are_reached_in_any_order_and_depend_on_the_seed() -> None:
    def build(seed: int = 0) -> MixedDataset:
        return MixedDataset({"a": range(300), "b": range(1000, 1900)}, seed=seed, block_size=64)

    mixed, again = build(), build()
    forward = [mixed[i] for i in range(len(mixed))]
    assert [again[i] for i in reversed(range(len(mixed)))] == forward[::-1]
    assert again[-1] == forward[-1]
    assert again[np.int64(5)] == forward[5]
    assert again.source_of(-1) == again.source_of(len(again) - 1)
    assert [build(seed=1)[i] for i in range(64)] != forward[:64]
    with pytest.raises(IndexError):
        mixed[len(mixed)]


def test_by_default_it_ends_before_a_source_starts_over() -> None:
    mixed = MixedDataset({"a": range(100), "b": range(1000, 1030)}, weights={"a": 1, "b": 1}, block_size=8)
    samples = [mixed[i] for i in range(len(mixed))]
    assert len(set(samples)) == len(samples)
    longer = MixedDataset(
        {"a": range(100), "b": range(1000, 1030)}, {"a": 1, "b": 1}, block_size=8, length=len(mixed) + 1
    )
    assert longer[len(mixed)] in samples


@pytest.mark.parametrize(
    ("sources", "weights", "match"),
    [
        ({}, None, "no source"),
        ({"a": [], "b": [1]}, None, "'a' is empty"),
        ({"a": [1], "b": [1]}, [0, 0], "sum above 0"),
        ({"a": [1], "b": [1]}, [1, -1], "no negative"),
        ({"a": [1], "b": [1]}, [1], "Give one for each"),
        ({"a": [1], "b": [1]}, {"a": 1, "c": 1}, "Give one for each"),
        ({"a": [1], "b": [1]}, [1, 1e-6], "none of b"),
        ({1: [1], 2: [1]}, {1: 1}, "Give one for each"),
        ({"a": iter([1])}, None, "read by index"),
    ],
)
def test_sources_and_weights_that_make_no_mixture_are_refused(sources: Any, weights: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        MixedDataset(sources, weights)


# in a run -------------------------------------------------------------------------------------------------------------
def mixture() -> MixedDataset:
    packed = PackedDataset(documents(60), length=24), PackedDataset(documents(60, seed=1), length=24)
    return MixedDataset(dict(zip(("a", "b"), packed, strict=True)), {"a": 1, "b": 3}, block_size=8)


def pretrain(strategy: str, out: str, workers: int, resume: str | None = None) -> dict[str, Any]:
    module = HFModule(make_model("llama"), lr=1e-2)
    checkpoint = ModelCheckpoint(out, every_n_train_steps=2, save_top_k=-1)
    arguments = {**QUIET, "enable_checkpointing": True, "callbacks": [checkpoint]}
    trainer = Trainer(strategy=strategy, max_steps=5, verbose=False, **arguments)
    per_rank = 4 if strategy == "single_device" else 2
    trainer.fit(module, DataLoader(mixture(), per_rank, num_workers=workers), ckpt_path=resume)
    return {name: value.numpy() for name, value in trainer.strategy.full_state_dict(module, rank0_only=False).items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_packed_mixture_resumes_bit_for_bit(workers: int, tmp_path: Path) -> None:
    whole = pretrain("single_device", str(tmp_path / "whole"), workers)
    resumed = pretrain("single_device", str(tmp_path / "b"), workers, str(tmp_path / "whole" / "epoch=0-step=2"))
    assert all((resumed[name] == value).all() for name, value in whole.items())


def test_two_ranks_read_the_mixture_of_one_process(tmp_path: Path) -> None:
    expected = pretrain("single_device", str(tmp_path / "one"), 0)
    found = run_world(2, pretrain, "ddp", str(tmp_path / "two"), 0)[0]
    assert all(abs(found[name] - value).max() < 1e-5 for name, value in expected.items())


def test_an_order_by_length_is_a_permutation_with_even_batches() -> None:
    lengths = torch.randint(1, 500, (1003,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthGroupedSampler(lengths, batch_size=4)
    order = list(sampler)
    assert sorted(order) == list(range(1003)) and len(sampler) == 1003
    assert lengths[order[0]] == max(lengths)

    def padding(order: list[int]) -> int:
        batches = [[lengths[index] for index in order[i : i + 4]] for i in range(0, len(order), 4)]
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    assert padding(order) < 0.1 * padding(list(range(1003)))
    assert list(sampler) == order
    sampler.set_epoch(1)
    assert list(sampler) != order
    with pytest.raises(ConfigurationError, match="batch_size=0"):
        LengthGroupedSampler(lengths, batch_size=0)


# counts ---------------------------------------------------------------------------------------------------------------
class Counting(TrainModule):
    """Notes after each step what the monitor has counted, and what this rank has read of each source."""

    def __init__(self, monitor: MixtureMonitor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.monitor, self.read, self.noted = monitor, Counter[str](), []  # type: ignore[var-annotated]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.read.update("b" if sample >= 1000 else "a" for sample in batch.tolist())
        return self.weight * batch.float().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.window.closes:
            self.noted.append([*self.monitor.counts.values(), self.read["a"], self.read["b"]])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def count(strategy: str, out: str, resume: str | None = None, **options: Any) -> Any:
    monitor = MixtureMonitor()
    module = Counting(monitor)
    mixed = MixedDataset({"a": range(30), "b": range(1000, 1040)}, {"a": 1, "b": 3}, block_size=8, length=45)
    callbacks = [monitor, ModelCheckpoint(f"{out}/saved", every_n_train_steps=3, save_top_k=-1)]
    arguments = {**QUIET, "logger": CSVLogger(out), "enable_checkpointing": True, "log_every_n_steps": 1, **options}
    trainer = Trainer(strategy=strategy, max_epochs=2, verbose=False, callbacks=callbacks, **arguments)
    trainer.fit(module, DataLoader(mixed, 4), ckpt_path=resume)
    return np.array(module.noted)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_samples_of_each_source_are_counted_over_ranks_epochs_and_resumes(accumulated: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": accumulated}
    alone = count("single_device", str(tmp_path / "one"), **options)
    assert (alone[:, :2] == alone[:, 2:]).all() and alone[-1, :2].sum() == 90
    row = list(csv.DictReader(next((tmp_path / "one").rglob("metrics.csv")).open()))[-1]
    assert [float(row["samples/a"]), float(row["samples/b"])] == alone[-1, :2].tolist()
    for step, epoch in ((3, 0), (len(alone) // 2 + 3, 1)):
        saved = str(tmp_path / "one" / "saved" / f"epoch={epoch}-step={step // 3 * 3}")
        again = count("single_device", str(tmp_path / f"again-{step}"), saved, **options)
        assert (again[:, :2] == alone[step // 3 * 3 :, :2]).all()
    if accumulated == 2:
        ranks = run_world(2, count, "ddp", str(tmp_path / "two"))
        assert (ranks[0][:, :2] == ranks[1][: len(ranks[0]), :2]).all()
        assert (ranks[0][-1, :2] == alone[-1, :2]).all()
        assert (ranks[0][:, :2] == ranks[0][:, 2:] + ranks[1][:, 2:]).all()


def test_counts_of_a_loader_in_another_order_are_refused() -> None:
    mixed = MixedDataset({"a": range(30)}, length=20, block_size=5)
    trainer = Trainer(max_steps=1, callbacks=[MixtureMonitor()], verbose=False, **QUIET)
    some = torch.utils.data.Subset(mixed, range(8))
    for loader in (DataLoader(mixed, 4, shuffle=True), DataLoader(list(range(8)), 4), DataLoader(some, 4)):
        with pytest.raises(ConfigurationError, match="MixtureMonitor"):
            trainer.fit(Counting(MixtureMonitor()), loader)

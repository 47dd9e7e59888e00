"""The table of docs/language-models.md: every feature with every strategy runs, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import LENGTH, STRATEGIES, make_model, rows
from models import QUIET
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.hf import HFModule, PackedDataset

transformers = pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
schedulefree = pytest.importorskip("schedulefree")

ROOT = Path(__file__).parents[2]
NAMES = {
    "one process": "single",
    "DDP": "ddp",
    "FSDP": "fsdp",
    "tensor parallel": "tp",
    "pipeline": "pp",
    "FSDP × tensor": "mesh",
}


def documents() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"][: 3 + i % 6].tolist()} for i, row in enumerate(rows("llama", 40))]


def first_label(evaluated: Any) -> dict[str, float]:
    return {"first": float(evaluated.label_ids[0][0])}


def prompted() -> list[dict[str, Any]]:
    data = rows("llama", 16)
    for row in data:
        row["labels"][:2] = -100
    return data


# What each row of the table trains with: arguments of HFModule, and its data.
FEATURES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "loss and gradients": ({}, lambda: rows("llama", 16)),
    "`compute_metrics`": ({"compute_metrics": first_label}, lambda: rows("llama", 16)),
    "`generation`": ({"generation": {"max_new_tokens": 3}}, prompted),
    "packed rows": ({}, lambda: PackedDataset(documents(), LENGTH)),
    "LoRA": ({"peft_config": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}, lambda: rows("llama", 16)),
    '`optimizer="muon"`': ({"optimizer": "muon"}, lambda: rows("llama", 16)),
    "schedule-free": (
        {"optimizer": schedulefree.AdamWScheduleFree, "scheduler": None},
        lambda: rows("llama", 16),
    ),
    "`chunked_loss`": ({"chunked_loss": True}, lambda: rows("llama", 16)),
}


def table() -> dict[str, dict[str, str]]:
    """Returns the cells of the table, by strategy and feature."""
    text = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    section = text.partition("## Features and strategies\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    header, cells = lines[0], lines[2:]
    # The header's first cell is empty.
    names = [NAMES[name.strip()] for name in header if name.strip()]
    return {name: {row[0].strip(): row[i].strip() for row in cells} for i, name in enumerate(names, 1)}


def train(layout: str, feature: str, folder: str) -> float:
    """Returns the validation loss after four steps, of which a checkpoint without frozen weights repeats two."""
    arguments, data = FEATURES[feature]
    arguments = dict(arguments)
    if "peft_config" in arguments:
        arguments["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", **arguments["peft_config"])

    def run(steps: int, resumes: bool) -> Trainer:
        module = HFModule(make_model("llama"), lr=1e-3, **arguments)
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, trainable_only=True)
        settings = {**QUIET, "enable_checkpointing": True}
        trainer = Trainer(
            strategy=STRATEGIES[layout](),
            max_steps=steps,
            limit_train_batches=4,
            callbacks=[saves],
            log_every_n_steps=1,
            **settings,
        )
        size = 4 // trainer.strategy.data_size
        loaders = DataLoader(data(), size), DataLoader(data(), size)
        trainer.fit(module, *loaders, ckpt_path=f"{folder}/step=2" if resumes else None)
        module.save_pretrained(f"{folder}/saved")
        return trainer

    run(2, resumes=False)
    return float(run(4, resumes=True).callback_metrics["val_loss"])


def train_all(layout: str, features: list[str], folder: str) -> dict[str, float]:
    return {feature: train(layout, feature, f"{folder}/{i}") for i, feature in enumerate(features)}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return train_all("single", [*FEATURES], str(tmp_path_factory.mktemp("single")))


def test_the_table_has_every_feature_and_strategy() -> None:
    cells = table()
    assert cells.keys() == STRATEGIES.keys()
    for column in cells.values():
        assert column.keys() == FEATURES.keys() and set(column.values()) <= {"yes", "refused"}


@pytest.mark.full
@pytest.mark.parametrize("layout", [name for name in STRATEGIES if name != "single"])
def test_features_that_the_table_allows_train_like_one_process(
    layout: str, single: dict[str, float], tmp_path: Path
) -> None:
    allowed = [feature for feature, cell in table()[layout].items() if cell == "yes"]
    for found in run_world(4 if layout == "mesh" else 2, train_all, layout, allowed, str(tmp_path)):
        # A rank without the last stage of a pipeline has the same value.
        assert found == pytest.approx({feature: single[feature] for feature in allowed}, abs=2e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "feature"),
    [(layout, feature) for layout, column in table().items() for feature, cell in column.items() if cell == "refused"],
)
def test_features_that_the_table_refuses_raise_an_error_with_the_name(
    layout: str, feature: str, tmp_path: Path
) -> None:
    answers = run_world(4 if layout == "mesh" else 2, train, layout, feature, str(tmp_path), may_fail=True)
    named = re.sub(r"\W.*", "", feature.strip("`"))
    assert any(str(answer).startswith("ConfigurationError") and named in str(answer) for answer in answers), answers

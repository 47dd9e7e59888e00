"""HFModule(generation=): prompts, tokens, metrics and tables, in one process and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import STRATEGIES, make_model, rows
from models import QUIET
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import Logger, TensorBoardLogger
from leyden.hf import HFModule, from_training_arguments
from leyden.strategies import DeepSpeedStrategy, FSDPStrategy, MeshStrategy

transformers = pytest.importorskip("transformers", minversion="5")

ENDS = {"llama": [7, 23, 41], "t5": [1, 56]}
"""Tokens that end an answer, at another length for each row: the models are untrained."""


def prompted(kind: str, count: int) -> list[dict[str, Any]]:
    """Returns samples; those of a causal model begin with a prompt of 1 to 5 tokens."""
    samples = rows(kind, count)
    if kind == "llama":
        for number, sample in enumerate(samples):
            sample["labels"][: 1 + number % min(5, int(sample["attention_mask"].sum()) - 1)] = -100
    return samples


def by_hand(kind: str, sample: dict[str, Any], model: Any, **arguments: Any) -> list[int]:
    """Returns what the model generates for one sample alone, up to its end."""
    ids = sample["input_ids"][sample["attention_mask"].bool()]
    start = 1
    if kind == "llama":
        start = int((sample["labels"] != -100).long().argmax())
        ids = ids[:start]
    model.eval()
    tokens = model.generate(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **arguments)[0].tolist()
    answer = tokens[start:]
    ends = [place for place, token in enumerate(answer) if token in ENDS[kind]]
    answer = answer[: ends[0] + 1] if ends else answer
    return answer if kind == "llama" else tokens[:1] + answer


def kept(row: Any) -> list[int]:
    return [int(token) for token in row if token != -100]


def settings(kind: str, **further: Any) -> dict[str, Any]:
    # Untrained, T5 says nothing but padding.
    return {"max_new_tokens": 8, "eos_token_id": ENDS[kind], "pad_token_id": 0, "suppress_tokens": [0], **further}


def validate(module: HFModule, loaders: Any, **arguments: Any) -> Trainer:
    trainer = Trainer(verbose=False, **QUIET | arguments)
    trainer.validate(module, loaders, verbose=False)
    return trainer


class Kept:
    """A `compute_metrics` that keeps what it got."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, evaluated: Any) -> dict[str, float]:
        self.seen.append((evaluated.predictions, evaluated.label_ids))
        return {"length": float((evaluated.predictions != -100).sum(-1).mean())}


class Tables(Logger):
    """Keeps the tables that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_table(self, key: str, columns: Any, data: Any, step: int | None = None) -> None:
        self.seen.append((key, columns, data, step))


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("further", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_answers_are_those_of_each_row_alone(kind: str, further: Any) -> None:
    data, model, metrics = prompted(kind, 7), make_model(kind), Kept()
    module = HFModule(model, compute_metrics=metrics, generation=settings(kind, **further))
    trainer = validate(module, DataLoader(data, 3))
    [(predictions, labels)] = metrics.seen
    answers = [kept(row) for row in predictions]
    assert answers == [by_hand(kind, sample, model, **settings(kind, **further)) for sample in data]
    assert further or len({len(answer) for answer in answers}) > 1
    assert (labels == torch.stack([sample["labels"] for sample in data]).numpy()).all()
    plain = validate(HFModule(model), DataLoader(data, 3))
    assert trainer.callback_metrics["val_loss"] == plain.callback_metrics["val_loss"]


def test_predictions_are_those_of_the_trainer_of_transformers(tmp_path: Path) -> None:
    data, metrics, theirs, model = prompted("t5", 6), Kept(), Kept(), make_model("t5")
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": ENDS["t5"], "suppress_tokens": [0]}
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path),
        predict_with_generate=True,
        generation_max_length=7,
        generation_num_beams=2,
        generation_config=transformers.GenerationConfig(**special),
        per_device_eval_batch_size=3,
        report_to=[],
        use_cpu=True,
    )
    converted = from_training_arguments(args)
    assert converted.unconverted == []
    validate(HFModule(model, compute_metrics=metrics, **converted.module), DataLoader(data, 3))
    transformers.Seq2SeqTrainer(model, args, eval_dataset=data, compute_metrics=theirs).evaluate()
    [(predictions, labels)], [(expected, their_labels)] = metrics.seen, theirs.seen
    # They fill rows with the token of padding.
    assert np.array_equal(np.where(predictions == -100, 0, predictions), expected[:, : predictions.shape[1]])
    assert not expected[:, predictions.shape[1] :].any() and np.array_equal(labels, their_labels[:, : labels.shape[1]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_may_be_padded_on_either_side(side: str) -> None:
    data, found = prompted("llama", 4), []
    if side == "left":
        order = [row["attention_mask"].argsort(stable=True) for row in data]
        data = [{k: v[places] for k, v in row.items()} for row, places in zip(data, order, strict=True)]
    module = HFModule(make_model("llama"), generation=settings("llama"))
    module.eval()
    with torch.no_grad():
        found = [kept(row) for row in module.validation_step(torch.utils.data.default_collate(data), 0)["generated"]]
    assert found == [by_hand("llama", sample, module.model, **settings("llama")) for sample in prompted("llama", 4)]


def test_rows_without_labels_are_prompts() -> None:
    data = [{k: v for k, v in row.items() if k != "labels"} for row in rows("llama", 3)]
    module = HFModule(make_model("llama"), compute_metrics=(metrics := Kept()), generation={"max_new_tokens": 3})
    trainer = validate(module, DataLoader(data, 2))
    assert metrics.seen[0][0].shape == (3, 3) and metrics.seen[0][1] is None
    assert "val_loss" not in trainer.callback_metrics


def test_training_does_not_depend_on_what_validation_samples(tmp_path: Path) -> None:
    weights, sampled = [], Kept()
    for generation in (None, settings("llama", do_sample=True)):
        torch.manual_seed(3)
        model = make_model("llama", attention_dropout=0.1)
        module = HFModule(model, lr=1e-2, compute_metrics=sampled if generation else None, generation=generation)
        trainer = Trainer(max_epochs=2, default_root_dir=tmp_path, verbose=False, **QUIET)
        data = prompted("llama", 6)
        trainer.fit(module, DataLoader(data, 2, shuffle=True), DataLoader(data[3:4] * 4, 2))
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    # Two batches of the same prompt.
    answers = [kept(row) for row in sampled.seen[-1][0]]
    assert len({tuple(answer) for answer in answers}) == 4


def test_samples_are_decoded_into_a_table_of_each_loader(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, tokenizer = make_model("t5", vocab_size=259), transformers.ByT5Tokenizer(extra_ids=0)
    texts = ["one", "two", "three", "four", "five"]
    data = [{"input_ids": ids, "labels": ids[:2]} for ids in tokenizer(texts).input_ids]
    # An untrained model would say bytes that are no text.
    letters = {"suppress_tokens": [*range(100), *range(125, 259)], "max_new_tokens": 4}
    module = HFModule(model, tokenizer, generation=letters, generation_samples=3)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer)
    loaders = [DataLoader(data, 2, collate_fn=collate), DataLoader(data[4:], 2, collate_fn=collate)]
    logger = TensorBoardLogger(tmp_path)
    trainer = Trainer(max_steps=1, verbose=False, **QUIET | {"logger": logger})
    trainer.fit(module, DataLoader(data, 5, collate_fn=collate), loaders)
    trainer.test(module, loaders[1], verbose=False)
    logger.save()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        [event] = events.Tensors(tag)
        found[tag.removesuffix("/text_summary")] = event.step, event.tensor_proto.string_val[0].decode().splitlines()
    assert found.keys() == {"val_samples/dataloader_idx_0", "val_samples/dataloader_idx_1", "test_samples"}
    step, (header, _, *lines) = found["val_samples/dataloader_idx_0"]
    assert step == 1 and header == "| prompt | generated | label |"
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert [(prompt, label) for prompt, _, label in cells] == [("one", "on"), ("two", "tw"), ("three", "th")]
    assert all(len(answer) == 4 and answer.isalpha() for _, answer, _ in cells)
    assert [line.split(" | ")[0] for line in found["val_samples/dataloader_idx_1"][1][2:]] == ["| five"]


def test_without_a_tokenizer_the_samples_are_numbers(tmp_path: Path) -> None:
    tables = Tables()
    module = HFModule(make_model("llama"), generation=settings("llama"), generation_samples=1)
    validate(module, DataLoader(prompted("llama", 3), 2), logger=tables, default_root_dir=tmp_path)
    [(key, columns, [row], _)] = tables.seen
    assert key == "val_samples" and columns == ["prompt", "generated", "label"]
    assert row[:2] == ["27", "7"]
    module.generation_samples = 0
    validate(module, DataLoader(prompted("llama", 3), 2), logger=tables, default_root_dir=tmp_path)
    assert len(tables.seen) == 1


@pytest.mark.parametrize(
    ("kind", "generation", "message"),
    [
        ("bert", True, "BertForSequenceClassification cannot generate.*AutoModelForCausalLM"),
        ("llama", 20, "generation is an int: use True"),
        ("llama", {"max_new_tokns": 3}, "takes no 'max_new_tokns'.*'max_new_tokens'"),
        ("llama", {"max_new_tokens": 0}, "max_new_tokens"),
        ("llama", {"num_return_sequences": 2, "num_beams": 2}, "num_return_sequences"),
    ],
)
def test_a_wrong_argument_is_refused_before_training(kind: str, generation: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HFModule(make_model(kind), generation=generation)


def test_a_negative_number_of_samples_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="generation_samples=-1"):
        HFModule(make_model("llama"), generation_samples=-1)


def test_a_row_without_a_prompt_is_refused_in_the_sanity_check(tmp_path: Path) -> None:
    module, data = HFModule(make_model("llama"), generation=True), rows("llama", 4)
    trainer = Trainer(max_steps=1, default_root_dir=tmp_path, verbose=False, **QUIET)
    with pytest.raises(ConfigurationError, match="has no prompt.*-100"):
        trainer.fit(module, DataLoader(data, 2), DataLoader(data, 2))
    assert trainer.global_step == 0


# ranks ----------------------------------------------------------------------------------------------------------------
OTHERS: dict[str, Any] = {
    "mesh": lambda: MeshStrategy(tp=2, dp_shard=2),
    # The model is a group of its own, and generate() calls its encoder without its forward.
    "whole": lambda: FSDPStrategy({transformers.T5ForConditionalGeneration}),
    "zero3": lambda: DeepSpeedStrategy(stage=3),
}


def evaluated(strategy: str, kinds: list[str], root: str) -> dict[str, Any]:
    """Returns what `compute_metrics` got, the metrics, and the table, for each kind of model and each loader.

    The second loader has one sample, so that a second data rank has none.
    """
    found: dict[str, Any] = {}
    made = (STRATEGIES | OTHERS)[strategy]
    per_rank = 4 if strategy in ("single", "tp", "pp") else 2
    for kind in kinds:
        data, metrics, tables = prompted(kind, 16), Kept(), Tables()
        module = HFModule(make_model(kind), compute_metrics=metrics, generation=settings(kind), lr=1e-3)
        trainer = Trainer(
            strategy=made(),
            max_steps=2,
            validate_at_start=True,
            default_root_dir=root,
            verbose=False,
            **QUIET | {"logger": tables},
        )
        trainer.fit(module, DataLoader(data[:8], per_rank), [DataLoader(data[:7], per_rank), DataLoader(data[7:8], 1)])
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "val_" in name}
        found[kind] = {"seen": metrics.seen, "logged": logged, "tables": tables.seen}
    return found


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return evaluated("single", ["llama", "t5"], str(tmp_path_factory.mktemp("single")))


def check_equal(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    for kind in ranks[0]:
        first, expected = ranks[0][kind], single[kind]
        # Twice, before and after training, with two loaders.
        assert len(first["seen"]) == len(expected["seen"]) == 4
        for (predictions, labels), (theirs, their_labels) in zip(first["seen"], expected["seen"], strict=True):
            assert np.array_equal(predictions, theirs) and np.array_equal(labels, their_labels), kind
        assert first["tables"] == expected["tables"] and len(first["tables"]) == 4
        for other in ranks[1:]:
            assert other[kind]["seen"] == [] and other[kind]["tables"] == []
        for own in ranks:
            assert own[kind]["logged"] == pytest.approx(expected["logged"], abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", pytest.param("whole", marks=pytest.mark.full)])
def test_two_ranks_generate_the_tokens_of_one_process(strategy: str, single: dict[str, Any], tmp_path: Path) -> None:
    kinds = {"tp": ["llama"], "whole": ["t5"]}.get(strategy, ["llama", "t5"])
    check_equal(run_world(2, evaluated, strategy, kinds, str(tmp_path)), single)


@pytest.mark.full
def test_a_mesh_of_shards_and_split_layers_generates_the_tokens_of_one_process(
    single: dict[str, Any], tmp_path: Path
) -> None:
    check_equal(run_world(4, evaluated, "mesh", ["llama"], str(tmp_path)), single)


def test_a_pipeline_is_refused_before_the_first_step(tmp_path: Path) -> None:
    # The rank that fails second ends without a word.
    errors = run_world(2, evaluated, "pp", ["llama"], str(tmp_path), may_fail=True)
    assert "generation does not work in a pipeline" in next(error for error in errors if isinstance(error, str))

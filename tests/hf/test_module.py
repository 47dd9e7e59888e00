"""HFModule: building, loss, optimizer, schedule, metrics and saving, in one process."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_model, rows
from models import QUIET
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import ThroughputMonitor
from leyden.hf import HFModule, encode_chat, from_training_arguments
from leyden.hf.arguments import CONVERTED, IGNORED
from leyden.hf.loss import averages_items, shifts_labels

transformers = pytest.importorskip("transformers", minversion="5")


def fit(module: HFModule, data: Any = None, val: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(verbose=False, **{"max_steps": 2} | arguments, **QUIET)
    trainer.fit(module, DataLoader(data or rows("llama", 8), 4), None if val is None else DataLoader(val, 2))
    return trainer


def batch_of(kind: str, count: int = 4) -> Any:
    return torch.utils.data.default_collate(rows(kind, count))


@pytest.mark.parametrize(("kind", "shifts"), [("llama", True), ("mixtral", True), ("t5", False), ("bert", False)])
def test_only_causal_models_leave_out_the_first_label_of_a_row(kind: str, shifts: bool) -> None:
    model = make_model(kind)
    assert shifts_labels(model) is shifts and averages_items(model)
    batch = batch_of(kind)
    labels = batch["labels"][:, 1:] if shifts else batch["labels"]
    assert HFModule(model).count_items(batch) == (labels != -100).sum()


def test_shift_labels_count_instead_of_labels() -> None:
    batch = batch_of("llama") | {"shift_labels": torch.tensor([[1, -100, 2]])}
    assert HFModule(make_model("llama")).count_items(batch) == 2


def test_a_model_that_takes_no_number_of_items_has_a_mean_per_batch() -> None:
    model = make_model("llama")
    model.accepts_loss_kwargs = False
    module = HFModule(model)
    output = module.training_step(batch_of("llama"), 0)
    assert torch.equal(output, model(**batch_of("llama")).loss)


def test_a_batch_without_labels_to_predict_counts_for_nothing() -> None:
    batch = batch_of("llama")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    output = HFModule(make_model("llama")).training_step(batch, 0)
    assert output["num_items"] == 0 and output["loss"] == 0


def test_label_smoothing_is_that_of_cross_entropy() -> None:
    model, batch = make_model("llama"), batch_of("llama")
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.2
    )
    loss, _ = HFModule(model, label_smoothing=0.2).compute_loss(batch)
    torch.testing.assert_close(loss, expected)


def test_a_loss_function_gets_outputs_labels_and_the_number_of_items() -> None:
    seen: list[Any] = []

    def double(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        seen.append((labels, num_items_in_batch))
        return 2 * outputs.logits.logsumexp(-1).sum() / num_items_in_batch

    module, batch = HFModule(make_model("llama"), compute_loss_func=double), batch_of("llama")
    items = module.count_items(batch)
    output = module.training_step(batch, 0)
    assert torch.equal(seen[0][0], batch["labels"]) and seen[0][1] == items
    assert output["num_items"] == items


def test_biases_and_norms_do_not_decay() -> None:
    module = HFModule(make_model("bert"), weight_decay=0.1, scheduler=None)
    decayed, others = module._parameter_groups()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(names[id(p)].endswith("weight") and "LayerNorm" not in names[id(p)] for p in decayed["params"])
    assert {names[id(p)].rsplit(".", 1)[1] for p in others["params"]} == {"bias", "weight"}
    theirs = transformers.Trainer.get_decay_parameter_names(None, module.model)
    assert {names[id(p)].removeprefix("model.") for p in decayed["params"]} == set(theirs)


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    rates: list[float] = []

    class Watched(HFModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

    fit(Watched(make_model("llama"), lr=1.0, warmup_steps=0.4), rows("llama", 40), max_steps=5)
    assert rates == pytest.approx([0, 0.5, 1, 2 / 3, 1 / 3])


@pytest.mark.parametrize("optimizer", ["SGD", "adamw", torch.optim.Adam])
def test_an_optimizer_by_name_or_by_class(optimizer: Any) -> None:
    module = HFModule(make_model("llama"), optimizer=optimizer, scheduler=None)
    trainer = fit(module)
    wanted = (
        optimizer if isinstance(optimizer, type) else {"SGD": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    )
    assert type(trainer.optimizers[0]) is wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamv"}, "adamw"),
        ({"scheduler": "liner"}, "liner"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"model_kwargs": {"num_labels": 3}}, "model_kwargs"),
        ({"label_smoothing": 0.1, "compute_loss_func": print}, "compute_loss_func"),
        ({"scheduler": "greedy"}, "reduce_lr_on_plateau"),
    ],
)
def test_a_wrong_argument_is_refused_before_training(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(HFModule(make_model("llama"), **arguments))


def test_a_schedule_that_needs_an_end_is_refused_in_an_endless_run() -> None:
    with pytest.raises(ConfigurationError, match="max_steps"):
        fit(HFModule(make_model("llama")), max_steps=-1, max_epochs=-1)


def test_label_smoothing_would_lose_the_auxiliary_loss_of_experts() -> None:
    with pytest.raises(ConfigurationError, match="output_router_logits"):
        HFModule(make_model("mixtral"), label_smoothing=0.1)


def test_metrics_see_every_sample_once_in_order_and_padded() -> None:
    seen: list[Any] = []

    def metrics(evaluated: Any) -> dict[str, float]:
        seen.append(evaluated)
        return {"rows": len(evaluated.predictions)}

    data = rows("llama", 5)
    short = [{name: value[:7] for name, value in row.items()} for row in data[:2]]
    module = HFModule(make_model("llama"), compute_metrics=metrics)
    trainer = fit(module, val=short + data[2:], num_sanity_val_steps=0)
    [evaluated] = seen
    assert evaluated.predictions.shape == (5, 12, 64) and evaluated.label_ids.shape == (5, 12)
    assert (evaluated.label_ids[0, 7:] == -100).all() and (evaluated.label_ids[2] == data[2]["labels"].numpy()).all()
    assert trainer.callback_metrics["val_rows"] == 5


def test_the_validation_loss_is_the_mean_over_all_labels() -> None:
    data, module = rows("llama", 5), HFModule(make_model("llama"))
    trainer = Trainer(verbose=False, **QUIET)
    trainer.validate(module, DataLoader(data, 2), verbose=False)
    whole, _ = module.compute_loss(torch.utils.data.default_collate(data))
    assert trainer.callback_metrics["val_loss"] == pytest.approx(whole.item(), abs=1e-5)


def test_logits_may_be_reduced_before_they_are_kept() -> None:
    shapes: list[Any] = []

    def metrics(evaluated: Any) -> dict[str, float]:
        shapes.append(evaluated.predictions.shape)
        return {}

    def best(logits: Any, labels: Any) -> Any:
        return logits.argmax(-1)

    module = HFModule(make_model("llama"), compute_metrics=metrics, preprocess_logits_for_metrics=best)
    fit(module, val=rows("llama", 3), num_sanity_val_steps=0)
    assert shapes == [(3, 12)]


def test_an_interrupted_validation_leaves_no_predictions_to_the_next() -> None:
    counts: list[int] = []

    class Stops(HFModule):
        stops = True

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if batch_idx == 1 and self.stops:
                raise KeyError("stop")
            return super().validation_step(batch, batch_idx)

    def metrics(evaluated: Any) -> dict[str, float]:
        counts.append(len(evaluated.predictions))
        return {}

    module, trainer = Stops(make_model("llama"), compute_metrics=metrics), Trainer(verbose=False, **QUIET)
    loader = DataLoader(rows("llama", 6), 2)
    with pytest.raises(KeyError):
        trainer.validate(module, loader, verbose=False)
    module.stops = False
    trainer.validate(module, loader, verbose=False)
    assert counts == [6]


def test_predictions_by_name_are_joined_and_metrics_lose_the_prefix_of_transformers() -> None:
    def best(logits: Any, labels: Any) -> Any:
        return {"best": logits.argmax(-1), "top": logits.amax(-1)}

    def metrics(evaluated: Any) -> dict[str, float]:
        return {"eval_rows": len(evaluated.predictions["best"]), "top": evaluated.predictions["top"].shape[0]}

    module = HFModule(make_model("llama"), compute_metrics=metrics, preprocess_logits_for_metrics=best)
    trainer = fit(module, val=rows("llama", 5), num_sanity_val_steps=0)
    assert (trainer.callback_metrics["val_rows"], trainer.callback_metrics["val_top"]) == (5, 5)


def test_question_answering_has_a_validation_loss_and_two_labels() -> None:
    labels: list[Any] = []

    def metrics(evaluated: Any) -> dict[str, float]:
        labels.append(evaluated.label_ids)
        return {}

    model = transformers.BertForQuestionAnswering(make_model("bert", num_labels=2).config)
    ends = {"start_positions": torch.tensor(1), "end_positions": torch.tensor(2)}
    data = [{"input_ids": row["input_ids"], **ends} for row in rows("bert", 4)]
    trainer = fit(HFModule(model, compute_metrics=metrics), data, val=data, num_sanity_val_steps=0)
    assert "val_loss" in trainer.callback_metrics and [part.tolist() for part in labels[0]] == [[1] * 4, [2] * 4]


def test_a_metric_that_is_no_number_is_named() -> None:
    def metrics(evaluated: Any) -> dict[str, Any]:
        return {"f1": [0.1, 0.2]}

    module = HFModule(make_model("llama"), compute_metrics=metrics)
    with pytest.raises(ConfigurationError, match="f1"):
        fit(module, val=rows("llama", 2), num_sanity_val_steps=0)


def test_positions_of_packed_sequences_begin_again() -> None:
    row = {"input_ids": torch.arange(600) % 64, "position_ids": torch.arange(600) % 100}
    module = HFModule(make_model("llama", max_position_embeddings=128), scheduler=None)
    trainer = fit(module, [row | {"labels": row["input_ids"]}] * 4, max_steps=1)
    assert trainer.global_step == 1


def test_a_folder_is_built_when_the_run_starts_and_saved_back(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "before")
    module = HFModule(tmp_path / "before", lr=0.0, scheduler=None)
    with pytest.raises(ConfigurationError, match="built when a run starts"):
        module.save_pretrained(tmp_path / "after")
    fit(module)
    assert module.model.training
    module.save_pretrained(tmp_path / "after")
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    assert all(torch.equal(after[name], value) for name, value in make_model("llama").state_dict().items())


def test_a_class_and_its_arguments_choose_the_head(tmp_path: Path) -> None:
    make_model("bert").bert.save_pretrained(tmp_path)
    module = HFModule(
        tmp_path, model_class=transformers.AutoModelForSequenceClassification, model_kwargs={"num_labels": 5}
    )
    module.configure_model()
    assert module.model.classifier.out_features == 5


def test_a_class_by_name_is_found_again_by_load_from_checkpoint(tmp_path: Path) -> None:
    make_model("bert").bert.save_pretrained(tmp_path / "bert")
    name, sizes = "AutoModelForSequenceClassification", {"num_labels": 3}
    module = HFModule(tmp_path / "bert", model_class=name, model_kwargs=sizes, scheduler=None)
    trainer = fit(module, rows("bert", 8))
    trainer.save_checkpoint(tmp_path / "saved")
    again = HFModule.load_from_checkpoint(tmp_path / "saved")
    assert type(again.model) is transformers.BertForSequenceClassification and again.scheduler is None
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())


def test_a_class_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    make_model("bert").bert.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="AutoModelForSequences"):
        HFModule(tmp_path, model_class="AutoModelForSequences").configure_model()


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("llama", {"input_ids": torch.full((12,), 64)}, "token 64.*64 embeddings"),
        ("llama", {"labels": torch.full((12,), 70)}, "label 70.*0 to 63"),
        ("llama", {"labels": torch.full((12,), -1)}, "label -1"),
        ("bert", {"labels": torch.tensor(3)}, "label 3.*0 to 2"),
        ("bert", {"input_ids": torch.zeros(600).long(), "attention_mask": torch.ones(600).long()}, "600.*512"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_the_first_step(kind: str, wrong: Any, message: str) -> None:
    module = HFModule(make_model(kind))
    with pytest.raises(ConfigurationError, match=message):
        fit(module, [row | wrong for row in rows(kind, 4)])
    assert module.trainer.global_step == 0


def test_labels_of_a_regression_are_not_classes() -> None:
    model = make_model("bert", num_labels=1)
    trainer = fit(HFModule(model), [row | {"labels": torch.tensor(7.5)} for row in rows("bert", 4)], max_steps=1)
    assert trainer.global_step == 1


def chat_tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"hi": 0, "hello": 1, "you": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)


SAID = [
    {"role": "user", "content": "hi you"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
]


def test_only_what_the_assistant_says_is_a_label() -> None:
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    template += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ ' ' }}{% endfor %}"
    sample = encode_chat(chat_tokenizer(template), SAID)
    assert sample["input_ids"] == [0, 2, 1, 2, 0, 1]
    assert sample["labels"] == [-100, -100, 1, 2, -100, 1]
    assert sample["attention_mask"] == [1] * 6


@pytest.mark.parametrize("arguments", [([SAID, SAID], {}), (SAID, {"return_tensors": "pt"})], ids=["two", "tensors"])
def test_one_conversation_is_encoded_at_a_time(arguments: Any) -> None:
    tokenizer = chat_tokenizer("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    with pytest.raises(ConfigurationError, match="one conversation"):
        encode_chat(tokenizer, arguments[0], **arguments[1])


def test_a_chat_template_without_marks_is_refused() -> None:
    tokenizer = chat_tokenizer("{% for m in messages %}{{ m.content + ' ' }}{% endfor %}")
    with pytest.raises(ConfigurationError, match="generation"):
        encode_chat(tokenizer, SAID)


@pytest.mark.parametrize(
    ("model", "message"),
    [("./no/such/folder", "no such folder"), (torch.nn.Linear(2, 2), "model of transformers")],
    ids=["a folder", "a layer"],
)
def test_a_model_that_is_not_there_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HFModule(model).prepare_data()


def test_a_folder_of_adapters_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"PeftModel\.from_pretrained"):
        HFModule(tmp_path).configure_model()


class Tokens:
    """What HFModule asks of a tokenizer."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def get_vocab(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(("tokens", "rows_after"), [(60, 64), (70, 70)])
def test_embeddings_grow_for_a_tokenizer_with_more_tokens(tokens: int, rows_after: int) -> None:
    module = HFModule(make_model("llama"), Tokens(tokens))
    module.configure_model()
    assert module.model.get_input_embeddings().weight.shape[0] == rows_after


def test_training_arguments_become_those_of_the_trainer_and_the_module(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path),
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        max_steps=7,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=4,
    )
    converted = from_training_arguments(args)
    assert converted.unconverted == []
    module = HFModule(make_model("llama"), **converted.module)
    trainer = Trainer(**converted.trainer, enable_checkpointing=False, verbose=False)
    trainer.fit(module, DataLoader(rows("llama", 24), **converted.loader), DataLoader(rows("llama", 4), 4))
    assert trainer.global_step == 7 and trainer.precision == "bf16-mixed"
    assert trainer.val_check_interval == 6 and type(trainer.optimizers[0]) is torch.optim.AdamW
    assert trainer.optimizers[0].defaults["fused"]


def test_every_training_argument_has_a_row_that_says_what_is_done_with_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-hf-trainer.md").read_text(encoding="utf-8")
    rows_of_page = dict(re.findall(r"^\| (`[^|]+`) \| (.*) \|$", page.split("## TrainingArguments")[1], re.MULTILINE))
    said = {name: answer for names, answer in rows_of_page.items() for name in re.findall(r"`(\w+)`", names)}
    names = {entry.name for entry in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert said.keys() == names
    left_out = {name for name, answer in said.items() if answer.startswith("no counterpart")}
    assert left_out - {"load_best_model_at_end"} == names - CONVERTED - IGNORED - {"load_best_model_at_end"}


def test_arguments_without_a_counterpart_are_named() -> None:
    args = transformers.TrainingArguments(neftune_noise_alpha=5.0, report_to=[])
    with pytest.warns(UserWarning, match="neftune_noise_alpha"):
        converted = from_training_arguments(args)
    assert converted.unconverted == ["neftune_noise_alpha"]


def test_fractions_of_all_steps_become_steps() -> None:
    args = transformers.TrainingArguments(
        max_steps=25, eval_strategy="steps", eval_steps=0.1, save_steps=0.5, logging_steps=0.05, report_to=[]
    )
    converted = from_training_arguments(args)
    assert converted.trainer["val_check_interval"] == 3 and converted.trainer["log_every_n_steps"] == 2
    with pytest.raises(ConfigurationError, match="max_steps"):
        from_training_arguments(transformers.TrainingArguments(save_steps=0.5, report_to=[]))


def test_an_output_folder_in_a_bucket_is_for_checkpoints_alone() -> None:
    args = transformers.TrainingArguments(output_dir="memory://bucket/run", report_to=["tensorboard"])
    trainer = Trainer(**from_training_arguments(args).trainer, accelerator="cpu")
    assert str(trainer.arguments.bucket) == "memory://bucket/run"
    assert Path(trainer.logger.save_dir) == Path.cwd()


def test_a_reporter_without_a_counterpart_is_named() -> None:
    args = transformers.TrainingArguments(report_to=[])
    args.report_to = ["mlflow"]
    with pytest.warns(UserWarning, match="report_to=mlflow"):
        from_training_arguments(args)


def test_an_optimizer_of_another_library_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="galore_adamw"):
        from_training_arguments(transformers.TrainingArguments(optim="galore_adamw", optim_target_modules="mlp"))


def test_one_argument_shows_tokens_per_second_and_utilization() -> None:
    module = HFModule(make_model("llama"), throughput=True)
    trainer = fit(module, rows("llama", 88), max_steps=22, log_every_n_steps=1)
    shown = trainer.callback_metrics
    assert shown["train/items_per_sec"] > shown["train/samples_per_sec"] > 0
    assert shown["train/items_per_sec"] == pytest.approx(float(shown["train/samples_per_sec"]) * 12, rel=1e-4)
    assert shown["train/flops_per_sec"] > 0 and "train/device/peak_memory_gb" in trainer.progress_bar_metrics


def test_operations_are_counted_by_matrix_tokens_and_experts_taken() -> None:
    model = make_model("llama")
    batch = {"input_ids": torch.zeros(2, 10, dtype=torch.long)}
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim > 1 and "embed_tokens" not in name]
    products = sum(p.numel() for _, p in matrices)
    attention = 12 * 2 * 32 * 10
    assert HFModule(model).flops_per_batch(batch) == 20 * (6 * products + attention)
    for name, parameter in matrices:
        parameter.requires_grad_("lm_head" in name)
    head = model.lm_head.weight.numel()
    assert HFModule(model).flops_per_batch(batch) == 20 * (6 * head + 4 * (products - head) + attention)
    mixtral = make_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    experts = sum(p.numel() for name, p in mixtral.named_parameters() if "experts" in name)
    rest = sum(p.numel() for n, p in mixtral.named_parameters() if p.ndim > 1 and "embed" not in n) - experts
    assert HFModule(mixtral).flops_per_batch(batch) == 20 * (6 * (rest + experts / 2) + attention)
    assert HFModule(make_model("t5")).flops_per_batch(batch) is None
    shared = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        n_group=1,
        topk_group=1,
    )
    deepseek = transformers.DeepseekV3ForCausalLM(shared)
    counted = [(n, p.numel()) for n, p in deepseek.named_parameters() if p.ndim > 1 and "embed" not in n]
    per_token = sum(size * (0.25 if ".experts." in name else 1) for name, size in counted)
    assert HFModule(deepseek).flops_per_batch(batch) == 20 * (6 * per_token + 12 * 16 * 10)
    assert any("shared_experts" in name for name, _ in counted)


def test_a_monitor_of_ones_own_is_kept() -> None:
    own = ThroughputMonitor(len, window_size=2)
    trainer = Trainer(callbacks=[own], max_steps=2, **QUIET)
    trainer.fit(HFModule(make_model("llama"), throughput=True), DataLoader(rows("llama", 8), 4))
    assert [c for c in trainer.callbacks if isinstance(c, ThroughputMonitor)] == [own]
    assert own._stages["train"].totals.batches == 2

"""Adapters by peft under every strategy: trained, saved without their model, resumed, merged and converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import STRATEGIES, make_model, rows
from models import QUIET
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.checkpoint.reader import CheckpointReader
from leyden.cli.main import main
from leyden.hf import HFModule

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5")

IN_FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("tp", "pp")]
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}


def train(
    strategy: str, out: str, config: dict[str, Any], model: Any = None, dtype: Any = None, resume: str | None = None
) -> str:
    """Trains six steps with a checkpoint after the third, saves the adapters, and returns the last checkpoint's path.

    Args:
        strategy: a key of STRATEGIES.
        out: the folder for checkpoints, and for the adapters in `adapter`.
        config: the configuration of the adapters.
        model: the model's folder; None for a model that is built here.
        dtype: the dtype of a model that is built here.
        resume: the checkpoint to resume.
    """
    model = make_model("llama").to(dtype) if model is None else model
    torch.manual_seed(1)
    module = HFModule(model, lr=1e-2, peft_config=config)
    checkpoint = ModelCheckpoint(out, every_n_train_steps=3, save_top_k=-1, trainable_only=True)
    arguments = {**QUIET, "enable_checkpointing": True, "callbacks": [checkpoint], "default_root_dir": out}
    trainer = Trainer(strategy=STRATEGIES[strategy](), max_steps=6, verbose=False, **arguments)
    data = DataLoader(rows("llama", 24), 2 if strategy in ("ddp", "fsdp") else 4)
    trainer.fit(module, data, ckpt_path=resume)
    module.save_pretrained(f"{out}/adapter")
    return checkpoint.last_model_path or checkpoint.best_model_path


def train_all(strategy: str, runs: list[tuple[Any, ...]]) -> None:
    for run in runs:
        train(strategy, *run)


def adapters(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "adapter" / "adapter_model.safetensors")


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], value, rtol=0, atol=atol) for name, value in expected.items())


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    train("single", str(folder), LORA)
    return folder


def test_adapters_train_alone_and_are_saved_alone(single: Path) -> None:
    module = HFModule(make_model("llama"), peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert all("lora_" in name for name, parameter in module.named_parameters() if parameter.requires_grad)
    assert not (single / "adapter" / "model.safetensors").exists()
    base = make_model("llama")
    again = peft.PeftModel.from_pretrained(base, single / "adapter")
    loaded = HFModule.load_from_checkpoint(single / "epoch=0-step=6", model=make_model("llama"))
    ids = torch.arange(8)[None]
    assert torch.equal(again(input_ids=ids).logits, loaded.model.eval()(input_ids=ids).logits)
    with pytest.raises(ConfigurationError, match="peft_config"):
        HFModule(again, peft_config=LORA)


def test_a_checkpoint_takes_little_more_than_the_adapters_and_their_optimizer(tmp_path: Path) -> None:
    path = Path(train("single", str(tmp_path), {**LORA, "r": 128}))
    names = CheckpointReader(path).names()
    assert all("lora_" in name for name in names)
    trained = sum(tensor.numel() * 4 for tensor in CheckpointReader(path).model().values())
    size = sum(file.stat().st_size for file in path.iterdir())
    # States of random generators and descriptions take about 60 KB, whatever the model's size.
    assert size - 70_000 < 1.05 * 3 * trained < size * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *IN_FULL])
def test_two_ranks_end_like_one_process_and_resume_each_others_checkpoints(
    strategy: str, single: Path, tmp_path: Path
) -> None:
    own, others = (str(folder / "epoch=0-step=3") for folder in (tmp_path / "whole", single))
    whole = (str(tmp_path / "whole"), LORA)
    resumed = (str(tmp_path / "own"), LORA, None, None, own)
    run_world(2, train_all, strategy, [whole, resumed, (str(tmp_path / "other"), LORA, None, None, others)])
    assert_close(adapters(tmp_path / "whole"), adapters(single))
    assert all("lora_" in name for name in CheckpointReader(own).names())
    assert_equal(adapters(tmp_path / "own"), adapters(tmp_path / "whole"))
    assert_close(adapters(tmp_path / "other"), adapters(single))
    train("single", str(tmp_path / "one"), LORA, None, None, own)
    assert_close(adapters(tmp_path / "one"), adapters(single))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("strategy", ["fsdp", *IN_FULL])
def test_the_model_under_the_adapters_is_read_in_shards(strategy: str, folder: str, tmp_path: Path) -> None:
    # A layer that trains as a whole is a copy of the model's; a plan cannot split it.
    config = LORA if strategy == "tp" else {**LORA, "modules_to_save": ["lm_head"]}
    train("single", str(tmp_path / "single"), config, folder)
    middle, resumed = str(tmp_path / strategy / "epoch=0-step=3"), str(tmp_path / "resumed")
    runs = [(str(tmp_path / strategy), config, folder), (resumed, config, folder, None, middle)]
    run_world(2, train_all, strategy, runs)
    assert_close(adapters(tmp_path / strategy), adapters(tmp_path / "single"), atol=1e-4)
    assert_equal(adapters(tmp_path / "resumed"), adapters(tmp_path / strategy))


KINDS = {
    "lora on bfloat16": (LORA, torch.bfloat16),
    "dora": ({**LORA, "use_dora": True}, None),
    "prompt": ({"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}, None),
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_kinds_of_adapters(strategy: str, tmp_path: Path) -> None:
    runs: list[tuple[Any, ...]] = []
    for kind, (config, dtype) in KINDS.items():
        train("single", str(tmp_path / "single" / kind), config, None, dtype)
        middle = str(tmp_path / "whole" / kind / "epoch=0-step=3")
        runs.append((str(tmp_path / "whole" / kind), config, None, dtype))
        runs.append((str(tmp_path / "resumed" / kind), config, None, dtype, middle))
    run_world(2, train_all, strategy, runs)
    for kind in KINDS:
        whole, expected = adapters(tmp_path / "whole" / kind), adapters(tmp_path / "single" / kind)
        assert_close(whole, expected)
        assert all(tensor.dtype == torch.float32 for tensor in expected.values())
        assert_equal(adapters(tmp_path / "resumed" / kind), whole)


def test_adapters_that_start_from_the_weights_need_the_model_itself_under_shards(folder: str) -> None:
    module = HFModule(folder, peft_config={**LORA, "use_dora": True})
    with pytest.raises(ConfigurationError, match="Pass the model itself"):
        Trainer(strategy="fsdp", max_steps=1, verbose=False, **QUIET).fit(module, DataLoader(rows("llama", 4), 2))


def test_the_merged_model_is_a_copy_that_transformers_reads(folder: str, tmp_path: Path) -> None:
    path = train("single", str(tmp_path), {**LORA, "modules_to_save": ["lm_head"]}, folder)
    module = HFModule.load_from_checkpoint(path)
    ids = torch.arange(8)[None]
    before = module.model.eval()(input_ids=ids).logits
    module.save_pretrained(tmp_path / "merged", merged=True)
    assert torch.equal(module.model(input_ids=ids).logits, before)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(merged) is transformers.LlamaForCausalLM
    assert torch.allclose(merged(input_ids=ids).logits, before, rtol=0, atol=1e-6)
    assert not torch.allclose(make_model("llama")(input_ids=ids).logits, before, rtol=0, atol=1e-3)


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head", None])
def test_a_model_with_tied_embeddings_is_merged(saved: str | None, tmp_path: Path) -> None:
    config = {**LORA, "modules_to_save": [saved] if saved else None, "init_lora_weights": False}
    module = HFModule(make_model("llama", tie_word_embeddings=True), peft_config=config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.rand_like(parameter) * parameter.requires_grad
    ids = torch.arange(8)[None]
    module.save_pretrained(tmp_path, merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(merged(input_ids=ids).logits, module.model.eval()(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_a_random_head_that_peft_replaces_is_not_compared(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "target_modules": ["query"]}
    torch.manual_seed(0)
    module = HFModule(make_model("bert"), lr=1e-2, peft_config=config)
    checkpoint = ModelCheckpoint(tmp_path, trainable_only=True)
    arguments = {**QUIET, "enable_checkpointing": True, "callbacks": [checkpoint]}
    Trainer(max_steps=2, verbose=False, **arguments).fit(module, DataLoader(rows("bert", 8), 4))
    other = make_model("bert")
    torch.nn.init.normal_(other.classifier.weight)
    loaded = HFModule.load_from_checkpoint(checkpoint.best_model_path, model=other)
    batch = torch.utils.data.default_collate(rows("bert", 4))
    assert torch.equal(loaded.model.eval()(**batch).logits, module.model.eval()(**batch).logits)


def test_several_adapters_are_saved_and_the_active_one_is_merged(tmp_path: Path) -> None:
    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
    model.set_adapter("other")
    module, ids = HFModule(model), torch.arange(8)[None]
    module.save_pretrained(tmp_path / "merged", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(merged(input_ids=ids).logits, model.eval()(input_ids=ids).logits, rtol=0, atol=1e-6)
    module.save_pretrained(tmp_path / "alone")
    assert (tmp_path / "alone" / "other" / "adapter_model.safetensors").is_file()


def test_adapters_that_transformers_adds_are_saved(tmp_path: Path) -> None:
    model = make_model("llama")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    HFModule(model).save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    with pytest.raises(ConfigurationError, match="holds adapters"):
        HFModule(make_model("llama")).save_pretrained(tmp_path)


def test_a_checkpoint_of_another_module_is_not_written(single: Path, tmp_path: Path) -> None:
    module = HFModule(make_model("llama"), peft_config={**LORA, "r": 4, "target_modules": ["k_proj"]})
    with pytest.raises(ConfigurationError, match="k_proj"):
        module.save_pretrained(tmp_path / "out", ckpt_path=single / "epoch=0-step=6")
    assert not (tmp_path / "out").exists()


def merge_shards(out: str, adapter: str) -> None:
    module = HFModule(make_model("llama"), lr=0.0, scheduler=None, peft_config=LORA)
    module.model.load_adapter(adapter, "default", is_trainable=True)
    Trainer(strategy="fsdp", max_steps=1, verbose=False, **QUIET).fit(module, DataLoader(rows("llama", 8), 2))
    module.save_pretrained(out, merged=True)


def test_shards_are_merged_as_one_process_merges(single: Path, tmp_path: Path) -> None:
    run_world(2, merge_shards, str(tmp_path), str(single / "adapter"))
    expected = peft.PeftModel.from_pretrained(make_model("llama"), single / "adapter").merge_and_unload().state_dict()
    assert_equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), expected)


def test_convert_writes_a_checkpoint_for_peft_and_merged_for_transformers(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train("single", str(tmp_path), LORA, folder)
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    assert main(["convert", path, str(alone)]) == 0
    assert "adapter_model.safetensors" in capsys.readouterr().out
    assert main(["convert", "--merged", path, str(merged)]) == 0
    assert json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"] == folder
    ids = torch.arange(8)[None]
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(alone)(input_ids=ids).logits
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
    assert torch.allclose(adapted, whole, rtol=0, atol=1e-6)


def test_convert_needs_the_name_of_the_model(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(single / "epoch=0-step=6"), str(tmp_path / "out")]) == 2
    assert "load_from_checkpoint" in capsys.readouterr().err


def test_what_cannot_be_merged_or_adapted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="merged"):
        HFModule(make_model("llama")).save_pretrained(tmp_path, merged=True)
    prompts = HFModule(make_model("llama"), peft_config=KINDS["prompt"][0])
    with pytest.raises(ConfigurationError, match="PROMPT_TUNING"):
        prompts.save_pretrained(tmp_path, merged=True)
    with pytest.raises(ConfigurationError, match="to_dict"):
        HFModule(make_model("llama"), peft_config={"r": 4})
    quantized = make_model("llama")
    quantized.is_quantized = True
    with pytest.raises(ConfigurationError, match="QLoRA"):
        HFModule(quantized, peft_config=LORA)


def split_adapters(layout: str, config: Any) -> float:
    module = HFModule(make_model("llama"), lr=1e-2, peft_config=config, scheduler=None)
    torch.manual_seed(0)
    trainer = Trainer(strategy=STRATEGIES[layout](), max_steps=4, verbose=False, **QUIET)
    trainer.fit(module, DataLoader(rows("llama", 16), 4))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return sum(float(value.double().abs().sum()) for value in state.values())


DORA = {"r": 4, "use_dora": True, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "kind", "arguments", "refused"),
    [
        ("pp", "LoraConfig", DORA, ""),
        ("tp", "PromptTuningConfig", {"num_virtual_tokens": 3}, ""),
        ("tp", "LoraConfig", DORA, "lora_magnitude_vector"),
        ("tp", "PrefixTuningConfig", {"num_virtual_tokens": 3}, "PREFIX_TUNING does not work with tensor parallel"),
        ("pp", "PromptTuningConfig", {"num_virtual_tokens": 3}, "PROMPT_TUNING does not work with a pipeline"),
    ],
)
def test_other_adapters_train_on_split_models_or_are_refused(
    layout: str, kind: str, arguments: dict[str, Any], refused: str
) -> None:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **arguments)
    answers = run_world(2, split_adapters, layout, config, may_fail=True)
    if refused:
        assert any(refused in str(answer) for answer in answers), answers
    else:
        assert answers == pytest.approx([split_adapters("single", config)] * 2, rel=1e-5)

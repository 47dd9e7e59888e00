"""push_to_hub and SavePretrained, against a stand-in for the hub on the loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_hub import Hub, serving
from hf_models import make_model, rows
from models import QUIET, Line
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import ModelCheckpoint, WeightAveraging
from leyden.checkpoint.reader import CheckpointReader
from leyden.hf import HFModule, SavePretrained
from leyden.strategies import FSDPStrategy

transformers = pytest.importorskip("transformers", minversion="5")
TOKEN = "hf_" + "q7ZtR0pXw3" * 3
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as served:
        yield served


def push(hub: Hub, folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with a trained `module`. The library reads HF_ENDPOINT only when it is imported."""
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from hf_models import make_model, rows
        from leyden import Trainer
        from leyden.hf import HFModule, SavePretrained
        from models import QUIET
        from torch.utils.data import DataLoader

        data = DataLoader(rows("llama", 8), 4)
        module = HFModule(make_model("llama"), lr=1e-3)
        trainer = Trainer(max_steps=2, verbose=False, **QUIET)
    """
    variables = {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(folder / "home"),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(body)]
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_is_uploaded_private_with_a_card(hub: Hub, tmp_path: Path) -> None:
    done = push(
        hub,
        tmp_path,
        f"""
        trainer.fit(module, data, data)
        print("commit", module.push_to_hub("me/model", token={TOKEN!r}))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert f"commit {hub.address}/me/model/commit/" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    # The address of a large file is signed, and gets no token.
    assert hub.tokens - {""} == {f"Bearer {TOKEN}"}
    [created], [files] = hub.created, hub.commits
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "model", "private")
    assert set(files) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    readme = bytes(files["README.md"]).decode()
    assert "library_name: transformers" in readme and "| val_loss |" in readme and "| lr | `0.001` |" in readme
    weights = hub.blobs[str(files["model.safetensors"])]
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_bytes(bytes(files["config.json"]))
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) is transformers.LlamaForCausalLM


def test_a_second_upload_sends_only_what_the_broken_one_did_not(hub: Hub, tmp_path: Path) -> None:
    hub.refuses.add("put")
    # Shards of 20 KB make several files.
    body = """
        from leyden.hf.sharing import upload
        from pathlib import Path
        module.save_pretrained("out", max_shard_size="20KB")
        upload(Path("out"), "me/model", module)
    """
    first = push(hub, tmp_path, body)
    assert first.returncode and "Error while uploading" in first.stderr
    assert not hub.commits
    arrived = list(hub.sent)
    assert len(arrived) == 1
    hub.refuses.clear()
    second = push(hub, tmp_path, body)
    assert second.returncode == 0, second.stderr
    [files] = hub.commits
    large = {str(value) for name, value in files.items() if name.endswith(".safetensors")}
    assert len(large) > 2 and sorted(hub.sent) == sorted(large)


def test_a_failed_upload_at_the_end_of_a_fit_is_a_warning_and_the_folder_stays(hub: Hub, tmp_path: Path) -> None:
    hub.refuses.add("create")
    done = push(
        hub,
        tmp_path,
        f"""
        share = SavePretrained("out", push_to_hub="me/model", token={TOKEN!r})
        Trainer(max_steps=1, verbose=False, callbacks=[share], **QUIET).fit(module, data)
        print("trained")
        """,
    )
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    assert "its upload to me/model failed" in done.stderr and TOKEN not in done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


# beside the best checkpoint -------------------------------------------------------------------------------------------
class Judged(HFModule):
    """A module whose first checkpoint is the best."""

    def on_train_epoch_end(self) -> None:
        self.log("score", float(self.trainer.progress.epoch))


def fit_and_save(
    strategy: Any, out: str, peft: Any = None, merged: bool = False, *callbacks: Any, saved: str = ""
) -> str:
    torch.manual_seed(1)
    module = Judged(make_model("llama"), lr=1e-2, peft_config=peft)
    best = ModelCheckpoint(saved or f"{out}/best", monitor="score", trainable_only=peft is not None)
    share = SavePretrained(f"{out}/pretrained", merged=merged)
    arguments = {**QUIET, "enable_checkpointing": True, "callbacks": [*callbacks, share, best]}
    trainer = Trainer(strategy=strategy, max_epochs=3, verbose=False, **arguments)
    trainer.fit(module, DataLoader(rows("llama", 16), 4))
    assert not any(
        torch.equal(value, CheckpointReader(best.best_model_path).model([name])[name])
        for name, value in trainer.strategy.full_state_dict(module, rank0_only=False).items()
        if "lora_" in name or (peft is None and "proj" in name)
    )
    return best.best_model_path


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("saved", ["", "memory://bucket/best"])
def test_the_folder_has_the_weights_of_the_best_checkpoint(averaged: bool, saved: str, tmp_path: Path) -> None:
    averages = [WeightAveraging()] if averaged else []
    path = fit_and_save("single_device", str(tmp_path), None, False, *averages, saved=saved)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained").state_dict()
    expected = CheckpointReader(path).model()
    assert all(torch.equal(found[name.removeprefix("model.")], value) for name, value in expected.items())


def on_shards(out: str) -> str:
    return fit_and_save(FSDPStrategy(), out, LORA, True)


def test_shards_with_adapters_are_merged_from_the_best_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = run_world(2, on_shards, str(tmp_path))[0]
    module = HFModule.load_from_checkpoint(path, model=make_model("llama"))
    module.save_pretrained(tmp_path / "expected", merged=True)
    found, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("pretrained", "expected")
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_without_a_checkpoint_the_last_weights_go_into_the_runs_folder(tmp_path: Path) -> None:
    module = HFModule(make_model("llama"), lr=1e-2)
    trainer = Trainer(max_steps=1, verbose=False, callbacks=[SavePretrained()], default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, DataLoader(rows("llama", 4), 4))
    [config] = tmp_path.rglob("config.json")
    assert json.loads(config.read_text())["model_type"] == "llama"
    found = transformers.AutoModelForCausalLM.from_pretrained(config.parent).state_dict()
    assert all(torch.equal(found[name], value) for name, value in module.model.state_dict().items())


def test_another_module_is_refused_before_it_trains() -> None:
    trainer = Trainer(max_steps=1, verbose=False, callbacks=[SavePretrained()], **QUIET)
    with pytest.raises(ConfigurationError, match="HFModule"):
        trainer.fit(Line(), DataLoader(torch.zeros(4, 2), 2))
    assert trainer.global_step == 0

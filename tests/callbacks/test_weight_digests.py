"""WeightDigests: a line of digests for every n-th step; a resume truncates the lines after its checkpoint."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from xxhash import xxh3_64_hexdigest

from leyden import ConfigurationError, Trainer
from leyden.callbacks import CSVLogger, ModelCheckpoint, WeightDigests
from leyden.checkpoint.format.digests import DigestsError, read_digests
from leyden.strategies import MeshStrategy

NAMES = ["scale", "seen", "layer.weight", "layer.bias"]


class Net(Line):
    """Has a buffer, records the digests of its weights after each step, and fails in the step `fails_in`."""

    def __init__(self, fails_in: int | None = None) -> None:
        torch.manual_seed(0)
        super().__init__(4, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))
        self.fails_in = fails_in
        self.after: dict[int, dict[str, str]] = {}

    def forward(self, x: Any) -> Any:
        self.seen += x[:, :2].sum(0)
        return self.layer(x) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step + 1 == self.fails_in:
            raise RuntimeError("the power is out")
        return self(batch[0]).square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = {name: value.detach().numpy().tobytes() for name, value in self.state_dict().items()}
        self.after[self.trainer.global_step] = {name: xxh3_64_hexdigest(value) for name, value in state.items()}


def loader(samples: int = 24) -> DataLoader[Any]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), 2)


def train(
    folder: Path, module: Net | None = None, ckpt_path: Any = None, samples: int = 24, **arguments: Any
) -> tuple[Net, Trainer]:
    module = Net() if module is None else module
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": folder, **arguments})
    trainer.fit(module, loader(samples), ckpt_path=ckpt_path)
    return module, trainer


def test_each_line_holds_the_digests_of_all_tensors_after_a_step(tmp_path: Path) -> None:
    module, _ = train(tmp_path, digest_every_n_steps=1)
    records = list(read_digests(tmp_path / "version_0" / "digests.jsonl"))
    assert [record.step for record in records] == list(range(13))
    assert list(records[1].digests) == NAMES
    assert records[1].digests["layer.weight"].form == "float32 (2, 4)"
    for record in records[1:]:
        assert {name: digest.value for name, digest in record.digests.items()} == module.after[record.step]


def test_digest_every_n_steps_counts_optimizer_steps(tmp_path: Path) -> None:
    module, _ = train(tmp_path, digest_every_n_steps=2, accumulate_grad_batches=3)
    first, second, third = read_digests(tmp_path / "version_0" / "digests.jsonl")
    assert [first.step, second.step, third.step] == [0, 2, 4]
    assert third.digests["layer.bias"].value == module.after[4]["layer.bias"] != module.after[3]["layer.bias"]


def test_unusual_tensors_have_digests_of_their_elements(tmp_path: Path) -> None:
    class Unusual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tied = self.layer.weight
            self.low = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
            self.register_buffer("rows", torch.arange(6.0).view(2, 3).t())
            self.register_buffer("complex", torch.tensor([1 + 2j]).conj())
            self.register_buffer("empty", torch.empty(0, 3))
            self.register_buffer("flag", torch.tensor(True))
            self.register_buffer("sparse", torch.eye(2).to_sparse())
            self.register_buffer("temporary", torch.ones(1), persistent=False)

        def on_train_batch_end(self, *_: Any) -> None: ...

    module, _ = train(tmp_path, Unusual(), digest_every_n_steps=12)
    *_, last = read_digests(tmp_path / "version_0" / "digests.jsonl")
    values = {name: digest.value for name, digest in last.digests.items()}
    assert values["tied"] == values["layer.weight"] == xxh3_64_hexdigest(module.layer.weight.detach().numpy())
    assert values["low"] == xxh3_64_hexdigest(module.low.detach().view(torch.int16).numpy())
    assert values["rows"] == xxh3_64_hexdigest(torch.arange(6.0).view(2, 3).t().contiguous().numpy())
    assert values["complex"] == xxh3_64_hexdigest(torch.tensor([1 - 2j]).numpy())
    assert values["flag"] == xxh3_64_hexdigest(b"\1") and values["empty"] == xxh3_64_hexdigest(b"")
    assert "sparse" in values and "temporary" not in values


# resumes --------------------------------------------------------------------------------------------------------------
def folder_of(root: Path, logger: bool) -> Path:
    return root / "logs" / "version_0" if logger else root / "version_0"


@pytest.mark.parametrize("logger", [False, True], ids=["no logger", "a logger"])
def test_a_killed_and_resumed_run_writes_the_same_file(tmp_path: Path, logger: bool) -> None:
    def arguments(root: Path) -> dict[str, Any]:
        keeper = ModelCheckpoint(root / "saved", every_n_train_steps=4, save_top_k=-1, filename="{step}")
        loggers = CSVLogger(root) if logger else False
        own = {"callbacks": keeper, "enable_checkpointing": True, "logger": loggers}
        return {**own, "digest_every_n_steps": 1, "max_epochs": 2}

    train(tmp_path / "straight", **arguments(tmp_path / "straight"))
    cut = tmp_path / "cut"
    with pytest.raises(RuntimeError, match="the power is out"):
        train(cut, Net(fails_in=8), **arguments(cut))
    file = folder_of(cut, logger) / "digests.jsonl"
    with file.open("a") as half:
        # A kill during a write leaves such a partial line.
        half.write('{"step": 8, "dig')
    assert [record.step for record in read_digests(file)] == list(range(8))
    for at in ("step=4", "step=16"):
        train(cut, ckpt_path=str(cut / "saved" / at), **arguments(cut))
        assert file.read_bytes() == (folder_of(tmp_path / "straight", logger) / "digests.jsonl").read_bytes()
    assert len(list(cut.rglob("digests*.jsonl"))) == 1


def test_a_resume_records_a_step_saved_before_its_digests(tmp_path: Path) -> None:
    class SavesInHook(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 3:
                self.trainer.save_checkpoint(tmp_path / "third")

    train(tmp_path, SavesInHook(), digest_every_n_steps=3)
    straight = (tmp_path / "version_0" / "digests.jsonl").read_bytes()
    train(tmp_path, SavesInHook(), str(tmp_path / "third"), digest_every_n_steps=3)
    assert (tmp_path / "version_0" / "digests.jsonl").read_bytes() == straight


def test_a_new_run_keeps_earlier_files(tmp_path: Path) -> None:
    module, trainer = train(tmp_path, digest_every_n_steps=4)
    first = (tmp_path / "version_0" / "digests.jsonl").read_bytes()
    trainer.fit(module, loader())
    train(tmp_path, digest_every_n_steps=4)
    assert (tmp_path / "version_1" / "digests.jsonl").read_bytes() == first
    assert (tmp_path / "version_0" / "digests.jsonl").read_bytes() == first
    # The second fit started from the weights of the first.
    assert (tmp_path / "version_0" / "digests-v1.jsonl").read_bytes() != first


def test_a_continued_fit_appends_to_its_file(tmp_path: Path) -> None:
    module, trainer = train(tmp_path, digest_every_n_steps=6)
    trainer.fit(module, loader(), ckpt_path="current", max_epochs=2)
    assert [record.step for record in read_digests(tmp_path / "version_0" / "digests.jsonl")] == [0, 6, 12, 18, 24]


def test_a_resume_whose_file_has_changed_starts_another_with_a_warning(tmp_path: Path) -> None:
    _, trainer = train(tmp_path, digest_every_n_steps=4, max_steps=8)
    trainer.save_checkpoint(tmp_path / "saved")
    file = tmp_path / "version_0" / "digests.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"step": 4', b'"step": 5'))
    with pytest.warns(UserWarning, match=r"is not the digest file .*digests-v1\.jsonl begins after step 8"):
        train(tmp_path, ckpt_path=str(tmp_path / "saved"), digest_every_n_steps=4)
    assert [record.step for record in read_digests(tmp_path / "version_0" / "digests-v1.jsonl")] == [8, 12]


def test_resuming_a_checkpoint_without_digests_starts_a_file(tmp_path: Path) -> None:
    _, trainer = train(tmp_path, max_steps=5)
    trainer.save_checkpoint(tmp_path / "saved")
    assert not list(tmp_path.rglob("digests*"))
    train(tmp_path, ckpt_path=str(tmp_path / "saved"), digest_every_n_steps=4)
    assert [record.step for record in read_digests(tmp_path / "version_0" / "digests.jsonl")] == [8, 12]


@pytest.mark.parametrize(
    "change", [{"file": "../digests.jsonl"}, {"file": "weights.bin"}, {"size": -1}, {"step": "9"}, {"sum": 3}]
)
def test_forged_states_raise(change: dict[str, Any]) -> None:
    state = {"file": "digests.jsonl", "size": 3, "sum": "00", "step": 1, **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        WeightDigests().check_state_dict(state)


@pytest.mark.parametrize(
    "lines",
    ["nothing", "[]", '{"step": 1, "digests": []}', '{"format": 9, "algorithm": "xxh3_64", "tensors": {}}', "[" * 9999],
)
def test_reading_a_damaged_file_raises_with_the_line_number(tmp_path: Path, lines: str) -> None:
    file = tmp_path / "digests.jsonl"
    file.write_text(lines + "\n")
    with pytest.raises(DigestsError, match=r"digests\.jsonl, line 1: is not a line of digests"):
        list(read_digests(file))


# arguments ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"digest_every_n_steps": 0}, "digest_every_n_steps=0: use a whole number from 1"),
        ({"digest_every_n_steps": True}, "digest_every_n_steps=True: use a whole number from 1"),
        ({"digest_every_n_steps": 5, "callbacks": WeightDigests()}, "holds a WeightDigests: choose one"),
        ({"digest_every_n_steps": 5, "barebones": True}, "barebones=True disables digest_every_n_steps"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Trainer(**(arguments if "barebones" in arguments else {**QUIET, **arguments}))
    with pytest.raises(ConfigurationError, match="every_n_steps=-1"):
        WeightDigests(-1)


def test_trials_and_fast_dev_run_write_nothing(tmp_path: Path) -> None:
    _, trainer = train(tmp_path, digest_every_n_steps=1, fast_dev_run=3)
    assert not [callback for callback in trainer.trial().callbacks if isinstance(callback, WeightDigests)]
    assert not list(tmp_path.rglob("digests*"))


# several ranks --------------------------------------------------------------------------------------------------------
class Wide(Net):
    """FSDP gives each of two ranks a row of the layer. The second rank changes its row after one step."""

    def __init__(self, changed_at: int | None = None) -> None:
        super().__init__()
        self.changed_at = changed_at

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.changed_at and self.trainer.global_rank == 1:
            self.trainer.strategy.local_weights(self).parameters["layer.weight"].add_(1.0)


def on_ranks(root: str) -> None:
    """The last of seven global batches has a sample for the first rank only."""
    for strategy in ("ddp", "fsdp"):
        keeper = ModelCheckpoint(f"{root}/{strategy}/saved", every_n_train_steps=3, save_top_k=-1, filename="{step}")
        own = {"strategy": strategy, "samples": 25, "digest_every_n_steps": 1, "enable_checkpointing": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(Path(root, strategy), Wide(), **own, callbacks=keeper)
            train(Path(root, f"{strategy} changed"), Wide(4), **{**own, "enable_checkpointing": False})
            train(Path(root, strategy), Wide(), f"{root}/{strategy}/saved/step=3", **{**own, "max_steps": 5})


def test_ranks_record_replicas_once_and_shards_together(tmp_path: Path) -> None:
    run_world(2, on_ranks, str(tmp_path))
    for strategy in ("ddp", "fsdp"):
        resumed = list(read_digests(tmp_path / strategy / "version_0" / "digests.jsonl"))
        changed = list(read_digests(tmp_path / f"{strategy} changed" / "version_0" / "digests.jsonl"))
        assert len(list(tmp_path.joinpath(strategy).rglob("digests*"))) == 1
        assert [record.step for record in resumed] == list(range(6))
        assert [record.step for record in changed] == list(range(8))
        weights = [record.digests["layer.weight"] for record in resumed]
        others = [record.digests["layer.weight"] for record in changed]
        assert weights[:4] == others[:4]
        # A change of the second rank's replica reaches rank 0 one step later; a change of its shard shows immediately.
        assert (weights[4] == others[4]) is (strategy == "ddp")
        shards = r"float32 (2, 4) in 2 shards (" if strategy == "fsdp" else "float32 (2, 4)"
        assert weights[1].form.startswith(shards)
        assert resumed[1].digests["seen"].form == "float32 (2,)"
    text = (tmp_path / "fsdp" / "version_0" / "digests.jsonl").read_text().splitlines()
    assert sum("format" in json.loads(line) for line in text) == 1


def on_a_mesh(root: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the digests of the final weights of a pipeline and of a tensor-parallel run."""
    found = []
    for name, strategy in {
        "pp": MeshStrategy(pp=2, microbatches=2),
        "tp": MeshStrategy(tp=2, plan=PLAN),
    }.items():
        torch.manual_seed(0)
        module = GPT()
        if name == "pp":
            module.head.weight = nn.Parameter(module.head.weight.detach().clone())
        arguments = {**QUIET, "default_root_dir": f"{root}/{name}", "max_steps": 2, "digest_every_n_steps": 2}
        trainer = Trainer(**arguments, strategy=strategy)
        trainer.fit(module, DataLoader(data(), 8))
        state = strategy.full_state_dict(module, rank0_only=False)
        found.append({key: xxh3_64_hexdigest(value.contiguous().numpy()) for key, value in state.items()})
    return found[0], found[1]


def test_pipeline_stages_and_tensor_parallel_shards_are_recorded(tmp_path: Path) -> None:
    pipeline, tensors = run_world(2, on_a_mesh, str(tmp_path))[0]
    first, last = read_digests(tmp_path / "pp" / "version_0" / "digests.jsonl")
    # Each stage holds whole tensors.
    assert {name: digest.value for name, digest in last.digests.items()} == pipeline
    assert list(last.digests) == list(GPT().state_dict())
    assert first.digests["tokens.weight"] != last.digests["tokens.weight"]
    _, last = read_digests(tmp_path / "tp" / "version_0" / "digests.jsonl")
    assert list(last.digests) == list(tensors)
    assert last.digests["norm.weight"].value == tensors["norm.weight"]
    assert last.digests["blocks.0.up.weight"].form.startswith("float32 (128, 32) in 2 shards (")
    assert last.digests["head.weight"] == last.digests["tokens.weight"]

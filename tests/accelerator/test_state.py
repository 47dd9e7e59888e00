"""save_state and load_state: restored state, loader positions, checkpoint names and limits, and exported weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from samples import pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import (
    Accelerator,
    CheckpointError,
    ConfigurationError,
    DataLoaderConfiguration,
    ProjectConfiguration,
    skip_first_batches,
)


class Counter:
    """A registered object with state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == {1, 2}
        self.count = state["count"]


class Run:
    """A loop with one object of each kind that a checkpoint holds."""

    def __init__(self, seed: int = 0, precision: str = "no", accumulation: int = 1, **arguments: Any) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation, **arguments
        )
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(pairs(12), 2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.seen: list[float] = []

    def step(self, batch: Any) -> None:
        x, y = batch
        self.seen += x[:, 0].tolist()
        with self.accelerator.accumulate(self.model):
            with self.accelerator.autocast():
                loss = F.mse_loss(self.model(x), y)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.count += 1

    def result(self) -> tuple[list[Any], list[float], int]:
        return [p.tolist() for p in self.model.parameters()], self.scheduler.get_last_lr(), self.counter.count


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("how", ["skip", "plain"])
@pytest.mark.parametrize("stop", [2, 6, 9])
def test_a_resumed_loop_yields_each_sample_once(tmp_path: Path, precision: str, how: str, stop: int) -> None:
    """Saves inside the first epoch, at its end and inside the second; resumes with and without `skip_first_batches`."""
    uninterrupted = Run(precision=precision)
    for epoch in range(2):
        for index, batch in enumerate(uninterrupted.loader):
            uninterrupted.step(batch)
            if epoch * 6 + index + 1 == stop:
                uninterrupted.accelerator.save_state(tmp_path / "saved")
    run = Run(seed=1, precision=precision)
    run.accelerator.load_state(tmp_path / "saved")
    start, skip = divmod(stop, 6)
    for epoch in range(start, 2):
        first = epoch == start
        batches = run.accelerator.skip_first_batches(run.loader, skip) if first and how == "skip" else run.loader
        for batch in batches:
            run.step(batch)
    assert run.seen == uninterrupted.seen[2 * stop :]
    assert run.result() == uninterrupted.result()


@pytest.mark.parametrize("stop", [5, 6, 12])
def test_loader_iteration_is_the_epoch_of_a_resumed_loop(tmp_path: Path, stop: int) -> None:
    """Saves inside an epoch, and after the last batch of one."""
    uninterrupted = Run()
    for _ in range(2):
        for batch in uninterrupted.loader:
            uninterrupted.step(batch)
            if uninterrupted.accelerator.steps == stop:
                uninterrupted.accelerator.save_state(tmp_path / "saved")
    run = Run(seed=1)
    run.accelerator.load_state(tmp_path / "saved")
    assert run.loader.iteration == stop // 6
    for _ in range(run.loader.iteration, 2):
        for batch in run.loader:
            run.step(batch)
    assert run.seen == uninterrupted.seen[2 * stop :]
    assert run.result() == uninterrupted.result()


def test_a_checkpoint_saved_between_epochs_resumes_at_the_next_epoch(tmp_path: Path) -> None:
    uninterrupted = Run()
    for epoch in range(2):
        for batch in uninterrupted.loader:
            uninterrupted.step(batch)
        if epoch == 0:
            uninterrupted.accelerator.save_state(tmp_path / "epoch_0")
    run = Run(seed=1)
    run.accelerator.load_state(str(tmp_path / "epoch_0"))
    for batch in run.loader:
        run.step(batch)
    assert run.seen == uninterrupted.seen[12:]
    assert run.result() == uninterrupted.result()


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("stop", [2, 6, 9, 12])
def test_a_checkpoint_saved_after_a_break_continues_where_the_script_skips_to(
    tmp_path: Path, stop: int, seedable: bool
) -> None:
    """The usual loop with a limit of steps: it breaks, saves at its end, and is continued with a higher limit."""

    def train(limit: int, begun: int = 0) -> Run:
        run = Run(seed=0, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
        if begun:
            run.accelerator.load_state(tmp_path / "saved")
        start, skip = divmod(begun, 6)
        for epoch in range(start, 3):
            for batch in run.accelerator.skip_first_batches(run.loader, skip if epoch == start else 0):
                run.step(batch)
                if run.counter.count == limit:
                    break
            if run.counter.count == limit:
                break
        return run

    uninterrupted = train(18)
    first = train(stop)
    first.accelerator.save_state(tmp_path / "saved")
    second = train(18, begun=stop)
    assert first.seen + second.seen == uninterrupted.seen
    assert second.result() == uninterrupted.result()


def test_a_save_inside_an_accumulation_window_is_deferred_to_its_end(tmp_path: Path) -> None:
    """Saves after 2 of 3 batches and skips 2 after resuming: no sample is repeated or lost."""
    uninterrupted = Run(accumulation=3)
    for index, batch in enumerate(uninterrupted.loader):
        uninterrupted.step(batch)
        if index == 1:
            uninterrupted.accelerator.save_state(tmp_path / "saved")
        assert (tmp_path / "saved").exists() == (index > 2)
    run = Run(seed=1, accumulation=3)
    run.accelerator.load_state(tmp_path / "saved")
    for batch in run.accelerator.skip_first_batches(run.loader, 2):
        run.step(batch)
    assert run.seen == uninterrupted.seen[6:]
    assert run.result() == uninterrupted.result()


def test_automatic_naming_keeps_counting_and_total_limit_keeps_the_newest(tmp_path: Path) -> None:
    def config() -> ProjectConfiguration:
        return ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)

    run = Run(project_dir=tmp_path, project_config=config())
    for _ in range(3):
        run.accelerator.save_state()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert run.accelerator.save_iteration == 3
    again = Run(project_dir=tmp_path, project_config=config())
    again.accelerator.load_state()
    assert Path(again.accelerator.save_state()).name == "checkpoint_3"
    fresh_run = Run(project_dir=tmp_path, project_config=config())
    fresh_run.accelerator.save_state()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "checkpoint_3"]


def test_a_failed_save_removes_no_checkpoint(tmp_path: Path) -> None:
    config = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=1)
    run = Run(project_dir=tmp_path, project_config=config)
    run.accelerator.save_state()
    run.counter.state_dict = lambda: {"lock": object()}  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="lock"):
        run.accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]


def test_saving_to_an_existing_checkpoint_replaces_it(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "last")
    run.step(next(iter(run.loader)))
    run.accelerator.save_state(tmp_path / "last")
    other = Run(seed=3)
    other.accelerator.load_state(tmp_path / "last")
    assert other.counter.count == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="holds other files"):
        run.accelerator.save_state(tmp_path / "mine")


def test_models_are_restored_by_order(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[Accelerator, nn.Module, nn.Module]:
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(nn.Linear(2, 1), nn.Linear(2, 1))

    accelerator, first, second = pair(0)
    accelerator.save_state(tmp_path / "gan")
    other, one, two = pair(1)
    other.load_state(tmp_path / "gan")
    assert torch.equal(one.weight, first.weight) and torch.equal(two.weight, second.weight)
    with pytest.raises(ConfigurationError, match="2 models, and this Accelerator has 0.*leyden merge"):
        Accelerator(cpu=True).load_state(tmp_path / "gan")


def test_models_removed_by_hooks_are_not_saved_or_loaded(tmp_path: Path) -> None:
    """The hooks save and load the model themselves, as diffusers' scripts do."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        (Path(folder) / "unet").mkdir()
        torch.save(models[0].state_dict(), Path(folder) / "unet" / "weights.bin")
        weights.pop()

    def load(models: list[nn.Module], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "unet" / "weights.bin", weights_only=True))

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(tmp_path / "saved")
    handle.remove()
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert "unet/weights.bin" in manifest["files"]
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "saved")
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("removed", [0, 1])
def test_models_that_hooks_leave_are_restored(tmp_path: Path, removed: int) -> None:
    accelerator = Accelerator(cpu=True)
    models = accelerator.prepare(nn.Linear(2, 1), nn.Linear(2, 1))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop(removed))
    accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(removed))
    accelerator.save_state(tmp_path / "saved")
    left, weight = models[1 - removed], models[1 - removed].weight.detach().clone()
    nn.init.zeros_(left.weight)
    accelerator.load_state(tmp_path / "saved")
    assert torch.equal(left.weight, weight)


def test_errors_name_missing_files_and_invalid_arguments(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="does not exist"):
        run.accelerator.load_state(tmp_path / "none")
    (tmp_path / "saved" / "rank-0.json").unlink()
    with pytest.raises(CheckpointError, match=r"rank-0.json"):
        run.accelerator.load_state(tmp_path / "saved")
    with pytest.raises(ConfigurationError, match="needs both state_dict"):
        run.accelerator.register_for_checkpointing(object())
    with pytest.raises(ConfigurationError, match="needs a folder"):
        run.accelerator.save_state()


class Tied(nn.Module):
    """A model whose head shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(x)))
        return out


def test_save_model_writes_files_that_other_libraries_load(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path / "one")
    uninterrupted = load_file(tmp_path / "one" / "model.safetensors")
    assert set(uninterrupted) == {"embed.weight", "body.weight", "body.bias"}
    fresh = Tied()
    missing, unexpected = fresh.load_state_dict(uninterrupted, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert torch.equal(fresh.head.weight, model.head.weight)

    accelerator.save_model(model, tmp_path / "one", max_shard_size="1KB")
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert not (tmp_path / "one" / "model.safetensors").exists()
    joined = {k: v for name in names for k, v in load_file(tmp_path / "one" / name).items()}
    assert all(torch.equal(joined[name], uninterrupted[name]) for name in uninterrupted)
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in uninterrupted.values())

    accelerator.save_model(model, tmp_path / "bin", safe_serialization=False)
    loaded = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["embed.weight"], model.embed.weight)


def test_save_chooses_the_format_by_extension(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    state = {"a": torch.ones(2), "part": torch.arange(6.0).view(2, 3)[:, 1:]}
    accelerator.save(state, tmp_path / "a.safetensors")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["part"], state["part"])
    accelerator.save({**state, "step": 3}, tmp_path / "a.bin")
    assert torch.load(tmp_path / "a.bin", weights_only=True)["step"] == 3
    accelerator.save(torch.ones(2), tmp_path / "tensor.pt")
    assert torch.equal(torch.load(tmp_path / "tensor.pt", weights_only=True), torch.ones(2))
    accelerator.save([torch.ones(2), "a"], tmp_path / "list.pt")
    assert torch.load(tmp_path / "list.pt", weights_only=True)[1] == "a"
    with pytest.raises(ConfigurationError, match=r"obj\['f'\] is a builtin_function"):
        accelerator.save({"f": print}, tmp_path / "b.bin")
    with pytest.raises(ConfigurationError, match="state_dict"):
        accelerator.save(nn.Linear(1, 1), tmp_path / "c.bin")
    assert not (tmp_path / "b.bin").exists()


def test_skip_first_batches_does_not_load_skipped_samples(tmp_path: Path) -> None:
    loaded: list[int] = []

    class RecordingDataset(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    torch.manual_seed(0)
    uninterrupted = [batch.tolist() for batch in DataLoader(RecordingDataset(), 10, shuffle=True)]
    loaded.clear()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(RecordingDataset(), 10, shuffle=True))
    skipped = accelerator.skip_first_batches(loader, 97)
    assert len(skipped) == 3
    assert [batch.tolist() for batch in skipped] == uninterrupted[97:]
    assert len(loaded) == 30
    torch.manual_seed(0)
    assert [
        b.tolist() for b in skip_first_batches(DataLoader(RecordingDataset(), 10, shuffle=True), 98)
    ] == uninterrupted[98:]
    # The next epoch has a new order and all samples.
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(1000))


def test_skip_first_batches_keeps_the_order_of_a_later_epoch() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(list(range(12)), 4, shuffle=True))
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    for epoch, batches in enumerate(epochs):
        loader.set_epoch(epoch)
        assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)] == batches[1:]

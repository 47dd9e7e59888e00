"""Ranks that write one checkpoint: complete or absent whichever rank fails, with writing and verification shared."""

from __future__ import annotations

import json
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.world import run_world
from torch import nn

from leyden.checkpoint import copies
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import newest
from leyden.checkpoint.format import safefile
from leyden.checkpoint.format import shard_table as shards
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.shard_table import spread
from leyden.checkpoint.owners import rank_seed
from leyden.checkpoint.reader import CheckpointReader, open_verified
from leyden.checkpoint.writer import CheckpointWriter
from leyden.strategies.ddp import DDPStrategy
from leyden.trainer.events.hooks import Hooks
from leyden.trainer.logging.logs import Logs


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"a": 4000, "b": 3000, "c": 2000, "d": 1000}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def optimizer_state() -> dict[str, Any]:
    state = {name: {"exp_avg": tensor * 2, "step": torch.tensor(3.0)} for name, tensor in weights().items()}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def write(folder: str, name: str, strategy: Any, fail: str = "") -> Path:
    """Writes a checkpoint on all ranks, one of which may fail at a given point."""

    def reach(point: str) -> None:
        if fail == f"{point}:{strategy.ranks.global_rank}":
            raise ZeroDivisionError(f"at {point}")
        if fail == f"kill {point}:{strategy.ranks.global_rank}":
            os.kill(os.getpid(), signal.SIGKILL)

    with CheckpointWriter(Path(folder, name), ranks=CheckpointRanks(strategy, Path(folder, name))) as writer:
        reach("begin")
        own = weights()
        state = {**own, "buffer": torch.tensor([float(strategy.ranks.global_rank)]), "tied": own["d"]}
        writer.model(state, replicated=list(own))
        reach("model")
        writer.optimizers([optimizer_state()])
        reach("optimizers")
        writer.state("user", {"of": strategy.ranks.global_rank})
        writer.state(f"rank-{strategy.ranks.global_rank}", {"rng": torch.get_rng_state()}, of_rank=True)
        if fail.startswith("fsync"):
            break_fsync(strategy.ranks.global_rank == int(fail[-1]))
        writer.state(f"late-{strategy.ranks.global_rank}", {"x": 1}, of_rank=True)
        reach("end")
        return writer.commit(progress={"global_step": 1}, world_size=strategy.ranks.world_size, strategy="ddp")


def break_fsync(fails: bool) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    if fails:
        safefile.os.fsync = full  # type: ignore[attr-defined]


def join() -> DDPStrategy:
    torch.manual_seed(int(os.environ["RANK"]))
    strategy = DDPStrategy()
    strategy.setup_environment()
    return strategy


def save_spread(folder: str) -> tuple[str, dict[str, int]]:
    shards.SPREAD_FROM = 0
    strategy = join()
    written: dict[str, int] = {}
    plain = copies.write_stream

    def recording(path: Path, forms: Any, *rest: Any, **named: Any) -> Any:
        written[path.name] = sum(math.prod(shape) for _, shape in forms.values())
        return plain(path, forms, *rest, **named)

    copies.write_stream = recording  # type: ignore[assignment]
    path = write(folder, "one", strategy)
    again = write(folder, "one", strategy)
    assert again.name == "one-v1"
    strategy.teardown()
    return str(path), written


def test_replicated_tensors_are_written_once_and_spread_over_ranks(tmp_path: Path) -> None:
    (path, first), (other, second) = run_world(2, save_spread, str(tmp_path))
    assert path == other == str(tmp_path / "one")
    # Each rank writes half of the 10,000 weights and of the optimizer's state; no tensor is written twice.
    assert first["model-00001-of-00002.safetensors"] + second["model-00002-of-00002.safetensors"] == 10_001
    assert abs(first["model-00001-of-00002.safetensors"] - 5000) <= 1
    assert first["optimizer-0-00001-of-00002.safetensors"] + second["optimizer-0-00002-of-00002.safetensors"] == 10_004
    assert not {name for name in first if not name.startswith("rank")} & {
        name for name in second if not name.startswith("rank")
    }
    reader = CheckpointReader(path)
    reader.verify()
    loaded = reader.model()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights().items())
    assert loaded["buffer"] == 0.0, "the buffer is not that of rank 0"
    state = reader.optimizers()[0]
    assert all(torch.equal(state["state"][n]["exp_avg"], e["exp_avg"]) for n, e in optimizer_state()["state"].items())
    assert state["param_groups"] == optimizer_state()["param_groups"]
    assert reader.state("user") == {"of": 0}
    assert not torch.equal(reader.state("rank-0")["rng"], reader.state("rank-1")["rng"])
    assert reader.manifest.world_size == 2

    # The index and files, as transformers reads them.
    from safetensors import safe_open

    index = json.loads(Path(path, "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 10_001 * 4
    for name, file in index["weight_map"].items():
        with safe_open(f"{path}/{file}", "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert torch.equal(opened.get_tensor(name), loaded[name])


def test_a_small_model_stays_in_one_file() -> None:
    assert set(spread(weights(), set(weights()), 4).values()) == {0}


def fail_at(folder: str, points: list[str]) -> list[str]:
    shards.SPREAD_FROM = 0
    strategy = join()
    write(folder, "whole", strategy)
    fsync = os.fsync
    messages = []
    for point in points:
        try:
            write(folder, "broken", strategy, fail=point)
        except (ZeroDivisionError, CheckpointError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        safefile.os.fsync = fsync  # type: ignore[attr-defined]
    # Rank 0 deletes the partial checkpoint.
    strategy.ranks.barrier()
    left = [path.name for path in Path(folder).iterdir()]
    assert left == ["whole"], left
    strategy.ranks.barrier()
    write(folder, "after", strategy)
    strategy.teardown()
    return messages


def test_an_error_on_one_rank_raises_on_all_and_leaves_no_files(tmp_path: Path) -> None:
    points = [f"{point}:{rank}" for point in ("begin", "model", "optimizers", "end") for rank in (0, 1)]
    points += ["fsync:0", "fsync:1"]
    found = run_world(2, fail_at, str(tmp_path), points)
    for number, point in enumerate(points):
        failing = int(point[-1])
        other = found[1 - failing][number]
        assert other.startswith("OtherRankError") and f"rank {failing} could not do its part" in other, point
        assert found[failing][number].startswith("CheckpointError" if "fsync" in point else "ZeroDivisionError"), point
        assert ("No space left" if "fsync" in point else point.split(":")[0]) in other
    for name in ("whole", "after"):
        CheckpointReader(tmp_path / name).verify()
    assert newest(tmp_path) == tmp_path / "after"


def killed_at(folder: str, point: str) -> str:
    strategy = join()
    write(folder, "whole", strategy)
    try:
        write(folder, "broken", strategy, fail=point)
    except RuntimeError as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize("point", ["kill model:1", "kill end:0", "kill begin:1", "kill optimizers:0"])
def test_a_killed_rank_leaves_the_last_checkpoint_intact(tmp_path: Path, point: str) -> None:
    killed = int(point[-1])
    found = run_world(2, killed_at, str(tmp_path), point, may_fail=True)
    assert found[killed] == -signal.SIGKILL
    # The other rank's collective raises at once; the error's class depends on the backend.
    assert found[1 - killed] not in ("saved", 0)
    assert newest(tmp_path) == tmp_path / "whole"
    CheckpointReader(tmp_path / "whole").verify()
    # `newest` has cleared the leftovers.
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def save_different_shapes(folder: str) -> str:
    shards.SPREAD_FROM = 0
    strategy = join()
    size = 4 + strategy.ranks.global_rank
    with (
        pytest.raises(CheckpointError, match="tensors of 'model' on rank 1 differ") as error,
        CheckpointWriter(Path(folder, "one"), ranks=CheckpointRanks(strategy)) as writer,
    ):
        writer.model({"w": torch.zeros(size)}, replicated=["w"])
        writer.commit(progress={})
    strategy.teardown()
    return str(error.value)


def test_ranks_with_different_tensors_save_nothing(tmp_path: Path) -> None:
    run_world(2, save_different_shapes, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def find_newest(folder: str) -> tuple[str, list[str], int, list[str]]:
    strategy = join()
    shards.SPREAD_FROM = 0
    paths = [write(folder, f"step={step}", strategy) for step in (1, 2, 3)]
    if strategy.ranks.global_rank == 0:
        for path, file in ((paths[2], "rank-1.safetensors"), (paths[1], "model-00002-of-00002.safetensors")):
            data = bytearray((path / file).read_bytes())
            data[-1] ^= 1
            (path / file).write_bytes(data)
    strategy.ranks.barrier()
    read = 0
    read_exactly = safefile.CheckedFile._read_exactly

    def counting(self: Any, part: Any, views: list[memoryview], offset: int) -> None:
        nonlocal read
        read += sum(map(len, views))
        read_exactly(self, part, views, offset)

    ranks = CheckpointRanks(strategy, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = newest(folder, ranks=ranks)
    errors = []
    for path in paths[1:]:
        try:
            open_verified(path, ranks)
        except CheckpointError as error:
            errors.append(str(error))
    safefile.CheckedFile._read_exactly = counting  # type: ignore[method-assign]
    open_verified(paths[0], ranks)
    strategy.teardown()
    return str(found), [str(warning.message) for warning in caught], read, errors


def test_rank_0_chooses_the_checkpoint_and_all_ranks_share_its_verification(tmp_path: Path) -> None:
    first, second = run_world(2, find_newest, str(tmp_path))
    assert first[0] == second[0] == str(tmp_path / "step=1")
    assert len(first[1]) == 2 and second[1] == [], "not only rank 0 warned of the skipped checkpoints"
    assert first[3] == second[3] and len(first[3]) == 2, "the ranks raised different errors"
    assert "rank-1.safetensors" in first[3][1]
    total = sum(entry.size for entry in CheckpointReader(tmp_path / "step=1").manifest.files.values())
    assert first[2] + second[2] == total
    assert first[2] < 0.6 * total


def entry(total: Any, weight: float, reduce_fx: str | None = "mean", values: Any = ()) -> dict[str, Any]:
    return {
        "event": "training_step",
        "name": "x",
        "options": [],
        "value": 1.0,
        "fresh": True,
        "result": None,
        "reduce_fx": reduce_fx,
        "total": total,
        "weight": weight,
        "values": list(values),
    }


def test_logged_values_of_all_ranks_are_merged() -> None:
    logs = Logs(Hooks((), None, nn.Module(), nn.Module), nn.Module())

    def merged(*entries: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        states = [{"entries": [found], "epoch_values": {}} for found in entries]
        first, second = (logs.regroup(states, rank, seed=0) or {} for rank in (0, 1))
        return first["entries"][0], second["entries"][0]

    whole, rest = merged(entry(torch.tensor(6.0), 3), entry(torch.tensor(1.0), 2))
    assert (float(whole["total"]), whole["weight"]) == (7.0, 5)
    assert (float(rest["total"]), rest["weight"]) == (0.0, 0)
    whole, rest = merged(entry(2.0, 0, "max"), entry(5.0, 0, "max"))
    assert whole["total"] == 5.0 and rest["total"] == 5.0
    whole, rest = merged(entry(None, 0, None, [1.0, 2.0]), entry(None, 0, None, [3.0]))
    assert whole["values"] == [1.0, 2.0, 3.0] and rest["values"] == []


def test_seeds_of_ranks_differ() -> None:
    seeds = {rank_seed(seed, step, rank) for seed in (0, 1) for step in (5, 6) for rank in (1, 2, 3)}
    assert len(seeds) == 12

"""Edge cases of a user's own loop on two ranks: calls that would hang or read foreign memory raise on every rank."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.world import run_world
from torch import nn
from torch.utils.data import DataLoader

from leyden import ConfigurationError
from leyden.accelerator.prepared.dispatch import join


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class WithExport(nn.Linear):
    """Writes its state dict by save_pretrained, as a transformers model does."""

    def save_pretrained(self, folder: str, state_dict: Any = None, is_main_process: bool = True) -> None:
        if is_main_process:
            torch.save(state_dict if state_dict is not None else self.state_dict(), folder)


def export_shards(folder: str) -> list[str]:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True, strategy="fsdp", mixed_precision="bf16")
    model = accelerator.prepare(WithExport(4, 4))
    assert model(torch.ones(1, 4)).dtype == torch.float32
    bare, main = accelerator.unwrap_model(model), accelerator.is_main_process
    found = [
        error_of(lambda: accelerator.save(bare.state_dict(), f"{folder}/weights.bin")),
        error_of(lambda: accelerator.save({"model": bare.state_dict()}, f"{folder}/weights.safetensors")),
        # On the main rank alone, as in many scripts: nothing may wait for the other rank.
        error_of(lambda: bare.save_pretrained(f"{folder}/exported")) if main else "get_state_dict",
        error_of(lambda: torch.save(bare.state_dict(), f"{folder}/weights.pt")) if main else "get_state_dict",
    ]
    whole = accelerator.get_state_dict(model)
    bare.save_pretrained(f"{folder}/whole", state_dict=whole, is_main_process=main)
    accelerator.save(whole, f"{folder}/whole.safetensors")
    accelerator.wait_for_everyone()
    return found


def test_saving_a_state_dict_of_shards_raises_on_every_rank_and_writes_no_file(tmp_path: Path) -> None:
    for found in run_world(2, export_shards, str(tmp_path), timeout=60):
        assert all("get_state_dict" in words for words in found), found
    assert sorted(os.listdir(tmp_path)) == ["whole", "whole.safetensors"]
    assert torch.load(tmp_path / "whole")["weight"].shape == (4, 4)


def exchange() -> dict[str, Any]:
    from leyden import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    found: dict[str, Any] = {
        "gather a number": error_of(lambda: accelerator.gather(0.8)),
        "gather a number in a dict": error_of(lambda: accelerator.gather({"loss": torch.ones(1), "step": 3})),
        "reduce a number": error_of(lambda: accelerator.reduce([0.5])),
        "gather a number for metrics": error_of(lambda: accelerator.gather_for_metrics({"loss": 0.5})),
        "gather other shapes": error_of(lambda: accelerator.gather(torch.zeros(2 + rank))),
        "reduce other shapes": error_of(lambda: accelerator.reduce(torch.zeros(2 + rank))),
        "save elsewhere": error_of(lambda: accelerator.save_state(f"run-{rank}")),
    }
    scalar, nothing = accelerator.gather((torch.tensor(float(rank)), None))
    found["scalars"] = (scalar.tolist(), nothing)
    for even, data in ((True, 7), (False, 5), (False, 9)):
        config = DataLoaderConfiguration(dispatch_batches=True, even_batches=even)
        other = Accelerator(cpu=True, dataloader_config=config)
        loader = other.prepare(DataLoader(torch.arange(float(data)), 4))
        batches = [batch.tolist() for batch in loader]
        # No rank is left waiting in the loader's own exchange.
        found[f"{data} dispatched"] = (batches, other.gather(torch.tensor([rank])).tolist())
    tensors = [torch.ones(2), torch.zeros(2)]
    found["list of tensors"] = accelerator.prepare(tensors) is tensors
    half = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    model = half.prepare(nn.Linear(2, 2))
    bare = half.unwrap_model(model)
    found["compiled"] = (str(model(torch.ones(1, 2)).dtype), type(bare).__name__, type(bare._orig_mod).__name__)
    return found


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, Any]]:
    """Returns the results of the exchanges on two ranks."""
    return run_world(2, exchange, timeout=60)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gather a number", "TypeError: "),
        ("gather a number in a dict", "TypeError: "),
        ("reduce a number", "TypeError: "),
        ("gather a number for metrics", "TypeError: "),
        ("gather other shapes", "rank 0 has (2,) float32 and rank 1 has (3,) float32"),
        ("reduce other shapes", "ConfigurationError: "),
        ("save elsewhere", "save_state got 'run-0' on rank 0 and 'run-1' on rank 1"),
    ],
)
def test_a_mistake_in_a_collective_raises_on_every_rank(
    exchanged: list[dict[str, Any]], name: str, message: str
) -> None:
    for found in exchanged:
        assert message in found[name]


def test_scalars_are_gathered_and_none_stays_none(exchanged: list[dict[str, Any]]) -> None:
    assert [found["scalars"] for found in exchanged] == [([0.0, 1.0], None)] * 2


@pytest.mark.parametrize(
    ("data", "first", "second"),
    [
        # The second rank's three samples are padded from the start of the data.
        (7, [[0.0, 1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0, 0.0]]),
        (5, [[0.0, 1.0, 2.0]], [[3.0, 4.0]]),
        (9, [[0.0, 1.0, 2.0, 3.0], [8.0]], [[4.0, 5.0, 6.0, 7.0]]),
    ],
)
def test_dispatched_batches_are_complete_and_leave_no_exchange_open(
    exchanged: list[dict[str, Any]], data: int, first: Any, second: Any
) -> None:
    assert [found[f"{data} dispatched"] for found in exchanged] == [(first, [0, 1]), (second, [0, 1])]


def test_prepare_returns_a_list_of_tensors_unchanged(exchanged: list[dict[str, Any]]) -> None:
    assert all(found["list of tensors"] for found in exchanged)


def test_a_compiled_model_under_bf16_returns_float32(exchanged: list[dict[str, Any]]) -> None:
    assert [found["compiled"] for found in exchanged] == [("torch.float32", "OptimizedModule", "Linear")] * 2


def call_accelerate_utils() -> list[Any]:
    from leyden.state import PartialState
    from leyden.utils import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        save,
        synchronize_rng_states,
        tqdm,
        wait_for_everyone,
    )

    rank = int(os.environ["RANK"])
    own = torch.tensor([float(rank)])
    generator = torch.Generator().manual_seed(rank)
    found: list[Any] = [
        gather(own).tolist(),
        gather_object([rank]),
        reduce(own).tolist(),
        reduce(own, "sum").tolist(),
        gather(pad_across_processes(torch.ones(1 + rank))).tolist(),
        broadcast_object_list([rank, "a"], from_process=1),
    ]
    broadcast({"x": own}, from_process=1)
    torch.manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    wait_for_everyone()
    found += [own.tolist(), torch.rand(1).item(), torch.rand(1, generator=generator).item()]
    save({"x": own}, f"{os.environ['FOLDER']}/x-{rank}.bin")
    found += [PartialState().num_processes, tqdm(range(1)).disable]
    return found


def test_accelerate_utils_work_without_an_accelerator(tmp_path: Path) -> None:
    first, second = run_world(2, call_accelerate_utils, environ={"FOLDER": str(tmp_path)}, timeout=60)
    assert first[:7] == [[0.0, 1.0], [0, 1], [0.5], [1.0], [1.0, 0.0, 1.0, 1.0], [1, "a"], [1.0]]
    assert first[:9] == second[:9]
    assert (first[10], second[10]) == (False, True)
    assert os.listdir(tmp_path) == ["x-0.bin"]


@pytest.mark.parametrize("value", [0.5, [1], "text"])
def test_reducing_a_non_tensor_raises_on_one_process_too(value: Any) -> None:
    """As in Accelerate: returning the value unchanged would ignore the scale."""
    from leyden import Accelerator

    with pytest.raises(TypeError, match=r"Pass torch\.tensor"):
        Accelerator(cpu=True).reduce(value)


def test_dispatched_batches_of_different_shapes_raise_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"differ in shape: \[\(2, 1\), \(2, 3\)\]\. Pad them"):
        join([{"x": torch.zeros(2, 1)}, {"x": torch.zeros(2, 3)}])


ELSEWHERE = "import pickle, sys; state = pickle.load(sys.stdin.buffer); print(state.process_index, state.num_processes)"


def dispatched(folder: str, resumes: bool) -> list[list[float]]:
    """Reads dispatched batches; the first run saves after its second batch."""
    from leyden import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(torch.arange(20.0), 2, shuffle=True))
    if resumes:
        torch.manual_seed(1)
        accelerator.load_state(folder)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number == 1 and not resumes:
            accelerator.save_state(folder)
    return seen


def ported(folder: str) -> dict[str, Any]:
    """Returns what a script written for Accelerate sees of dispatched positions, of a mesh and in a worker."""
    from leyden import Accelerator, ParallelismConfig

    config = ParallelismConfig(tp_size=2)
    mesh = config.build_device_mesh("cpu")
    assert mesh is not None
    accelerator = Accelerator(cpu=True)
    # What a data set that holds the Accelerator reads in a loader's spawned worker.
    worker = subprocess.run([sys.executable, "-c", ELSEWHERE], input=pickle.dumps(accelerator), capture_output=True)
    return {
        "mesh": (mesh.mesh_dim_names, mesh.size(), mesh.get_local_rank("tp")),
        "replicas": ParallelismConfig(dp_replicate_size=2).build_device_mesh("cpu")["dp"].size(),  # type: ignore[index]
        "nothing": ParallelismConfig().build_device_mesh("cpu"),
        "backend": (accelerator.state.backend, accelerator.multi_device),
        "whole": dispatched(folder, resumes=False),
        "rest": dispatched(folder, resumes=True),
        "worker": worker.stdout.decode().split(),
    }


def test_ported_scripts_find_positions_meshes_and_ranks_on_several_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(run_world(2, ported, str(tmp_path / "saved"), timeout=120)):
        assert found["mesh"] == (("tp",), 2, rank)
        assert (found["replicas"], found["nothing"], found["backend"]) == (2, None, ("gloo", False))
        assert found["rest"] == found["whole"][2:] and len(found["whole"]) == 5
        assert found["worker"] == [str(rank), "2"]

"""Fragments, an engine's ranges of flat memory, are saved and loaded as shards under every layout."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks.share import counting
from ranks.world import run_world
from safetensors.torch import load_file
from torch import Tensor

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.foreign import ForeignWeights
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.merge import merge
from leyden.checkpoint.optimizers import to_named
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.errors import ConfigurationError
from leyden.strategies.fragment import Fragment, rectangles

# Numbers of ranks; "flat" splits all elements evenly, "padded" each tensor on its own, as stages of ZeRO do.
LAYOUTS = {"whole": 1, "flat 2": 2, "flat 3": 3, "padded 3": 3, "rows 2": 2, "columns 2": 2}
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (7, 11),
    "cube": (3, 4, 5),
    "row": (1, 40),
    "vector": (13,),
    "one": (1,),
    "scalar": (),
    "empty": (0, 4),
}


def every_range() -> Iterator[tuple[tuple[int, ...], int, int]]:
    for shape in [(), (1,), (5,), (2, 3), (1, 4), (3, 1, 2), (2, 3, 2), (2, 1, 2, 2)]:
        count = math.prod(shape)
        yield from ((shape, start, end - start) for start in range(count + 1) for end in range(start, count + 1))


def test_rectangles_cover_their_range() -> None:
    for shape, start, count in every_range():
        whole = torch.arange(math.prod(shape)).view(shape)
        found = rectangles(shape, start, count)
        assert len(found) <= max(1, 2 * len(shape) - 1)
        values = [whole[tuple(slice(o, o + n) for o, n in zip(*part, strict=True))] for part in found]
        assert [int(value) for part in values for value in part.reshape(-1)] == list(range(start, start + count))


def test_a_fragment_has_its_tensors_shape_and_rejects_arithmetic() -> None:
    fragment = Fragment(torch.ones(3), (2, 3), 2)
    assert fragment.shape == (2, 3) and fragment.detach() is fragment and "3 elements from 2" in repr(fragment)
    with pytest.raises(NotImplementedError, match="Use its `flat`"):
        fragment + 1
    with pytest.raises(ValueError, match="not a contiguous range"):
        Fragment(torch.ones(3), (2, 3), 4)
    with pytest.raises(ValueError, match="not a contiguous range"):
        Fragment(torch.ones(3, 1), (3, 1))


def values(offset: int = 0, factor: int = 1) -> dict[str, Tensor]:
    found = {}
    for name, shape in SHAPES.items():
        shape = tuple(factor * size if factor > 1 and size > 1 else size for size in shape)
        found[name] = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + offset
        offset += 1000
    return found


def cut(tensors: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Returns this rank's part of each tensor."""
    kind, _, size = layout.partition(" ")
    if kind == "whole":
        return dict(tensors)
    rank, ranks = dist.get_rank(), int(size)
    if kind in ("rows", "columns"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (ranks,))
        dim = kind == "columns"
        return {
            name: distribute_tensor(t, mesh, [Shard(int(dim and t.dim() > 1))], src_data_rank=None) if t.dim() else t
            for name, t in tensors.items()
        }
    found: dict[str, Tensor] = {}
    share, offset = -(-sum(tensor.numel() for tensor in tensors.values()) // ranks), 0
    for name, tensor in tensors.items():
        count = tensor.numel()
        if kind == "padded":
            share, offset = -(-count // ranks), 0
        begin = min(max(rank * share - offset, 0), count)
        end = min(max((rank + 1) * share - offset, 0), count)
        offset += count
        found[name] = Fragment(tensor.reshape(-1)[begin:end].clone(), tensor.shape, begin)
    return found


def join(layout: str) -> Any:
    if layout == "whole":
        return None
    from leyden.strategies.ddp import DDPStrategy

    strategy = DDPStrategy()
    strategy.setup_environment()
    return strategy


def save(folder: str, layout: str, factor: int = 1) -> str:
    strategy = join(layout)
    weights = cut(values(factor=factor), layout)
    # A tied tensor, a whole one among fragments, and step counts that every rank has.
    weights = {**weights, "again": weights["matrix"], "buffer": torch.ones(2)}
    first, second = cut(values(1, factor), layout), cut(values(2, factor), layout)
    state = {name: {"exp_avg": first[name], "exp_avg_sq": second[name], "step": torch.tensor(5.0)} for name in SHAPES}
    named = {
        "state": state,
        "param_groups": [{"lr": 0.1, "params": list(SHAPES)}],
        "other": {},
        "host": {},
        "extra": {},
    }
    path = Path(folder, layout)
    with CheckpointWriter(path, ranks=CheckpointRanks(strategy, path)) as writer:
        writer.model(weights, replicated=list(SHAPES))
        writer.optimizers([named])
        writer.commit(progress={"global_step": 1})
    if strategy is not None:
        strategy.teardown()
    return str(path)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Fragment):
        assert isinstance(found, Fragment) and found.start == expected.start
        return torch.equal(found.flat, expected.flat)
    if hasattr(expected, "_local_tensor"):
        return torch.equal(found._local_tensor, expected._local_tensor)
    return torch.equal(found, expected)


def read(layout: str, paths: list[str]) -> None:
    strategy = join(layout)
    for path in paths:
        reader = CheckpointReader(path)
        targets = cut({name: torch.full_like(value, -1) for name, value in values().items()}, layout)
        reader.fill(targets)
        assert all(same(targets[name], value) for name, value in cut(values(), layout).items()), path
        [state] = reader.optimizers(like=targets)
        for name in SHAPES:
            assert same(state["state"][name]["exp_avg"], cut(values(1), layout)[name]), (path, name)
            assert same(state["state"][name]["exp_avg_sq"], cut(values(2), layout)[name]), (path, name)
            assert type(state["state"][name]["step"]) is Tensor and float(state["state"][name]["step"]) == 5
        lower = cut({"matrix": torch.zeros(7, 11, dtype=torch.bfloat16)}, layout)
        reader.fill(lower)
        assert same(lower["matrix"], cut({"matrix": values()["matrix"].bfloat16()}, layout)["matrix"])
        with pytest.raises(ConfigurationError, match="shape"):
            reader.fill(cut({"matrix": torch.zeros(7, 10)}, layout))
    if strategy is not None:
        strategy.teardown()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = str(tmp_path_factory.mktemp("saved"))
    return {layout: run_world(size, save, folder, layout)[0] for layout, size in LAYOUTS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_checkpoints_of_every_other(saved: dict[str, str], layout: str) -> None:
    run_world(LAYOUTS[layout], read, layout, list(saved.values()))


def test_each_element_is_written_once(saved: dict[str, str]) -> None:
    for layout in ("flat 2", "flat 3", "padded 3"):
        path = Path(saved[layout])
        for kind, copies in (("model", 1), ("optimizer-0", 2)):
            files = [load_file(file) for file in sorted(path.glob(f"{kind}-*.safetensors"))]
            assert len(files) == LAYOUTS[layout], "not every rank wrote a file"
            elements = [tensor for file in files for name, tensor in file.items() if "step" not in name]
            expected = copies * sum(tensor.numel() for tensor in values().values()) + (2 if kind == "model" else 0)
            assert sum(tensor.numel() for tensor in elements) == expected
        tables = json.loads((path / "layout.json").read_text())["tensors"]
        assert tables["again"] == {"alias_of": "matrix"}
        pieces = sum(len(tables[name]["parts"][""]["shards"]) for name in SHAPES)
        assert pieces > len(SHAPES) + LAYOUTS[layout] - 1, "no range was split into rectangles"
        assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_a_checkpoint_of_fragments_merges_into_one_file(saved: dict[str, str], tmp_path: Path) -> None:
    for path in saved.values():
        found = load_file(merge(path, tmp_path))
        assert all(torch.equal(found[name], value) for name, value in values().items())
        whole = CheckpointReader(path).model()
        assert all(torch.equal(whole[name], value) for name, value in values().items())


def fill_from_foreign_file(file: str) -> None:
    strategy = join("flat 2")
    targets = cut({name: torch.zeros_like(value) for name, value in values().items()}, "flat 2")
    ForeignWeights(Path(file), trust=False).fill(targets)
    assert all(same(targets[name], value) for name, value in cut(values(), "flat 2").items())
    strategy.teardown()


def test_another_trainers_file_is_loaded_into_fragments(saved: dict[str, str], tmp_path: Path) -> None:
    run_world(2, fill_from_foreign_file, str(merge(saved["whole"], tmp_path)))


def read_into_memory(path: str) -> None:
    """Reads optimizer state into the engine's memory."""
    strategy = join("flat 2")
    weights, memory = cut(values(), "flat 2"), {}

    def memory_of(name: str, flat: Tensor) -> Any:
        def state(entry: str, dtype: torch.dtype) -> Tensor:
            found: Tensor = memory.setdefault((name, entry), torch.zeros(flat.shape, dtype=dtype))
            return found

        return state

    fragments: Any = weights
    like = {name: Fragment(w.flat, w.shape, w.start, memory_of(name, w.flat)) for name, w in fragments.items()}
    [state] = CheckpointReader(path).optimizers(like=like)
    expected = cut(values(2), "flat 2")
    for name in SHAPES:
        assert torch.equal(memory[name, "exp_avg_sq"], expected[name].flat)  # type: ignore[attr-defined]
        assert state["state"][name]["exp_avg_sq"].flat.data_ptr() == memory[name, "exp_avg_sq"].data_ptr()
    strategy.teardown()


def test_state_is_read_into_the_engines_memory(saved: dict[str, str]) -> None:
    run_world(2, read_into_memory, saved["flat 3"])


def measure(layout: str, paths: list[str]) -> list[float]:
    strategy = join(layout)
    found = []
    for path in paths:
        targets: Any = cut(values(factor=40), layout)
        share = sum(target.flat.nbytes for target in targets.values())
        with counting() as counts:
            CheckpointReader(path).fill(targets)
        found.append(counts["bytes"] / share)
    strategy.teardown()
    return found


def test_no_rank_reads_more_than_its_share(tmp_path: Path) -> None:
    sources = ("whole", "flat 2", "flat 3", "rows 2")
    paths = [run_world(LAYOUTS[layout], save, str(tmp_path), layout, 40)[0] for layout in sources]
    found = run_world(2, measure, "flat 2", paths) + run_world(3, measure, "padded 3", paths)
    assert all(1 <= figure < 1.10 for figure in itertools.chain(*found)), found


def save_gap_and_overlap(folder: str) -> list[str]:
    strategy = join("flat 2")
    messages = []
    # A gap, and two ranks that claim the same elements.
    for number, starts in enumerate([(0, 5), (0, 3)]):
        path = Path(folder, str(number))
        with (
            pytest.raises(CheckpointError) as raised,
            CheckpointWriter(path, ranks=CheckpointRanks(strategy, path)) as writer,
        ):
            writer.model({"weight": Fragment(torch.ones(4), (9,), starts[dist.get_rank()])})
        messages.append(str(raised.value))
    strategy.teardown()
    return messages


def test_fragments_with_a_gap_or_an_overlap_raise(tmp_path: Path) -> None:
    for messages in run_world(2, save_gap_and_overlap, str(tmp_path)):
        assert all("weight" in message for message in messages), messages
    assert not list(tmp_path.iterdir())


def test_checkpoints_do_not_record_where_an_engine_offloads_state() -> None:
    """With the parameter on another device, only state outside fragments is recorded as host state."""
    parameter = torch.nn.Parameter(torch.empty(2, 3, device="meta"))

    class Engine:
        param_groups: ClassVar[list[dict[str, Any]]] = [{"lr": 0.1, "params": [parameter]}]
        dtypes: ClassVar[dict[Tensor, torch.dtype]] = {parameter: torch.bfloat16}

        def state_dict(self) -> dict[str, Any]:
            state = {"exp_avg": Fragment(torch.ones(3), (2, 3)), "step": torch.tensor(2.0)}
            return {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    named = to_named(Engine(), {parameter: "weight"})  # type: ignore[arg-type]
    assert named["host"] == {"weight": ["step"]} and named["dtypes"] == {"weight": torch.bfloat16}

"""Sharded models: each rank writes and reads its own part, whichever strategy and ranks wrote the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.share import Peak, counting
from ranks.world import run_world
from safetensors.torch import load_file
from same import whole
from torch import Tensor, nn

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.foreign import ForeignWeights
from leyden.checkpoint.format import shard_table as shards
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.merge import merge
from leyden.checkpoint.optimizers import from_named, parameter_names, to_named
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.errors import ConfigurationError
from leyden.strategies.weights import fill_weights, load_weights

LAYOUTS = {"single": 1, "ddp": 2, "fsdp 2": 2, "fsdp 3": 3, "fsdp 4": 4, "hsdp": 4}
# A world of four takes seconds on a small machine.
QUICK = ("single", "fsdp 2", "fsdp 3")


def marking_slow_ones(layouts: Any) -> list[Any]:
    return [layout if layout in QUICK else pytest.param(layout, marks=pytest.mark.full) for layout in layouts]


def sources(config: pytest.Config) -> dict[str, int]:
    """Returns the layouts under which checkpoints are saved."""
    return {name: LAYOUTS[name] for name in QUICK} if config.option.markexpr == "not full" else LAYOUTS


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 3 * size)
        self.down = nn.Linear(3 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Tied weights, a parameter with fewer rows than ranks, a buffer, and extra state that is not a tensor."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.head = nn.Linear(size, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(2))
        self.word = "none"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.scale.sum()
        return out

    def get_extra_state(self) -> Any:
        return {"word": self.word}

    def set_extra_state(self, state: Any) -> None:
        self.word = state["word"]


class WithoutExtraState(Model):
    """The model without its extra state, which safetensors' own loader does not accept."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def build(layout: str, seed: int, size: int = 64, meta: bool = False) -> Model:
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = Model(size)
    if layout in ("single", "ddp"):
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, 2), ("replicate", "shard")) if layout == "hsdp" else ((LAYOUTS[layout],), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if meta:
        model.to_empty(device="cpu")
        # to_empty unties parameters.
        model.head.weight = model.embedding.weight
    return model


def step(model: Model, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Trains on the same batch on every rank, so that all layouts learn the same."""
    tokens = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(count))
    model(tokens).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def strategy_of(layout: str) -> Any:
    if layout == "single":
        return None
    from leyden.strategies.ddp import DDPStrategy

    strategy = DDPStrategy()
    strategy.setup_environment()
    return strategy


def write(model: Model, optimizer: Any, path: Path, strategy: Any, layout: str) -> Path:
    with CheckpointWriter(path, ranks=CheckpointRanks(strategy, path)) as writer:
        writer.model(model.state_dict(), replicated=list(dict(model.named_parameters())))
        writer.optimizers([to_named(optimizer, parameter_names(model))])
        return writer.commit(progress={"global_step": 3}, world_size=LAYOUTS[layout], strategy=layout)


def contents(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    named = to_named(optimizer, parameter_names(model))["state"]
    state |= {f"{name}/{key}": value for name, own in named.items() for key, value in own.items()}
    return {name: whole(value).detach().clone() for name, value in state.items()}


def save(folder: str, layout: str) -> dict[str, Any]:
    shards.SPREAD_FROM = 0
    strategy = strategy_of(layout)
    model = build(layout, seed=1)
    model.word, model.seen[0] = "kept", 7.0
    optimizer = optimizer_of(model)
    for count in range(3):
        step(model, optimizer, count)
    path = write(model, optimizer, Path(folder, layout), strategy, layout)
    found = {name: tensor.numpy() for name, tensor in contents(model, optimizer).items()}
    if strategy is not None:
        strategy.teardown()
    return {"path": str(path), "found": found}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    """Returns the path and contents of a checkpoint for each layout."""
    folder = tmp_path_factory.mktemp("saved")
    found = {}
    for layout, size in sources(pytestconfig).items():
        results = run_world(size, save, str(folder), layout)
        assert len({result["path"] for result in results}) == 1
        found[layout] = results[0]
    return found


def restore(layout: str, paths: dict[str, str], meta: bool) -> dict[str, Any]:
    strategy = strategy_of(layout)
    results = {}
    for source, path in paths.items():
        model = build(layout, seed=9, meta=meta)
        reader = CheckpointReader(path)
        if layout in ("single", "ddp"):
            load_weights(model, reader.model())
        else:
            fill_weights(model, reader)
        optimizer = optimizer_of(model)
        saved = reader.optimizers(like=dict(model.named_parameters()))
        from_named(optimizer, saved[0], parameter_names(model))
        found = {name: tensor.numpy() for name, tensor in contents(model, optimizer).items()}
        assert model.head.weight is model.embedding.weight
        step(model, optimizer, 3)
        after = {name: tensor.numpy() for name, tensor in contents(model, optimizer).items()}
        results[source] = {"found": found, "after": after, "word": model.word}
    if strategy is not None:
        strategy.teardown()
    return results


@pytest.mark.parametrize("layout", marking_slow_ones(LAYOUTS))
def test_every_layout_reads_checkpoints_of_every_other(saved: dict[str, Any], layout: str) -> None:
    paths = {source: entry["path"] for source, entry in saved.items()}
    for results in run_world(LAYOUTS[layout], restore, layout, paths, layout in ("fsdp 4", "fsdp 3")):
        for source, result in results.items():
            expected = saved[source]["found"]
            assert result["found"].keys() == expected.keys() and result["word"] == "kept"
            for name, value in expected.items():
                assert value.tobytes() == result["found"][name].tobytes(), (source, name)
            # With the restored optimizer, the fourth step is the same under every layout.
            for name, value in results["single"]["after"].items():
                torch.testing.assert_close(
                    torch.tensor(result["after"][name]), torch.tensor(value), rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("layout", marking_slow_ones(["fsdp 4", "hsdp", "fsdp 3"]))
def test_each_shard_is_written_once(saved: dict[str, Any], layout: str) -> None:
    path = Path(saved[layout]["path"])
    elements: dict[str, int] = {}
    for kind in ("model", "optimizer-0"):
        sizes = []
        for file in sorted(path.glob(f"{kind}-*.safetensors")):
            tensors = load_file(file)
            sizes.append(sum(tensor.numel() for tensor in tensors.values()))
            for key, tensor in tensors.items():
                elements[key] = elements.get(key, 0) + tensor.numel()
        assert len(sizes) == LAYOUTS[layout], "not every rank wrote a file"
        assert max(sizes) < 1.35 * sum(sizes) / len(sizes), sizes
    single = CheckpointReader(saved["single"]["path"])
    assert sum(elements.values()) == sum(
        tensor.numel()
        for name, tensor in single.model().items()
        if isinstance(tensor, Tensor) and name != "head.weight"
    ) + sum(tensor.numel() for own in single.optimizers()[0]["state"].values() for tensor in own.values())
    assert not (path / "model.safetensors.index.json").exists(), "an index that no reader of shards can use"
    layout_file = json.loads((path / "layout.json").read_text())
    assert layout_file["tensors"]["head.weight"] == {"alias_of": "embedding.weight"}
    assert {name.suffix for name in path.iterdir()} == {".json", ".safetensors"}


# After load_state_dict, torch 2.9 copies each uneven shard to pad it.
PADS_IN_PLACE = torch.__version__ >= (2, 10)


def share_of(model: Model) -> int:
    return sum(parameter._local_tensor.nbytes for parameter in model.parameters())  # type: ignore[union-attr]


def save_large(folder: str, layout: str) -> str:
    strategy = strategy_of(layout)
    model = build(layout, seed=1, size=256)
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    path = write(model, optimizer, Path(folder, layout), strategy, layout)
    if strategy is not None:
        strategy.teardown()
    return str(path)


def measure(layout: str, paths: list[str]) -> list[dict[str, float]]:
    strategy = strategy_of(layout)
    found = []
    for path in paths:
        model = build(layout, seed=2, size=256, meta=True)
        share = share_of(model)
        reader = CheckpointReader(path)
        with Peak() as peak, counting() as weights:
            fill_weights(model, reader)
        with Peak() as states_peak, counting() as states:
            loaded = reader.optimizers(like=dict(model.named_parameters()))
        found.append(
            {
                "weights": weights["bytes"] / share,
                "states": states["bytes"] / (2 * share),
                "extra memory for weights": peak.most / share,
                "memory for states": states_peak.most / (2 * share),
            }
        )
        del loaded
    strategy.teardown()
    return found


def test_no_rank_reads_or_holds_more_than_its_share(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    layouts = sources(pytestconfig)
    paths = {name: run_world(size, save_large, str(tmp_path), name)[0] for name, size in layouts.items()}
    for layout in (name for name in layouts if "fsdp" in name or name == "hsdp"):
        for rank in run_world(LAYOUTS[layout], measure, layout, list(paths.values())):
            for source, figures in zip(paths, rank, strict=True):
                assert figures["weights"] < 1.10, (layout, source, figures)
                assert figures["states"] < 1.10, (layout, source, figures)
                assert figures["memory for states"] < 1.10, (layout, source, figures)
                assert figures["extra memory for weights"] < (0.05 if PADS_IN_PLACE else 1), (layout, source, figures)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("held", ["embedding.weight", "head.weight"])
def test_tied_parameters_load_from_a_file_with_one_of_their_names(held: str, tmp_path: Path) -> None:
    """Other libraries' safetensors files store a tied tensor once."""
    weight = torch.randn(5, 3)
    with CheckpointWriter(tmp_path / "one") as writer:
        writer.model({held: weight})
        path = writer.commit(progress={}, strategy="converted")
    for load in (
        lambda module: load_weights(module, {held: weight}),
        lambda module: fill_weights(module, CheckpointReader(path)),
    ):
        module = Tied()
        load(module)
        assert torch.equal(module.embedding.weight, weight) and module.head.weight is module.embedding.weight
    with pytest.raises(ConfigurationError, match="Missing"):
        load_weights(Tied(), {"other": weight})


def read_damaged(path: str, layout: str) -> list[str]:
    strategy = strategy_of(layout)
    file = Path(path, "model-00002-of-00002.safetensors")
    if dist.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[-2] ^= 8
        file.write_bytes(data)
    strategy.ranks.barrier()
    messages = []
    model = build(layout, seed=2)
    try:
        fill_weights(model, CheckpointReader(path))
        messages.append("read")
    except CheckpointError as error:
        messages.append(str(error))
    other = build(layout, seed=2, size=32)
    with pytest.raises(ConfigurationError, match="shape"):
        fill_weights(other, CheckpointReader(path))
    strategy.teardown()
    return messages


def test_a_damaged_shard_raises_on_the_rank_that_reads_it(tmp_path: Path) -> None:
    path = run_world(2, save, str(tmp_path), "fsdp 2")[0]["path"]
    first, second = run_world(2, read_damaged, path, "fsdp 2")
    assert first == ["read"], "rank 0 reads nothing from that file"
    assert "model-00002-of-00002.safetensors" in second[0] and "checksum" in second[0]


def fill_with_missing_name(path: str) -> None:
    strategy = strategy_of("fsdp 2")
    model = build("fsdp 2", seed=1)
    model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigurationError, match=r"Missing: more"):
        fill_weights(model, CheckpointReader(path))
    fill_weights(model, CheckpointReader(path), strict=False)
    assert model.word == "kept"
    strategy.teardown()


def test_the_error_for_a_missing_parameter_names_it(saved: dict[str, Any]) -> None:
    run_world(2, fill_with_missing_name, saved["fsdp 3"]["path"])


def test_reading_a_sharded_checkpoint_imports_no_planner(saved: dict[str, Any]) -> None:
    run_world(1, read_alone, saved["fsdp 3"]["path"])


def read_alone(path: str) -> None:
    import subprocess
    import sys

    program = (
        "import sys; from leyden.checkpoint.reader import CheckpointReader; "
        f"reader = CheckpointReader({path!r}); reader.model(); reader.optimizers(); "
        "assert not [name for name in sys.modules if name.startswith('torch.distributed.checkpoint')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ))


def test_a_sharded_checkpoint_merges_into_one_file(saved: dict[str, Any], tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_model

    for source in saved:
        with Peak() as peak:
            file = merge(saved[source]["path"], tmp_path / f"{source}.safetensors")
        found = load_file(file)
        expected = {name: torch.tensor(value) for name, value in saved[source]["found"].items() if "/" not in name}
        assert found.keys() == expected.keys() - {"head.weight"}
        assert all(torch.equal(found[name], expected[name]) for name in found)
        # Memory for the largest tensor, not for all of them.
        assert peak.most <= max(tensor.nbytes for tensor in found.values())
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
        model = WithoutExtraState()
        load_model(model, file)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items() if name in expected)


def test_merging_a_submodule_strips_its_prefix(saved: dict[str, Any], tmp_path: Path) -> None:
    source = saved["fsdp 3"]
    (tmp_path / "there").mkdir()
    file = merge(source["path"], tmp_path / "there", module_prefix="blocks.1")
    assert file == tmp_path / "there" / "model.safetensors"
    block = Block(64)
    block.load_state_dict(load_file(file))
    assert block.up.weight.detach().numpy().tobytes() == source["found"]["blocks.1.up.weight"].tobytes()
    # Of two tied names, the selected one stores the tensor.
    assert list(load_file(merge(source["path"], file, module_prefix="head."))) == ["weight"]
    with pytest.raises(ConfigurationError, match=r"no weight .* begins with 'block\.'.*Did you mean 'blocks'"):
        merge(source["path"], file, module_prefix="block")
    assert [path.name for path in file.parent.iterdir()] == ["model.safetensors"]


def fill_from_foreign_file(path: str) -> dict[str, Any]:
    strategy = strategy_of("fsdp 2")
    model = build("fsdp 2", seed=9, meta=True)
    fill_weights(model, ForeignWeights(Path(path), trust=False), strict=False)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found = {name: whole(value).detach().clone().numpy() for name, value in state.items()}
    strategy.teardown()
    return found


def test_another_trainers_file_is_loaded_into_shards(saved: dict[str, Any], tmp_path: Path) -> None:
    file = merge(saved["single"]["path"], tmp_path)
    expected = saved["single"]["found"]
    for found in run_world(2, fill_from_foreign_file, str(file)):
        assert all(value.tobytes() == expected[name].tobytes() for name, value in found.items())

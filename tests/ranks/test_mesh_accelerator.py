"""The mesh under a user's own loop: the Accelerator's model, loader and steps train like one process."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN, VOCABULARY, data
from ranks.world import run_world
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset

from leyden import Accelerator, DataLoaderConfiguration, Trainer
from leyden.cli.launch.plan import ElasticOptions, resolve
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import parse
from leyden.strategies import MeshStrategy
from leyden.utils import ParallelismConfig

GLOBAL_BATCH = 4


class LogRecorder(logging.Handler):
    """Records what torch logs about redistributions."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(accelerator: Accelerator, kind: type[GPT]) -> dict[str, Any]:
    """Returns the result of `trained`, and torch's warnings about views from FSDP and consecutive collectives."""
    recorder, logger = LogRecorder(), logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(recorder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(accelerator, kind)
    logger.removeHandler(recorder)
    views = [str(warning.message) for warning in caught if "view tensor" in str(warning.message)]
    return {**found, "warnings": recorder.messages + views}


def trained(accelerator: Accelerator, kind: type[GPT]) -> dict[str, Any]:
    """Trains the GPT for two epochs, in windows of two batches."""
    torch.manual_seed(0)
    module = kind()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    readers = accelerator.strategy.data_size
    loader = DataLoader(data(), GLOBAL_BATCH // readers)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses, norms, seen = [], [], []
    for _ in range(2):
        for tokens, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(tokens[:, 0].tolist())
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "seen": seen,
        "data_rank": accelerator.strategy.data_rank,
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
    }


class Planned(GPT):
    """A GPT with its own plan."""

    def parallel_plan(self) -> dict[str, str]:
        return PLAN


def train_on_a_mesh(sizes: dict[str, int], plan: dict[str, str]) -> dict[str, Any]:
    return train(Accelerator(cpu=True, gradient_accumulation_steps=2, strategy=MeshStrategy(**sizes, plan=plan)), GPT)


def train_by_a_config(sizes: dict[str, int]) -> dict[str, Any]:
    """Trains as in Accelerate's documentation."""
    config = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=config)
    mesh = accelerator.torch_device_mesh
    return train(accelerator, Planned) | {
        "dimensions": {name: mesh[name].size() for name in (*config.active_mesh_dims, *config.dp_cp_dim_names)},
        "averaged over": mesh["dp_cp"].size() if config.dp_cp_dim_names else 1,
        "tp rank": accelerator.tensor_parallel_rank,
        "type": accelerator.distributed_type.value,
    }


def train_both(sizes: dict[str, int], plan: dict[str, str]) -> list[dict[str, Any]]:
    """Trains with a strategy and with a config, in one launch."""
    return [train_on_a_mesh(sizes, plan), train_by_a_config(sizes)]


def check_like_one_process(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    readers = {rank["data_rank"]: rank for rank in ranks}
    losses = [sum(column) / len(column) for column in zip(*(rank["losses"] for rank in readers.values()), strict=True)]
    assert losses == pytest.approx(single["losses"], abs=1e-5)
    for rank in ranks:
        assert rank["warnings"] == []
        assert rank["seen"] == readers[rank["data_rank"]]["seen"], "ranks of a tp group read different batches"
        assert rank["norms"] == pytest.approx(single["norms"], abs=1e-5)
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-5, name


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return train(Accelerator(cpu=True, gradient_accumulation_steps=2), GPT)


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ({"tp": 2}, SEQUENCE_PLAN),
        pytest.param({"dp_shard": 2, "tp": 2}, PLAN, marks=pytest.mark.full),
        pytest.param({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, SEQUENCE_PLAN, marks=pytest.mark.full),
    ],
    ids=["alone", "within fsdp", "within replicas"],
)
def test_a_users_own_loop_trains_on_a_mesh_like_one_process(
    sizes: dict[str, int], plan: dict[str, str], single: dict[str, Any]
) -> None:
    copies = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    found = run_world(copies * sizes["tp"], train_both, sizes, plan)
    for ranks in zip(*found, strict=True):
        check_like_one_process(list(ranks), single)
    for number, (_, rank) in enumerate(found):
        assert rank["dimensions"] == {name: size for name, size in sizes.items() if size > 1}
        assert rank["averaged over"] == copies
        assert rank["tp rank"] == number % sizes["tp"]
        assert rank["type"] == ("MULTI_CPU" if copies == 1 else "FSDP")


Parts: TypeAlias = tuple[Any, Any, Any]


def prepared(accelerator: Accelerator) -> Parts:
    torch.manual_seed(0)
    module = GPT(dropout=0.1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    loader = DataLoader(data(), GLOBAL_BATCH // accelerator.strategy.data_size, shuffle=True)
    parts: Parts = accelerator.prepare(module, optimizer, loader)
    return parts


def losses_of_an_epoch(accelerator: Accelerator, parts: Parts, save: tuple[int, str] | None = None) -> list[float]:
    """Returns the losses of an epoch, or those after the batch at which it saves a checkpoint."""
    model, optimizer, loader = parts
    losses: list[float] = []
    for number, (tokens, labels) in enumerate(loader, 1):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save is not None and number == save[0]:
            accelerator.save_state(save[1])
            losses.clear()
    return losses


def resume(folder: str) -> dict[str, Any]:
    def new() -> Accelerator:
        return Accelerator(cpu=True, strategy=MeshStrategy(tp=2, plan=SEQUENCE_PLAN))

    accelerator = new()
    parts = prepared(accelerator)
    uninterrupted = losses_of_an_epoch(accelerator, parts, (4, f"{folder}/state"))
    accelerator.save_model(parts[0], f"{folder}/model")
    weights = {name: tensor.numpy() for name, tensor in accelerator.get_state_dict(parts[0]).items()}
    again = new()
    parts = prepared(again)
    again.load_state(f"{folder}/state")
    return {"uninterrupted": uninterrupted, "resumed": losses_of_an_epoch(again, parts), "weights": weights}


@pytest.mark.full
def test_a_loop_on_a_mesh_resumes_exactly_and_saves_whole_weights(tmp_path: Path) -> None:
    for rank in run_world(2, resume, str(tmp_path)):
        assert len(rank["uninterrupted"]) == 6
        assert rank["resumed"] == rank["uninterrupted"]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensor, torch.from_numpy(rank["weights"][name])), name
    alone = Accelerator(cpu=True)
    loader = prepared(alone)[2]
    alone.load_state(tmp_path / "state")
    assert sum(1 for _ in loader) == 6, "one process does not continue at the next sample"


def train_unseeded() -> dict[str, list[float]]:
    """Trains without a common seed: every rank starts with different random numbers."""
    torch.manual_seed(int(os.environ["RANK"]))
    accelerator = Accelerator(cpu=True, strategy=MeshStrategy(tp=2, plan=SEQUENCE_PLAN))
    module = GPT(dropout=0.1)
    parts: Parts = accelerator.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(data(), GLOBAL_BATCH, shuffle=True)
    )
    by_hand = losses_of_an_epoch(accelerator, parts)
    accelerator.teardown()
    torch.manual_seed(int(os.environ["RANK"]))
    trained = GPT(dropout=0.1)
    trainer = Trainer(strategy=MeshStrategy(tp=2, plan=SEQUENCE_PLAN), max_epochs=1, **QUIET)
    trainer.fit(trained, DataLoader(data(), GLOBAL_BATCH, shuffle=True))
    return {"accelerator": by_hand, "trainer": trained.losses}


@pytest.mark.full
def test_ranks_of_a_tp_group_share_batches_and_dropout_without_a_seed() -> None:
    first, second = run_world(2, train_unseeded)
    assert first == second
    assert len(set(first["trainer"])) > 1


class OnRank0(Dataset[Any]):
    """A dataset that exists only on rank 0; draws a random number for each sample, and returns its index."""

    def __init__(self) -> None:
        self.tokens, self.labels = data().tensors

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        assert os.environ.get("RANK", "0") == "0"
        torch.rand(())
        return self.tokens[index], self.labels[index], index


def train_dispatched(sizes: dict[str, int] | None) -> dict[str, Any]:
    """Trains two epochs of shuffled batches that rank 0 reads for all ranks."""
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes, plan=PLAN)
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    accelerator = Accelerator(cpu=True, strategy=strategy, dataloader_config=config)
    torch.manual_seed(0)
    module = GPT()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    loader = DataLoader(OnRank0(), GLOBAL_BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses, seen = [], []
    for _ in range(2):
        for tokens, labels, index in loader:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(index.tolist())
    return {
        "data_rank": accelerator.strategy.data_rank,
        "losses": losses,
        "seen": seen,
        "random": float(torch.rand(())),
    }


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=["alone", "within fsdp"])
def test_dispatched_batches_reach_each_tp_group_once(sizes: dict[str, int]) -> None:
    single = train_dispatched(None)
    ranks = run_world(2 * sizes.get("dp_shard", 1), train_dispatched, sizes)
    readers = {rank["data_rank"]: rank for rank in ranks}
    for rank in ranks:
        assert rank == readers[rank["data_rank"]], "ranks of a tp group differ in losses, samples or random numbers"
    ordered = [readers[number] for number in sorted(readers)]
    seen = [[index for part in parts for index in part] for parts in zip(*(r["seen"] for r in ordered), strict=True)]
    losses = [sum(column) / len(column) for column in zip(*(r["losses"] for r in ordered), strict=True)]
    assert seen == single["seen"] and sorted(index for batch in seen[:10] for index in batch) == list(range(40))
    assert losses == pytest.approx(single["losses"], abs=1e-5)


def train_launched() -> dict[str, Any]:
    """Trains without naming a strategy: the Accelerator and the Trainer follow the launch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    config = accelerator.parallelism_config
    assert config is not None
    found = train(accelerator, Planned)
    trainer = Trainer(max_epochs=1, **QUIET)
    torch.manual_seed(0)
    trainer.fit(Planned(), DataLoader(data(8), GLOBAL_BATCH))
    return found | {"config": (config.tp_size, config.total_size), "details": trainer.strategy.details}


@pytest.mark.full
def test_launch_lays_out_the_mesh_of_its_config_file(single: dict[str, Any]) -> None:
    file = {"num_processes": 2, "use_cpu": True, "parallelism_config": {"parallelism_config_tp_size": 2}}
    plan = resolve(parse(file), ElasticOptions(), Machine(cpus=2), {})
    variables = {
        name: value for name, value in plan.variables().items() if name.startswith(("LEYDEN", "ACCEL", "PARALLEL"))
    }
    ranks = run_world(2, train_launched, environ=variables)
    check_like_one_process(ranks, single)
    for rank in ranks:
        assert rank["config"] == (2, 2)
        assert rank["details"].startswith("tp 2 of 2 ranks")


def train_transformers(folder: str, split: bool) -> dict[str, Any]:
    """Trains a model split by transformers, loaded as in Accelerate's documentation, or a whole one."""
    from transformers import LlamaForCausalLM

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2) if split else None)
    options = {"tp_plan": "auto", "tp_size": 2, "device_mesh": accelerator.torch_device_mesh} if split else {}
    model = LlamaForCausalLM.from_pretrained(folder, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(24), GLOBAL_BATCH))
    losses, norms = [], []
    for tokens, labels in loader:
        loss = model(input_ids=tokens, labels=labels).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": {name: tensor.numpy() for name, tensor in state.items()}}


@pytest.mark.full
def test_a_model_split_by_transformers_trains_like_a_whole_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    single = train_transformers(str(tmp_path), False)
    for rank in run_world(2, train_transformers, str(tmp_path), True):
        assert rank["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert rank["norms"] == pytest.approx(single["norms"], abs=1e-4)
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-4, name

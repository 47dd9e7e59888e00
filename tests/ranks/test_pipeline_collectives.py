"""What the ranks of a pipeline send each other in a batch: counts of collectives, with the numbers of one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, VOCABULARY
from ranks.world import run_world
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy
from leyden.strategies.mesh.consistency import is_sampled

OBJECTS = ("all_gather_object", "broadcast_object_list", "send_object_list", "recv_object_list")
GLOBAL_BATCH, BATCHES = 16, 4


class Collectives(TorchDispatchMode):
    """Counts the collectives that run within this context, and the objects that are pickled for other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2].strip("_")
            self.found["all_gather" if "allgather" in name else name] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._plain = {name: getattr(dist, name) for name in OBJECTS}
        for name in OBJECTS:
            setattr(dist, name, self._counting(name))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, function in self._plain.items():
            setattr(dist, name, function)

    def _counting(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.found["objects gathered" if "gather" in name else "objects sent"] += 1
            return self._plain[name](*args, **kwargs)

        return call


class Counting(MeshStrategy):
    """Counts the collectives of each training batch and of each validation batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.steps: list[Counter[str]] = []
        self.evaluations: list[Counter[str]] = []

    def forward_backward(self, *args: Any) -> Any:
        with Collectives() as collectives:
            outputs = super().forward_backward(*args)
        self.steps.append(collectives.found)
        return outputs

    def evaluate(self, *args: Any) -> Any:
        with Collectives() as collectives:
            outputs = super().evaluate(*args)
        self.evaluations.append(collectives.found)
        return outputs


class Padded(GPT):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("first", self(batch[0])[:, 0].square().mean())


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch of the length of its longest sample, whose labels ignore the padding."""
    tokens = pad_sequence(samples, batch_first=True)
    labels = pad_sequence([tokens.roll(-1) for tokens in samples], batch_first=True, padding_value=-100)
    return tokens, labels


def loader(batch_size: int) -> DataLoader[Any]:
    """Batches of different lengths; those of different data ranks differ as well."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3 + (place * 5) % 11 if place % GLOBAL_BATCH < 2 else 3 for place in range(GLOBAL_BATCH * BATCHES)]
    samples = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    return DataLoader(samples, batch_size, collate_fn=padded)  # type: ignore[arg-type]


def train(layout: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Padded(depth=4, counts_items=True)
    strategy: Any = "single_device" if layout is None else Counting(pp=2, **layout)
    arguments: dict[str, Any] = {"precision": "64-true", "max_epochs": 2, "num_sanity_val_steps": 0, **QUIET}
    trainer = Trainer(strategy=strategy, gradient_clip_val=1.0, **arguments)
    batch_size = GLOBAL_BATCH // trainer.strategy.data_size
    trainer.fit(module, loader(batch_size), loader(batch_size))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "steps": getattr(strategy, "steps", []),
        "evaluations": getattr(strategy, "evaluations", []),
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
        "first": float(trainer.callback_metrics["first"]),
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "gathered once": {},
    "freed after forward": {"reshard_after_forward": True},
    "two stages on a rank": {"schedule": "Interleaved1F1B"},
}


def train_each() -> dict[str, dict[str, Any]]:
    return {name: train({"dp_shard": 2, "microbatches": 8, **layout}) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_world(4, train_each)


def check_numbers(found: list[dict[str, Any]]) -> None:
    single = train(None)
    for rank in found:
        assert rank["first"] == pytest.approx(single["first"], rel=1e-13)
        for name, value in single["weights"].items():
            assert np.abs(rank["weights"][name] - value).max() < 2e-15, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_of_changing_shapes_train_like_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    check_numbers([rank[name] for rank in ranks])


@pytest.mark.full
def test_three_dimensions_train_like_one_process_in_float64() -> None:
    check_numbers(run_world(8, train, {"dp_shard": 2, "tp": 2, "plan": PLAN, "microbatches": 8}))


def test_groups_are_gathered_once_per_step_unless_they_are_freed_after_forward(ranks: list[dict[str, Any]]) -> None:
    blocks_and_root, micro_batches = 3, 8
    for rank in ranks:
        for name in ("gathered once", "two stages on a rank"):
            assert [step["all_gather"] for step in rank[name]["steps"][1:]] == [blocks_and_root] * 7
        assert rank["freed after forward"]["steps"][-1]["all_gather"] > blocks_and_root * micro_batches


@pytest.mark.parametrize("name", ["gathered once", "two stages on a rank"])
def test_a_step_has_no_collective_but_those_of_shards_unless_its_shape_is_new(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for number, rank in enumerate(ranks):
        for batch, step in enumerate(rank[name]["steps"][1:], start=2):
            # Only the first data rank has batches of new shapes, in the first epoch. The other one does not wait.
            is_new = number % 2 == 0 and batch <= BATCHES
            assert step["allreduce"] == is_new + is_sampled(batch), batch
            assert step["objects gathered"] == 0 and (is_new or step["objects sent"] == 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_pickles_nothing_once_a_shape_is_known(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        first_epoch, second = rank[name]["evaluations"][:BATCHES], rank[name]["evaluations"][BATCHES:]
        assert first_epoch[0]["objects sent"] and len(second) == BATCHES
        assert not any(batch["objects sent"] or batch["objects gathered"] for batch in second)

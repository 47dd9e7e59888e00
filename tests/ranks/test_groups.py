"""Process groups of a mesh, and collectives on many tensors at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import QUIET, Squares
from ranks.world import run_world
from torch import nn

from leyden import Trainer
from leyden.strategies import DDPStrategy, FSDPStrategy, MeshStrategy
from leyden.strategies.process_group import BUCKET, backends_in, buckets_of, sum_all


@pytest.mark.parametrize(
    ("name", "backend"),
    [("nccl", "nccl"), ("cpu:gloo,cuda:nccl", "nccl"), ("cuda:nccl", "nccl"), ("gloo", "gloo"), ("cpu:gloo", None)],
)
def test_a_name_of_backends_has_one_for_each_device(name: str, backend: str | None) -> None:
    """A group that has NCCL is bound to the rank's GPU, whatever else its name lists."""
    assert backends_in(name).get("cuda") == backend


def groups_of_two_runs() -> tuple[list[int], str]:
    counts = []
    for _ in range(2):
        strategy = MeshStrategy(dp_shard=2, tp=2, timeout=timedelta(seconds=1))
        strategy.setup_environment()
        counts.append(len(dist.distributed_c10d._world.pg_map))
        strategy.teardown()
    store, error = dist.distributed_c10d._get_default_store(), ""
    if strategy.ranks.global_rank:
        store.wait(["tried"], timedelta(minutes=2))
        return counts, error
    try:
        dist.all_reduce(torch.ones(1), group=strategy.tensor_mesh.get_group())
    except RuntimeError as raised:
        error = str(raised)
    store.set("tried", "")
    return counts, error


def test_groups_of_a_mesh_serve_later_runs_and_have_the_strategys_timeout() -> None:
    (counts, error), *_ = run_world(4, groups_of_two_runs)
    # All ranks, the rows and the columns. The joined dimensions are all ranks.
    assert counts == [3, 3]
    assert "Timed out waiting 1000ms" in error


class Many(Squares):
    """A model of many small parameters and buffers, of several dtypes, that differ between the ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.many = nn.ParameterList(nn.Parameter(torch.full((3, 2), float(n + 100 * rank))) for n in range(20))
        self.register_buffer("is_first", torch.tensor([rank == 0, True]))
        self.register_buffer("phase", torch.tensor([1j * (1 - rank)]))
        self.register_buffer("count", torch.tensor(rank))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.many) / 1e3


class Calls:
    """Records the number of elements that one of torch's collectives sends in each call."""

    def __init__(self, name: str) -> None:
        self.sizes: list[int] = []
        self._call = getattr(dist, name)
        setattr(dist, name, self)

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(tensor.numel())
        return self._call(tensor, *args, **kwargs)


def broadcasts_of_a_start() -> tuple[int, list[bytes]]:
    strategy, calls = DDPStrategy(), Calls("broadcast")
    strategy.setup_environment()
    module = Many()
    strategy.synchronize(module)
    return len(calls.sizes), [tensor.numpy(force=True).tobytes() for tensor in module.state_dict().values()]


def test_weights_and_buffers_are_broadcast_together() -> None:
    (count, first), (_, second) = run_world(2, broadcasts_of_a_start)
    assert first == second
    # One for each dtype: float32, bool, complex64 and int64. There are 25 tensors.
    assert count == 4


def reduces_of_ignored_modules() -> tuple[list[int], list[float]]:
    module = Many()
    strategy = FSDPStrategy(auto_wrap_policy=None, ignored_modules=[module.many])
    trainer = Trainer(**QUIET, strategy=strategy, max_steps=2)
    calls = Calls("all_reduce")
    trainer.fit(module, [torch.full((2, 2), float(1 + trainer.global_rank))] * 2)
    return calls.sizes, [p.sum().item() for p in module.many]


def test_gradients_of_ignored_modules_are_averaged_together() -> None:
    (sizes, first), (_, second) = run_world(2, reduces_of_ignored_modules)
    assert first == second
    # 20 tensors of 6 elements, once per step.
    assert sizes.count(120) == 2 and 6 not in sizes


def summed() -> list[Any]:
    DDPStrategy().setup_environment()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = [
        torch.randn(3, 5, generator=generator).t(),
        torch.randn((), generator=generator),
        torch.randn(4, generator=generator, dtype=torch.float64),
        torch.eye(2).to_sparse(),
        torch.randn(0),
    ]
    together = [tensor.clone() for tensor in tensors]
    sum_all(together)
    for tensor in tensors:
        dist.all_reduce(tensor)
    return [torch.equal(one.to_dense(), other.to_dense()) for one, other in zip(tensors, together, strict=True)]


def test_sums_in_a_buffer_are_those_of_single_tensors() -> None:
    for equal in run_world(2, summed):
        assert equal == [True] * 5


def test_a_bucket_holds_one_dtype_and_at_most_its_size() -> None:
    small, large = torch.zeros(10), torch.zeros(BUCKET // 4 + 1)
    whole = torch.zeros(2, dtype=torch.int64)
    buckets = buckets_of([small, whole, small, large, small])
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets] == [[10, 10], [large.numel()], [10], [2]]

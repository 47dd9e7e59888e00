"""`leyden estimate`: a simulated rank sends the bytes that real ranks send, as torch and the kernel count them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mixture import Experts
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback
from leyden.strategies import DDPStrategy, MeshStrategy
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.sent import SentBytes
from leyden.strategies.mesh.traced import SavedActivations, gathered_parameters, unsharded

BATCH, LENGTH, WIDTH, COUNT, TOP_K = 4, 64, 16, 4, 2
EXPERTS = {"experts": "expert_parallel"}
PLAN = {"tokens": "rowwise", "up": "colwise", "down": "rowwise", "head": "gather"}
PLAN |= {"experts": "experts", "experts.up": "colwise", "experts.down": "rowwise"}


class Net(TrainModule):
    """Attention, a feed-forward layer and experts.

    Args:
        is_even: whether each expert gets the same number of tokens, rather than those that the router sends.
    """

    def __init__(self, is_even: bool = True) -> None:
        super().__init__()
        self.is_even = is_even
        self.tokens = nn.Embedding(32, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, COUNT, bias=False), Experts(COUNT, False, False)
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def parallel_plan(self) -> dict[str, str]:
        return EXPERTS

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        ids, labels = batch["input_ids"], batch["labels"]
        x = self.tokens(ids)
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        index = probabilities.topk(TOP_K).indices
        if self.is_even:
            index = torch.arange(index.numel()).remainder(COUNT).view(index.shape)
        x = x + self.experts(tokens, index, probabilities.gather(1, index)).view_as(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss, "num_items": labels.numel()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Stack(TrainModule):
    """Blocks that a pipeline cuts, between an embedding and a head that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x = self.tokens(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return {"loss": loss, "num_items": batch["labels"].numel()}

    def parallel_plan(self) -> dict[str, str]:
        split = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        return split | {"tokens": "rowwise", "head": "gather"}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def data(samples: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 32, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": own, "labels": own.roll(-1)} for own in ids]


class Counted(SentBytes):
    """Also counts what gloo sends: it reduces everything on every rank where a part is enough."""

    by_gloo = 0

    def _count(self, kind: str, *args: Any) -> None:
        before = self.bytes.total()
        super()._count(kind, *args)
        self.by_gloo += (2 if kind == "reducescatter" else 1) * (self.bytes.total() - before)


def written() -> int:
    """Returns the bytes that this process has written, to files and sockets."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


class ThirdBatch(Callback):
    """Counts what the third batch sends, which is none of those that a mesh compares between ranks."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            strategy = trainer.strategy
            self.counted = Counted(strategy.meshes if isinstance(strategy, MeshStrategy) else [])
            self.counted.__enter__()
            self.written = written()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.written = written() - self.written
            self.counted.__exit__(None, None, None)


def on_real_ranks(layouts: dict[str, tuple[Layout, Any]]) -> dict[str, tuple[Counter[str], int, int]]:
    """Returns for each layout: the bytes by dimension, those that gloo sends, and those that the kernel counts."""
    found = {}
    for name, (layout, plan) in layouts.items():
        mesh = MeshStrategy(**layout.sizes, ep=layout.ep, plan=plan)
        strategy: Any = DDPStrategy() if name == "ddp" else mesh
        torch.manual_seed(0)
        third = ThirdBatch()
        trainer = Trainer(**QUIET, strategy=strategy, max_steps=3, callbacks=[third])
        samples: Any = data(3 * BATCH * trainer.strategy.data_size)
        module = Net(is_even=name != "routed")
        trainer.fit(module, DataLoader(samples, BATCH))
        found[name] = third.counted.bytes, third.counted.by_gloo, third.written
    return found


def on_a_simulated_rank(layouts: dict[str, tuple[Layout, Any]]) -> dict[str, dict[str, int]]:
    from leyden.cli.estimate.layouts import Training
    from leyden.cli.estimate.traced_step import TracedBatch

    found = {}
    for name, (layout, plan) in layouts.items():
        batch = TracedBatch(default_collate(data(BATCH)), "")
        [row] = Training(Net(), plan, batch).on(layout, "32-true")
        assert row.step is not None, row.notes
        found[name] = dict(row.step.sent)
    return found


WORLDS: dict[int, dict[str, tuple[Layout, Any]]] = {
    2: {
        "ddp": (Layout(2, 1), None),
        "fsdp": (Layout(1, 2), None),
        "tp": (Layout(1, 1, 2), PLAN),
        "cp": (Layout(1, 1, cp=2), None),
        "ep": (Layout(1, 2, ep=2), EXPERTS),
        "routed": (Layout(1, 2, ep=2), EXPERTS),
    },
    4: {
        "dp_shard × tp × ep": (Layout(1, 2, 2, ep=2), PLAN | EXPERTS),
        "dp_shard × cp × ep": (Layout(1, 2, cp=2, ep=2), EXPERTS),
        "dp_replicate × dp_shard": (Layout(2, 2), None),
    },
}
OTHERS = 256
"""Bytes of single numbers that a run sends besides: flags, and the number of items."""
LOGGED = 3 * 64 * 8
"""Bytes of the message of what a step on a part of a sequence logs."""


@pytest.mark.parametrize("world", WORLDS)
def test_a_simulated_rank_sends_the_bytes_of_a_real_one(world: int) -> None:
    layouts = WORLDS[world]
    [estimated], real = run_world(1, on_a_simulated_rank, layouts), run_world(world, on_real_ranks, layouts)
    for name, (layout, _) in layouts.items():
        others = OTHERS + (LOGGED if layout.cp > 1 else 0)
        for counted, by_gloo, kernel in (rank[name] for rank in real):
            # Besides, the kernel counts gloo's own headers.
            assert by_gloo <= kernel <= 1.05 * by_gloo + 4096, name
            if name != "routed":
                assert 0 <= counted.total() - sum(estimated[name].values()) <= others, name
            if world == 4:
                # On two ranks, dimensions have the same group.
                different = counted - Counter(estimated[name])
                assert max(different.values(), default=0) <= others, (name, counted, estimated[name])
    if world == 2:
        assert estimated["routed"] == estimated["ep"]
        mean = sum(rank["routed"][0].total() for rank in real) / world
        assert mean == pytest.approx(sum(estimated["ep"].values()), rel=0.1)


def test_a_small_case_by_hand() -> None:
    [found] = run_world(1, on_a_simulated_rank, WORLDS[2])
    elements = sum(parameter.numel() for parameter in Net().parameters())
    pairs = BATCH * LENGTH * TOP_K
    # An all-reduce of two ranks sends all gradients; FSDP gathers all weights once, as one group that stays
    # gathered until backward has used it, and scatters the gradients: half of them each time.
    assert found["ddp"]["dp_replicate"] == 4 * elements
    assert found["fsdp"]["dp_shard"] == 2 * elements * 2
    # Half of the tokens' vectors and weights go to the other rank and back, in forward and in backward, and once the
    # counts of two experts.
    rows = 2 * (2 * WIDTH * 4 + 4) * pairs // 2
    assert found["ep"]["ep"] == rows + 8 * COUNT // 2


# pipelines ------------------------------------------------------------------------------------------------------------
ROWS = 8


class NotedMesh(MeshStrategy):
    """Notes what a batch keeps for backward, when a backward pass begins."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.saved = SavedActivations()
        self.most_gathered = 0

    def _begin_backward(self, is_last: bool, outputs: Any) -> None:
        assert self._pipeline is not None
        self.saved.note([*self._pipeline.pipeline.kept(), *tree_leaves(outputs)])
        self.most_gathered = max(self.most_gathered, unsharded(self.modules[0]))
        super()._begin_backward(is_last, outputs)


class ThirdBatchOfStages(ThirdBatch):
    """Also measures the memory of this rank."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if batch_idx == 2:
            trainer.strategy.saved.__enter__()  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if batch_idx == 2:
            strategy: Any = trainer.strategy
            strategy.saved.__exit__(None, None, None)
            held = strategy.held(module.parameters())
            states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            kept = strategy.saved.size([*held, *gathered_parameters(module)])
            sizes = [sum(local(tensor).nbytes for tensor in own) for own in (held, [p.grad for p in held], states)]
            self.memory = *sizes, strategy.most_gathered, kept


def stages_on_real_ranks(layouts: dict[str, tuple[Layout, str, int]]) -> dict[str, tuple[Counter[str], int, int, Any]]:
    """Returns for each layout: the bytes by dimension, those that gloo sends and the kernel counts, and the memory."""
    found = {}
    for name, (layout, schedule, count) in layouts.items():
        strategy = NotedMesh(**layout.sizes, schedule=schedule, microbatches=count)
        third = ThirdBatchOfStages()
        trainer = Trainer(**QUIET, strategy=strategy, max_steps=3, callbacks=[third], precision=PRECISIONS.get(name))
        torch.manual_seed(0)
        trainer.fit(Stack(), DataLoader(data(3 * ROWS * strategy.data_size), ROWS))  # type: ignore[arg-type]
        found[name] = third.counted.bytes, third.counted.by_gloo, third.written, third.memory
    return found


def stages_on_simulated_ranks(layouts: dict[str, tuple[Layout, str, int]]) -> dict[str, list[Any]]:
    from leyden.cli.estimate.layouts import Training
    from leyden.cli.estimate.traced_step import TracedBatch

    found = {}
    for name, (layout, schedule, count) in layouts.items():
        pipeline = {"schedule": schedule, "microbatches": count}
        training = Training(Stack(), None, TracedBatch(default_collate(data(ROWS)), ""), None, pipeline)
        rows = training.on(layout, PRECISIONS.get(name, "32-true"))
        assert all(row.step is not None and not row.notes for row in rows), rows[0].notes
        found[name] = rows
    return found


PIPELINES: dict[int, dict[str, tuple[Layout, str, int]]] = {
    2: {
        "GPipe": (Layout(1, 1, pp=2), "GPipe", 4),
        "1F1B": (Layout(1, 1, pp=2), "1F1B", 4),
        "3 micro-batches": (Layout(1, 1, pp=2), "1F1B", 3),
        "Interleaved1F1B": (Layout(1, 1, pp=2), "Interleaved1F1B", 4),
        "ZBVZeroBubble": (Layout(1, 1, pp=2), "ZBVZeroBubble", 4),
    },
    4: {
        "pp × dp_shard": (Layout(1, 2, pp=2), "1F1B", 4),
        "pp × dp_shard, bf16": (Layout(1, 2, pp=2), "1F1B", 4),
        "pp × cp": (Layout(1, 1, pp=2, cp=2), "1F1B", 2),
        "pp × tp": (Layout(1, 1, 2, pp=2), "1F1B", 2),
    },
}
PRECISIONS = {"pp × dp_shard, bf16": "bf16-mixed"}


@pytest.mark.parametrize("world", PIPELINES)
def test_the_stages_of_a_simulated_pipeline_send_and_hold_what_real_ones_do(world: int) -> None:
    layouts = PIPELINES[world]
    [estimated], real = (
        run_world(1, stages_on_simulated_ranks, layouts),
        run_world(world, stages_on_real_ranks, layouts),
    )
    for name, (layout, _, _) in layouts.items():
        for rank, (counted, by_gloo, kernel, memory) in enumerate(own[name] for own in real):
            row = estimated[name][rank * layout.pp // layout.size]
            others = OTHERS + (LOGGED if layout.cp > 1 else 0)
            assert by_gloo <= kernel <= 1.05 * by_gloo + 4096, (name, rank)
            different = counted - Counter(row.step.sent), Counter(row.step.sent) - counted
            assert max(different[0].values(), default=0) <= others and not different[1], (name, rank, different)
            if rank == row.rank:
                held = row.memory.weights, row.memory.gradients, row.memory.optimizer, row.memory.passing
                assert (*held, row.step.activations) == memory, (name, rank)

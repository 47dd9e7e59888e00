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
from torch.utils.data import DataLoader, default_collate

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback
from leyden.strategies import DDPStrategy, MeshStrategy
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.sent import SentBytes

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
        row = Training(Net(), plan, batch).on(layout, "32-true")
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

"""Modules built on the meta device: they have the values of a plain build, and no rank ever holds a whole one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leyden import Trainer, TrainModule
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width) * 0.1)
        self.register_buffer("steps", torch.arange(width).float() / width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(x)) * self.scale + self.steps


class Net(nn.Module):
    """Initialized twice, as many models are: by each part, and at the end by `apply`."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Language(TrainModule):
    def __init__(self, late: bool = True, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.size = (width, depth)
        self.net: Any = None if late else Net(*self.size)
        self.start: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net(*self.size)
            self.late = all(p.device.type == "meta" for p in self.parameters())

    def on_fit_start(self) -> None:
        state = {**self.state_dict(), **dict(self.named_buffers())}
        self.start = {name: whole(tensor).clone().numpy() for name, tensor in state.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tokens(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    return [torch.randint(0, 11, (2, 5), generator=generator) for _ in range(count)]


def built(late: bool, precision: str) -> tuple[bool, list[str], list[str]]:
    """Returns whether the build was on meta, and what differs from a plain build before and after training."""
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    whole_one = Language(late=False)
    plain = {
        name: value.clone().numpy()
        for name, value in {**whole_one.state_dict(), **dict(whole_one.named_buffers())}.items()
    }
    state = torch.get_rng_state()
    Trainer(strategy=FSDPStrategy(), precision=precision, max_epochs=2, **QUIET).fit(whole_one, tokens())
    torch.manual_seed(4)
    trainer = Trainer(strategy=FSDPStrategy(), precision=precision, max_epochs=2, **QUIET)
    if late:
        module = Language()
    else:
        with trainer.init_module():
            module = Language(late=False)
        module.late = all(p.is_meta for p in module.parameters())
    states: list[Tensor] = []
    module.setup = lambda stage: states.append(torch.get_rng_state())
    module.on_train_start = lambda: states.append(torch.get_rng_state())
    trainer.fit(module, tokens())
    assert torch.equal(states[1], state)
    changed = [name for name, value in plain.items() if not np.array_equal(value, module.start[name])]
    pairs = zip(whole_one.state_dict().items(), module.state_dict().values(), strict=True)
    trained = [name for (name, a), b in pairs if not torch.equal(whole(a), whole(b))]
    assert module.net.head.weight is module.net.embed.weight
    return module.late, changed, trained


@pytest.mark.parametrize(("late", "precision"), [(True, "64-true"), (False, "bf16-mixed")])
def test_a_meta_device_build_matches_a_plain_build(late: bool, precision: str) -> None:
    """With draws that depend on values (trunc_normal_), repeated initialization, buffers and a tied weight."""
    assert run_world(2, built, late, precision) == [(True, [], [])] * 2


def peak_above(build: str) -> tuple[float, float]:
    """Returns the peak of resident memory above the start, and the size of the whole model, in MB."""
    torch.manual_seed(0)
    # Freed memory returns to the system at once instead of staying with the allocator (M_MMAP_THRESHOLD).
    assert ctypes.CDLL(None).mallopt(-3, 1 << 20) == 1
    module = Language(width=1024, depth=24)
    strategy = FSDPStrategy(auto_wrap_policy={"Block"})
    strategy.setup_environment()
    small = Language()
    with strategy.model_context():
        small.configure_model()
    strategy.setup_modules([small])  # so that what torch loads lazily is not counted
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    if build == "late":
        with strategy.model_context():
            module.configure_model()
    else:
        module.configure_model()
    strategy.setup_modules([module])
    peak = _resident("VmHWM") - before
    size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
    assert all(isinstance(p, DTensor) for p in module.parameters())
    del module
    strategy.teardown()
    return peak, size


def _resident(kind: str) -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


def test_a_rank_never_holds_the_whole_model() -> None:
    """At its peak, a rank holds half of the model and little more than one block; a plain build holds all of it."""
    for peak, size in run_world(2, peak_above, "late"):
        assert 90 < size < 110 and peak < 0.5 * size + 25
    for peak, size in run_world(2, peak_above, "plain"):
        assert peak > size


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


def by_hand_on_meta(kind: str) -> dict[str, Any]:
    """Shards modules that the user put on meta: reset_parameters or rank 0's values fill them, or nothing can."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    rank_0_has_it = kind == "first rank" and dist.get_rank() == 0
    with torch.device("cpu" if rank_0_has_it else "meta"):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Bare() if kind == "bare" else nn.Linear(4, 2))
    strategy = FSDPStrategy(auto_wrap_policy=None)
    strategy.setup_environment()
    strategy.setup_modules([net])
    return {name: whole(value).detach().numpy().copy() for name, value in net.state_dict().items()}


def test_modules_on_the_meta_device_are_initialized_on_their_shards() -> None:
    for kind in ("all", "first rank"):
        first, second = run_world(2, by_hand_on_meta, kind)
        assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
        assert (
            np.ptp(first["0.weight"]) > 0.1
            and np.all(first["1.running_var"] == 1)
            and np.all(first["1.running_mean"] == 0)
        )
    torch.manual_seed(0)
    expected = nn.Linear(3, 4)
    assert np.array_equal(first["0.weight"], expected.weight.detach().numpy())
    with pytest.raises(AssertionError, match="'weight' of a Bare is on the meta device(.|\\n)*reset_parameters"):
        run_world(2, by_hand_on_meta, "bare")


def resume_on_meta(folder: str) -> list[str]:
    """Resumes in a module built on meta; returns the weights that differ from an uninterrupted run."""
    trainers = [
        Trainer(strategy=FSDPStrategy(), max_epochs=2, max_steps=steps, default_root_dir=folder, **QUIET)
        for steps in (-1, 4, -1)
    ]
    torch.manual_seed(4)
    straight, half = Language(late=False), Language(late=False)
    half.load_state_dict(straight.state_dict())
    trainers[0].fit(straight, tokens())
    trainers[1].fit(half, tokens())
    path = trainers[1].save_checkpoint(Path(folder) / "half")
    torch.manual_seed(99)
    with trainers[2].init_module(empty_init=True):
        late = Language(late=False)
    assert all(p.is_meta for p in late.parameters())
    trainers[2].fit(late, tokens(), ckpt_path=path)
    assert late.net.head.weight is late.net.embed.weight
    pairs = zip(straight.state_dict().items(), late.state_dict().values(), strict=True)
    return [name for (name, a), b in pairs if not torch.equal(whole(a), whole(b))]


def test_a_checkpoint_resumes_in_a_module_built_on_meta(tmp_path: Path) -> None:
    assert run_world(2, resume_on_meta, str(tmp_path)) == [[], []]

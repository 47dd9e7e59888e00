"""ActivationCheckpointing: blocks run twice, and results are bit-identical to a run that stores activations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from ranks.world import run_world
from same import numbers_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer, Tuner
from leyden.callbacks import ActivationCheckpointing, ModelCheckpoint
from leyden.strategies import FSDPStrategy, MeshStrategy
from leyden.strategies.recomputing import recompute


class Block(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.passes = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.passes += 1
        return x + self.drop(torch.tanh(self.layer(x))) * scale


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def fit(callbacks: Any = (), samples: int = 9, size: int = 2, path: str | None = None, **arguments: Any) -> Squares:
    compiled = arguments.pop("compiled", False)
    torch.manual_seed(0)
    module = Squares(Blocks(), lambda module: torch.optim.AdamW(module.parameters(), 0.01))
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "callbacks": callbacks, **arguments})
    data = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    fitted = torch.compile(module, backend="aot_eager") if compiled else module
    trainer.fit(fitted, DataLoader(data, size), ckpt_path=path)
    return module


def passes(module: Squares) -> list[int]:
    return [block.passes for block in module.net.blocks]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("modules", "every", "twice"),
    [
        (Block, 1, [0, 1, 2, 3]),
        ({"Block"}, 2, [0, 2]),
        ("Block", 3, [0, 3]),
        ([nn.Dropout, Block], 8, [0]),
        (lambda module: isinstance(module, Block), 1, [0, 1, 2, 3]),
    ],
)
def test_blocks_run_twice_with_identical_results(modules: Any, every: int, twice: list[int]) -> None:
    plain, again = fit(), fit(ActivationCheckpointing(modules, every))
    assert numbers_of(again) == numbers_of(plain) and passes(plain) == [5] * 4
    assert passes(again) == [10 if number in twice else 5 for number in range(4)]


@pytest.mark.parametrize("compiled", [False, True])
def test_offloading_gives_identical_results(compiled: bool) -> None:
    plain = fit()
    again = fit(ActivationCheckpointing(Block, offload=True), compiled=compiled)
    assert numbers_of(again) == numbers_of(plain)
    assert compiled or passes(again) == [10] * 4


def test_offloading_copies_only_block_inputs_to_the_host() -> None:
    """Runs on the meta device, whose tensors have no values, and records which tensors would be copied to the host."""
    block = Block().to("meta")
    recompute([block], offloads=True)
    copied: list[Any] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default and kwargs["device"].type == "cpu":
                copied.append(tuple(args[0].shape))
                return torch.empty(args[0].shape)
            return function(*args, **(kwargs or {}))

    inputs = torch.empty(3, 4, device="meta", requires_grad=True)
    with Copies():
        block(inputs, scale=0.5).sum().backward()
    assert copied == [(3, 4)] and block.passes == 2
    assert inputs.grad is not None and inputs.grad.device.type == "meta"


def test_the_module_is_restored_after_fit() -> None:
    callback = ActivationCheckpointing(Block)
    module = fit(callback)
    before = passes(module)
    module.net(torch.ones(1, 4)).sum().backward()
    assert passes(module) == [count + 1 for count in before] and callback.names == []
    assert not any("forward" in vars(part) for part in module.modules())


class Copied(ActivationCheckpointing):
    """Copies the module during fit, as weight averaging does."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        blocks = copy.deepcopy(module.net).blocks
        blocks[0](torch.ones(1, 4, requires_grad=True)).sum().backward()
        self.copied = blocks[0].passes, module.net.blocks[0].passes


def test_a_copy_of_the_module_recomputes_independently() -> None:
    callback = Copied(Block)
    with torch.random.fork_rng():
        fit(callback)
    assert callback.copied == (2, 0)


def test_a_compiled_module_gives_identical_results() -> None:
    assert numbers_of(fit(ActivationCheckpointing(Block), compiled=True)) == numbers_of(fit())


def test_a_checkpoint_of_a_plain_run_resumes_with_identical_results(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    plain = fit([keeper], enable_checkpointing=True)
    assert numbers_of(fit(ActivationCheckpointing(Block), path=str(tmp_path / "step=2"))) == numbers_of(plain)


def test_lr_find_recomputes_blocks() -> None:
    """The batch size finder, for instance, depends on it."""
    seen: list[Any] = []
    callback = ActivationCheckpointing(lambda module: isinstance(module, Block) and not seen.append(module))
    trainer = Trainer(**QUIET, callbacks=callback, max_epochs=1)
    module = Squares(Blocks(), lambda module: torch.optim.SGD(module.parameters(), module.lr))
    module.lr = 0.1
    Tuner(trainer).lr_find(module, DataLoader(torch.ones(8, 4), 2), num_training=3)
    assert len(seen) == 4 and seen[0].passes == 6 and passes(module) == [0] * 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fit(ActivationCheckpointing("Blok")), "names Blok, and the model has no such module. Did you mean 'B"),
        (lambda: fit(ActivationCheckpointing(nn.LSTM)), "names LSTM, and the model has no such module"),
        (lambda: fit(ActivationCheckpointing(lambda module: False)), "True for no module"),
        (lambda: fit(ActivationCheckpointing(Squares)), "cannot recompute Squares, the trained module itself"),
        (lambda: fit(ActivationCheckpointing([3])), "contains 3: use classes"),  # type: ignore[list-item]
        (lambda: ActivationCheckpointing([]), "give the classes of the model's blocks"),
        (lambda: ActivationCheckpointing(3), "give classes of modules, their names, or a function"),  # type: ignore
        (lambda: ActivationCheckpointing(nn.Linear(1, 1)), "give classes of modules, such as Linear"),  # type: ignore
        (lambda: ActivationCheckpointing({"Block": True}), "give classes of modules, such as Block"),
        (lambda: ActivationCheckpointing(Block, every=0), "every=0"),
        (lambda: ActivationCheckpointing(Block, offload="cpu"), "offload='cpu'.: use True or False"),  # type: ignore
    ],
)
def test_invalid_arguments_raise(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def on_ranks() -> dict[str, Any]:
    """The second rank has no sample of the last global batch."""
    found: dict[str, Any] = {}
    for name, strategy in {
        "ddp": lambda: "ddp",
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Block}),
        "mesh": lambda: MeshStrategy(dp_shard=1, tp=2, plan={"net.blocks.*.layer": "gather"}),
    }.items():
        again = ActivationCheckpointing(Block, offload=name == "mesh")
        runs = [fit(callbacks, 5, 1, strategy=strategy()) for callbacks in ([], again)]
        found[name] = [numbers_of(run) for run in runs], [passes(run) for run in runs]
    return found


def test_ranks_give_identical_results() -> None:
    for rank in run_world(2, on_ranks):
        for strategy, ((plain, again), (once, twice)) in rank.items():
            assert again == plain, strategy
            assert twice[0] > once[0], strategy

"""fp8 on two ranks: bit-identical to scripts by hand, gathered in fp8, built on the meta device, saved and resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.test_fsdp_features import SentBytes
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from leyden import Callback, ConfigurationError, Trainer, TrainModule
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole
from leyden.strategies.precision import Float8Precision

SETTINGS: dict[str, Any] = {**QUIET, "use_distributed_sampler": False}
CONVERTED = ["net.1.up", "net.1.down", "net.2.up", "net.2.down"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regression(TrainModule):
    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential() if late else self.build()

    def build(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 8))

    def configure_model(self) -> None:
        if not len(self.net):
            self.net = self.build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]).float(), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def batches(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches, of 7 samples."""
    rank, size = rank_and_size()
    generator = torch.Generator().manual_seed(5)
    found = [
        (torch.randn(7, 16, generator=generator), torch.randn(7, 8, generator=generator)) for _ in range(count * size)
    ]
    return found[rank::size]


def build(late: bool = False) -> Regression:
    torch.manual_seed(0)
    return Regression(late)


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: whole(p).detach().clone().numpy() for name, p in module.state_dict().items()}


def differ(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if (a[name] != b[name]).any()]


def strategy_of(kind: str, **arguments: Any) -> Any:
    return "ddp" if kind == "ddp" else FSDPStrategy(auto_wrap_policy={Block}, **arguments)


def precision_of(kind: str) -> Float8Precision:
    return Float8Precision(enable_fsdp_float8_all_gather=kind == "gather")


def trainer_of(kind: str, strategy: Any = None, **arguments: Any) -> Trainer:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2, **SETTINGS, **arguments}
    settings.setdefault("precision", precision_of(kind))
    return Trainer(strategy=strategy or strategy_of(kind), devices=rank_and_size()[1], **settings)


# by hand --------------------------------------------------------------------------------------------------------------
def by_hand(kind: str) -> dict[str, Any]:
    """Trains with torchao and torch alone; torchao's layer supports only CUDA's autocast, so inputs are cast here."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    module = build()
    config = Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=kind == "gather")
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in CONVERTED)
    for name in CONVERTED:
        module.get_submodule(name).register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    model: Any = module
    if kind == "ddp":
        stepped = nn.Module()
        stepped.module, stepped.forward = module, module.training_step  # type: ignore[assignment]
        model = DistributedDataParallel(stepped)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for part in (*module.net[1:3], module):
            fully_shard(part, mp_policy=policy)
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for index, batch in enumerate(batches()):
            length = 2 if index < 4 else 1
            closes = index % 2 == length - 1
            if index % 2 == 0:
                optimizer.zero_grad()
            if kind == "ddp":
                model.require_backward_grad_sync = closes
            else:
                module.set_requires_gradient_sync(closes)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch, index) if kind == "ddp" else F.mse_loss(model(batch).float(), batch[1])
            (loss / length).backward()
            if closes:
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
    return weights(module)


def compared(kind: str) -> tuple[list[str], list[str], bool]:
    """Returns the weights that differ from the script's, the converted layers, and whether all weights changed."""
    module = build()
    trainer_of(kind).fit(module, batches(), batches(1))
    before = weights(build())
    found = weights(module)
    converted = [name for name, part in module.named_modules() if hasattr(part, "linear_mm_config")]
    original = Regression.forward
    Regression.forward = lambda self, batch: self.net(batch[0])  # type: ignore[method-assign]
    try:
        expected = by_hand(kind)
    finally:
        Regression.forward = original  # type: ignore[method-assign]
    return differ(found, expected), converted, len(differ(found, before)) == len(before)


# saved and resumed ----------------------------------------------------------------------------------------------------
class StopAt(Callback):
    def __init__(self, path: Path) -> None:
        self.path, self.saved = path, False

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        if trainer.global_step == 4 and trainer.current_epoch == 1 and not self.saved:
            trainer.save_checkpoint(self.path)
            self.saved = trainer.should_stop = True
            self.weights = weights(module)


def resumed(kind: str, folder: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """Returns differences from an uninterrupted run, keys that a plain module lacks, and the weights at the stop."""
    path = Path(folder) / kind
    full, part, again = build(), build(), build()
    trainer_of(kind).fit(full, batches(), batches(1))
    stop = StopAt(path)
    trainer_of(kind, callbacks=[stop]).fit(part, batches(), batches(1))
    trainer = trainer_of(kind)
    trainer.fit(again, batches(), batches(1), ckpt_path=path)
    assert trainer.global_step == 6
    return (
        differ(weights(again), weights(full)),
        sorted(set(build().state_dict()) ^ set(again.state_dict())),
        stop.weights,
    )


# FSDP: bytes, late builds, recomputation, graphs ----------------------------------------------------------------------
def gathered_bytes(kind: str) -> int:
    """Returns the bytes that enter and leave all-gathers on this rank, in one training step."""
    found = []

    class Counting(FSDPStrategy):
        def forward_backward(self, step_fn: Any, batch: Any, extra: Any, window: Any, hooks: Any) -> Any:
            with SentBytes() as sent:
                outputs = super().forward_backward(step_fn, batch, extra, window, hooks)
            found.append(sum(count for name, count in sent.bytes.items() if "gather" in name))
            return outputs

    strategy = Counting(auto_wrap_policy={Block})
    precision = "bf16-mixed" if kind == "bf16" else precision_of(kind)
    trainer_of(kind, strategy, precision=precision, max_epochs=1).fit(build(), batches(2))
    return found[-1]


def built_late(kind: str) -> list[str]:
    """Returns the weights that differ if configure_model builds on the meta device."""
    plain, late = build(), build(late=True)
    trainer_of(kind).fit(plain, batches())
    torch.manual_seed(0)
    trainer_of(kind).fit(late, batches())
    return differ(weights(late), weights(plain))


def recomputed(kind: str) -> list[str]:
    """Returns the weights that differ if blocks recompute their activations."""
    plain, again = build(), build()
    trainer_of(kind).fit(plain, batches())
    trainer_of(kind, strategy_of(kind, activation_checkpointing_policy={Block})).fit(again, batches())
    return differ(weights(again), weights(plain))


def compiled(kind: str) -> tuple[bool, float]:
    plain, module = build(), build()
    trainer_of(kind).fit(plain, batches())
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trainer_of(kind, strategy_of(kind, compile={"backend": "aot_eager"})).fit(module, batches())
    pairs = zip(weights(module).values(), weights(plain).values(), strict=True)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] > before, max(abs(a - b).max() for a, b in pairs)


def fit_in_another_precision() -> str:
    module = build()
    trainer_of("fsdp").fit(module, batches())
    trainer_of("fsdp").validate(module, batches(1), verbose=False)
    try:
        trainer_of("fsdp", precision="bf16-mixed").fit(module, batches())
    except ConfigurationError as error:
        return str(error)
    return ""


RUNS: list[tuple[Any, ...]] = [
    *(("compared", kind) for kind in ("ddp", "fsdp", "gather")),
    *(("resumed", kind) for kind in ("ddp", "fsdp", "gather")),
    *(("gathered_bytes", kind) for kind in ("bf16", "fsdp", "gather")),
    *(("built_late", kind) for kind in ("fsdp", "gather")),
    *(("recomputed", kind) for kind in ("fsdp", "gather")),
]
ResultsOf = Callable[..., list[Any]]


def run_all(folder: str) -> list[Any]:
    found = []
    for name, *args in RUNS:
        found.append(globals()[name](*args, *([folder] if name == "resumed" else [])))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def results_of(folder: Path) -> ResultsOf:
    """Returns a function from a run to its results on each rank; all runs share a world."""
    found = run_world(2, run_all, str(folder))

    def of(*run: Any) -> list[Any]:
        return [own[RUNS.index(run)] for own in found]

    return of


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "gather"])
def test_weights_match_a_hand_written_script(results_of: ResultsOf, kind: str) -> None:
    for wrong, converted, learned in results_of("compared", kind):
        assert wrong == [] and converted == CONVERTED and learned


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "gather"])
def test_a_resumed_run_matches_an_uninterrupted_one(results_of: ResultsOf, folder: Path, kind: str) -> None:
    for wrong, keys, _ in results_of("resumed", kind):
        assert wrong == [] and keys == []
    # One process, in any precision, reads the ranks' checkpoint.
    module = build()
    trainer = Trainer(**SETTINGS, default_root_dir=folder)
    [_, _, at_stop] = results_of("resumed", kind)[0]
    trainer.validate(module, [(torch.ones(2, 16), torch.ones(2, 8))], ckpt_path=folder / kind, verbose=False)
    assert differ(weights(module), at_stop) == []


def test_fp8_all_gathers_halve_the_bytes(results_of: ResultsOf) -> None:
    [bf16, fsdp, gather] = [results_of("gathered_bytes", kind)[0] for kind in ("bf16", "fsdp", "gather")]
    assert fsdp == bf16
    # The matrices of two blocks: one byte less for each value, in forward and in backward.
    values = 2 * (2 * 32 * 64)
    assert bf16 - gather == (values // 2 + values) * 2


@pytest.mark.parametrize("kind", ["fsdp", "gather"])
def test_a_module_built_on_the_meta_device_trains_the_same(results_of: ResultsOf, kind: str) -> None:
    assert results_of("built_late", kind) == [[], []]


@pytest.mark.parametrize("kind", ["fsdp", "gather"])
def test_recomputed_activations_train_the_same(results_of: ResultsOf, kind: str) -> None:
    assert results_of("recomputed", kind) == [[], []]


@pytest.mark.full
def test_compiled_blocks_train_like_plain_ones() -> None:
    for made_graphs, error in run_world(2, compiled, "gather"):
        assert made_graphs and error < 5e-3


def test_layers_sharded_in_fp8_reject_another_precision() -> None:
    for message in run_world(1, fit_in_another_precision):
        assert "was sharded by an earlier run with" in message and "fp8 tensorwise" in message

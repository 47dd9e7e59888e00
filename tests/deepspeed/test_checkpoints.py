"""DeepSpeed runs resume bit for bit on as many ranks, and move to other strategies and back."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED
from ranks.numbered import blocks, global_batches, numbered_samples
from ranks.share import Peak, counting
from ranks.world import run_world
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.checkpoint.merge import merge
from leyden.checkpoint.optimizers import from_named
from leyden.checkpoint.reader import CheckpointReader

# For the runs that the tests of this file share.
pytestmark = pytest.mark.timeout(900)
# 86 samples are ten global batches of 8 and one of 6: a run is saved in mid-epoch, twelve steps before its end.
SIZE, GLOBAL, SAVED_AT, END = 86, 8, 4, 16
KILLED_AT, EVERY = 8, 3


@dataclass(frozen=True)
class Layout:
    """Ranks, strategy and precision of a run.

    Attributes:
        ranks: number of ranks.
        strategy: a name, or arguments of DeepSpeedStrategy.
        precision: of the Trainer.
        built: whether configure_model builds the model, so that stage 3 shards each layer at once.
    """

    ranks: int
    strategy: Any = field(default_factory=dict)
    precision: str = "32-true"
    built: bool = True


LAYOUTS = {
    "single": Layout(1, "single_device"),
    "ddp": Layout(2, "ddp"),
    "fsdp": Layout(2, "fsdp"),
    **{f"stage {stage}": Layout(2, {"stage": stage}) for stage in range(4)},
    "stage 3, model built whole": Layout(2, {"stage": 3, "stage3_param_persistence_threshold": 20}, built=False),
    "stage 2 offload": Layout(2, {"stage": 2, "offload_optimizer": True}),
    "stage 3 offload": Layout(2, {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "round robin": Layout(2, {"stage": 2, "round_robin_gradients": True}),
    "many groups": Layout(2, {"stage": 3, "sub_group_size": 100}),
    **{f"bf16 stage {stage}": Layout(2, {"stage": stage}, "bf16-true") for stage in (1, 2, 3)},
    "bf16 stage 1, float32 gradients": Layout(
        2, {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}, "bf16-true"
    ),
    "bf16 ddp": Layout(2, "ddp", "bf16-true"),
    "stage 2 on 1": Layout(1, {"stage": 2}),
    "stage 3 on 1": Layout(1, {"stage": 3}),
    "stage 3 on 4": Layout(4, {"stage": 3}),
    "stage 1 on 4": Layout(4, {"stage": 1}),
}


# Layouts of the default run; `.ci/run full` takes all.
QUICK = (
    "ddp",
    "fsdp",
    "stage 1",
    "stage 2",
    "stage 3",
    "stage 2 offload",
    "stage 3 offload",
    "bf16 stage 2",
    "bf16 stage 3",
)
KILLED = ("stage 1", "stage 2", "stage 3", "bf16 stage 1", "bf16 stage 2", "bf16 stage 3", "stage 3 offload")
KILLED_QUICK = ("stage 3", "bf16 stage 2")


class Net(TrainModule):
    """Odd sizes, so that fragments begin and end within rows; a frozen layer, a buffer and two parameter groups."""

    def __init__(self, layout: Layout, killed_at: int | None = None, rate: float = 0.005) -> None:
        super().__init__()
        self.layout, self.killed_at, self.rate = layout, killed_at, rate
        self.seen: list[tuple[list[int], list[float]]] = []
        if not layout.built:
            self.build()

    def configure_model(self) -> None:
        if self.layout.built and not hasattr(self, "blocks"):
            self.build()

    def build(self) -> None:
        torch.manual_seed(3)
        self.blocks = blocks(31)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def losses(self, batch: Any) -> Tensor:
        x, y, _ = batch
        out = self.blocks(x)
        return cross_entropy((out + self.scale * self.frozen(out)).float(), y, reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(self.seen) == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        losses = self.losses(batch)
        self.seen.append((batch[2].tolist(), losses.detach().tolist()))
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.losses(batch).mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        groups = [
            {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in named.items() if name.endswith("bias")], "lr": 0.8 * self.rate},
        ]
        optimizer = torch.optim.AdamW(groups, self.rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"},
        }


def fit(
    name: str,
    folder: str,
    steps: int = END,
    every: int = SAVED_AT,
    path: str | None = None,
    killed_at: int | None = None,
    rate: float = 0.005,
) -> dict[str, Any]:
    """Fits under a layout; returns this rank's samples and losses, and on rank 0 the final weights."""
    from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

    layout = LAYOUTS[name]
    strategy = layout.strategy if isinstance(layout.strategy, str) else DeepSpeedStrategy(**layout.strategy)
    torch.manual_seed(4)
    module = Net(layout, killed_at, rate)
    checkpoint = ModelCheckpoint(filename="{step}", save_top_k=-1, every_n_train_steps=every)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=strategy,
        precision=layout.precision,
        default_root_dir=folder,
        max_epochs=-1,
        max_steps=steps,
        callbacks=[checkpoint],
    )
    trainer.fit(module, DataLoader(numbered_samples(SIZE), GLOBAL // layout.ranks, shuffle=True), ckpt_path=path)
    weights = trainer.strategy.full_state_dict(module)
    return {
        "seen": module.seen,
        "weights": {key: value.float().numpy().copy() for key, value in weights.items()},
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "steps": getattr(getattr(trainer.strategy, "engine", None), "global_steps", END),
        "path": f"{folder}/version_0/checkpoints/step={steps}",
    }


def fits(runs: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """Runs several fits in one launch."""
    found = {}
    for key, run in runs.items():
        found[key] = fit(*run)
        # Closes the strategy's engine now, since closing all of them at the end takes long.
        gc.collect()
    return found


def launch(ranks: int, runs: dict[str, tuple[Any, ...]]) -> dict[str, list[dict[str, Any]]]:
    found = run_world(ranks, fits, runs, timeout=800)
    return {key: [rank[key] for rank in found] for key in runs}


def check_same_losses(rest: list[tuple[list[int], float]], straight: list[dict[str, Any]], rel: float = 1e-5) -> None:
    """Checks that the last batches have the samples and losses of a straight run."""
    whole = global_batches(straight)[-len(rest) :]
    assert [samples for samples, _ in rest] == [samples for samples, _ in whole]
    assert [loss for _, loss in rest] == pytest.approx([loss for _, loss in whole], rel=rel)


def check_identical(rest: list[dict[str, Any]], straight: list[dict[str, Any]]) -> None:
    for after, before in zip(rest, straight, strict=True):
        assert after["seen"] == before["seen"][-len(after["seen"]) :], "samples or losses differ on a rank"
        assert after["lr"] == before["lr"] and after["steps"] == before["steps"] == END
        assert after["weights"].keys() == before["weights"].keys()
        assert all(value.tobytes() == before["weights"][name].tobytes() for name, value in after["weights"].items())


def load_repeatedly(paths: list[str], folder: str) -> dict[str, list[Any]]:
    """With one Trainer, validates several checkpoints, fits, and resumes from the middle of that fit."""
    from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

    found: dict[str, list[Any]] = {}
    for name in ("stage 2", "stage 3"):
        strategy = DeepSpeedStrategy(**LAYOUTS[name].strategy)
        trainer = Trainer(
            **{**QUIET, "enable_checkpointing": True},
            strategy=strategy,
            default_root_dir=f"{folder}/{name}",
            max_epochs=-1,
            max_steps=8,
            callbacks=[ModelCheckpoint(filename="{step}", save_top_k=-1, every_n_train_steps=4)],
        )
        module, loader = Net(LAYOUTS[name]), DataLoader(numbered_samples(SIZE), 4, shuffle=True)
        ordered = DataLoader(numbered_samples(SIZE), 8)
        losses = [trainer.validate(module, ordered, ckpt_path=path, verbose=False)[0]["loss"] for path in paths]
        seen, weights = [], []
        for path in (None, f"{folder}/{name}/version_0/checkpoints/step=4"):
            module.seen = []
            trainer.fit(module, loader, ckpt_path=path)
            seen.append(module.seen[-4:])
            weights.append({key: value.clone() for key, value in strategy.full_state_dict(module).items()})
        same = all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
        found[name] = [losses, len(module.seen), same and seen[0] == seen[1]]
    return found


def whole_loss(path: str) -> float:
    module = Net.load_from_checkpoint(path, layout=Layout(1, built=False))
    with torch.no_grad():
        return float(module.losses(numbered_samples(SIZE).tensors).mean())


Runs = dict[str, list[dict[str, Any]]]


def run_straight(names: Iterable[str], folder: Path) -> Runs:
    """Runs each layout without an interruption."""
    return launch(2, {name: (name, f"{folder}/straight {name}") for name in names})


def saved(straight: Runs, name: str, step: int = SAVED_AT) -> str:
    """Returns the path of a straight run's checkpoint at a step."""
    return str(Path(straight[name][0]["path"]).with_name(f"step={step}"))


def run_chains(straight: Runs, folder: Path) -> Runs:
    """Resumes under one strategy and number of ranks after another; `resume` ends the first chain."""
    found = launch(
        2,
        {
            "fsdp": ("fsdp", f"{folder}/fsdp", 6, 6, saved(straight, "stage 3")),
            "ddp": ("ddp", f"{folder}/ddp", 8, 8, f"{folder}/fsdp/version_0/checkpoints/step=6"),
        },
    )
    found |= launch(
        1,
        {
            "single": ("single", f"{folder}/single", 10, 10, f"{folder}/ddp/version_0/checkpoints/step=8"),
            "one": ("stage 2 on 1", f"{folder}/one", 8, 8, saved(straight, "stage 2")),
        },
    )
    return found | launch(
        4, {"four": ("stage 3 on 4", f"{folder}/four", END, END, f"{folder}/one/version_0/checkpoints/step=8")}
    )


def resume(straight: Runs, chained: Runs, folder: Path) -> Runs:
    """Resumes on two ranks, in one launch, straight and killed runs, the first chain, and weights from a file."""
    runs: dict[str, tuple[Any, ...]] = {
        name: (name, f"{folder}/resumed {name}", END, END, saved(straight, name)) for name in straight
    }
    runs |= {f"{name} after a kill": (name, f"{folder}/killed {name}", END, END, "last") for name in KILLED_QUICK}
    # From bf16 weights to DDP and back.
    runs["bf16 away"] = ("bf16 ddp", f"{folder}/bf16 away", 10, 10, saved(straight, "bf16 stage 2"))
    away = f"{folder}/bf16 away/version_0/checkpoints/step=10"
    runs["bf16 back"] = ("bf16 stage 3", f"{folder}/bf16 back", END, END, away)
    runs["back"] = ("stage 3", f"{folder}/back", END, END, chained["single"][0]["path"])
    # Only weights, and a step that does not change them.
    merged = str(merge(saved(straight, "stage 3"), folder))
    for name in ("stage 3", "bf16 stage 2"):
        runs[f"{name} of a file"] = (name, f"{folder}/{name} of a file", 1, END, merged, None, 0.0)
    return launch(2, runs)


def kill(names: Iterable[str], folder: Path) -> None:
    """Kills both ranks in mid-epoch, two steps after their last checkpoint."""
    for name in names:
        codes = run_world(2, fit, name, f"{folder}/killed {name}", END, EVERY, None, KILLED_AT, may_fail=True)
        assert codes == [-signal.SIGKILL, -signal.SIGKILL], codes
        left = (folder / f"killed {name}" / SAVED).glob("step=*")
        assert sorted(path.name for path in left) == ["step=3", "step=6"]


@dataclass(frozen=True)
class Fitted:
    """Runs that all tests share, since each start of ranks takes seconds."""

    folder: Path
    straight: Runs
    chained: Runs
    resumed: Runs


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    folder = tmp_path_factory.mktemp("fitted")
    straight = run_straight(QUICK, folder)
    kill(KILLED_QUICK, folder)
    chained = run_chains(straight, folder)
    return Fitted(folder, straight, chained, resume(straight, chained, folder))


@pytest.mark.parametrize("name", QUICK)
def test_batches_and_losses_match_ddp(fitted: Fitted, name: str) -> None:
    straight = fitted.straight
    check_same_losses(global_batches(straight[name]), straight["ddp"], 1e-5 if "bf16" not in name else 0.05)


@pytest.mark.parametrize("name", QUICK)
def test_a_run_resumes_bit_for_bit(fitted: Fitted, name: str) -> None:
    assert len(fitted.resumed[name][0]["seen"]) == END - SAVED_AT
    check_identical(fitted.resumed[name], fitted.straight[name])


@pytest.mark.parametrize("name", KILLED_QUICK)
def test_a_killed_run_resumes_bit_for_bit(fitted: Fitted, name: str) -> None:
    after = fitted.resumed[f"{name} after a kill"]
    assert len(after[0]["seen"]) == END - 6
    check_identical(after, fitted.straight[name])


def test_a_merged_checkpoint_holds_the_gathered_weights(fitted: Fitted) -> None:
    check_merged(fitted.straight, fitted.folder)


def test_checkpoints_contain_no_deepspeed_files(fitted: Fitted) -> None:
    check_files(fitted.straight)


def test_a_run_moves_from_stage_3_to_fsdp_ddp_one_process_and_back(fitted: Fitted) -> None:
    chain = [*(fitted.chained[name] for name in ("fsdp", "ddp", "single")), fitted.resumed["back"]]
    assert [len(ranks[0]["seen"]) for ranks in chain] == [2, 2, 2, 6]
    check_same_losses([batch for ranks in chain for batch in global_batches(ranks)], fitted.straight["stage 3"])


def test_a_run_moves_from_bf16_weights_to_ddp_and_back(fitted: Fitted) -> None:
    rest = global_batches(fitted.resumed["bf16 away"]) + global_batches(fitted.resumed["bf16 back"])
    assert len(rest) == END - SAVED_AT
    check_same_losses(rest, fitted.straight["bf16 stage 2"], 0.05)


def test_a_run_moves_from_two_ranks_to_one_and_four(fitted: Fitted) -> None:
    assert [len(fitted.chained[name]) for name in ("one", "four")] == [1, 4]
    rest = global_batches(fitted.chained["one"]) + global_batches(fitted.chained["four"])
    assert len(rest) == END - SAVED_AT
    check_same_losses(rest, fitted.straight["stage 2"])


def test_one_trainer_loads_several_checkpoints(fitted: Fitted) -> None:
    paths = [saved(fitted.straight, "stage 3", step) for step in (SAVED_AT, END)]
    for rank in run_world(2, load_repeatedly, paths, str(fitted.folder / "again"), timeout=800):
        for losses, steps, same in rank.values():
            assert losses == pytest.approx([whole_loss(path) for path in paths], rel=1e-5)
            assert (steps, same) == (4, True)


@pytest.mark.parametrize("name", ["stage 3", "bf16 stage 2"])
def test_a_weights_file_loads_in_the_runs_dtype(fitted: Fitted, name: str) -> None:
    weights = fitted.resumed[f"{name} of a file"][0]["weights"]
    for key, value in CheckpointReader(saved(fitted.straight, "stage 3")).model().items():
        lower = value.bfloat16().float() if "bf16" in name else value
        assert lower.numpy().tobytes() == weights[key].tobytes(), key


def check_merged(straight: Runs, folder: Path) -> None:
    """Checks that a merged file holds the gathered weights or, for bf16, the float32 masters that round to them."""
    for name, ranks in straight.items():
        whole = ranks[0]["weights"]
        assert len(whole) == 15
        found = load_file(merge(ranks[0]["path"], folder))
        assert found.keys() == whole.keys()
        loaded = Net.load_from_checkpoint(ranks[0]["path"], layout=Layout(1, built=False)).state_dict()
        for key, value in whole.items():
            if "bf16 stage" in name and "scale" not in key and "frozen" not in key:
                assert found[key].dtype == torch.float32
                assert not torch.equal(found[key], torch.tensor(value)), (
                    "the file has bf16 weights instead of float32 masters"
                )
            lower = found[key].bfloat16().float() if "bf16" in name else found[key]
            assert lower.numpy().tobytes() == value.tobytes(), (name, key)
            assert torch.equal(loaded[key], found[key].float())


def check_files(straight: Runs) -> None:
    """Checks that there are no DeepSpeed files or pickles, that each rank writes, and that state has torch's form."""
    shapes = {"step": (), "exp_avg": (31, 16), "exp_avg_sq": (31, 16)}
    for name, ranks in straight.items():
        path = Path(ranks[0]["path"])
        files = [file for file in path.parent.rglob("*") if file.is_file()]
        assert len(files) > 4 * 8 and {file.suffix for file in files} == {".json", ".safetensors"}
        writers = len(list(path.glob("optimizer-0-*.safetensors")))
        assert writers == (0 if name in ("ddp", "bf16 ddp", "stage 0") else 2), name
        state = CheckpointReader(path).optimizers()[0]["state"]["blocks.1.first.weight"]
        assert {key: tuple(value.shape) for key, value in state.items()} == shapes
        assert float(state["step"]) == END


@pytest.mark.full
def test_every_layout_resumes_bit_for_bit(tmp_path: Path) -> None:
    names = [name for name, layout in LAYOUTS.items() if layout.ranks == 2 and name not in QUICK]
    killed = [name for name in KILLED if name not in KILLED_QUICK]
    straight = run_straight([*names, *killed], tmp_path)
    check_merged(straight, tmp_path)
    check_files(straight)
    kill(killed, tmp_path)
    runs = {name: (name, f"{tmp_path}/resumed {name}", END, END, saved(straight, name)) for name in names}
    runs |= {name: (name, f"{tmp_path}/killed {name}", END, END, "last") for name in killed}
    for name, ranks in launch(2, runs).items():
        check_identical(ranks, straight[name])


SOURCES = (
    "single",
    "ddp",
    "fsdp",
    "stage 0",
    "stage 1",
    "stage 2",
    "stage 3",
    "round robin",
    "stage 3 on 1",
    "stage 1 on 4",
)
TARGETS = (*SOURCES, "stage 2 on 1", "stage 3 on 4", "stage 3 offload", "many groups")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_layout_resumes_the_checkpoints_of_every_other(tmp_path: Path) -> None:
    straight: Runs = {}
    for size in (1, 2, 4):
        runs = {name: (name, f"{tmp_path}/straight {name}") for name in SOURCES if LAYOUTS[name].ranks == size}
        straight |= launch(size, runs)
    for name in TARGETS:
        runs = {s: (name, f"{tmp_path}/{name} < {s}", END, END, saved(straight, s)) for s in SOURCES}
        for source, ranks in launch(LAYOUTS[name].ranks, runs).items():
            rest = global_batches(ranks)
            assert len(rest) == END - SAVED_AT
            check_same_losses(rest, straight[source])


class Wide(TrainModule):
    """Large enough that what a rank reads besides its share is negligible."""

    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(200, 701), nn.Tanh(), nn.Linear(701, 200))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0])
        return out.float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def fit_wide(name: str, folder: str) -> Any:
    from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

    layout = LAYOUTS[name]
    strategy = layout.strategy if isinstance(layout.strategy, str) else DeepSpeedStrategy(**layout.strategy)
    trainer = Trainer(**QUIET, strategy=strategy, precision=layout.precision, default_root_dir=folder, max_steps=1)
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(8, 200)), 4))
    return trainer


def save_wide(names: list[str], folder: str) -> list[str]:
    return [str(fit_wide(name, folder).save_checkpoint(f"{folder}/{name}")) for name in names]


def measure(names: list[str], folder: str, paths: list[str]) -> dict[tuple[str, str], dict[str, float]]:
    """Returns what this rank reads of each checkpoint, and its peak extra memory, relative to its share."""
    found = {}
    for name in names:
        trainer = fit_wide(name, folder)
        strategy, optimizer = trainer.strategy, trainer.optimizers[0]
        share = sum(part.flat.nbytes for part in strategy.master_weights.parts(trainer.module).values())
        for path in paths:
            reader = CheckpointReader(path)
            with Peak() as peak, counting() as read:
                strategy.load_module(reader, trainer.module)
            figures = {"weights": read["bytes"] / share, "peak beyond the weights": peak.most / share}
            optimizer.state.clear()
            with Peak() as peak, counting() as read:
                [state] = reader.optimizers(like=strategy.master_weights.parts(trainer.module))
                from_named(strategy.master_weights.saved_form(optimizer), state, trainer.module)
            figures |= {"states": read["bytes"] / (2 * share), "peak for states": peak.most / (2 * share)}
            found[name, path] = figures
    return found


def test_no_rank_reads_or_holds_more_than_its_share(tmp_path: Path) -> None:
    sources = ["ddp", "fsdp", "stage 2", "bf16 stage 3"]
    paths = run_world(2, save_wide, sources, str(tmp_path), timeout=280)[0]
    for rank in run_world(2, measure, ["stage 2", "stage 3", "bf16 stage 1"], str(tmp_path), paths, timeout=280):
        for source, figures in rank.items():
            assert 0.95 < figures["weights"] < 1.10 and 0.95 < figures["states"] < 1.10, (source, figures)
            assert figures["peak for states"] < 1.10, (source, figures)
            assert figures["peak beyond the weights"] < 0.05, (source, figures)

"""DeepSpeed through the Accelerator: a user's loop matches DDP, and conflicting settings are refused."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import (
    Accelerator,
    ConfigurationError,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
)
from leyden.strategies.fragment import Fragment

STEPS = 3
"""Batches per step; an epoch has 5 on each of 2 ranks, so that its last window is shorter."""


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def data(samples: int = 39) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def accelerator_of(stage: int | None, **kwargs: Any) -> Accelerator:
    plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage)
    return Accelerator(cpu=True, deepspeed_plugin=plugin, **kwargs)


def train(stage: int | None, **kwargs: Any) -> dict[str, Any]:
    """Trains two epochs; returns what a user sees."""
    accelerator = accelerator_of(stage, gradient_accumulation_steps=STEPS, **kwargs)
    model, optimizer, loader, scheduler = prepared(accelerator)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "seen": []}
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                outputs = model(x)
                with accelerator.autocast():
                    loss = F.mse_loss(outputs, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
            if accelerator.sync_gradients:
                found["rates"].append(scheduler.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        for x, _ in loader:
            found["seen"] += accelerator.gather_for_metrics(model(x).sum(dim=1)).tolist()
    found["weights"] = {name: value.float().tolist() for name, value in accelerator.get_state_dict(model).items()}
    found["type"] = (str(accelerator.distributed_type.value), accelerator.steps)
    accelerator.free_memory()
    return found


def prepared(accelerator: Accelerator) -> Any:
    # Ranks start from different weights and receive rank 0's.
    model, optimizer, scheduler = build(accelerator.process_index)
    scheduler, model, loader, optimizer = accelerator.prepare(scheduler, model, data(), optimizer)
    return model, optimizer, loader, scheduler


def every_stage() -> dict[str, Any]:
    found = {"ddp": train(None)} | {f"stage {stage}": train(stage) for stage in range(4)}
    found["bf16 ddp"], found["bf16"] = train(None, mixed_precision="bf16"), train(2, mixed_precision="bf16")
    return found


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest) -> Any:
    """All stages in one world of 1 rank, and of 2."""
    return run_world(request.param, every_stage)


@pytest.mark.parametrize("stage", range(4))
def test_losses_norms_rates_and_weights_match_ddp(results: Any, stage: int) -> None:
    for rank in results:
        ours, ddp = rank[f"stage {stage}"], rank["ddp"]
        assert len(ours["losses"]) == 2 * (10 if len(results) == 1 else 5)
        assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-6)
        assert ours["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        # Schedulers step once for each optimizer step, on any number of ranks.
        assert ours["rates"] == pytest.approx([0.01 * 0.8 ** (step + 1) for step in range(len(ddp["norms"]))])
        assert ours["type"] == ("DEEPSPEED", len(ddp["norms"]))
        assert len(ours["seen"]) == 39 and ours["seen"] == pytest.approx(ddp["seen"], rel=1e-4, abs=1e-5)
        assert ours["weights"].keys() == ddp["weights"].keys()
        for name, value in ours["weights"].items():
            torch.testing.assert_close(Tensor(value), Tensor(ddp["weights"][name]), rtol=1e-5, atol=1e-6)


def test_bf16_matches_ddp(results: Any) -> None:
    """Under DeepSpeed, too, bf16 means autocast over float32 weights."""
    for rank in results:
        assert rank["bf16"]["losses"] == pytest.approx(rank["bf16 ddp"]["losses"], rel=1e-3)
        assert rank["bf16"]["losses"] != rank["ddp"]["losses"]


CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.999]}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def run_loop(
    accelerator: Accelerator, objects: tuple[Any, ...], items: bool = False, clip: float | None = None
) -> tuple[list[float], list[float]]:
    """Runs an epoch; returns losses, and the learning rate after each step."""
    model, optimizer, loader, scheduler = accelerator.prepare(*objects)
    losses, rates = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y, reduction="sum" if items else "mean")
            accelerator.backward(loss, num_items=y.numel() if items else None)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if accelerator.sync_gradients:
            rates.append(scheduler.get_last_lr()[0])
    return losses, rates


def by_config() -> dict[str, Any]:
    """Trains with the config's optimizer and scheduler, and the plugin's accumulation and clipping."""
    found: dict[str, Any] = {}
    model, _, _ = build()
    plugin = DeepSpeedPlugin(CONFIG, gradient_accumulation_steps=2, gradient_clipping=0.3)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    found["accumulation"] = accelerator.gradient_accumulation_steps
    dummy = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.1)
    found["dummies"] = run_loop(accelerator, (model, dummy, data(), DummyScheduler(dummy, 20, 4)))
    final = accelerator.state.deepspeed_plugin.strategy.final_config()
    found["final"] = [
        final["train_micro_batch_size_per_gpu"],
        final["gradient_clipping"],
        final["optimizer"]["params"]["lr"],
    ]
    accelerator.free_memory()

    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    model, _, _ = build()
    accelerator = Accelerator(cpu=True, strategy="ddp", gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = WarmupDecayLR(optimizer, 20, 0.0, 0.02, 4)
    found["by hand"] = run_loop(accelerator, (model, optimizer, data(), scheduler), clip=0.3)

    for name, stage in (("items ddp", None), ("items", 2)):
        accelerator = accelerator_of(stage, gradient_accumulation_steps=STEPS)
        model, optimizer, scheduler = build()
        found[name] = run_loop(accelerator, (model, optimizer, data(), scheduler), items=True)
        accelerator.free_memory()
    accelerator = accelerator_of(1)
    model, optimizer, scheduler = build()
    made = DummyScheduler(optimizer, lr_scheduler_callable=lambda own: torch.optim.lr_scheduler.StepLR(own, 1, 0.5))
    found["callable"] = run_loop(accelerator, (model, optimizer, data(), made))[1]
    accelerator.free_memory()
    return found


class Expert(nn.Linear):
    """A layer of a mixture of experts."""


def offloaded() -> dict[str, Any]:
    """Trains stage 3 built sharded and offloaded to the CPU, and bf16 weights as the config says."""
    found: dict[str, Any] = {}
    for name in ("ddp", "offloaded", "bf16"):
        settings: dict[str, Any] = {"strategy": "ddp"}
        if name == "offloaded":
            both = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
            settings = {
                "deepspeed_plugin": DeepSpeedPlugin(
                    zero_stage=3, zero3_init_flag=True, transformer_moe_cls_names="Expert", **both
                )
            }
        elif name == "bf16":
            settings = {"deepspeed_plugin": DeepSpeedPlugin({"bf16": {"enabled": True}}, zero_stage=1)}
        accelerator = Accelerator(cpu=True, **settings)
        plugin = accelerator.state.deepspeed_plugin
        torch.manual_seed(0)
        with plugin.zero3_init_context_manager() if plugin else nullcontext():
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Expert(16, 4))
        found[f"{name} built"] = model[0].weight.numel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        found[name] = run_loop(accelerator, (model, optimizer, data(), scheduler))[0]
        state = accelerator.get_state_dict(accelerator.prepared_models[0])
        found[f"{name} state"] = (
            accelerator.mixed_precision,
            str(state["0.weight"].dtype),
            list(state["0.weight"].shape),
        )
        accelerator.free_memory()
    return found


def test_offloaded_sharded_and_bf16_weights_match_ddp() -> None:
    for rank in run_world(2, offloaded):
        assert rank["ddp built"] == rank["bf16 built"] == 128 and rank["offloaded built"] == 0
        assert rank["offloaded"] == pytest.approx(rank["ddp"], rel=1e-6)
        assert rank["bf16"] == pytest.approx(rank["ddp"], rel=0.02) and rank["bf16"] != rank["ddp"]
        assert rank["ddp state"] == rank["offloaded state"] == ("no", "torch.float32", [16, 8])
        assert rank["bf16 state"] == ("bf16", "torch.bfloat16", [16, 8])


def test_the_configs_optimizer_and_the_plugins_settings_match_ddp() -> None:
    for rank in run_world(2, by_config):
        assert rank["accumulation"] == 2
        assert rank["final"] == [4, 0.3, 0.02]
        assert rank["dummies"][0] == pytest.approx(rank["by hand"][0], rel=1e-5)
        assert rank["dummies"][1] == pytest.approx(rank["by hand"][1], rel=1e-6)
        assert rank["items"][0] == pytest.approx(rank["items ddp"][0], rel=1e-6)
        assert rank["callable"] == pytest.approx([0.01 * 0.5 ** (step + 1) for step in range(5)])


def resumed(folder: str) -> dict[str, Any]:
    """Takes five steps at stages 2 and 3, and resumes from the third at the same stage, at the other, and under DDP."""
    found: dict[str, Any] = {}

    def run(stage: int | None, saved: str | None) -> list[float]:
        accelerator = accelerator_of(stage)
        model, optimizer, scheduler = build(0 if saved is None else 9)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, data(), scheduler)
        if saved is not None:
            accelerator.load_state(f"{folder}/{saved}")
        losses = []
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if saved is None and len(losses) == 3:
                accelerator.save_state(f"{folder}/stage_{stage}")
        if saved is None:
            accelerator.save_model(model, f"{folder}/model_{stage}", max_shard_size="600B")
            found[f"weights {stage}"] = {
                name: value.tolist() for name, value in accelerator.get_state_dict(model).items()
            }
        accelerator.free_memory()
        return losses

    for stage in (2, 3):
        found[f"whole {stage}"] = run(stage, None)
        for other in (stage, 5 - stage, None):
            found[f"{stage} to {other}"] = run(other, f"stage_{stage}")
    return found


def reload_earlier_state(folder: str) -> dict[str, list[list[float]]]:
    """Returns the losses of five steps, and again after reloading the state before them, without optimizer state."""
    found = {}
    for stage in (1, 2, 3):
        for kind in ("AdamW", "SGD"):
            accelerator = accelerator_of(stage)
            model = build()[0]
            chosen = {"AdamW": {"lr": 0.05}, "SGD": {"lr": 0.05, "momentum": 0.9}}[kind]
            model, optimizer, loader = accelerator.prepare(
                model, getattr(torch.optim, kind)(model.parameters(), **chosen), data()
            )
            accelerator.save_state(f"{folder}/{stage}-{kind}")
            passes = []
            for again in (False, True):
                if again:
                    accelerator.load_state(f"{folder}/{stage}-{kind}")
                losses = []
                for x, y in loader:
                    loss = F.mse_loss(model(x), y)
                    losses.append(float(loss))
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                passes.append(losses)
            found[f"{stage} {kind}"] = passes
            accelerator.free_memory()
    return found


def test_reloading_an_earlier_state_repeats_the_losses_exactly(tmp_path: Path) -> None:
    for rank in run_world(2, reload_earlier_state, str(tmp_path)):
        for name, (first, second) in rank.items():
            assert len(first) == 5 and first == second, name


def test_a_saved_loop_resumes_under_every_strategy(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for rank in run_world(2, resumed, str(tmp_path)):
        for stage in (2, 3):
            rest = rank[f"whole {stage}"][3:]
            assert len(rest) == 2 and rank[f"{stage} to {stage}"] == rest
            for other in (5 - stage, None):
                assert rank[f"{stage} to {other}"] == pytest.approx(rest, rel=1e-5)
    for stage in (2, 3):
        folder = tmp_path / f"model_{stage}"
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 1
        for name, value in rank[f"weights {stage}"].items():
            assert load_file(folder / index[name])[name].tolist() == value


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def record(name: str, call: Any) -> None:
        try:
            call()
            found[name] = "accepted"
        except ConfigurationError as error:
            found[name] = str(error)

    def make(config: Any = None, plugin: dict[str, Any] | None = None, **kwargs: Any) -> Accelerator:
        return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config, **(plugin or {})), **kwargs)

    def prepare(*objects: Any, config: Any = None, **kwargs: Any) -> Any:
        return make(config, **kwargs).prepare(*(objects or (*build()[:2], data())))

    record("stage twice", lambda: make({"zero_optimization": {"stage": 1}}, {"zero_stage": 2}))
    record("clipping twice", lambda: make({"gradient_clipping": 1.0}, {"gradient_clipping": 0.5}))
    record("accumulation twice", lambda: make({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}))
    record("accumulation", lambda: prepare(config={"gradient_accumulation_steps": 2}, gradient_accumulation_steps=4))
    record("batch size", lambda: prepare(config={"train_micro_batch_size_per_gpu": 8}))
    record("precision", lambda: make({"bf16": {"enabled": True}}, mixed_precision="fp16"))
    record("two optimizers", lambda: prepare(build()[0], build()[1], build()[1], data()))
    record("config and script", lambda: prepare(config={"optimizer": CONFIG["optimizer"]}))
    record("dummy without section", lambda: prepare(build()[0], DummyOptim([]), data()))
    record("plugin and strategy", lambda: make(strategy="ddp"))
    record("two plugins", lambda: Accelerator(deepspeed_plugins={"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()}))
    record("no plugin", lambda: Accelerator(deepspeed_plugin={"zero_stage": 2}))
    record("msamp", lambda: make(plugin={"enable_msamp": True}))
    record("nvme", lambda: make(plugin={"zero_stage": 3, "offload_param_device": "nvme"}))
    record("optimizer before model", lambda: make().prepare(build()[1]))
    record("two models", lambda: make().prepare(build()[0], build()[0]))

    accelerator = make({"gradient_clipping": 0.5})
    model, optimizer, loader = accelerator.prepare(*build()[:2], data())
    frozen = accelerator.prepare_model(build()[0], evaluation_mode=True)
    x, y = next(iter(loader))
    assert frozen(x).shape == y.shape
    record("join_uneven_inputs", lambda: accelerator.strategy.own_loop.joining([model]))
    accelerator.backward(F.mse_loss(model(x), y))
    record("clip", lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1))
    record("clip value", lambda: accelerator.clip_grad_value_(model.parameters(), 0.1))
    record("clip some", lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], 0.5))
    record("backward twice", lambda: accelerator.backward(F.mse_loss(model(x), y)))
    optimizer.step()
    record("create_graph", lambda: accelerator.backward(F.mse_loss(model(x), y), create_graph=True))
    accelerator.free_memory()
    accelerator = make()
    model, optimizer, _ = build()
    late = model[2].weight.requires_grad_(False)
    loader = accelerator.prepare(model, optimizer, data())[2]
    next(iter(loader))
    late.requires_grad_(True)
    record("unfrozen", lambda: next(iter(loader)))
    accelerator.free_memory()
    return found


WORDS = {
    "stage twice": "stage=2 was given, but the DeepSpeed config says zero_optimization.stage=1",
    "clipping twice": "gradient_clipping=0.5 was given, but the DeepSpeed config says gradient_clipping=1.0",
    "accumulation twice": "gradient_accumulation_steps=4 was given, but the DeepSpeed config says",
    "accumulation": "The DeepSpeed config says gradient_accumulation_steps=2, but the run accumulates 4",
    "batch size": "train_micro_batch_size_per_gpu=8, but the training loader has batch_size=4",
    "precision": "The DeepSpeed config enables bf16, but the run's precision is '16-mixed'",
    "two optimizers": "2 optimizers were given, but DeepSpeed's engine drives only one",
    "config and script": "The DeepSpeed config has an optimizer (AdamW)",
    "dummy without section": "a DummyOptim was prepared, but the DeepSpeed config has no optimizer section",
    "plugin and strategy": "deepspeed_plugin and strategy were both given",
    "two plugins": "2 DeepSpeed plugins were given (a, b), but one engine drives the trained model",
    "no plugin": "pass a DeepSpeedPlugin, such as",
    "msamp": "MS-AMP",
    "nvme": "offload_param to 'nvme' needs an nvme_path",
    "optimizer before model": "an optimizer was prepared before its model",
    "two models": "is a second model, but deepspeed_stage_2's engine drives one",
    "join_uneven_inputs": "DeepSpeed does not support join_uneven_inputs",
    "clip": "gradient_clipping=0.5, but the run clips to 0.1",
    "clip value": "DeepSpeed clips gradients only by norm",
    "clip some": "DeepSpeed clips all trained parameters by one norm, but some were left out",
    "backward twice": "Skip a bad batch before its backward",
    "unfrozen": "2.weight was frozen when DeepSpeed's engine was created and is trained now",
    "create_graph": "inputs=…): its engine runs its own backward",
}


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    [found] = run_world(1, refusals)
    assert found.keys() == WORDS.keys()
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WORDS)
def test_conflicting_settings_and_misuse_of_the_engine_are_refused(refused: dict[str, str], name: str) -> None:
    assert WORDS[name] in refused[name]


def fail_and_skip(folder: str) -> dict[str, Any]:
    """Returns whether a refused load and losses that are not finite left the state unchanged, and the warnings."""
    found: dict[str, Any] = {}

    def step(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, factor: float = 1.0) -> None:
        x, y = next(iter(loader))
        accelerator.backward(F.mse_loss(model(x), y) * factor)
        optimizer.step()
        optimizer.zero_grad()

    def state(accelerator: Accelerator, model: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
        entries = accelerator.strategy.master_weights.saved_form(optimizer.optimizer).state_dict()["state"].values()
        moments = [part.flat.tolist() for entry in entries for part in entry.values() if isinstance(part, Fragment)]
        return moments, [value.tolist() for value in accelerator.get_state_dict(model).values()]

    for stage in (2, 3):
        for bias in (False, True):
            accelerator = accelerator_of(stage)
            model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=bias))
            parts = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), data())
            for _ in range(1 + bias):
                step(accelerator, *parts)
            if bias:
                break
            accelerator.save_state(f"{folder}/{stage}")
            accelerator.free_memory()
        before = state(accelerator, *parts[:2])
        with pytest.raises(ConfigurationError, match=r"Missing: 1\.bias"):
            accelerator.load_state(f"{folder}/{stage}")
        found[f"load {stage}"] = before[0] and before == state(accelerator, *parts[:2])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for factor in (float("nan"), float("inf")):
                step(accelerator, *parts, factor)
        found[f"skipped {stage}"] = before == state(accelerator, *parts[:2])
        found[f"warned {stage}"] = [str(entry.message) for entry in caught if "not finite" in str(entry.message)]
        accelerator.free_memory()
    return found


def test_failed_loads_and_skipped_steps_leave_the_state_unchanged(tmp_path: Path) -> None:
    for number, rank in enumerate(run_world(2, fail_and_skip, str(tmp_path))):
        for stage in (2, 3):
            assert rank[f"load {stage}"] and rank[f"skipped {stage}"]
            # Warns only once, on rank 0.
            assert len(rank[f"warned {stage}"]) == (number == 0)

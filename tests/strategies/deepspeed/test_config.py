"""ZeroConfig: conflicting settings raise an error that names both, unless the docs say which one wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line

from leyden import Trainer
from leyden.core.errors import ConfigurationError, MissingExtraError
from leyden.strategies import find_strategy
from leyden.strategies.base import RunSettings
from leyden.strategies.deepspeed.config import ARGUMENTS, ZeroConfig
from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

SETTINGS = {**QUIET, "max_steps": 1}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


def stage(number: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **more}}


def trainer_of(config: dict[str, Any] | None = None, strategy: dict[str, Any] | None = None, **trainer: Any) -> Trainer:
    return Trainer(strategy=DeepSpeedStrategy(config=config, **(strategy or {})), **{**SETTINGS, **trainer})


def check(config: dict[str, Any], **settings: Any) -> None:
    ZeroConfig(config).check(RunSettings(**settings), world_size=2)


def build(config: dict[str, Any], **run: Any) -> dict[str, Any]:
    return ZeroConfig(config).build(**run)


CONFLICTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "stage": (
        lambda: find_strategy(DeepSpeedStrategy(stage=2, config=stage(3))),
        ("stage=2", "zero_optimization.stage=3", "'auto'"),
    ),
    "unknown stage": (lambda: ZeroConfig(stage(4)), ("zero_optimization.stage=4", "0, 1, 2 or 3")),
    "argument and config": (
        lambda: ZeroConfig(stage(2, overlap_comm=True), overlap_comm=False),
        ("overlap_comm=False", "overlap_comm=True"),
    ),
    "unknown argument": (lambda: DeepSpeedStrategy(reduce_buket_size=5), ("Did you mean 'reduce_bucket_size'?",)),
    "accumulation": (
        lambda: trainer_of({"gradient_accumulation_steps": 4}),
        ("gradient_accumulation_steps=4", "accumulates 1", "accumulate_grad_batches=4"),
    ),
    "accumulation of the Trainer": (
        lambda: trainer_of({"gradient_accumulation_steps": 4}, accumulate_grad_batches=2),
        ("gradient_accumulation_steps=4", "accumulates 2"),
    ),
    "clipping": (
        lambda: trainer_of({"gradient_clipping": 1.0}, gradient_clip_val=0.5),
        ("gradient_clipping=1.0", "clips to 0.5", "gradient_clip_val"),
    ),
    "clipping by value": (
        lambda: trainer_of(gradient_clip_val=0.5, gradient_clip_algorithm="value"),
        ("gradient_clip_algorithm='value'", "'norm'"),
    ),
    "clipping without a norm": (
        lambda: trainer_of(stage(2, compute_grad_norm=False), gradient_clip_val=0.5),
        ("gradient_clip_val", "compute_grad_norm=false"),
    ),
    "batch size per rank": (
        lambda: check({"train_micro_batch_size_per_gpu": 8}, batch_size=4),
        ("train_micro_batch_size_per_gpu=8", "batch_size=4", "The loader decides"),
    ),
    "global batch size": (
        lambda: check({"train_batch_size": 64}, batch_size=4, accumulation=3),
        ("train_batch_size=64", "4 per rank × 2 rank(s) × 3 accumulated = 24"),
    ),
    "bf16 and 32-true": (
        lambda: build({"bf16": {"enabled": True}}, precision="32-true"),
        ("enables bf16", "'32-true'", "precision='bf16-true'"),
    ),
    "bf16 off and bf16-true": (
        lambda: build({"bf16": {"enabled": False}}, precision="bf16-true"),
        ("bf16.enabled=false", "'bf16-true'"),
    ),
    "fp16 and bf16-mixed": (
        lambda: build({"fp16": {"enabled": True}}, precision="bf16-mixed", device="cuda"),
        ("enables fp16", "'bf16-mixed'", "precision='16-true'"),
    ),
    "fp16 and bf16": (
        lambda: ZeroConfig({"fp16": {"enabled": True}, "bf16": {"enabled": True}}),
        ("enables fp16 and bf16", "Enable only one"),
    ),
    "torch_autocast and 32-true": (
        lambda: build({"torch_autocast": {"enabled": True}}, precision="32-true"),
        ("torch_autocast", "'32-true'", "bf16-mixed"),
    ),
    "fp16 on the CPU": (
        lambda: build({}, precision="16-mixed", device="cpu"),
        ("'16-mixed'", "Type fp16 is not supported on your device", "bf16"),
    ),
    "float64": (lambda: build({}, precision="64-true"), ("'64-true'", "strategy='fsdp'")),
    "fp8": (lambda: build({}, precision="fp8"), ("'fp8'", "strategy='fsdp'")),
    "bf16 weights at stage 0": (
        lambda: build(stage(0), precision="bf16-true"),
        ("stage 0", "stage=1", "precision='bf16-mixed'"),
    ),
    "optimizer in config and module": (
        lambda: check({"optimizer": ADAMW}, optimizers=1),
        ("optimizer (AdamW)", "configure_optimizers returns one too"),
    ),
    "no optimizer": (lambda: check({}, optimizers=0), ("neither configure_optimizers nor the config",)),
    "several optimizers": (lambda: check({}, optimizers=2), ("2 optimizers", "drives only one", "strategy='fsdp'")),
    "scheduler in config and module": (
        lambda: check({"scheduler": WARMUP}, optimizers=1, schedulers=1),
        ("scheduler (WarmupLR)", "configure_optimizers returns one too"),
    ),
    "parameters offloaded at stage 2": (
        lambda: ZeroConfig(stage=2, offload_parameters=True),
        ("'cpu'", "needs stage 3", "the stage is 2"),
    ),
    "optimizer offloaded at stage 0": (
        lambda: ZeroConfig(stage=0, offload_optimizer=True),
        ("needs stage 1, 2 or 3", "the stage is 0"),
    ),
    "optimizer on NVMe at stage 2": (
        lambda: ZeroConfig(stage=2, offload_optimizer="nvme", nvme_path="/disk"),
        ("'nvme'", "needs stage 3"),
    ),
    "NVMe without a path": (lambda: ZeroConfig(stage=3, offload_optimizer="nvme"), ("nvme_path",)),
    "unknown offload device": (lambda: ZeroConfig(stage=3, offload_optimizer="disk"), ("'cpu', 'nvme'",)),
    "offload device in argument and config": (
        lambda: ZeroConfig(
            stage(3, offload_optimizer={"device": "nvme", "nvme_path": "/disk"}), offload_optimizer="cpu"
        ),
        ("offload_optimizer.device='cpu'", "'nvme'"),
    ),
    "NVMe path without NVMe offload": (
        lambda: ZeroConfig(stage=3, offload_optimizer="cpu", nvme_path="/disk"),
        ("nvme_path='/disk'", "to 'nvme'", "Leave it out"),
    ),
    "pinned memory without offload": (
        lambda: ZeroConfig(stage=3, pin_memory=True),
        ("pin_memory=True", "nothing is offloaded", "Leave it out"),
    ),
    "NVMe path in argument and config": (
        lambda: ZeroConfig(stage(3, offload_optimizer={"device": "nvme", "nvme_path": "/a"}), nvme_path="/b"),
        ("nvme_path='/b'", "nvme_path='/a'"),
    ),
    "arguments besides a ZeroConfig": (
        lambda: DeepSpeedStrategy(config=ZeroConfig(stage=1), stage=3, overlap_comm=True),
        ("ZeroConfig(…)", "stage and overlap_comm"),
    ),
    "scaler arguments without a scaler": (
        lambda: ZeroConfig(loss_scale=128.0, hysteresis=2).build(precision="bf16-true"),
        ("loss_scale= and hysteresis=", "'bf16-true'", "precision='16-true'"),
    ),
    "misspelled key": (
        lambda: ZeroConfig({"gradient_cliping": 1.0}),
        ("'gradient_cliping'", "Did you mean 'gradient_clipping'?"),
    ),
    "tensor parallelism": (lambda: ZeroConfig({"tensor_parallel": {"autotp_size": 2}}), ("tensor_parallel",)),
    "gradients summed over ranks": (
        lambda: ZeroConfig({"gradient_allreduce_op": "sum"}),
        ("gradient_allreduce_op", "'mean'"),
    ),
    "unmanaged accumulation": (
        lambda: ZeroConfig({"managed_gradient_accumulation": False}),
        ("managed_gradient_accumulation",),
    ),
    "auto without a value": (
        lambda: build({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
        ("optimizer.params.lr", "'auto'", "Set a value"),
    ),
    "autocast in another dtype": (
        lambda: build({"torch_autocast": {"enabled": True, "dtype": "float16"}}, precision="bf16-mixed"),
        ("torch_autocast", "float16", "'bf16-mixed'"),
    ),
    "no autocast for 16-mixed": (
        lambda: build({"torch_autocast": {"enabled": False}}, precision="16-mixed", device="cuda"),
        ("torch_autocast.enabled=false", "'16-mixed'"),
    ),
    "Apex": (lambda: ZeroConfig({"amp": {"enabled": True}}), ("amp", "Apex", "bf16-mixed")),
    "optimizer that needs whole parameters": (
        lambda: ZeroConfig({}, stage=2).check_optimizer(torch.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))])),
        ("Adafactor", "stage 2", "stage=0"),
    ),
    "fully frozen parameter group": (
        lambda: ZeroConfig({}, stage=1).check_optimizer(
            torch.optim.SGD(
                [{"params": [torch.ones(1, requires_grad=needs)]} for needs in (True, False)],
                lr=0.1,
            )
        ),
        ("only frozen parameters", "stage=3"),
    ),
    "manual optimization": (lambda: check({}, manual=True), ("manual optimization", "automatic_optimization = True")),
    "overridden backward": (lambda: check({}, own_backward=True), ("overrides backward",)),
    "missing file": (lambda: ZeroConfig("/no/such/file.json"), ("/no/such/file.json", "cannot be read")),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicting_settings_raise_an_error_that_names_both(name: str) -> None:
    make, words = CONFLICTS[name]
    with pytest.raises(ConfigurationError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


# precedence -----------------------------------------------------------------------------------------------------------
def test_run_settings_are_filled_in_and_other_keys_stay() -> None:
    given = {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7},
        "wall_clock_breakdown": False,
    }
    before = json.dumps(given)
    config = ZeroConfig(given)
    config.check(RunSettings(accumulation=4, batch_size=2, clip_value=0.5, optimizers=1), world_size=2)
    assert config.build(precision="bf16-true", device="cpu", micro_batch=2) == {
        # The engine is told where a window ends, and gradients are divided by its actual length.
        "gradient_accumulation_steps": 1,
        # The run's clipping is set before each step.
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7},
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    assert json.dumps(given) == before


def test_unrecognized_keys_are_passed_to_deepspeed() -> None:
    """They may belong to a later DeepSpeed or to the user's tools."""
    assert build({"my_company": {"owner": "me"}})["my_company"] == {"owner": "me"}


def test_null_sections_count_as_missing() -> None:
    assert ZeroConfig({"zero_optimization": None, "aio": None}, stage=1, block_size=4).values == {
        "zero_optimization": {"stage": 1},
        "aio": {"block_size": 4},
    }


def test_offload_arguments_apply_to_the_configs_offload_sections() -> None:
    config = stage(3, offload_optimizer={"device": "nvme"}, offload_param={"device": "cpu"})
    placed = ZeroConfig(config, nvme_path=Path("/disk"), pin_memory=True).get("zero_optimization")
    assert placed["offload_optimizer"] == {"device": "nvme", "nvme_path": "/disk", "pin_memory": True}
    assert placed["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_equal_values_do_not_conflict() -> None:
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "train_batch_size": 16}
    check(config, accumulation=2, clip_value=0.5, batch_size=4)
    assert ZeroConfig(stage(3), stage=3).stage == 3


def test_the_configs_clipping_applies_if_the_run_sets_none() -> None:
    check({"gradient_clipping": 1.0}, clip_value=None)
    assert build({"gradient_clipping": 1.0})["gradient_clipping"] == 1.0


def test_accumulation_that_changes_during_a_run_does_not_conflict() -> None:
    check({"gradient_accumulation_steps": 4}, accumulation=None)


def test_bf16_in_the_config_overrides_autocast() -> None:
    assert build({"bf16": {"enabled": True}}, precision="bf16-mixed")["bf16"] == {"enabled": True}
    assert "bf16" not in build({}, precision="bf16-mixed")
    assert ZeroConfig({"bf16": {"enabled": True}}).lower_weights("bf16-mixed") == "bf16"


def test_fp16_on_a_gpu_uses_deepspeeds_loss_scaler() -> None:
    assert build({}, precision="16-mixed", device="cuda")["torch_autocast"] == {"enabled": True, "dtype": "float16"}
    half = ZeroConfig(loss_scale=128.0).build(precision="16-true", device="cuda")
    assert half["fp16"] == {"enabled": True, "loss_scale": 128.0}


def test_adam_on_the_cpu_defaults_to_torchs_to_avoid_compiling() -> None:
    assert build({"optimizer": ADAMW}, device="cpu")["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in build({"optimizer": ADAMW}, device="cuda")["optimizer"]["params"]
    own = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": False}}
    assert build({"optimizer": own}, device="cpu")["optimizer"]["params"]["torch_adam"] is False


def test_the_run_takes_over_the_configs_scheduler() -> None:
    assert "scheduler" not in build({"scheduler": WARMUP})
    assert ZeroConfig({"scheduler": WARMUP}).scheduler == WARMUP


def test_fill_sets_auto_values_and_refuses_to_change_others() -> None:
    config = ZeroConfig({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    config.fill({"optimizer.params.lr": 0.1, "optimizer.params.weight_decay": 0.0})
    assert config.build()["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.0, "torch_adam": True}
    with pytest.raises(ConfigurationError, match=r"optimizer\.params\.lr=0\.2"):
        config.fill({"optimizer.params.lr": 0.2})


def test_a_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(stage(3, stage3_max_live_parameters=5)))
    assert ZeroConfig(tmp_path / "ds.json").get("zero_optimization.stage3_max_live_parameters") == 5
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not valid JSON"):
        ZeroConfig(str(tmp_path / "ds.json"))


# names ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "number", "optimizer", "parameters"),
    [
        ("deepspeed", 2, None, None),
        ("deepspeed_stage_1", 1, None, None),
        ("deepspeed_stage_2", 2, None, None),
        ("deepspeed_stage_2_offload", 2, "cpu", None),
        ("deepspeed_stage_3", 3, None, None),
        ("deepspeed_stage_3_offload", 3, "cpu", "cpu"),
    ],
)
def test_strategy_names_set_stage_and_offload(
    name: str, number: int, optimizer: str | None, parameters: str | None
) -> None:
    strategy = find_strategy(name, "cpu", 2)
    assert isinstance(strategy, DeepSpeedStrategy)
    assert (strategy.stage, strategy.ranks.world_size) == (number, 2)
    assert strategy.config.offloads("optimizer") == optimizer
    assert strategy.config.offloads("param") == parameters
    assert strategy.replicates is strategy.supports_inference_mode is (number < 3)


def test_every_argument_sets_its_config_key() -> None:
    strategy = DeepSpeedStrategy(**dict.fromkeys(ARGUMENTS, 1))
    for path in ARGUMENTS.values():
        assert strategy.config.get(path) == 1
    nvme = ZeroConfig(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path="/disk", pin_memory=False)
    assert nvme.values["zero_optimization"]["offload_param"] == {
        "device": "nvme",
        "nvme_path": "/disk",
        "pin_memory": False,
    }


# before training ------------------------------------------------------------------------------------------------------
class NeverTrained(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("training started")


def test_a_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'leyden\[deepspeed\]'"):
        Trainer(strategy="deepspeed", **SETTINGS).fit(NeverTrained(), [torch.ones(2, 2)])

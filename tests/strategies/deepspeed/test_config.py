"""ZeRO's config: a contradiction is an error that names both sides, or the docs state the winner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line

from leyden import Trainer
from leyden.strategies import find_strategy
from leyden.strategies.deepspeed.config import ARGUMENTS, ZeroConfig
from leyden.strategies.deepspeed.strategy import DeepSpeedStrategy
from leyden.strategies.errors import ConfigurationError, MissingExtraError
from leyden.strategies.settings import RunSettings

SETTINGS = {**QUIET, "max_steps": 1}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


def stage(number: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **more}}


def trained(config: dict[str, Any] | None = None, strategy: dict[str, Any] | None = None, **trainer: Any) -> Trainer:
    return Trainer(strategy=DeepSpeedStrategy(config=config, **(strategy or {})), **{**SETTINGS, **trainer})


def checked(config: dict[str, Any], **settings: Any) -> None:
    ZeroConfig(config).check(RunSettings(**settings), world_size=2)


def built(config: dict[str, Any], **run: Any) -> dict[str, Any]:
    return ZeroConfig(config).build(**run)


CONFLICTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "stage": (
        lambda: find_strategy(DeepSpeedStrategy(stage=2, config=stage(3))),
        ("stage=2", "zero_optimization.stage=3", "'auto'"),
    ),
    "unknown stage": (lambda: ZeroConfig(stage(4)), ("zero_optimization.stage=4", "0, 1, 2 or 3")),
    "an argument and the config": (
        lambda: ZeroConfig(stage(2, overlap_comm=True), overlap_comm=False),
        ("overlap_comm=False", "overlap_comm=True"),
    ),
    "unknown argument": (lambda: DeepSpeedStrategy(reduce_buket_size=5), ("Did you mean 'reduce_bucket_size'?",)),
    "accumulation": (
        lambda: trained({"gradient_accumulation_steps": 4}),
        ("gradient_accumulation_steps=4", "accumulates 1", "accumulate_grad_batches=4"),
    ),
    "accumulation of the Trainer": (
        lambda: trained({"gradient_accumulation_steps": 4}, accumulate_grad_batches=2),
        ("gradient_accumulation_steps=4", "accumulates 2"),
    ),
    "clipping": (
        lambda: trained({"gradient_clipping": 1.0}, gradient_clip_val=0.5),
        ("gradient_clipping=1.0", "clips to 0.5", "gradient_clip_val"),
    ),
    "clipping by value": (
        lambda: trained(gradient_clip_val=0.5, gradient_clip_algorithm="value"),
        ("gradient_clip_algorithm='value'", "'norm'"),
    ),
    "clipping without a norm": (
        lambda: trained(stage(2, compute_grad_norm=False), gradient_clip_val=0.5),
        ("gradient_clip_val", "compute_grad_norm=false"),
    ),
    "batch size of a rank": (
        lambda: checked({"train_micro_batch_size_per_gpu": 8}, batch_size=4),
        ("train_micro_batch_size_per_gpu=8", "batch_size=4", "The loader decides"),
    ),
    "batch size of all": (
        lambda: checked({"train_batch_size": 64}, batch_size=4, accumulation=3),
        ("train_batch_size=64", "4 per rank × 2 rank(s) × 3 accumulated = 24"),
    ),
    "bf16 and 32-true": (
        lambda: built({"bf16": {"enabled": True}}, precision="32-true"),
        ("enables bf16", "'32-true'", "precision='bf16-true'"),
    ),
    "bf16 off and bf16-true": (
        lambda: built({"bf16": {"enabled": False}}, precision="bf16-true"),
        ("bf16.enabled=false", "'bf16-true'"),
    ),
    "fp16 and bf16-mixed": (
        lambda: built({"fp16": {"enabled": True}}, precision="bf16-mixed", device="cuda"),
        ("enables fp16", "'bf16-mixed'", "precision='16-true'"),
    ),
    "fp16 and bf16": (
        lambda: ZeroConfig({"fp16": {"enabled": True}, "bf16": {"enabled": True}}),
        ("enables fp16 and bf16", "Enable only one"),
    ),
    "torch_autocast and 32-true": (
        lambda: built({"torch_autocast": {"enabled": True}}, precision="32-true"),
        ("torch_autocast", "'32-true'", "bf16-mixed"),
    ),
    "fp16 on the CPU": (
        lambda: built({}, precision="16-mixed", device="cpu"),
        ("'16-mixed'", "Type fp16 is not supported on your device", "bf16"),
    ),
    "float64": (lambda: built({}, precision="64-true"), ("'64-true'", "strategy='fsdp'")),
    "fp8": (lambda: built({}, precision="fp8"), ("'fp8'", "strategy='fsdp'")),
    "bf16 weights at stage 0": (
        lambda: built(stage(0), precision="bf16-true"),
        ("stage 0", "stage=1", "precision='bf16-mixed'"),
    ),
    "two optimizers of two owners": (
        lambda: checked({"optimizer": ADAMW}, optimizers=1),
        ("optimizer (AdamW)", "configure_optimizers returns one too"),
    ),
    "no optimizer": (lambda: checked({}, optimizers=0), ("neither configure_optimizers nor the config",)),
    "several optimizers": (lambda: checked({}, optimizers=2), ("2 optimizers", "drives only one", "strategy='fsdp'")),
    "two schedulers": (
        lambda: checked({"scheduler": WARMUP}, optimizers=1, schedulers=1),
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
    "offloaded to nowhere": (lambda: ZeroConfig(stage=3, offload_optimizer="disk"), ("'cpu', 'nvme'",)),
    "offload of the argument and the config": (
        lambda: ZeroConfig(
            stage(3, offload_optimizer={"device": "nvme", "nvme_path": "/disk"}), offload_optimizer="cpu"
        ),
        ("offload_optimizer.device='cpu'", "'nvme'"),
    ),
    "a path for what is on no disk": (
        lambda: ZeroConfig(stage=3, offload_optimizer="cpu", nvme_path="/disk"),
        ("nvme_path='/disk'", "to 'nvme'", "Leave it out"),
    ),
    "pinned memory for nothing": (
        lambda: ZeroConfig(stage=3, pin_memory=True),
        ("pin_memory=True", "nothing is offloaded", "Leave it out"),
    ),
    "a path of the argument and the config": (
        lambda: ZeroConfig(stage(3, offload_optimizer={"device": "nvme", "nvme_path": "/a"}), nvme_path="/b"),
        ("nvme_path='/b'", "nvme_path='/a'"),
    ),
    "arguments beside a whole config": (
        lambda: DeepSpeedStrategy(config=ZeroConfig(stage=1), stage=3, overlap_comm=True),
        ("ZeroConfig(…)", "stage and overlap_comm"),
    ),
    "a scaler's arguments without one": (
        lambda: ZeroConfig(loss_scale=128.0, hysteresis=2).build(precision="bf16-true"),
        ("loss_scale= and hysteresis=", "'bf16-true'", "precision='16-true'"),
    ),
    "a key with a typo": (
        lambda: ZeroConfig({"gradient_cliping": 1.0}),
        ("'gradient_cliping'", "Did you mean 'gradient_clipping'?"),
    ),
    "ranks of tensor parallelism": (lambda: ZeroConfig({"tensor_parallel": {"autotp_size": 2}}), ("tensor_parallel",)),
    "a sum over ranks": (lambda: ZeroConfig({"gradient_allreduce_op": "sum"}), ("gradient_allreduce_op", "'mean'")),
    "windows that DeepSpeed does not manage": (
        lambda: ZeroConfig({"managed_gradient_accumulation": False}),
        ("managed_gradient_accumulation",),
    ),
    "an auto that nobody fills": (
        lambda: built({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
        ("optimizer.params.lr", "'auto'", "Set a value"),
    ),
    "autocast in another dtype": (
        lambda: built({"torch_autocast": {"enabled": True, "dtype": "float16"}}, precision="bf16-mixed"),
        ("torch_autocast", "float16", "'bf16-mixed'"),
    ),
    "no autocast for 16-mixed": (
        lambda: built({"torch_autocast": {"enabled": False}}, precision="16-mixed", device="cuda"),
        ("torch_autocast.enabled=false", "'16-mixed'"),
    ),
    "Apex": (lambda: ZeroConfig({"amp": {"enabled": True}}), ("amp", "Apex", "bf16-mixed")),
    "an optimizer of whole parameters": (
        lambda: ZeroConfig({}, stage=2).check_optimizer(torch.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))])),
        ("Adafactor", "stage 2", "stage=0"),
    ),
    "a group that is frozen as a whole": (
        lambda: ZeroConfig({}, stage=1).check_optimizer(
            torch.optim.SGD(
                [{"params": [torch.ones(1, requires_grad=needs)]} for needs in (True, False)],
                lr=0.1,
            )
        ),
        ("only frozen parameters", "stage=3"),
    ),
    "manual optimization": (lambda: checked({}, manual=True), ("manual optimization", "automatic_optimization = True")),
    "a backward of one's own": (lambda: checked({}, own_backward=True), ("overrides backward",)),
    "no such file": (lambda: ZeroConfig("/no/such/file.json"), ("/no/such/file.json", "cannot be read")),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_a_contradiction_is_an_error_that_names_both_sides(name: str) -> None:
    make, words = CONFLICTS[name]
    with pytest.raises(ConfigurationError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


# winners --------------------------------------------------------------------------------------------------------------
def test_what_belongs_to_the_run_is_filled_in_and_the_rest_stays() -> None:
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
        # The engine learns the window's end, and its true length divides.
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


def test_unknown_keys_that_resemble_none_are_passed_on() -> None:
    """Of a later DeepSpeed, or of the user's own tools."""
    assert built({"my_company": {"owner": "me"}})["my_company"] == {"owner": "me"}


def test_a_section_that_is_null_is_none() -> None:
    assert ZeroConfig({"zero_optimization": None, "aio": None}, stage=1, block_size=4).values == {
        "zero_optimization": {"stage": 1},
        "aio": {"block_size": 4},
    }


def test_where_and_how_to_offload_goes_for_the_configs_offloads_too() -> None:
    config = stage(3, offload_optimizer={"device": "nvme"}, offload_param={"device": "cpu"})
    placed = ZeroConfig(config, nvme_path=Path("/disk"), pin_memory=True).get("zero_optimization")
    assert placed["offload_optimizer"] == {"device": "nvme", "nvme_path": "/disk", "pin_memory": True}
    assert placed["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_the_same_value_given_twice_is_no_contradiction() -> None:
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "train_batch_size": 16}
    checked(config, accumulation=2, clip_value=0.5, batch_size=4)
    assert ZeroConfig(stage(3), stage=3).stage == 3


def test_the_config_clips_where_the_run_does_not() -> None:
    checked({"gradient_clipping": 1.0}, clip_value=None)
    assert built({"gradient_clipping": 1.0})["gradient_clipping"] == 1.0


def test_accumulation_that_changes_during_the_run_belongs_to_the_run() -> None:
    checked({"gradient_accumulation_steps": 4}, accumulation=None)


def test_the_configs_bf16_wins_over_autocast() -> None:
    assert built({"bf16": {"enabled": True}}, precision="bf16-mixed")["bf16"] == {"enabled": True}
    assert "bf16" not in built({}, precision="bf16-mixed")
    assert ZeroConfig({"bf16": {"enabled": True}}).lower_weights("bf16-mixed") == "bf16"


def test_fp16_on_a_gpu_brings_deepspeeds_own_scaler() -> None:
    assert built({}, precision="16-mixed", device="cuda")["torch_autocast"] == {"enabled": True, "dtype": "float16"}
    half = ZeroConfig(loss_scale=128.0).build(precision="16-true", device="cuda")
    assert half["fp16"] == {"enabled": True, "loss_scale": 128.0}


def test_adam_on_the_cpu_is_torchs_so_that_nothing_is_compiled() -> None:
    assert built({"optimizer": ADAMW}, device="cpu")["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in built({"optimizer": ADAMW}, device="cuda")["optimizer"]["params"]
    own = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": False}}
    assert built({"optimizer": own}, device="cpu")["optimizer"]["params"]["torch_adam"] is False


def test_a_scheduler_is_the_runs_to_step_and_to_save() -> None:
    assert "scheduler" not in built({"scheduler": WARMUP})
    assert ZeroConfig({"scheduler": WARMUP}).scheduler == WARMUP


def test_values_may_be_filled_from_elsewhere() -> None:
    config = ZeroConfig({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    config.fill({"optimizer.params.lr": 0.1, "optimizer.params.weight_decay": 0.0})
    assert config.build()["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.0, "torch_adam": True}
    with pytest.raises(ConfigurationError, match=r"optimizer\.params\.lr=0\.2"):
        config.fill({"optimizer.params.lr": 0.2})


def test_a_file_is_read(tmp_path: Path) -> None:
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
def test_names_choose_stage_and_offload(name: str, number: int, optimizer: str | None, parameters: str | None) -> None:
    strategy = find_strategy(name, "cpu", 2)
    assert isinstance(strategy, DeepSpeedStrategy)
    assert (strategy.stage, strategy.ranks.world_size) == (number, 2)
    assert strategy.config.offloads("optimizer") == optimizer
    assert strategy.config.offloads("param") == parameters
    assert strategy.replicates is strategy.supports_inference_mode is (number < 3)


def test_every_plain_argument_lands_in_its_place() -> None:
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
class Untrained(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("nothing may be trained")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'leyden\[deepspeed\]'"):
        Trainer(strategy="deepspeed", **SETTINGS).fit(Untrained(), [torch.ones(2, 2)])

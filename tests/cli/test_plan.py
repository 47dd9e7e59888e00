"""The launch plan that flags and a configuration file lead to: the ranks, their machines and their variables."""

from __future__ import annotations

from typing import Any

import pytest

from leyden import ConfigurationError
from leyden.cli.launch.plan import ElasticOptions, LaunchPlan, planned_for, resolve
from leyden.cli.settings.keys import PRECISIONS
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import parse
from leyden.strategies import NAMES as STRATEGIES
from leyden.strategies.precision import NAMES as PRECISION_NAMES
from leyden.trainer.launched import read_launched, with_options

CPU, GPUS = Machine(cpus=8), Machine(gpus=4, cpus=8, bf16=True)
TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "4711",
}


def plan(
    found: dict[str, Any], machine: Machine = CPU, elastic: ElasticOptions | None = None, **environ: str
) -> LaunchPlan:
    return resolve(parse(found), elastic or ElasticOptions(), machine, environ)


@pytest.mark.parametrize(
    ("found", "machine", "ranks", "accelerator"),
    [
        ({}, CPU, 1, "cpu"),
        ({}, GPUS, 4, "cuda"),
        ({"num_processes": 2}, GPUS, 2, "cuda"),
        ({"use_cpu": True}, GPUS, 1, "cpu"),
        ({"gpu_ids": "1,3"}, GPUS, 2, "cuda"),
    ],
)
def test_one_machine_gets_one_rank_per_device(
    found: dict[str, Any], machine: Machine, ranks: int, accelerator: str
) -> None:
    planned = plan(found, machine)
    assert (planned.per_machine, planned.accelerator) == (ranks, accelerator)
    assert planned.variables().get("CUDA_VISIBLE_DEVICES") == found.get("gpu_ids")


def test_ranks_divide_the_cores_unless_omp_num_threads_is_set() -> None:
    assert plan({}).threads == 8
    assert plan({"num_processes": 2}).threads == 4
    assert plan({"num_processes": 2}, OMP_NUM_THREADS="3").threads == 3


@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP", "DEEPSPEED"])
def test_a_gpu_configuration_without_gpus_raises_but_can_be_planned(kind: str) -> None:
    found = {"distributed_type": kind, "use_cpu": False, "num_processes": 8, "num_machines": 2, "machine_rank": 0}
    found["main_process_ip"] = "host"
    with pytest.raises(
        ConfigurationError, match=f"distributed_type: {kind}.*torch sees no GPU on this machine: add --cpu"
    ):
        plan(found)
    assert plan({**found, "use_cpu": True, "distributed_type": "FSDP"}).accelerator == "cpu"
    hypothetical = plan(found, planned_for(parse(found), CPU))
    assert (hypothetical.accelerator, hypothetical.per_machine) == ("cuda", 4)
    assert "beware      torch sees no GPU on this machine" in hypothetical.lines("python train.py")
    with pytest.raises(ConfigurationError, match="nothing says how many: add --num_processes"):
        planned_for(parse({"distributed_type": kind, "use_cpu": False}), CPU)
    assert planned_for(parse(found), GPUS) is GPUS
    # Without use_cpu, FSDP runs on the devices of this machine.
    assert plan({"distributed_type": "FSDP", "num_processes": 2}).accelerator == "cpu"


def test_gpu_ids_without_a_gpu_warn() -> None:
    assert "beware      gpu_ids: 0,1 has no effect" in plan({"gpu_ids": "0,1"}).lines("python train.py")
    assert "beware      gpu_ids: 0,1 has no effect" in plan({"gpu_ids": "0,1", "use_cpu": True}, GPUS).lines("a")
    assert "beware" not in plan({"gpu_ids": "all"}).lines("python train.py")


def test_several_machines_rendezvous_at_the_main_address() -> None:
    where = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "num_processes": 4}
    found = plan(where)
    assert (found.machine_rank, found.per_machine) == (1, 2)
    assert (found.address, found.port, found.backend) == ("10.0.0.1", 29500, "static")
    # A static rendezvous happens only once, but restarted ranks must rendezvous again.
    assert plan({**where, "max_restarts": 1}).backend == "c10d"


def test_machines_without_a_rank_rendezvous_at_an_endpoint() -> None:
    found = plan({"num_machines": 2}, elastic=ElasticOptions(endpoint="host:123"))
    assert (found.machine_rank, found.address, found.port, found.backend) == (None, "host", 123, "c10d")


def test_one_slurm_task_per_machine_becomes_an_agent() -> None:
    found = plan({"compute_environment": "SLURM"}, GPUS, **TASK)
    assert found.rank is None
    assert (found.machines, found.machine_rank, found.per_machine) == (2, 1, 4)
    assert (found.address, found.port, found.backend) == ("gpu007", 19711, "static")


def test_one_slurm_task_per_rank_becomes_the_rank() -> None:
    task = {**TASK, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    found = plan({"main_process_port": 5000}, **task)
    assert found.rank is not None
    expected = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    expected |= {"MASTER_ADDR": "gpu007", "MASTER_PORT": "5000", "LEYDEN_STARTER": "slurm"}
    assert expected.items() <= found.variables().items()
    with pytest.raises(ConfigurationError, match="srun started 4 tasks"):
        plan({"num_processes": 2}, **task)
    with pytest.raises(ConfigurationError, match="one task there"):
        plan({"max_restarts": 1}, **task)


@pytest.mark.parametrize(
    ("found", "machine", "words"),
    [
        ({"num_processes": 0}, CPU, "give a number from 1"),
        ({"num_processes": 3, "num_machines": 2, "machine_rank": 0, "main_process_ip": "a"}, CPU, "a multiple of 2"),
        ({"num_processes": 5}, GPUS, "which has 4 GPUs"),
        ({"gpu_ids": "0,1,2,3,4"}, GPUS, "names 5 GPUs"),
        ({"distributed_type": "MULTI_GPU"}, CPU, "add --cpu"),
        ({"distributed_type": "MULTI_NPU"}, CPU, "MULTI_GPU or MULTI_CPU"),
        ({"num_machines": 2}, CPU, "no machine_rank and no main_process_ip"),
        ({"num_machines": 2, "machine_rank": 2, "main_process_ip": "a"}, CPU, "out of range for 2 machines"),
        ({"rdzv_backend": "gossip"}, CPU, "use static or c10d"),
        ({"num_machines": 2, "rdzv_backend": "static", "max_restarts": 1}, CPU, "use rdzv_backend: c10d"),
        ({"compute_environment": "SLURM"}, CPU, "srun --ntasks-per-node=1 leyden launch"),
        ({"num_processes": 4, "parallelism_config": {"parallelism_config_tp_size": 3}}, CPU, "tp=3 does not match 4"),
        (
            {
                "num_processes": 4,
                "parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2},
            },
            CPU,
            "cp_size=2 and sp_size=2 both divide",
        ),
        (
            {"num_processes": 2, "use_deepspeed": True, "parallelism_config": {"parallelism_config_sp_size": 2}},
            CPU,
            "Use distributed_type: FSDP",
        ),
        (
            {"num_processes": 2, "parallelism_config": {"parallelism_config_cp_size": 3}},
            CPU,
            "cp=3 does not match 2 ranks",
        ),
        (
            {
                "num_processes": 2,
                "parallelism_config": {
                    "parallelism_config_cp_size": 2,
                    "parallelism_config_cp_comm_strategy": "alltoall",
                },
            },
            CPU,
            "around a ring",
        ),
        (
            {"num_processes": 2, "use_deepspeed": True, "parallelism_config": {"parallelism_config_ep_size": 2}},
            CPU,
            "experts are divided on a mesh, without DeepSpeed",
        ),
        (
            {"num_processes": 4, "parallelism_config": {"parallelism_config_ep_size": 3}},
            CPU,
            "ep=3 does not divide dp_shard=4",
        ),
        (
            {
                "num_processes": 4,
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"},
                "parallelism_config": {"parallelism_config_ep_size": 2},
            },
            CPU,
            "ep=2 does not divide dp_shard=1",
        ),
        ({"tp_config": {"tp_size": 2, "tp_plan": "auto"}}, CPU, "give tp_size below it"),
        ({"use_deepspeed": True, "deepspeed_config": {"gradient_clipping": "much"}}, CPU, "is not a number"),
    ],
)
def test_an_impossible_plan_raises(found: dict[str, Any], machine: Machine, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan(found, machine)


def test_an_endpoint_requires_host_port_and_c10d() -> None:
    with pytest.raises(ConfigurationError, match="give host:port"):
        plan({"num_machines": 2}, elastic=ElasticOptions(endpoint="host"))
    with pytest.raises(ConfigurationError, match="leave rdzv_backend out"):
        plan({"num_machines": 2, "rdzv_backend": "static"}, elastic=ElasticOptions(endpoint="host:1"))


def test_settings_reach_scripts_through_environment_variables() -> None:
    found = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "use_cpu": True,
        "debug": True,
        "deepspeed_config": {
            "zero_stage": 3,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
            "offload_param_device": "cpu",
        },
        "dynamo_config": {"dynamo_backend": "inductor", "dynamo_use_fullgraph": True},
    }
    made = plan(found)
    launched = read_launched(made.variables())
    assert launched == made.launched
    assert launched is not None
    assert (launched.strategy, launched.options) == ("deepspeed_stage_3", {"offload_param_device": "cpu"})
    assert (launched.precision, launched.accumulate_grad_batches, launched.gradient_clip_val) == ("bf16-mixed", 4, 0.5)
    assert launched.compile == {"backend": "inductor", "fullgraph": True}
    assert made.variables()["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert read_launched({}) is None


@pytest.mark.parametrize("kind", ["MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
@pytest.mark.parametrize("precision", ["no", *PRECISIONS])
def test_every_strategy_and_precision_a_launch_sets_exists_in_the_trainer(kind: str, precision: str) -> None:
    launched = plan({"num_processes": 2, "distributed_type": kind, "mixed_precision": precision}).launched
    assert launched.strategy is None or launched.strategy in STRATEGIES
    assert launched.precision is None or launched.precision in PRECISION_NAMES


def test_the_plan_lists_keys_without_effect() -> None:
    made = plan({"same_network": True, "num_processes": 2})
    assert "no effect   same_network (--dry-run says why)" in made.lines("python a.py")
    assert "no effect   same_network: the main address is used as given." in made.lines("python a.py", reasons=True)
    assert len(made.lines("python a.py").splitlines()) <= 6


def mesh_of(found: dict[str, Any]) -> Any:
    """Returns the strategy that a script on 4 ranks gets."""
    launched = plan({"num_processes": 4, "use_cpu": True, **found}, CPU).launched
    assert launched.strategy == "mesh"
    return with_options("mesh", launched.options)


MEGATRON = {"distributed_type": "MEGATRON_LM"}


@pytest.mark.parametrize(
    ("found", "layout"),
    [
        ({"parallelism_config": {"parallelism_config_ep_size": 2}}, "dp_shard 4"),
        (
            {"parallelism_config": {"parallelism_config_ep_size": 2, "parallelism_config_dp_shard_size": 2}},
            "dp_replicate 2 × dp_shard 2",
        ),
        ({**MEGATRON, "megatron_lm_config": {"megatron_lm_ep_degree": 2}}, "dp_replicate 2 × dp_shard 2"),
        (
            {
                **MEGATRON,
                "megatron_lm_config": {
                    "megatron_lm_expert_model_parallel_size": 2,
                    "megatron_lm_use_distributed_optimizer": True,
                },
            },
            "dp_shard 4",
        ),
        ({**MEGATRON, "megatron_lm_config": {"megatron_lm_ep_degree": 2, "megatron_lm_cp_degree": 4}}, "cp 4"),
    ],
)
def test_a_size_divides_experts(found: dict[str, Any], layout: str) -> None:
    assert str(mesh_of(found).layout) == f"{layout} (experts over ep 2)"


AXES = ("dp_replicate", "dp_shard", "tp", "cp")


@pytest.mark.parametrize(
    ("found", "strategy", "sizes"),
    [
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "mesh", (2, 1, 2, 1)),
        ({"parallelism_config": {f"parallelism_config_{axis}_size": 1 for axis in (*AXES, "sp")}}, None, None),
        ({"parallelism_config": {"parallelism_config_dp_replicate_size": 4}}, "ddp", None),
        ({"distributed_type": "TP", "tp_config": {"tp_size": 4}}, "mesh", (1, 1, 4, 1)),
        ({"parallelism_config": {"parallelism_config_cp_size": 2}}, "mesh", (2, 1, 1, 2)),
        ({"parallelism_config": {"parallelism_config_sp_size": 2}}, "mesh", (2, 1, 1, 2)),
        ({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_cp_degree": 2}}, "mesh", (2, 1, 1, 2)),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
                "parallelism_config": {"parallelism_config_tp_size": 2},
            },
            "mesh",
            (1, 2, 2, 1),
        ),
    ],
)
def test_parallelism_sizes_lay_out_a_mesh(
    found: dict[str, Any], strategy: str | None, sizes: tuple[int, ...] | None
) -> None:
    launched = plan({"num_processes": 4, "use_cpu": True, **found}, CPU).launched
    assert launched.strategy == strategy
    if sizes is None:
        assert not launched.options
        return
    made = with_options("mesh", launched.options)
    assert tuple(made.layout.sizes[axis] for axis in AXES) == sizes
    is_ulysses = "parallelism_config_sp_size" in launched.options
    assert made._sequences[0] == ("ulysses" if is_ulysses else "gather")
    assert is_ulysses is ("parallelism_config_sp_size" in found.get("parallelism_config", {}))
    assert made.settings["cpu_offload"] is ("fsdp_config" in found)

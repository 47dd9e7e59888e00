"""The wizard of `leyden config`, answered in a real terminal for five machines; a dry run reads its files back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import Settings, parse
from leyden.cli.settings.wizard import Wizard
from leyden.core.errors import ConfigurationError

pexpect = pytest.importorskip("pexpect", reason="pip install 'leyden[test]'")

COMMON = {"compute_environment": "LOCAL_MACHINE"}
# Flags of `config`, beginnings of questions with their answers, the written file, and a line of the plan.
MACHINES: dict[str, tuple[list[str], list[tuple[str, str]], dict[str, Any], str]] = {
    "cpu": (
        ["--gpus", "0"],
        [
            ("How many machines [1]", ""),
            ("How many ranks [1]", ""),
            ("Compile the model (torch.compile) [no]", ""),
            ("Mixed precision (no, bf16) [no]", "bf61"),
            ("Error: 'bf61' is not known. Did you mean 'bf16'?", None),
            ("Mixed precision (no, bf16) [no]", "bf16"),
        ],
        {
            **COMMON,
            "distributed_type": "NO",
            "mixed_precision": "bf16",
            "use_cpu": True,
            "num_processes": 1,
            "num_machines": 1,
        },
        "ranks       1 on this machine, cpu",
    ),
    "gpus": (
        ["--gpus", "4"],
        [
            ("Run on (gpu, cpu) [gpu]", "tpu"),
            ("Error: 'tpu' is not known", None),
            ("Run on (gpu, cpu) [gpu]", ""),
            ("GPUs to use: all, or some of 0 to 3, such as 0,1 [all]", "0,4"),
            ("Error: there is no GPU 4: this machine has 0 to 3", None),
            ("GPUs to use: all, or some of 0 to 3, such as 0,1 [all]", "0,1"),
            ("How many machines [1]", "none"),
            ("Error: 'none' is not a whole number", None),
            ("How many machines [1]", ""),
            ("How is the model distributed (ddp, fsdp, deepspeed, parallel, megatron) [ddp]", ""),
            ("Check the operands of each collective", "yes"),
            ("Compile the model", "y"),
            ("Which backend (inductor, eager, aot_eager, cudagraphs) [inductor]", ""),
            ("Mode (default, reduce-overhead, max-autotune) [default]", ""),
            ("Raise on graph breaks [no]", ""),
            ("Compile for any shape [no]", ""),
            ("Bind each rank to the CPUs beside its GPU [no]", "yes"),
            ("  0 no   1 fp16   2 bf16   3 fp8", None),
            ("Mixed precision (no, fp16, bf16, fp8) [no]", "4"),
            ("Error: '4' is not known", None),
            ("Mixed precision (no, fp16, bf16, fp8) [no]", "1"),
        ],
        {
            **COMMON,
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "fp16",
            "use_cpu": False,
            "debug": True,
            "num_processes": 2,
            "num_machines": 1,
            "gpu_ids": "0,1",
            "enable_cpu_affinity": True,
            "dynamo_config": {
                "dynamo_backend": "inductor",
                "dynamo_mode": "default",
                "dynamo_use_fullgraph": False,
                "dynamo_use_dynamic": False,
            },
        },
        "beware      torch sees no GPU",
    ),
    "fsdp": (
        ["--gpus", "0"],
        [
            ("How many machines [1]", ""),
            ("How many ranks [1]", "2"),
            ("How is the model distributed (ddp, fsdp, deepspeed, parallel, megatron) [ddp]", "1"),
            ("  1 FULL_SHARD   2 SHARD_GRAD_OP   3 NO_SHARD", None),
            ("What is sharded (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD) [FULL_SHARD]", "2"),
            ("How are modules grouped", ""),
            ("Classes of the blocks to group", "Block"),
            ("Keep parameters on the CPU between uses [no]", "y"),
            ("Recompute activations in backward [no]", ""),
            ("Check the operands", ""),
            ("Compile the model", ""),
            ("Mixed precision (no, bf16) [no]", "bf16"),
        ],
        {
            **COMMON,
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "use_cpu": True,
            "debug": False,
            "num_processes": 2,
            "num_machines": 1,
            "fsdp_config": {
                "fsdp_sharding_strategy": "SHARD_GRAD_OP",
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Block",
                "fsdp_offload_params": True,
                "fsdp_activation_checkpointing": False,
            },
        },
        "strategy    fsdp (",
    ),
    "deepspeed": (
        ["--gpus", "0"],
        [
            ("How many machines [1]", ""),
            ("How many ranks [1]", "2"),
            ("How is the model distributed", "deepspeed"),
            ("DeepSpeed's own JSON file (none: answer questions) [none]", "nowhere.json"),
            ("Error: there is no file nowhere.json", None),
            ("DeepSpeed's own JSON file (none: answer questions) [none]", ""),
            ("ZeRO stage", "4"),
            ("Error: '4' is not a whole number from 0 to 3", None),
            ("ZeRO stage", "3"),
            ("Batches per optimizer step [1]", "4"),
            ("Largest norm of the gradients (none: no clipping) [none]", "1.0"),
            ("Where is optimizer state offloaded to (none, cpu, nvme) [none]", "cpu"),
            ("Where are parameters offloaded to (none, cpu, nvme) [none]", ""),
            ("Build the model sharded (zero.Init) [yes]", ""),
            ("Also save 16-bit weights of the whole model [no]", ""),
            ("Check the operands", ""),
            ("Compile the model", ""),
            ("Mixed precision (no, bf16) [no]", ""),
        ],
        {
            **COMMON,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "no",
            "use_cpu": True,
            "debug": False,
            "num_processes": 2,
            "num_machines": 1,
            "deepspeed_config": {
                "zero_stage": 3,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "none",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": False,
            },
        },
        "strategy    deepspeed_stage_3 (",
    ),
    "machines": (
        ["--gpus", "0"],
        [
            ("How many machines [1]", "2"),
            ("Which of them is this, from 0 to 1 [0]", "2"),
            ("Error: 2 is out of range for 2 machines", None),
            ("Which of them is this, from 0 to 1 [0]", "1"),
            ("Address of machine 0", "10.0.0.1, or so"),
            ("Error: '10.0.0.1, or so' is not an address", None),
            ("Address of machine 0", "10.0.0.1"),
            ("Port of machine 0 [29500]", "70000"),
            ("Error: '70000' is not a whole number from 1 to 65535", None),
            ("Port of machine 0 [29500]", ""),
            ("How many ranks on each machine [1]", "2"),
            ("How is the model distributed", ""),
            ("Check the operands", ""),
            ("Compile the model", ""),
            ("Mixed precision (no, bf16) [no]", ""),
        ],
        {
            **COMMON,
            "distributed_type": "MULTI_CPU",
            "mixed_precision": "no",
            "use_cpu": True,
            "debug": False,
            "num_processes": 4,
            "num_machines": 2,
            "machine_rank": 1,
            "main_process_ip": "10.0.0.1",
            "main_process_port": 29500,
        },
        "meeting     static at 10.0.0.1:29500, this is machine 1",
    ),
}


@pytest.mark.parametrize("machine", list(MACHINES))
def test_the_wizard_configures_a_machine_in_a_terminal(
    machine: str, tmp_path: Path, environ: dict[str, str], invoke: Any
) -> None:
    flags, dialog, expected, line = MACHINES[machine]
    file = tmp_path / "cache" / "leyden" / "default_config.yaml"
    # Wide enough that no question wraps, which expect_exact would not match.
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "leyden", "config", *flags],
        env=environ,
        cwd=str(tmp_path),
        timeout=60,
        encoding="utf-8",
        dimensions=(50, 200),
    )
    try:
        for question, answer in dialog:
            terminal.expect_exact(question)
            assert not file.exists()
            if answer is not None:
                terminal.sendline(answer)
        terminal.expect_exact("Written to")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    assert terminal.exitstatus == 0
    assert yaml.safe_load(file.read_text()) == expected
    assert line in invoke("launch", "--dry-run", "train.py").stdout


def run_wizard(
    machine: Machine, answers: list[str], earlier: Settings, monkeypatch: pytest.MonkeyPatch
) -> tuple[Settings, list[str]]:
    """Runs the wizard with the given answers; returns its settings and questions."""
    import click

    asked: list[str] = []
    left = list(answers)

    def prompt(text: str, default: Any, value_proc: Any, err: bool) -> Any:
        asked.append(text)
        given = left.pop(0) if left else ""
        return value_proc(given or default)

    monkeypatch.setattr(click, "prompt", prompt)
    return Wizard(machine, earlier).run(), asked


def test_the_wizard_asks_only_what_applies_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = run_wizard(Machine(), [], Settings(), monkeypatch)
    assert [text.split(" (")[0] for text in asked] == [
        "How many machines",
        "How many ranks",
        "Compile the model",
        "Mixed precision",
    ]
    _, asked = run_wizard(Machine(gpus=1, numa_nodes=2), [], Settings(), monkeypatch)
    assert not [text for text in asked if "GPUs to use" in text]
    # This GPU has no bf16.
    assert asked[-2:] == ["Bind each rank to the CPUs beside its GPU", "Mixed precision (no, fp16)"]
    settings, asked = run_wizard(Machine(gpus=8, slurm=True, bf16=True), [], Settings(), monkeypatch)
    assert asked[0].startswith("Where do ranks run")
    # srun provides machines, addresses and ranks.
    assert not [text for text in asked if "machine 0" in text or "How many machines" in text]
    assert (settings.get("compute_environment"), settings.get("num_processes")) == ("SLURM", -1)


def test_the_wizard_does_not_offer_invalid_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = run_wizard(Machine(gpus=4), ["gpu", "all", "1", "fsdp"], Settings(), monkeypatch)
    assert "How is the model distributed (ddp, fsdp, deepspeed, parallel, megatron)" in asked
    assert [text for text in asked if "HYBRID_SHARD" in text]
    _, asked = run_wizard(Machine(gpus=2), ["gpu", "all", "1", "fsdp"], Settings(), monkeypatch)
    # HYBRID_SHARD needs two replicas of at least two ranks.
    assert not [text for text in asked if "HYBRID_SHARD" in text]


@pytest.mark.parametrize("distribution", [["fsdp"], ["deepspeed"], ["parallel", "2", "2"], ["megatron", "2", "2"]])
def test_every_wizard_answer_has_an_effect(distribution: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = run_wizard(Machine(gpus=4), ["gpu", "all", "1", *distribution], Settings(), monkeypatch)
    assert settings.sections and settings.without_effect() == []


def test_cpu_binding_is_asked_unless_the_machine_has_one_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    question = "Bind each rank to the CPUs beside its GPU"
    for nodes, is_asked in ((0, True), (1, False), (2, True)):
        _, asked = run_wizard(Machine(gpus=2, numa_nodes=nodes), [], Settings(), monkeypatch)
        assert (question in asked) is is_asked
    _, asked = run_wizard(Machine(gpus=2), ["gpu", "all", "2", "0", "10.0.0.1"], Settings(), monkeypatch)
    assert question in asked


def test_mesh_sizes_that_do_not_match_the_ranks_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, right = ["3", "1", "1", "1"], ["2", "1", "2", "1", "2"]
    settings, _ = run_wizard(Machine(gpus=4), ["gpu", "all", "1", "parallel", *wrong, *right], Settings(), monkeypatch)
    sizes = settings.section("parallelism_config")
    assert sizes == {
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 1,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_ep_size": 2,
    }
    with pytest.raises(ConfigurationError, match="does not divide 2: give a divisor"):
        run_wizard(Machine(gpus=4), ["gpu", "all", "1", "parallel", *right[:-1], "3"], Settings(), monkeypatch)


def test_the_wizards_defaults_are_the_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = parse(
        {
            "num_processes": 2,
            "mixed_precision": "bf16",
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config": {"megatron_lm_tp_degree": 2},
        }
    )
    settings, _ = run_wizard(Machine(), [], earlier, monkeypatch)
    assert settings.kind == "MEGATRON_LM"
    assert settings.precision == "bf16"
    assert settings.section("megatron_lm_config")["megatron_lm_tp_degree"] == 2
    # An earlier answer that is invalid on this machine is dropped.
    settings, _ = run_wizard(Machine(), [], parse({"mixed_precision": "fp16"}), monkeypatch)
    assert settings.precision == "no"


def test_config_default_and_update_ask_nothing(invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    assert invoke("config", "default", "--config_file", file).returncode == 0
    assert yaml.safe_load(file.read_text()) == {
        **COMMON,
        "distributed_type": "NO",
        "mixed_precision": "no",
        "use_cpu": True,
        "debug": False,
        "num_processes": 1,
        "num_machines": 1,
        "machine_rank": 0,
    }
    assert "exists already" in invoke("config", "default", "--config_file", file).stderr
    file.write_text("use_fsdp: true\nfp16: true\nsame_network: true\nfsdp_config: {sharding_strategy: 2}\n")
    done = invoke("config", "update", "--config_file", file)
    assert "use_fsdp: true is read as distributed_type: FSDP" in done.stdout
    assert "same_network has no effect here" in done.stdout
    assert yaml.safe_load(file.read_text()) == {
        "distributed_type": "FSDP",
        "mixed_precision": "fp16",
        "same_network": True,
        "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    }


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ("1\n2\nddp\nno\nno\nbf16\n", ""),
        ("\n2\n\n\n\nbf16", ""),
        ("", "'How many machines', and the input has no answer"),
        ("1\n2\n", "leyden config default"),
        # Asking again would read the next question's answer.
        ("1\nmany\n2\nddp\n", "the answer to 'How many ranks': 'many' is not a whole number"),
    ],
)
def test_config_reads_piped_answers_one_per_line(answers: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "leyden", "config", "--gpus", "0", "--config_file", str(file)],
        input=answers,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    )
    assert error in done.stderr
    assert (done.returncode, file.exists()) == ((2, False) if error else (0, True)), done.stderr
    if not error:
        settings = yaml.safe_load(file.read_text())
        assert (settings["num_processes"], settings["mixed_precision"]) == (2, "bf16")

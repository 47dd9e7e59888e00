"""`leyden launch` with real ranks: variables, failure reports, restarts, several machines, and SLURM tasks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.world import free_port

SCRIPT = """\
import json, os, sys
import torch, torch.distributed as dist

def work():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    record = {key: value for key, value in os.environ.items() if key.startswith("LEYDEN_") and key != "LEYDEN_AGENT"}
    record.update(sum=total.item(), argv=sys.argv[1:], node=os.environ["GROUP_RANK"])
    with open(f"rank-{dist.get_rank()}.json", "w") as file:
        json.dump(record, file)
    if "--raise" in sys.argv and dist.get_rank() == 1:
        raise ValueError("the second rank cannot go on")
    if "--raise" in sys.argv:
        dist.barrier()
    dist.destroy_process_group()

work()
"""


def record_of(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank-{rank}.json").read_text()))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_two_ranks_start_with_the_settings_of_file_and_flags(leyden: Any, script: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("use_cpu: true\nnum_processes: 4\nmixed_precision: bf16\nsame_network: true\n")
    done = leyden("launch", "--config_file", file, "--num-processes", 2, "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"file        {file}"
    assert lines[1] == "ranks       2 on this machine, cpu, 1 thread each"
    assert "command     python train.py --lr 0.1" in lines
    expected = {
        "LEYDEN_LAUNCHED_FROM": str(file),
        "LEYDEN_STARTER": "launch",
        "LEYDEN_ACCELERATOR": "cpu",
        "LEYDEN_PRECISION": "bf16-mixed",
        "sum": 2.0,
        "argv": ["--lr", "0.1"],
        "node": "0",
    }
    for found in (record_of(tmp_path, 0), record_of(tmp_path, 1)):
        assert found.pop("LEYDEN_HEARTBEATS")
        assert json.loads(found.pop("LEYDEN_COMMAND"))[-4:] == ["2", "train.py", "--lr", "0.1"]
        # The path of this launch's file for restarted ranks.
        assert found.pop("LEYDEN_TRIES").endswith("given-up.json") and found == expected


def without_gloo_lines(printed: str) -> str:
    """Removes the lines that gloo of torch 2.9 prints about its connections."""
    return "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("[Gloo] "))


def test_the_line_of_a_failed_rank_is_the_users_in_a_folder_of_any_name(leyden: Any, tmp_path: Path) -> None:
    script = tmp_path / "lib" / "python-work" / "torch" / "leyden" / "trainer" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text("import torch\n\ntorch.nn.Linear(2, 2)(torch.zeros(3))\n")
    done = leyden("launch", "--cpu", "--num_processes", 1, "-q", script)
    assert f"line       {script}, line 3, in <module>" in done.stderr


def test_a_failing_rank_is_reported_in_one_block(leyden: Any, script: Path, tmp_path: Path) -> None:
    kept = ("--log_dir", tmp_path / "kept", "--tee", 0)
    done = leyden("launch", "--cpu", "--num_processes", 2, "-q", *kept, "train.py", "--raise")
    assert done.returncode == 1
    assert without_gloo_lines(done.stdout) == ""
    assert done.stderr.count("Traceback") == 1
    block = done.stderr[done.stderr.index("leyden launch: rank 1 failed first") :].splitlines()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in block[1:4]}
    assert rows["rank"].startswith("1 (local 1, process ")
    assert rows["host"] == socket.gethostname()
    assert rows["exception"] == "ValueError: the second rank cannot go on"
    assert block[4].split(maxsplit=1)[1] == "train.py, line 13, in work"
    log = Path(block[5].split(maxsplit=2)[2])
    assert log.is_relative_to(tmp_path / "kept") and log.read_text().rstrip().endswith(
        "ValueError: the second rank cannot go on"
    )
    # The traceback omits frames of Leyden and runpy.
    assert "rank.py" not in done.stderr


RESUMING_SCRIPT = """
import os, signal, sys
import torch
from leyden import Trainer, TrainModule, seed_everything
from leyden.callbacks import ModelCheckpoint

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if self.trainer.global_step == 5 and self.trainer.global_rank == 1 and first and "--kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.dropout(self.layer(batch), 0.3).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

seed_everything(7)
data = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=2, shuffle=True)
net = Net()
trainer = Trainer(
    max_epochs=2, logger=False, enable_progress_bar=False, default_root_dir=sys.argv[1],
    callbacks=ModelCheckpoint(every_n_train_steps=2),
)
trainer.fit(net, data, ckpt_path="auto")
if trainer.is_global_zero:
    torch.save(net.state_dict(), sys.argv[1] + "/weights.pt")
"""


@pytest.mark.full
def test_a_killed_rank_is_restarted_and_the_run_ends_with_the_same_weights(leyden: Any, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(RESUMING_SCRIPT)
    flags = ("launch", "--cpu", "--num_processes", 2, "--max_restarts", 1, "-q", "fit.py")
    killed = leyden(*flags, "killed", "--kill")
    assert killed.returncode == 0, killed.stderr
    assert "restart 1 of 1" in killed.stderr
    uninterrupted = leyden(*flags, "whole")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert "restart" not in uninterrupted.stderr
    left, right = (torch.load(tmp_path / name / "weights.pt") for name in ("killed", "whole"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_launch_reports_the_exit_code_of_a_program(leyden: Any) -> None:
    done = leyden("launch", "--cpu", "-q", "--no_python", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "rank 0 exited with code 3" in done.stderr


def run_together(commands: list[list[str]], environs: list[dict[str, str]], folder: Path) -> list[tuple[int, str]]:
    """Runs several processes at once; returns the exit code and output of each."""
    started = [
        subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, environ in zip(commands, environs)
    ]
    try:
        return [(process.returncode, text) for process in started for text in [process.communicate(timeout=120)[0]]]
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


@pytest.mark.full
def test_two_machines_rendezvous(script: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    """Two agents on one host act as two machines."""
    shared = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    base = [sys.executable, "-m", "leyden", "launch", "--cpu", *shared, "--main_process_port", str(free_port())]
    results = run_together(
        [[*base, "--machine_rank", str(rank), "train.py"] for rank in (0, 1)], [environ] * 2, tmp_path
    )
    assert [status for status, _ in results] == [0, 0], results
    assert "2 on 2 machines × 1" in results[1][1]
    assert [record_of(tmp_path, rank)["node"] for rank in (0, 1)] == ["0", "1"]
    assert record_of(tmp_path, 1)["sum"] == 2.0


def test_a_lost_rendezvous_is_reported_in_one_line(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    from leyden.cli.launch import agent

    def lose_connection(*_: Any, **__: Any) -> int:
        raise RendezvousConnectionError("the store has gone")

    monkeypatch.setattr(agent, "run_engine", lose_connection)
    flags = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--rdzv_endpoint", "10.0.0.1:5000"]
    done = invoke("launch", *flags, "--preflight_timeout", "0", "-q", "--no_python", "true")
    assert done.returncode == 2
    assert "lost each other at 10.0.0.1:5000 (the store has gone)" in done.stderr


@pytest.mark.full
def test_one_slurm_task_per_machine_starts_its_ranks(script: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    """This host acts as two machines, with the variables that srun sets for one task on each."""
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    slurm |= {"SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [{**environ, **slurm, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)} for node in (0, 1)]
    flags = ["--cpu", "--num_processes", "4", "--main_process_port", str(free_port())]
    results = run_together([[sys.executable, "-m", "leyden", "launch", *flags, "train.py"]] * 2, tasks, tmp_path)
    assert [status for status, _ in results] == [0, 0], results
    assert [record_of(tmp_path, rank)["node"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert record_of(tmp_path, 3)["sum"] == 4.0


def test_one_slurm_task_per_rank_becomes_the_rank(script: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    """The processes have the variables that srun sets for two tasks on one machine."""
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    slurm |= {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [{**environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    command = [sys.executable, "-m", "leyden", "launch", "--cpu", "--main_process_port", str(free_port()), "train.py"]
    # Without an agent, torch's elastic variables are not set.
    results = run_together([command] * 2, tasks, tmp_path)
    assert [status for status, _ in results] == [0, 0], results
    assert "srun, one task for each rank" in results[0][1]
    # Only the first task prints the plan.
    assert without_gloo_lines(results[1][1]) == ""
    assert record_of(tmp_path, 1)["LEYDEN_STARTER"] == "slurm"
    assert record_of(tmp_path, 1)["sum"] == 2.0


def test_a_dry_run_prints_the_plan_and_starts_nothing(invoke: Any, tmp_path: Path) -> None:
    accelerate_default = tmp_path / "cache" / "huggingface" / "accelerate" / "default_config.yaml"
    accelerate_default.parent.mkdir(parents=True)
    accelerate_default.write_text("num_processes: 7\n")
    # Like Accelerate, --cpu ignores the default file.
    done = invoke("launch", "--dry-run", "--cpu", "--no_python", "touch", "started")
    assert done.returncode == 0
    assert done.stdout.startswith("file        none: flags and defaults\nranks       1 on this machine")
    assert not (tmp_path / "started").exists()
    leyden_default = tmp_path / "cache" / "leyden" / "default_config.yaml"
    done = invoke("launch", "--dry-run", "train.py")
    assert done.stdout.startswith(
        f"file        {accelerate_default} (Accelerate's; there is no {leyden_default})\nranks       7 on this"
    )
    leyden_default.parent.mkdir(parents=True)
    leyden_default.write_text("num_processes: 3\n")
    done = invoke("launch", "--dry-run", "train.py")
    assert done.stdout.startswith(f"file        {leyden_default}\nranks       3 on this machine")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("launch", "--num_procesess", "2", "a.py"), "num_processes"),
        (("launch", "none.py"), "there is no script none.py"),
        (("launch", "--use_fsdp", "--use_deepspeed", "a.py"), "exclude each other"),
        (("launch", "--mixed_precision", "bf61", "a.py"), "Did you mean 'bf16'"),
        (("launch", "--fsdp_offload_params", "perhaps", "a.py"), "true or false"),
        (("launch", "-m", "--no_python", "a"), "give one of them"),
    ],
)
def test_invalid_command_lines_are_refused_with_the_reason(invoke: Any, arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_accept_true_and_false(invoke: Any) -> None:
    flags = ("--use_fsdp", "--fsdp_offload_params", "False", "--fsdp_activation_checkpointing", "True")
    done = invoke("launch", "--dry-run", "--cpu", "--num_processes", "2", *flags, "a.py")
    assert "fsdp_offload_params False, fsdp_activation_checkpointing True" in done.stdout


def test_help_lists_option_families_and_does_not_import_torch(invoke: Any, environ: dict[str, str]) -> None:
    text = invoke("launch", "--help").stdout
    assert all(name in text for name in ("FSDP:", "DeepSpeed:", "Megatron-LM:", "--rdzv_backend", "--monitor_interval"))
    program = (
        "import sys\nfrom leyden.cli.main import main\nmain(['--help'])\n"
        "print('torch' in sys.modules, 'click' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False True"
    assert "Did you mean 'launch'?" in invoke("lunch").stderr


def test_a_rank_runs_its_script_as_main(tmp_path: Path, environ: dict[str, str]) -> None:
    """Processes that a script spawns can import its functions, as under `python script.py`."""
    (tmp_path / "beside.py").write_text("word = 'beside'")
    (tmp_path / "main.py").write_text(
        "import multiprocessing, sys, beside\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]), sys.argv, beside.word, __file__)\n"
        "    sys.exit(5)\n"
    )
    command = [sys.executable, "-m", "leyden.cli.launch.rank", "main.py", "a"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "[2, 4] ['main.py', 'a'] beside main.py\n"), done.stderr
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__, __package__)\n1 / 0")
    command = [sys.executable, "-m", "leyden.cli.launch.rank", "-m", "package", "b"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "['b'] __main__ package\n")
    assert done.stderr.splitlines()[0].startswith("Traceback")
    assert "rank.py" not in done.stderr
    assert os.path.join("package", "__main__.py") in done.stderr.splitlines()[1]


def test_the_plan_masks_secrets(invoke: Any, tmp_path: Path) -> None:
    token = "hf_" + "aB3" * 12
    file = tmp_path / "config.yaml"
    file.write_text(f"distributed_type: XLA\ntpu_env: [HF_TOKEN={token}, PJRT_DEVICE=CPU]\n")
    words = ["train.py", "--api_key", "abc", "--password=def", "--hub", token, "--pad_token", "<pad>", "--lr", "0.1"]
    done = invoke("launch", "--dry-run", "--config_file", file, *words)
    assert done.returncode == 0, done.stderr
    assert (
        "command     python train.py --api_key '***' '--password=***' --hub '***' --pad_token '<pad>' --lr 0.1"
        in done.stdout
    )
    assert "variable    HF_TOKEN=***" in done.stdout
    assert token not in done.stdout


MISTAKES = {
    "a folder as the script": ["launch", "--cpu", "."],
    "an invalid port": ["launch", "--main_process_port", "70000", "x.py"],
    "a number with thousands of digits": ["launch", "--num_processes", "9" * 5000, "x.py"],
    "a log folder that cannot be created": ["launch", "--cpu", "--log_dir", "/dev/null/x", "train.py"],
    "a folder as the configuration file": ["config", "update", "--config_file", "."],
    "a file as the checkpoint": ["checkpoint", "show", "train.py"],
    "a file as the checkpoint folder": ["checkpoint", "ls", "train.py"],
    "a script to merge": ["merge", "train.py", "out/"],
    "a script to convert": ["convert", "train.py"],
    "a script without a model": ["estimate", "train.py"],
    "a missing module": ["estimate", "nowhere.at:All"],
    "arguments in invalid JSON": ["estimate", "torch.nn:Linear", "--args", "{"],
    "a model that cannot be built": ["estimate", "torch.nn:Linear", "--args", '{"in_features": "x"}'],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_users_mistake_exits_with_code_2_and_no_traceback(mistake: str, invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    done = invoke(*MISTAKES[mistake])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "This is a bug in Leyden" not in done.stderr
    assert done.stderr.strip()


def test_an_internal_error_prints_one_line_without_a_traceback(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from leyden.cli import env

    def broken() -> None:
        raise KeyError("internal")

    monkeypatch.setattr(env, "_versions", broken)
    done = invoke("env")
    assert done.returncode == 2
    assert done.stderr.startswith("leyden: KeyError: 'internal' (test_launch.py, line ")
    assert "LEYDEN_DEBUG=1 shows the traceback" in done.stderr

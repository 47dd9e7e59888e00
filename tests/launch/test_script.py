"""Ranks started by a plain script: the lines each one runs, exit codes, breakpoints, `-m`, torchrun, two machines."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks.world import free_port, run_world

from leyden import ConfigurationError, Trainer
from leyden.launch.script import machines_of

MODULE = """
import os, signal, sys
import torch
from leyden import Trainer, TrainModule

def say(*words):
    # One write of the whole line: ranks of torchrun are unbuffered, and the pieces of a print could mix.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        self.before_loss(batch_idx)
        return self.net(batch).square().mean()

    def before_loss(self, batch_idx):
        pass

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def batches(count=5):
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]

QUIET = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    use_distributed_sampler=False,
)

def weights(module):
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]
"""


def run(command: list[str], folder: Path, text: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script_parts.py").write_text(MODULE)
    return tmp_path


PACKAGE = """
import os, sys
from leyden import Trainer
from script_parts import QUIET, Module, batches, say

say("BEFORE", os.environ.get("RANK"), sys.argv[1:])
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")

class BreakpointModule(Module):
    def before_loss(self, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 0:
            breakpoint()
        if batch_idx == 2 and self.trainer.global_rank == 1:
            say("STDIN OF RANK 1", repr(sys.stdin.read()))

trainer = Trainer(devices=2, strategy="ddp", max_epochs=1, **QUIET)
say("PLAN", trainer.world_size, trainer.is_global_zero)
trainer.fit(BreakpointModule(), batches())
say("AFTER", trainer.global_rank, os.path.basename(os.getcwd()))
sys.exit(3)
"""


def test_every_rank_runs_the_whole_script_and_rank_0_can_open_a_debugger(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PACKAGE)
    found = run(["-X", "utf8", "-m", "package", "--lr", "1"], folder, "p 'from rank', self.trainer.global_rank\nc\n")
    lines = found.stdout.splitlines()
    # The agent and each rank, with the same arguments, without a __main__ guard.
    before = sorted(line for line in lines if line.startswith("BEFORE"))
    assert before == [f"BEFORE {rank} ['--lr', '1']" for rank in ("0", "1", "None")], found.stderr
    assert [line for line in lines if line.startswith("PLAN")].count("PLAN 2 True") == 2  # of the agent and of rank 0
    assert sorted(line for line in lines if line.startswith("AFTER")) == ["AFTER 0 elsewhere", "AFTER 1 elsewhere"]
    assert "('from rank', 0)" in found.stdout
    assert "STDIN OF RANK 1 ''" in found.stdout
    # The user's own exit code.
    assert found.returncode == 3


SIGNALLED = """
from leyden import Trainer
from script_parts import *

class SignalModule(Module):
    def before_loss(self, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 0:
            os.kill(int(os.environ["LEYDEN_AGENT"]), getattr(signal, sys.argv[1]))

    def on_train_end(self):
        say("ENDED GRACEFULLY", self.trainer.global_rank)

Trainer(devices=2, strategy="ddp", max_epochs=-1, **QUIET).fit(SignalModule(), batches())
say("NEVER")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), pytest.param("SIGTERM", 143, marks=pytest.mark.full)])
def test_a_signal_ends_every_rank_gracefully(name: str, code: int, folder: Path) -> None:
    (folder / "script.py").write_text(SIGNALLED)
    found = run(["script.py", name], folder)
    assert sorted(line for line in found.stdout.splitlines() if line.startswith("ENDED")) == [
        "ENDED GRACEFULLY 0",
        "ENDED GRACEFULLY 1",
    ], found.stderr
    assert found.returncode == code == 128 + getattr(signal, name) and "NEVER" not in found.stdout


INTERRUPTED = """
from leyden import Trainer
from script_parts import *

class InterruptedModule(Module):
    def before_loss(self, batch_idx):
        if batch_idx == 2 and os.environ.get("RANK", "0") == "0":
            for _ in range(int(sys.argv[1])):
                os.kill(os.getppid() if "all" in sys.argv else os.getpid(), signal.SIGINT)

ranks = dict(strategy="ddp") if "RANK" in os.environ else dict(strategy="ddp", devices=2) if "two" in sys.argv else {}
Trainer(max_epochs=-1, **ranks, **QUIET).fit(InterruptedModule(), batches())
say("NEVER")
"""


@pytest.mark.parametrize("presses", ["1", "2"])
@pytest.mark.parametrize("how", ["", "two", "launch"])
def test_ctrl_c_ends_in_a_line_without_a_traceback(how: str, presses: str, folder: Path) -> None:
    """It is no error of a rank, of which the others, or the agent, tell."""
    (folder / "script.py").write_text(INTERRUPTED)
    launch = ["-m", "leyden", "launch", "--cpu", "-q", "--num_processes", "2"] if how == "launch" else []
    found = run([*launch, "script.py", presses, how], folder)
    assert "\nstopped at step " in found.stdout, found.stderr
    assert "NEVER" not in found.stdout
    assert without_gloo(found.stderr) == []
    assert found.returncode in (130, -signal.SIGINT)


@pytest.mark.parametrize("how", ["two", "launch"])
def test_ctrl_c_in_the_terminal_of_a_launch_ends_in_a_line(how: str, folder: Path) -> None:
    """A terminal sends it to the launcher, which passes it on to its ranks."""
    (folder / "script.py").write_text(INTERRUPTED)
    launch = ["-m", "leyden", "launch", "--cpu", "-q", "--num_processes", "2"] if how == "launch" else []
    found = run([*launch, "script.py", "1", how, "all"], folder)
    assert "\nstopped at step " in found.stdout, found.stderr
    assert "NEVER" not in found.stdout
    assert without_gloo(found.stderr) == []
    assert found.returncode == 130


def test_ctrl_c_under_torchrun_leaves_only_torchruns_traceback(folder: Path) -> None:
    (folder / "script.py").write_text(INTERRUPTED)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = run([*torchrun, "script.py", "1", "all"], folder)
    assert "\nstopped at step " in found.stdout, found.stderr
    assert found.stderr.count("Traceback") == found.stderr.count("SignalException: Process") == 1, found.stderr
    assert "script.py" not in found.stderr and "NEVER" not in found.stdout


def without_gloo(printed: str) -> list[str]:
    """Removes the lines that gloo of torch 2.9 prints about its connections."""
    return [line for line in printed.splitlines() if not line.startswith("[Gloo] ")]


SEVERAL_RUNS = """
from leyden import Trainer
from script_parts import *

say("BEFORE", os.environ["RANK"])
trainer = Trainer(devices=2, strategy="ddp", max_epochs=1, **QUIET)
module = Module()
trainer.fit(module, batches(), batches(2))
[values] = trainer.validate(module, batches(2), verbose=False)
trainer.fit(module, batches())
other = Trainer(max_epochs=1, **QUIET)
other.fit(module, batches())
alone = Trainer(strategy="single_device", max_epochs=1, **QUIET)
alone.validate(module, batches(1), verbose=False)
say("RANK", trainer.global_rank, other.world_size, alone.world_size)
"""


def test_ranks_of_torchrun_are_reused_for_several_runs(folder: Path) -> None:
    (folder / "script.py").write_text(SEVERAL_RUNS)
    found = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"], folder)
    assert found.returncode == 0, found.stderr
    lines = sorted(line for line in found.stdout.splitlines() if line.startswith(("BEFORE", "RANK")))
    assert lines == ["BEFORE 0", "BEFORE 1", "RANK 0 2 1", "RANK 1 2 1"]


@pytest.mark.full
# A launch takes 5 s, and 20 s on a busy machine.
@pytest.mark.timeout(1800)
def test_fifty_launches_in_a_row_exit_with_0(folder: Path) -> None:
    (folder / "script.py").write_text(
        "from leyden import Trainer\nfrom script_parts import *\nmodule = Module()\n"
        'trainer = Trainer(devices=2, strategy="ddp", max_epochs=1, **QUIET)\n'
        "trainer.fit(module, batches(), batches(1))\nkept = trainer.strategy, trainer._fit\n"
    )
    for number in range(50):
        found = run(["script.py"], folder)
        assert (found.returncode, found.stderr) == (0, ""), f"launch {number}"


# two machines ---------------------------------------------------------------------------------------------------------
MACHINES = """
from leyden import Trainer
from script_parts import *

torch.manual_seed(0)
module = Module()
trainer = Trainer(devices=int(sys.argv[1]), num_nodes=2, strategy="ddp", max_epochs=1, **QUIET)
trainer.fit(module, batches())
place = trainer.global_rank, trainer.node_rank, trainer.local_rank, trainer.world_size, trainer.num_nodes
say("RANK", *place, weights(module))
"""
Machines = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Command prefix and environment variables for each of two machines.

    They are network namespaces joined by a virtual cable or, where those are not permitted, two agents on loopback.
    """
    port = str(free_port())
    names = [f"leyden{os.getpid()}{end}" for end in "ab"]
    made = make_namespaces(names)
    try:
        if made:
            yield [
                (
                    ["ip", "netns", "exec", name],
                    {
                        "MASTER_ADDR": "10.77.0.1",
                        "MASTER_PORT": port,
                        "NODE_RANK": str(rank),
                        "GLOO_SOCKET_IFNAME": f"v{rank}",
                    },
                )
                for rank, name in enumerate(names)
            ]
        else:
            yield [
                (
                    [],
                    {
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        "NODE_RANK": str(rank),
                        "GLOO_SOCKET_IFNAME": "lo",
                    },
                )
                for rank in range(2)
            ]
    finally:
        for name in names:
            if made:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def make_namespaces(names: list[str]) -> bool:
    if shutil.which("ip") is None:
        return False

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    first, second = names
    made = ip("netns", "add", first) and ip("netns", "add", second)
    made = made and ip("-n", first, "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", second)
    for rank, name in enumerate(names):
        made = made and ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"v{rank}")
        made = made and ip("-n", name, "link", "set", f"v{rank}", "up") and ip("-n", name, "link", "set", "lo", "up")
    if not made:
        for name in names:
            ip("netns", "del", name)
    return made


def ranks_of(output: str) -> dict[int, tuple[list[str], str]]:
    """Returns the place and the weights of each rank."""
    found = {}
    for line in output.splitlines():
        if line.startswith("RANK "):
            place, bracket, weights = line.partition("[")
            found[int(place.split()[1])] = place.split()[2:], bracket + weights
    return found


def on_one_machine(folder: str) -> list[float]:
    """Returns the script's weights, trained with all ranks on one machine."""
    sys.path.insert(0, folder)
    script_parts = importlib.import_module("script_parts")
    torch.manual_seed(0)
    module = script_parts.Module()
    Trainer(strategy="ddp", max_epochs=1, **script_parts.QUIET).fit(module, script_parts.batches())
    return script_parts.weights(module)  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_two_machines_match_one_machine_with_as_many_ranks(devices: int, folder: Path, machines: Machines) -> None:
    (folder / "script.py").write_text(MACHINES)
    agents = [
        subprocess.Popen(
            [*prefix, sys.executable, "script.py", str(devices)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for prefix, environ in machines
    ]
    try:
        outputs = [agent.communicate(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    found = ranks_of(outputs[0][0] + outputs[1][0])
    assert {rank: place for rank, (place, _) in found.items()} == {
        rank: [str(rank // devices), str(rank % devices), str(2 * devices), "2"] for rank in range(2 * devices)
    }
    [expected] = {str(weights) for weights in run_world(2 * devices, on_one_machine, str(folder))}
    assert {weights for _, weights in found.values()} == {expected}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"NODE_RANK": "1"},
            "num_nodes=2: start the script on each machine with.*which lacks MASTER_ADDR and MASTER_PORT",
        ),
        (
            {"NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "NODE_RANK=2 must be below num_nodes=2",
        ),
        ({"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)
def test_incomplete_variables_of_several_machines_are_refused(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        machines_of(2)


# temporary folders ----------------------------------------------------------------------------------------------------
LEAVES = """
from leyden import Trainer
from script_parts import *

class FailingModule(Module):
    def before_loss(self, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 0:
            if sys.argv[1] == "raise":
                raise ValueError("of rank 0")
            os.kill(int(os.environ["LEYDEN_AGENT"]), getattr(signal, sys.argv[1]))

Trainer(devices=1, strategy="ddp", max_epochs=3, **QUIET).fit(FailingModule(), batches())
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [(["raise"], 1), pytest.param(["SIGTERM"], 143, marks=pytest.mark.full), (["SIGKILL"], -9)],
)
def test_a_launch_leaves_no_temporary_folder_behind(
    command: list[str], code: int, folder: Path, tmp_path: Path
) -> None:
    (folder / "script.py").write_text(LEAVES)
    place = tmp_path / "tmp"
    place.mkdir()
    launch = ["-m", "leyden", "launch", "--cpu", "-q", "--num_processes", "1", "script.py"]
    found = run([*launch, *command], folder, TMPDIR=str(place))
    assert found.returncode == code, found.stderr
    left = {path.name.split("-")[1] for path in place.glob("leyden-*")}
    # A killed launch cannot delete its folders; the next launch on this host does.
    assert left == ({"launch", "tries"} if code == -9 else set())
    prelude = f"import tempfile; tempfile.tempdir = {str(place)!r}; from leyden.launch import processes"
    assert run(["-c", f"{prelude}; processes.clear_left_behind()"], folder).returncode == 0
    assert not list(place.glob("leyden-*"))

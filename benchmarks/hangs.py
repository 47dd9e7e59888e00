"""Makes a job of two ranks fail or hang in each known way, and measures how long it takes until every process is gone.

    python benchmarks/hangs.py --limit 2
    python benchmarks/hangs.py --only "SIGSTOP of rank 0" "two machines, one silent"
    sudo python benchmarks/hangs.py --only "two hosts, the cable cut"

Runs DDP on the CPU; in the sixth batch one rank fails or hangs as the row describes. The seconds are counted from that
moment until no process of the job is left, minus the limit (`hang_timeout`) if the watchdog must detect the hang.
"named" counts the lines on stderr that name the culprit; it must be 1. Two hosts are network namespaces of this
machine, each with its own agent, connected by a virtual cable; they need root and the command `ip`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 60.0
SCRIPT = """
import os, signal, sys, threading, time
import torch
from leyden import Trainer, TrainModule
from torch.utils.data import DataLoader, Dataset

how, odd = sys.argv[1], int(sys.argv[2])
rank = int(os.environ.get("RANK", "-1"))

def now():
    with open("began", "w") as file:
        file.write(str(time.time()))

class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if how.startswith("loader") and index >= 20 and rank == odd:
            now()
            threading.Event().wait()
        return torch.ones(4)

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and rank == odd:
            now()
            if how == "raise":
                raise ValueError("of this rank")
            if how == "exit":
                sys.exit(int(sys.argv[3]))
            if how == "vanish":
                os._exit(int(sys.argv[3]))
            if how == "sleep":
                threading.Event().wait()
            if how == "signal":
                os.kill(os.getpid(), getattr(signal, sys.argv[3]))
        if how == "machine" and rank == 0:
            if batch_idx == 5:
                print("under way", flush=True)
            time.sleep(0.02)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=2, num_workers=1 if how == "loader-worker" else 0)

Trainer(
    devices=1 if how == "machine" else 2, num_nodes=2 if how == "machine" else 1, strategy="ddp", accelerator="cpu",
    max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
    hang_timeout=float(os.environ["LIMIT"]),
).fit(Module())
"""


@dataclass(frozen=True)
class Case:
    """A way to fail or to hang.

    Attributes:
        command: arguments of the script.
        names: part of the line that names the culprit.
        hangs: True if the watchdog must detect it.
        gone: signal sent to machine 0, if there are two machines.
        cut: True if the two machines are separate hosts and the cable between them is cut.
    """

    command: str
    names: str
    hangs: bool = False
    gone: int = 0
    cut: bool = False


CASES = {
    "raise": Case("raise 1", "leyden: raised on rank 1"),
    "SIGKILL": Case("signal 1 SIGKILL", "leyden: rank 1 was killed by signal 9"),
    "SIGSEGV": Case("signal 1 SIGSEGV", "leyden: rank 1 was killed by signal 11"),
    "sys.exit(0)": Case("exit 1 0", "leyden: rank 1 exited with code 0"),
    "os._exit(0)": Case("vanish 1 0", "leyden: rank 1 exited with code 0"),
    "sys.exit(1)": Case("exit 1 1", "leyden: rank 1, step 5"),
    "os._exit(1)": Case("vanish 1 1", "leyden: rank 1 does not answer"),
    "sleep for ever": Case("sleep 1", "(hang_timeout): rank 1, at step 5", True),
    "SIGSTOP of rank 0": Case("signal 0 SIGSTOP", "(hang_timeout): rank 0, at step 5", True),
    "SIGSTOP of rank 1": Case("signal 1 SIGSTOP", "(hang_timeout): rank 1, at step 5", True),
    "loader asleep, num_workers=0": Case("loader 1", "(hang_timeout): rank 1, at step", True),
    "loader asleep, a worker": Case("loader-worker 1", "(hang_timeout): rank 1, at step", True),
    "two machines, one killed": Case("machine -1", "leyden: rank 0 has gone", gone=int(signal.SIGKILL)),
    "two machines, one silent": Case("machine -1", "(hang_timeout): rank 1 waits", True, int(signal.SIGSTOP)),
    "two hosts, the cable cut": Case("machine -1", "(hang_timeout): rank 1 waits", True, cut=True),
}


@dataclass(frozen=True)
class Ending:
    """How a case ended: seconds until all processes were gone, lines naming the culprit, processes left, and stderr."""

    seconds: float
    named: int
    left: int
    errors: str


def run(case: Case, folder: Path, limit: float) -> Ending:
    """Runs a case in a folder."""
    (folder / "script.py").write_text(SCRIPT)
    token = uuid.uuid4().hex
    environ = {**os.environ, "TOKEN": token, "LIMIT": str(limit), "OMP_NUM_THREADS": "1"}
    if case.gone:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        return _run_machines(case, folder, environ, limit, [Machine("lo", address)] * 2)
    if case.cut:
        with joined_hosts() as machines:
            return _run_machines(case, folder, environ, limit, machines)
    done = _start(case, folder, environ)
    errors = done.communicate(timeout=120)[1]
    return _ended(case, folder, [token], limit, errors)


@dataclass(frozen=True)
class Machine:
    """The machine on which an agent runs.

    Attributes:
        interface: network interface that ranks use.
        master: address and port of machine 0.
        host: network namespace of the machine; "" for that of this process.
    """

    interface: str
    master: str
    host: str = ""

    @property
    def prefix(self) -> list[str]:
        """The first words of a command that runs on this machine."""
        return ["ip", "netns", "exec", self.host] if self.host else []


@contextmanager
def joined_hosts() -> Iterator[list[Machine]]:
    """Creates two network namespaces with a virtual cable between them."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    hosts = [f"hangs-{os.getpid()}-{node}" for node in range(2)]
    try:
        for host in hosts:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", hosts[0], "type", "veth", "peer", "name", "cable", "netns", hosts[1])
        for node, host in enumerate(hosts):
            ip("-n", host, "address", "add", f"10.77.0.{node + 1}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
        yield [Machine("cable", "10.77.0.1:29500", host) for host in hosts]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)


def _run_machines(
    case: Case, folder: Path, environ: dict[str, str], limit: float, machines: Sequence[Machine]
) -> Ending:
    """Runs two agents. Machine 0 and its rank are killed or stopped, or the cable is cut."""
    tokens = [environ["TOKEN"] + "0", environ["TOKEN"] + "1"]
    agents = []
    for node, (machine, token) in enumerate(zip(machines, tokens, strict=True)):
        address, _, port = machine.master.partition(":")
        own = {"MASTER_ADDR": address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": machine.interface}
        agents.append(_start(case, folder, {**environ, **own, "NODE_RANK": str(node), "TOKEN": token}, machine.prefix))
    try:
        assert agents[0].stdout is not None
        while "under way" not in agents[0].stdout.readline():
            assert agents[0].poll() is None, "machine 0 ended on its own"
        (folder / "began").write_text(str(time.time()))
        if case.cut:
            subprocess.run(["ip", "-n", machines[0].host, "link", "set", "cable", "down"], check=True)
        else:
            for process in members(tokens[0]):
                os.kill(process, case.gone)
        errors = agents[1].communicate(timeout=120)[1]
        return _ended(case, folder, tokens if case.cut else tokens[1:], limit, errors)
    finally:
        for process in members(tokens[0]):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        for agent in agents:
            agent.kill()
            agent.wait()


def _start(case: Case, folder: Path, environ: dict[str, str], prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "script.py", *case.command.split()]
    environ = {**environ, "PYTHONPATH": os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environ, text=True, **pipes)


def _ended(case: Case, folder: Path, tokens: Sequence[str], limit: float, errors: str) -> Ending:
    deadline = time.monotonic() + DEADLINE
    while (left := [process for token in tokens for process in members(token)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    seconds = time.time() - float((folder / "began").read_text()) - (limit if case.hangs else 0.0)
    for process in left:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    return Ending(seconds, sum(case.names in line for line in errors.splitlines()), len(left), errors)


def members(token: str) -> list[int]:
    """Returns the running processes that have this token in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = f"TOKEN={token}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if is_ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=2.0, help="hang_timeout in seconds")
    possible = [name for name, case in CASES.items() if not case.cut or (os.geteuid() == 0 and shutil.which("ip"))]
    parser.add_argument("--only", nargs="+", choices=CASES, default=possible, metavar="CASE")
    options = parser.parse_args()
    print("| what happens | seconds until all are gone | named | left behind |")
    print("|---|---|---|---|")
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
            ending = run(CASES[name], Path(folder), options.limit)
        behind = "after the limit" if CASES[name].hangs else "after the failure"
        print(f"| {name} | {ending.seconds:.1f} {behind} | {ending.named} | {ending.left} |", flush=True)
        if ending.named != 1 or ending.left:
            print(ending.errors, file=sys.stderr)


if __name__ == "__main__":
    main()

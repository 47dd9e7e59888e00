"""Rendezvous: errors name the missing ranks, every wait has a limit, and one machine uses the loopback device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from programs import start_program
from ranks.world import free_port
from torch.distributed import PrefixStore, TCPStore

from leyden.core.environment import RankEnvironment
from leyden.core.errors import LeydenError
from leyden.launch import meeting
from leyden.launch.meeting import meet

SOON = timedelta(seconds=0.5)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the variables of a rank started by hand; returns rank 0's port."""
    for name in ("LEYDEN_AGENT", "LEYDEN_STARTER", "LOCAL_RANK", meeting.AGENTS_STORE):
        monkeypatch.delenv(name, raising=False)
    port = free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "SAID_AFTER", 0.1)
    monkeypatch.setattr(meeting, "STORE_OPENS", SOON)
    return port


def test_the_timeout_error_explains_leftover_variables(by_hand: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LeydenError, match=r"rank 0 of 8 waited 0 s at 127.0.0.1:\d+ for ranks 1 to 7.*left over"):
        meet(RankEnvironment(0, 0, 8, 1, starter="hand"), SOON)
    printed = capfd.readouterr().err
    assert f"leyden: rank 0 of 8 is waiting at 127.0.0.1:{by_hand} for ranks 1 to 7." in printed
    assert f"RANK=0 WORLD_SIZE=8 MASTER_ADDR=127.0.0.1 MASTER_PORT={by_hand}" in printed
    assert "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in printed


def test_waiting_for_a_store_that_never_opens_times_out(by_hand: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LeydenError, match=r"rank 1 of 8 waited 0 s for rank 0, but its store at .* did not open"):
        meet(RankEnvironment(1, 0, 8, 1, 1, "hand"), timedelta(minutes=30))
    printed = capfd.readouterr().err
    assert printed.count("rank 1 of 8 is waiting for rank 0") == 1 and "Connection refused" in printed


RANK_0 = """
from datetime import timedelta
from leyden.core.environment import RankEnvironment
from leyden.launch.meeting import meet
meet(RankEnvironment(0, 0, 3, 1, starter="hand"), timedelta(minutes=30))
"""


def test_rank_1_raises_if_rank_0_exits_before_all_ranks_join(
    by_hand: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(meeting, "STORE_OPENS", timedelta(minutes=2))
    found: list[BaseException] = []

    def rank_1() -> None:
        try:
            meet(RankEnvironment(1, 0, 3, 1, 1, "hand"), timedelta(minutes=30))
        except BaseException as error:
            found.append(error)

    rank_0 = start_program(["-c", RANK_0], tmp_path, tmp_path / "printed.txt", tmp_path / "printed.txt")
    try:
        waiting = threading.Thread(target=rank_1)
        waiting.start()
        # Blocks until rank 1 has announced itself in the store.
        store = TCPStore("127.0.0.1", by_hand, None, False, timedelta(minutes=2), wait_for_workers=False)
        PrefixStore("leyden/ranks/0", store).wait(["here/1"])
    finally:
        rank_0.kill()
        rank_0.join()
    waiting.join(60.0)
    [error] = found
    assert isinstance(error, LeydenError) and "before all ranks had joined: rank 0" in str(error)


LISTENS = """
import os, sys
from pathlib import Path
import torch
from leyden import Trainer, TrainModule
from torch.utils.data import DataLoader

def listening(process):
    # Addresses of the sockets of a process that wait for connections; 0A is LISTEN.
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).partition("socket:")[2].strip("[]"))
        except OSError:
            pass
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/{process}/net/{name}")]
    return {row[1].split(":")[0] for row in rows if row[3:4] == ["0A"] and row[9] in inodes}

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        sys.stdout.write(f"LISTENS {sorted(listening(os.getpid()) | listening(os.getppid()))}\\n")
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

Trainer(
    strategy=sys.argv[1], devices=2, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Module(), DataLoader(torch.ones(4, 1), 2))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_fork", marks=pytest.mark.full)])
def test_ranks_of_one_machine_listen_only_on_the_loopback_device(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LISTENS)
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        [sys.executable, "script.py", strategy], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    # 127.0.0.1, as the kernel writes it.
    assert [line for line in done.stdout.splitlines() if "LISTENS" in line] == ["LISTENS ['0100007F']"] * 2

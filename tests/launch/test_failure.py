"""Which errors follow from another rank's failure; a rank waits only briefly for an unresponsive store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from torch.distributed import DistBackendError, TCPStore

from leyden.launch import failure
from leyden.launch.failure import FirstFailure, is_lost


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        # As in libtorch_cuda and libnccl of torch 2.9.
        "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.27.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "Last error: socketProgress: Connection closed by remote peer node1<41000>",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_lost_connection_errors_are_recognized(text: str) -> None:
    assert is_lost(DistBackendError(text)) and is_lost(RuntimeError(text))
    assert not is_lost(ValueError(text))


def test_other_errors_are_not_lost_connections() -> None:
    assert not is_lost(DistBackendError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"))
    assert not is_lost(RuntimeError("Timed out waiting for a remote process exiting prematurely"))


HOST = """
import signal, sys
from leyden.launch.meeting import listen, store_on
listener = listen()
port = listener.getsockname()[1]
store = store_on(listener)
print(port, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP")
def test_a_rank_reports_its_error_when_the_stores_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "ANSWER", 0.5)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    try:
        store = TCPStore("127.0.0.1", int(host.stdout.readline()), None, False, wait_for_workers=False)
        watch = FirstFailure(store, 1, 2, is_host=False)
        watch.begin_run()
        os.kill(host.pid, signal.SIGSTOP)
        os.waitpid(host.pid, os.WUNTRACED)
        error = RuntimeError("Timed out waiting 10000ms for recv operation to complete")
        assert watch.report(error, "step 3")
        watch.close()
    finally:
        host.kill()
        host.wait()
    if sys.version_info >= (3, 11):
        [note] = error.__notes__
        assert "raised on rank 1, step 3" in note and "rank 0, which hosts the store, has exited or is stopped" in note

"""Which errors only follow from the end of another rank."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from leyden.strategies.launch.failure import is_lost


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
def test_what_is_said_where_another_rank_is_gone(text: str) -> None:
    assert is_lost(DistBackendError(text)) and is_lost(RuntimeError(text))
    assert not is_lost(ValueError(text))


def test_an_error_of_ones_own_is_not_that() -> None:
    assert not is_lost(DistBackendError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"))
    assert not is_lost(RuntimeError("Timed out waiting for a remote process exiting prematurely"))

"""The backends of FSDP's process group."""

from __future__ import annotations

import pytest
import torch

from leyden.strategies.fsdp import FSDPStrategy


@pytest.mark.parametrize(
    ("device", "offload", "backend"),
    [("cuda:0", False, "nccl"), ("cuda:0", True, "cpu:gloo,cuda:nccl"), ("cpu", True, "gloo")],
)
def test_what_waits_on_the_cpu_has_a_backend_there(device: str, offload: bool, backend: str) -> None:
    assert FSDPStrategy(devices=[torch.device(device)], cpu_offload=offload).default_backend == backend

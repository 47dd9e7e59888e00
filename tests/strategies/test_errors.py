"""Which errors mean out of memory, and how a run explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line

from leyden import Trainer
from leyden.core.errors import is_out_of_memory


class TwoArguments(RuntimeError):
    def __init__(self, place: str, text: str) -> None:
        super().__init__(f"{place}: {text}")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        # From the CUDA runtime, which could not create a context or pinned memory.
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
        TwoArguments("NCCL", "Cuda failure 2 'out of memory'"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_errors_are_explained(error: Exception, tmp_path: Path) -> None:
    assert is_out_of_memory(error)

    class ExhaustedNet(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise error

    trainer = Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path)
    kind = RuntimeError if isinstance(error, TwoArguments) else type(error)
    with pytest.raises(kind, match=r"out of memory on cpu in step 0.*\(2, 2\) float32.*Try \(1\)") as caught:
        trainer.fit(ExhaustedNet(), [torch.ones(2, 2)])
    assert caught.value.__cause__ is error


def test_other_errors_are_not_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("out of memory"))

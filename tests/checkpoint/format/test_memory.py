"""`room`: memory about to be filled from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leyden.checkpoint.format.safefile import room

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address: int) -> list[str]:
    """Returns the kernel's flags for the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return rest.split()
    return []


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the system has no transparent huge pages")
def test_room_puts_a_large_tensor_into_huge_pages() -> None:
    tensor = room((3, 8 * 2**20), torch.float32)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 8 * 2**20), torch.float32, True)
    assert "hg" in flags_of(tensor.data_ptr() + tensor.nbytes // 2)
    # Memory in huge pages is written and read like any other.
    tensor.zero_()
    assert not tensor.any()


@pytest.mark.parametrize("shape", [(), (0, 4), (5,), (3, 2**20)])
def test_room_allocates_any_shape_and_dtype(shape: tuple[int, ...]) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        tensor = room(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert room(shape, torch.float32, "meta").is_meta

"""Strategies in a world of one: the weights of a hand-written loop, and the features of docs/strategies.md."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import table
import torch
from torch.distributed.tensor import DTensor

MESHES = ("fsdp", "fsdp_shard_grad_op", "fsdp_cpu_offload", "mesh", "tp")
NAMES = ("single_device", "ddp", *MESHES)
ROWS = [row for row in table.rows() if row.strategy in NAMES and row.features(table.WORKS)]
PRECISIONS = {"32-true": (None, 1e-6), "16-mixed": (torch.float16, 4e-3), "bf16-mixed": (torch.bfloat16, 2e-2)}
"""Precision → the dtype of autocast, and the tolerance: sharding rounds elsewhere than autocast does."""
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")]


def skip_if_missing(precision: str, device: torch.device) -> None:
    """Skips fp8 without its package, and on a GPU without its units."""
    if precision == "fp8":
        pytest.importorskip("torchao")
        if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("fp8 needs compute capability 8.9")


def by_hand(precision: str, device: torch.device) -> table.Net:
    """Trains the net of the table by hand, in windows of 2, 2 and 1 batches; clips only the last norm."""
    half, _ = PRECISIONS[precision]
    module = table.Net().to(device)
    optimizer, scaler = (
        module.configure_optimizers(),
        torch.amp.GradScaler(device.type, 64.0, enabled=half is torch.half),
    )
    for index, (x, y) in enumerate(torch.utils.data.DataLoader(table.data(), 4)):
        with torch.autocast(device.type, half) if half else nullcontext():
            loss = module.loss((x.to(device), y.to(device)))
        scaler.scale(loss / (1 if index == 4 else 2)).backward()
        if index in (1, 3, 4):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return module


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", NAMES)
def test_a_world_of_one_matches_the_plain_loop(
    strategy: str, precision: str, device: torch.device, tmp_path: Path
) -> None:
    module, cell = table.Net(), table.Cell(strategy, precision, tmp_path, device.type)
    trainer = cell.trainer(accumulate_grad_batches=2, gradient_clip_val=2.0)
    trainer.fit(module, table.loader(trainer.strategy))
    held = "cpu" if strategy == "fsdp_cpu_offload" else device.type
    for parameter in module.parameters() if strategy in MESHES else ():
        assert isinstance(parameter, DTensor) and parameter.device.type == held
    expected, found = by_hand(precision, device).state_dict(), table.weights(trainer, module)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].to(value), value, rtol=0, atol=PRECISIONS[precision][1], msg=name)


@pytest.mark.parametrize(
    ("device", "row"),
    [
        *(pytest.param("cpu", row, id=f"cpu-{row.strategy}") for row in ROWS if row.precision == "bf16-mixed"),
        *(pytest.param("cuda", row, id=f"cuda-{row.strategy}-{row.precision}", marks=GPU) for row in ROWS),
    ],
    indirect=["device"],
)
def test_features_of_the_table_work_in_a_world_of_one(device: torch.device, row: table.Row, tmp_path: Path) -> None:
    """On a GPU in every precision. On the CPU in one: tests/ranks runs the others on several ranks."""
    skip_if_missing(row.precision, device)
    cell = table.Cell(row.strategy, row.precision, tmp_path, device.type)
    features = [name for name in row.features(table.WORKS) if name != table.OTHER_RANKS]
    found = {name: outcome for name in features if (outcome := table.run(cell, name)) != "works"}
    assert features and not found

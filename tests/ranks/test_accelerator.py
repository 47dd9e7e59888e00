"""The Accelerator on two ranks: the numbers of hand-written DDP, exact metrics, and what ranks tell each other."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks.world import run_world
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def numbers(count: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(tensors: Any) -> list[Any]:
    """As numbers, which a rank can send to the test."""
    return [tensor.detach().tolist() for tensor in tensors]


def by_accelerator(precision: str, accumulation: int, strategy: str = "auto") -> list[Any]:
    from leyden import Accelerator

    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation, strategy=strategy
    )
    model, optimizer = build()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), 2))
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return plain(accelerator.get_state_dict(model).values())


def by_hand(precision: str, accumulation: int) -> list[Any]:
    dist.init_process_group("gloo")
    rank, dtype = dist.get_rank(), DTYPES[precision]
    model, optimizer = build()
    wrapped = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    data = numbers()
    for _ in range(2):
        for index in range(4):
            x, y = data[4 * index + 2 * rank : 4 * index + 2 * rank + 2]
            length = min(accumulation, 4 - index // accumulation * accumulation)
            closes = (index + 1) % accumulation == 0 or index == 3
            wrapped.require_backward_grad_sync = closes
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = F.mse_loss(wrapped(x), y)
            scaler.scale(loss / length if length > 1 else loss).backward()
            if closes:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    del wrapped
    dist.destroy_process_group()
    return plain(model.parameters())


@pytest.mark.parametrize(("precision", "accumulation"), [("no", 1), ("no", 3), ("bf16", 2), ("fp16", 3)])
def test_weights_are_those_of_hand_written_ddp(precision: str, accumulation: int) -> None:
    ours, theirs = run_world(2, by_accelerator, precision, accumulation), run_world(2, by_hand, precision, accumulation)
    assert ours == theirs


def gathered(even: bool, split: bool) -> dict[str, Any]:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True, even_batches=even, split_batches=split)
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    data = [{"x": torch.tensor([float(number)]), "name": f"n{number}"} for number in range(9)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, DataLoader(data, 8 if split else 4), scheduler
        )
    seen: dict[str, Any] = {"sizes": [], "x": [], "pairs": [], "names": [], "objects": []}
    for batch in loader:
        seen["sizes"].append(len(batch["x"]))
        if not even and len(batch["x"]) < 4:
            continue
        found = accelerator.gather_for_metrics({"x": batch["x"], "pairs": batch["x"].repeat_interleave(2)})
        seen["x"] += found["x"].flatten().tolist()
        seen["pairs"] += found["pairs"].tolist()
        seen["names"] += accelerator.gather_for_metrics(batch["name"])
        objects = [{"name": name, "size": len(name)} for name in batch["name"]]
        seen["objects"] += accelerator.gather_for_metrics(objects, use_gather_object=True)
        seen["losses"] = accelerator.gather(torch.tensor(float(accelerator.process_index))).tolist()
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    seen["rate"] = scheduler.get_last_lr()[0]
    seen["warnings"] = [str(entry.message) for entry in caught]
    return seen


@pytest.mark.parametrize("split", [False, True])
def test_nine_samples_on_two_ranks_are_nine_in_order(split: bool) -> None:
    for seen in run_world(2, gathered, True, split):
        assert seen["sizes"] == [4, 4]
        assert seen["x"] == [float(number) for number in range(9)]
        assert seen["pairs"] == [float(number // 2) for number in range(18)]
        assert seen["names"] == [entry["name"] for entry in seen["objects"]] == [f"n{number}" for number in range(9)]
        assert seen["losses"] == [0.0, 1.0]
        assert seen["rate"] == pytest.approx(0.01 / 4)
        assert [text for text in seen["warnings"] if "count optimizer steps" in text]


def test_uneven_ranks_read_their_own_samples_alone() -> None:
    first, second = run_world(2, gathered, False, False)
    assert (first["sizes"], second["sizes"]) == ([4, 1], [4])
    assert first["x"] == second["x"] == [float(number) for number in range(8)]


def joined_inputs() -> list[Any]:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(10), 4))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        count = 0
        for x, y in loader:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    assert count == 2 and len(loader) == 2
    return plain(accelerator.unwrap_model(model).parameters())


def test_uneven_inputs_are_joined() -> None:
    first, second = run_world(2, joined_inputs)
    assert first == second


def exchanges() -> dict[str, Any]:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    own = torch.full((rank + 1, 2), float(rank + 1))
    padded = accelerator.pad_across_processes({"a": own}, pad_index=-1)["a"]
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
        split = part
    if rank == 1:
        accelerator.set_trigger()
    refusal = ""
    try:
        accelerator.on_main_process(lambda: accelerator.gather(torch.ones(1)))()
    except ValueError as error:
        refusal = str(error)
    return {
        "gather": accelerator.gather(padded).tolist(),
        "sum": accelerator.reduce(torch.tensor([rank + 1.0])).item(),
        "mean": accelerator.reduce(torch.tensor(rank + 1.0), "mean").item(),
        "max": accelerator.reduce(torch.tensor(rank + 1.0), "max", scale=2.0).item(),
        "split": split,
        "triggered": (accelerator.check_trigger(), accelerator.check_trigger()),
        "broadcast": accelerator.broadcast({"rank": rank}, 1),
        "type": accelerator.distributed_type,
        "refusal": refusal,
        "last": accelerator.is_last_process,
    }


def test_what_ranks_exchange() -> None:
    for rank, found in enumerate(run_world(2, exchanges)):
        assert found["gather"] == [[1.0, 1.0], [-1.0, -1.0], [2.0, 2.0], [2.0, 2.0]]
        assert (found["sum"], found["mean"], found["max"]) == (3.0, 1.5, 4.0)
        assert found["split"] == [["a", "b"], ["c", "c"]][rank]
        assert found["triggered"] == (True, False)
        assert found["broadcast"] == {"rank": 1}
        assert ("on one rank only" in found["refusal"]) == (rank == 0)
        assert (found["type"], found["last"]) == ("MULTI_CPU", rank == 1)


def resumed(folder: str, stop: int | None) -> tuple[list[float], list[Any]]:
    """Two epochs of shuffled samples; with `stop`, the second begins by taking back what was saved after that step."""
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5 + accelerator.process_index if stop is None else 99)
    model, optimizer = build()
    torch.manual_seed(7)
    loader = DataLoader(numbers(18), 2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start, begun, seen = 0, 0, []
    if stop is not None:
        accelerator.load_state(f"{folder}/step_{stop}")
        start, begun = divmod(stop, len(loader))
    for epoch in range(start, 2):
        batches = accelerator.skip_first_batches(loader, begun) if epoch == start and stop else loader
        for index, (x, y) in enumerate(batches, begun if epoch == start else 0):
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            seen += x[:, 0].tolist()
            if stop is None:
                accelerator.save_state(f"{folder}/step_{epoch * len(loader) + index + 1}")
    return seen, plain(accelerator.unwrap_model(model).parameters())


@pytest.mark.parametrize("stop", [3, 5, 8])
def test_a_resume_on_ranks_goes_on_exactly(tmp_path: Path, stop: int) -> None:
    whole = run_world(2, resumed, str(tmp_path), None)
    for rank, (seen, weights) in enumerate(run_world(2, resumed, str(tmp_path), stop)):
        assert seen == whole[rank][0][2 * stop :]
        assert weights == whole[rank][1]

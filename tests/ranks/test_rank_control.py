"""Which of two ranks runs a block first, preparing objects one by one, and synchronizing gradients late."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.world import run_world
from same import whole
from torch import nn
from torch.utils.data import DataLoader


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return model, optimizer, scheduler, DataLoader(torch.randn(8, 2), batch_size=2)


def entered_second(accelerator: Any, method: str, folder: Path) -> bool:
    """Returns True if the other rank had entered the block before this one."""
    mark = folder / method
    with getattr(accelerator, method)():
        found = mark.exists()
        mark.touch()
    accelerator.wait_for_everyone()
    return found


def error_in_main_block(accelerator: Any) -> str:
    """Returns the main rank's error in its block, or that the other rank continued."""
    try:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                raise OSError("no data")
    except OSError as error:
        return str(error)
    return "continued"


def trained(accelerator: Any, one_by_one: bool) -> dict[str, Any]:
    model, optimizer, scheduler, loader = build()
    if one_by_one:
        model = accelerator.prepare_model(model)
        optimizer = accelerator.prepare_optimizer(optimizer)
        scheduler = accelerator.prepare_scheduler(scheduler)
        loader = accelerator.prepare_data_loader(loader)
    else:
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    sizes = []
    for batch in loader:
        sizes.append(len(batch))
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    found = {
        "weights": [p.detach().tolist() for p in accelerator.unwrap_model(model).parameters()],
        "rate": scheduler.get_last_lr()[0],
        "sizes": sizes,
        "same": accelerator.prepare_optimizer(optimizer) is optimizer
        and accelerator.prepare_scheduler(scheduler) is scheduler
        and accelerator.prepare_data_loader(loader) is loader,
    }
    accelerator.free_memory()
    return found


def long_schedules() -> dict[str, list[str]]:
    """Returns the files to which warnings about each schedule point. Each rank has 6 of 12 batches, 3 steps of two."""
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rates = torch.optim.lr_scheduler

    def steps(number: int) -> Any:
        return partial(lambda step, *, num_training_steps: 1 - step / num_training_steps, num_training_steps=number)

    schedules: dict[str, Callable[[Any], Any]] = {
        "5 epochs": lambda optimizer: rates.CosineAnnealingLR(optimizer, 3 * 5),
        "5 epochs of a loader not prepared": lambda optimizer: rates.CosineAnnealingLR(optimizer, 6 * 5),
        "5 epochs by a function": lambda optimizer: rates.LambdaLR(optimizer, steps(3 * 5)),
        "5 epochs by a function, twice": lambda optimizer: rates.LambdaLR(optimizer, steps(2 * 3 * 5)),
        "no end": lambda optimizer: rates.ReduceLROnPlateau(optimizer, patience=6),
    }
    found = {}
    for name, schedule in schedules.items():
        model, optimizer, _, _ = build()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.prepare(model, optimizer, schedule(optimizer))
            accelerator.prepare(DataLoader(torch.randn(24, 2), 2))
        found[name] = [os.path.basename(e.filename) for e in caught if "multiplied by num_processes" in str(e.message)]
        accelerator.free_memory()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return found


def sync_late(strategy: str) -> dict[str, list[float] | None]:
    """Returns gradients after a backward under `no_sync`, and after one that syncs a forward under `no_sync`."""
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    own = torch.full((1, 1), accelerator.process_index + 1.0)
    with accelerator.no_sync(model):
        first, second = model(own).sum(), model(own * 10).sum()
        accelerator.backward(first)
    # FSDP sets no gradients before it sends them.
    kept = None if model.weight.grad is None else whole(model.weight.grad).flatten().tolist()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    sent = whole(model.weight.grad).flatten().tolist()
    accelerator.free_memory()
    return {"kept": kept, "sent": sent}


def on_two_machines() -> tuple[int, list[int]]:
    """Runs as the only rank of one of two machines; returns its local rank, and the ranks inside the block."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE="2")
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    with accelerator.local_main_process_first():
        inside = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    return accelerator.local_process_index, inside


def on_a_rank(folder: str) -> dict[str, Any]:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("images")
    accelerator.get_tracker("tensorboard").log_images({"digits": torch.zeros(2, 1, 4, 4)}, step=1)
    accelerator.end_training()
    place = Path(folder)
    return {
        "main": entered_second(accelerator, "main_process_first", place),
        "local": entered_second(accelerator, "local_main_process_first", place),
        "failed": error_in_main_block(accelerator),
        "one call": trained(accelerator, one_by_one=False),
        "one by one": trained(accelerator, one_by_one=True),
        "schedules": long_schedules(),
        "list": [batch.tolist() for batch in accelerator.prepare_data_loader([torch.tensor([n]) for n in range(4)])],
        "ddp": sync_late("ddp"),
        "fsdp": sync_late("fsdp"),
        "logged": len(list(place.glob("images/events.out.tfevents.*"))),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of two ranks."""
    return run_world(2, on_a_rank, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("which", ["main", "local"])
def test_the_main_rank_enters_the_block_first(found: list[dict[str, Any]], which: str) -> None:
    assert [rank[which] for rank in found] == [False, True]


def test_local_main_process_first_does_not_wait_for_other_machines() -> None:
    assert run_world(2, on_two_machines, timeout=60) == [(0, [0, 1])] * 2


def test_the_other_rank_continues_if_the_main_rank_fails_in_its_block(found: list[dict[str, Any]]) -> None:
    assert [rank["failed"] for rank in found] == ["no data", "continued"]


def test_objects_prepared_one_by_one_train_like_those_prepared_in_one_call(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["one by one"] == rank["one call"]
        assert rank["one call"]["same"]
    assert found[0]["one call"]["weights"] == found[1]["one call"]["weights"]


def test_a_scheduler_prepared_alone_steps_once_per_optimizer_step(found: list[dict[str, Any]]) -> None:
    # 8 samples in batches of 2 on 2 ranks are 2 batches each, which make one step.
    assert [rank["one by one"]["sizes"] for rank in found] == [[2, 2], [2, 2]]
    assert [rank["one by one"]["rate"] for rank in found] == [0.05, 0.05]


def test_only_schedules_that_may_be_multiplied_warn_on_rank_0_at_the_users_line(found: list[dict[str, Any]]) -> None:
    assert found[0]["schedules"] == {
        "5 epochs": [],
        "5 epochs of a loader not prepared": ["test_rank_control.py"],
        "5 epochs by a function": [],
        "5 epochs by a function, twice": ["test_rank_control.py"],
        "no end": [],
    }
    assert not any(found[1]["schedules"].values())


def test_a_list_of_batches_is_split_across_the_ranks(found: list[dict[str, Any]]) -> None:
    assert [rank["list"] for rank in found] == [[[0], [2]], [[1], [3]]]


@pytest.mark.parametrize(("strategy", "kept"), [("ddp", [[1.0], [2.0]]), ("fsdp", [None, None])])
def test_trigger_sync_in_backward_sends_gradients_of_an_unsynced_forward(
    found: list[dict[str, Any]], strategy: str, kept: Any
) -> None:
    assert [rank[strategy]["kept"] for rank in found] == kept
    # The mean over ranks of 1 + 10 and 2 + 20.
    assert [rank[strategy]["sent"] for rank in found] == [[16.5], [16.5]]


def test_only_the_main_rank_writes_images(found: list[dict[str, Any]]) -> None:
    assert [rank["logged"] for rank in found] == [1, 1]

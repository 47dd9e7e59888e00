"""The Accelerator on two ranks: the numbers of hand-written DDP, exact metrics, and collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
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
    """Returns the tensors as lists of numbers, which a rank can send to the test."""
    return [tensor.detach().tolist() for tensor in tensors]


def by_accelerator(
    precision: str, accumulation: int, strategy: str = "auto", init_scale: float = 2.0**16
) -> tuple[list[Any], int]:
    """Returns the weights, and how many steps the scaler skipped."""
    from leyden import Accelerator, GradScalerKwargs

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        strategy=strategy,
        kwargs_handlers=[GradScalerKwargs(init_scale=init_scale)],
    )
    skips = 0
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
            if accelerator.sync_gradients:
                skips += accelerator.optimizer_step_was_skipped
    return plain(accelerator.get_state_dict(model).values()), skips


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    set_sync: Callable[[bool], None],
    precision: str,
    accumulation: int,
    init_scale: float = 2.0**16,
) -> None:
    """Trains on this rank as a user's own loop would.

    Args:
        set_sync: turns gradient synchronization on or off for the next backward.
    """
    rank, dtype = dist.get_rank(), DTYPES[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=init_scale)
    data = numbers()
    for _ in range(2):
        for index in range(4):
            x, y = data[4 * index + 2 * rank : 4 * index + 2 * rank + 2]
            length = min(accumulation, 4 - index // accumulation * accumulation)
            closes = (index + 1) % accumulation == 0 or index == 3
            set_sync(closes)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = F.mse_loss(model(x), y)
            scaler.scale(loss / length if length > 1 else loss).backward()
            if closes:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


def by_ddp(precision: str, accumulation: int) -> list[Any]:
    dist.init_process_group("gloo")
    model, optimizer = build()
    wrapped = DistributedDataParallel(model)
    set_sync = partial(setattr, wrapped, "require_backward_grad_sync")
    train_by_hand(wrapped, optimizer, set_sync, precision, accumulation)
    del wrapped, set_sync
    dist.destroy_process_group()
    return plain(model.parameters())


@pytest.mark.parametrize(("precision", "accumulation"), [("no", 1), ("no", 3), ("bf16", 2), ("fp16", 3)])
def test_weights_match_hand_written_ddp(precision: str, accumulation: int) -> None:
    ours, theirs = run_world(2, by_accelerator, precision, accumulation), run_world(2, by_ddp, precision, accumulation)
    assert [weights for weights, _ in ours] == theirs


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


@pytest.fixture(scope="module", params=[False, True], ids=["batches", "split batches"])
def nine(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the results of two ranks that read nine samples in even batches."""
    return run_world(2, gathered, True, request.param)


def test_gather_for_metrics_drops_duplicates_and_keeps_the_order(nine: list[dict[str, Any]]) -> None:
    for seen in nine:
        assert seen["sizes"] == [4, 4]
        assert seen["x"] == [float(number) for number in range(9)]
        assert seen["pairs"] == [float(number // 2) for number in range(18)]
        assert seen["names"] == [entry["name"] for entry in seen["objects"]] == [f"n{number}" for number in range(9)]
        assert seen["losses"] == [0.0, 1.0]


def test_a_scheduler_steps_once_per_optimizer_step(nine: list[dict[str, Any]]) -> None:
    for seen in nine:
        assert seen["rate"] == pytest.approx(0.01 / 4)
        assert not any("count optimizer steps" in text for text in seen["warnings"])


def test_uneven_batches_repeat_no_samples() -> None:
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


def test_join_uneven_inputs_keeps_weights_equal() -> None:
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


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, Any]]:
    """Returns the results of the collectives on two ranks."""
    return run_world(2, exchanges)


EXCHANGED = {
    "gather": [[[1.0, 1.0], [-1.0, -1.0], [2.0, 2.0], [2.0, 2.0]]] * 2,
    "sum": [3.0, 3.0],
    "mean": [1.5, 1.5],
    # Scaled by two.
    "max": [4.0, 4.0],
    "broadcast": [{"rank": 1}] * 2,
    "split": [["a", "b"], ["c", "c"]],
    "type": ["MULTI_CPU", "MULTI_CPU"],
    "last": [False, True],
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_collectives_return_the_expected_values_on_each_rank(exchanged: list[dict[str, Any]], name: str) -> None:
    assert [found[name] for found in exchanged] == EXCHANGED[name]


def test_a_trigger_set_on_one_rank_fires_once_on_all(exchanged: list[dict[str, Any]]) -> None:
    assert [found["triggered"] for found in exchanged] == [(True, False)] * 2


def test_a_collective_inside_on_main_process_raises(exchanged: list[dict[str, Any]]) -> None:
    first, second = (found["refusal"] for found in exchanged)
    assert "which other ranks skip" in first and second == ""


def resumed(folder: str, stop: int | None) -> tuple[list[float], list[Any]]:
    """Trains two epochs and saves after each step; with `stop`, resumes from the state saved after that step."""
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
def test_a_distributed_run_resumes_exactly(tmp_path: Path, stop: int) -> None:
    whole = run_world(2, resumed, str(tmp_path), None)
    for rank, (seen, weights) in enumerate(run_world(2, resumed, str(tmp_path), stop)):
        assert seen == whole[rank][0][2 * stop :]
        assert weights == whole[rank][1]


def by_fully_shard(precision: str, accumulation: int, init_scale: float) -> list[Any]:
    """Trains by torch's own recipe: float32 shards, gathered in half precision, autocast, one scaler."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh, dtype = init_device_mesh("cpu", (2,)), DTYPES[precision]
    model, _ = build()
    reduced = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    set_sync: Any = model.set_requires_gradient_sync
    train_by_hand(model, optimizer, set_sync, precision, accumulation, init_scale)
    found = plain(p.full_tensor() for p in model.parameters())
    del model, optimizer, set_sync
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("precision", "accumulation", "init_scale"),
    [("no", 1, 1.0), ("no", 3, 1.0), ("bf16", 1, 1.0), ("bf16", 3, 1.0), ("fp16", 3, 2.0**10), ("fp16", 1, 2.0**30)],
)
def test_weights_match_hand_written_fsdp(precision: str, accumulation: int, init_scale: float) -> None:
    ours = run_world(2, by_accelerator, precision, accumulation, "fsdp", init_scale)
    theirs = run_world(2, by_fully_shard, precision, accumulation, init_scale)
    assert [weights for weights, _ in ours] == theirs
    assert all((skips > 0) == (init_scale > 2.0**20) for _, skips in ours)


def fsdp_state(folder: str) -> tuple[list[Any], list[Any], list[str]]:
    from leyden import Accelerator, FullyShardedDataParallelPlugin

    def run(seed: int) -> tuple[Any, nn.Module]:
        plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy="NO_WRAP")
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", fsdp_plugin=plugin)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        # Prepared before the model, the optimizer gets the sharded parameters once they exist.
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        model = accelerator.prepare(model)
        if seed:
            accelerator.load_state(f"{folder}/saved")
        for step in range(2):
            with accelerator.autocast():
                loss = F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 1))
            accelerator.backward(loss)
            assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() > 0
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and not seed:
                accelerator.save_state(f"{folder}/saved")
            if seed:
                break
        accelerator.save_model(model, f"{folder}/model")
        return accelerator, model

    first, model = run(0)
    again, other = run(1)
    assert first.distributed_type == "FSDP"
    one, two = first.get_state_dict(model), again.get_state_dict(other)
    return plain(one.values()), plain(two.values()), list(one)


def test_an_fsdp_model_saves_and_resumes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for straight, resumed_, names in run_world(2, fsdp_state, str(tmp_path)):
        assert straight == resumed_
        assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert plain(load_file(tmp_path / "model" / "model.safetensors")[name] for name in names) == straight


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream of `count` numbers, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        yield from (torch.tensor([float(number)]) for number in range(self.count))


class SplitStream(Stream):
    """A stream of which each worker process reads its own part, as torch asks."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from (torch.tensor([float(number)]) for number in range(first, self.count, step))


def streamed() -> dict[str, Any]:
    from leyden import Accelerator, DataLoaderConfiguration

    found: dict[str, Any] = {}
    for name, config, loader in (
        ("stream", DataLoaderConfiguration(), DataLoader(Stream(9), 2)),
        (
            "workers",
            DataLoaderConfiguration(),
            DataLoader(SplitStream(9), 2, num_workers=2, multiprocessing_context="fork"),
        ),
        (
            "batches",
            DataLoaderConfiguration(),
            DataLoader(SplitStream(9), None, num_workers=1, multiprocessing_context="fork"),
        ),
        ("own", DataLoaderConfiguration(even_batches=False), DataLoader(Stream(7), 2)),
        ("dispatched", DataLoaderConfiguration(dispatch_batches=True), DataLoader(Stream(9), 2)),
        ("split", DataLoaderConfiguration(dispatch_batches=True, split_batches=True), DataLoader(Stream(9), 4)),
        ("list", DataLoaderConfiguration(), [torch.full((1, 1), float(number)) for number in range(5)]),
        (
            "seeded",
            DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
            DataLoader(range(8), 2, shuffle=True),
        ),
    ):
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        prepared, own, seen = accelerator.prepare_data_loader(loader), [], []
        for batch in prepared:
            own.append(batch.flatten().tolist())
            if name != "own":
                seen += accelerator.gather_for_metrics(batch).flatten().tolist()
        found[name] = (own, seen)
    return found


def train_with_local_sgd() -> tuple[list[Any], Any]:
    """Returns the weights after each of three steps, averaged every second step, and at the end."""
    from leyden import Accelerator, LocalSGD

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model, optimizer = build()
    model, optimizer = accelerator.prepare(model, optimizer)
    weights = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
        for step in range(3):
            accelerator.backward(model(torch.full((1, 4), accelerator.process_index + step + 1.0)).sum())
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            weights.append(next(model.parameters()).tolist())
    return weights, next(model.parameters()).tolist()


def test_local_sgd_averages_the_weights_every_second_step_and_at_the_end() -> None:
    (first, first_end), (second, second_end) = run_world(2, train_with_local_sgd)
    assert [a != b for a, b in zip(first, second, strict=True)] == [True, False, True]
    assert first_end == second_end


@pytest.fixture(scope="module")
def streams() -> list[dict[str, Any]]:
    """Returns each loader's batches on two ranks, and the samples that gather_for_metrics returns for them."""
    return run_world(2, streamed)


FIRST, SECOND = [[0.0, 1.0], [4.0, 5.0], [8.0, 0.0]], [[2.0, 3.0], [6.0, 7.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("stream", FIRST, SECOND),
        ("dispatched", FIRST, SECOND),
        ("split", FIRST, SECOND),
        ("own", [[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0]]),
        ("list", [[0.0], [2.0], [4.0]], [[1.0], [3.0], [0.0]]),
    ],
)
def test_batches_of_a_stream_or_list_are_dealt_round_robin(
    streams: list[dict[str, Any]], name: str, first: Any, second: Any
) -> None:
    assert [found[name][0] for found in streams] == [first, second]


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        *((name, list(range(9))) for name in ("stream", "batches", "dispatched", "split")),
        # Each worker's part of the stream ends separately.
        ("workers", [0, 2, 4, 6, 1, 3, 5, 7, 8]),
        ("list", list(range(5))),
    ],
)
def test_gather_for_metrics_returns_each_sample_of_a_stream_once(
    streams: list[dict[str, Any]], name: str, samples: list[int]
) -> None:
    for found in streams:
        assert found[name][1] == samples


def test_a_seedable_sampler_gives_all_ranks_the_same_order(streams: list[dict[str, Any]]) -> None:
    first, second = (found["seeded"][1] for found in streams)
    assert first == second and sorted(first) == list(range(8))


def train_gan(by_leyden: bool) -> list[Any]:
    """WGAN-GP: the critic is run three times and differentiated twice before one backward."""
    from leyden import Accelerator

    torch.manual_seed(2)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers: Any = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    backward: Any = torch.Tensor.backward
    if by_leyden:
        accelerator = Accelerator(cpu=True)
        ddp_generator, ddp_critic, *optimizers = accelerator.prepare(generator, critic, *optimizers)
        backward, rank = accelerator.backward, accelerator.process_index
    else:
        dist.init_process_group("gloo")
        ddp_generator, ddp_critic, rank = (
            DistributedDataParallel(generator),
            DistributedDataParallel(critic),
            dist.get_rank(),
        )
    torch.manual_seed(10 + rank)
    for _ in range(3):
        real, fake = torch.randn(3, 4), ddp_generator(torch.randn(3, 3))
        between = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
        [gradient] = torch.autograd.grad(ddp_critic(between).sum(), between, create_graph=True)
        penalty = ((gradient.norm(dim=1) - 1) ** 2).mean()
        backward(ddp_critic(fake.detach()).mean() - ddp_critic(real).mean() + 10 * penalty)
        optimizers[1].step()
        optimizers[1].zero_grad()
        backward(-ddp_critic(fake).mean())
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    found = plain([*generator.parameters(), *critic.parameters()])
    if not by_leyden:
        del ddp_generator, ddp_critic
        dist.destroy_process_group()
    return found


def test_a_gan_with_gradient_penalty_matches_hand_written_ddp() -> None:
    ours, theirs = run_world(2, train_gan, True), run_world(2, train_gan, False)
    assert ours == theirs and ours[0] == ours[1]


def test_a_custom_method_of_a_ddp_model_raises_while_gradients_are_enabled(tmp_path: Path) -> None:
    assert run_world(2, call_custom_method) == [(True, [1.0], "accelerator.unwrap_model(model).loss")] * 2


class WithLoss(nn.Linear):
    config = "settings"

    def loss(self, x: Any) -> Any:
        return self(x).sum()


def call_custom_method() -> tuple[bool, list[float], str]:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(WithLoss(1, 1))
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
        value = [model.loss(torch.ones(1, 1)).item()]
    try:
        _ = model.loss
    except AttributeError as error:
        return (
            model.config == "settings" and not hasattr(model, "loss"),
            value,
            str(error).split(", or ")[1].split(" ")[0],
        )
    return False, value, ""


def compressed(hook: str) -> tuple[list[Any], str]:
    from leyden import Accelerator, DistributedDataParallelKwargs

    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2} if hook == "power_sgd" else {}
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model, optimizer = build()
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    for _ in range(4):
        accelerator.backward(F.mse_loss(model(torch.randn(6, 4)), torch.randn(6, 1)))
        optimizer.step()
        optimizer.zero_grad()
    return plain(accelerator.unwrap_model(model).parameters()), str(model.gradient_as_bucket_view)


def test_communication_hooks_change_the_result_and_keep_ranks_equal() -> None:
    results = {hook: run_world(2, compressed, hook) for hook in ("no", "fp16", "bf16", "power_sgd")}
    for first, second in results.values():
        assert first == second
        assert first[1] == "True"
    assert len({str(first[0]) for first, _ in results.values()}) == 4


def in_a_notebook(value: int) -> tuple[int, str, float]:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(float(value + accelerator.process_index)))
    return accelerator.num_processes, accelerator.mixed_precision, total.item()


def test_notebook_launcher_starts_the_ranks() -> None:
    from leyden import ConfigurationError, debug_launcher, notebook_launcher

    found = notebook_launcher(in_a_notebook, (2,), num_processes=2, mixed_precision="bf16")
    assert found == (2, "bf16", 5.0)
    assert debug_launcher(in_a_notebook, (2,)) == (2, "no", 5.0)
    with pytest.raises(ConfigurationError, match="runs on one machine only"):
        notebook_launcher(in_a_notebook, (2,), num_nodes=2)


def printed() -> tuple[str, str]:
    import contextlib
    import io

    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        for number in range(2):
            print("everywhere", number)
            accelerator.print("once", number)
    return out.getvalue(), err.getvalue()


def test_printing_on_every_rank_shows_one_hint() -> None:
    (first, no_hint), (second, hint) = run_world(2, printed)
    assert first == "everywhere 0\nonce 0\neverywhere 1\nonce 1\n" and second == "everywhere 0\neverywhere 1\n"
    assert no_hint == "" and hint.count("accelerator.print(...) prints once") == 1

"""Streams of `datasets`: shuffled and packed, they resume with the samples of an unbroken run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from torch.utils.data import DataLoader, IterableDataset

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.core.errors import StateError
from leyden.hf import PackedStream, ShuffledStream

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SHARDS, PER_SHARD = 6, 8
SAMPLES = SHARDS * PER_SHARD
BUFFER = 8


def generated(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for i in range(PER_SHARD):
            yield {"x": shard * PER_SHARD + i}


def stream() -> Any:
    return datasets.IterableDataset.from_generator(generated, gen_kwargs={"shards": list(range(SHARDS))})


def write(folder: Path) -> None:
    """Writes the samples as shards of three formats."""
    for shard in range(SHARDS):
        rows = list(generated([shard]))
        datasets.Dataset.from_list(rows).to_parquet(str(folder / f"{shard}.parquet"))
        (folder / f"{shard}.json").write_text("\n".join(json.dumps(row) for row in rows))
        (folder / f"{shard}.txt").write_text("\n".join(str(row["x"]) for row in rows))


def files(folder: Path, kind: str) -> Any:
    names = [str(folder / f"{shard}.{'txt' if kind == 'text' else kind}") for shard in range(SHARDS)]
    return datasets.load_dataset(kind, data_files=names, split="train", streaming=True)


class Counting(IterableDataset[dict[str, int]]):
    """A stream of one's own that counts what is read, and goes on where it was left."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.position, self.reads = samples, 0, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.position < self.samples:
            self.position, self.reads = self.position + 1, self.reads + 1
            yield {"x": self.position - 1}
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Lazy(Counting):
    """A stream that begins every pass at its start, and sets its position when the first sample is drawn."""

    loaded: int | None = None

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.position, self.loaded = self.loaded or 0, None
        while self.position < self.samples:
            self.position += 1
            yield {"x": self.position - 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = self.loaded = state["position"]


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": 2 * row["x"]}


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def both(folder: Path) -> list[Any]:
    return [stream(), files(folder, "json").map(double)]


KINDS: dict[str, Callable[[Path], Any]] = {
    "generator": lambda folder: stream(),
    "parquet": lambda folder: files(folder, "parquet"),
    "json": lambda folder: files(folder, "json"),
    "text": lambda folder: files(folder, "text").map(lambda row: {"x": int(row["text"])}),
    "map": lambda folder: files(folder, "parquet").map(double),
    "filter": lambda folder: files(folder, "parquet").filter(odd),
    "concatenated": lambda folder: datasets.concatenate_datasets(both(folder)),
    "interleaved": lambda folder: datasets.interleave_datasets(both(folder), probabilities=[0.3, 0.7], seed=1),
    "shuffled shards": lambda folder: stream().shuffle(seed=1, buffer_size=1),
    "own": lambda folder: Counting(),
    "own, lazy": lambda folder: Lazy(),
    "nested": lambda folder: ShuffledStream(stream(), 5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    write(made)
    return made


def samples_of(rows: Any) -> list[int]:
    return [int(row["x"]) for row in rows]


def documents(folder: Path) -> Any:
    return KINDS["parquet"](folder).map(lambda row: {"input_ids": [row["x"] + 1] * (row["x"] % 7)})


def rows_of(rows: Any) -> list[list[int]]:
    return [row["input_ids"].tolist() + row["position_ids"].tolist() for row in rows]


def check_cuts(make: Callable[[], Any], read: Callable[[Any], list[Any]], epoch: int, cuts: list[int]) -> list[Any]:
    """Checks that a stream resumed at each cut yields what an unbroken one yields; returns that."""
    whole = make()
    whole.set_epoch(epoch)
    samples = read(whole)
    for cut in cuts:
        begun = make()
        begun.set_epoch(epoch)
        assert read(itertools.islice(begun, cut)) == samples[:cut]
        # A checkpoint keeps numbers, text, dicts and lists.
        state = json.loads(json.dumps(begun.state_dict()))
        resumed = make()
        resumed.set_epoch(epoch)
        resumed.load_state_dict(state)
        assert read(resumed) == samples[cut:], cut
    return samples


# one process ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_shuffled_stream_resumes_with_the_samples_of_an_unbroken_one(kind: str, folder: Path) -> None:
    def make() -> Any:
        return ShuffledStream(KINDS[kind](folder), BUFFER, seed=3)

    # The threads that read several files at once take five seconds to end.
    cuts = [19] if kind == "interleaved" else [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 23]
    first = check_cuts(make, samples_of, 0, cuts)
    second = check_cuts(make, samples_of, 1, cuts[-1:])
    assert sorted(first) != first != second
    if kind != "interleaved":
        # Which of several sources ends first depends on the epoch.
        assert Counter(first) == Counter(second) == Counter(samples_of(KINDS[kind](folder)))


def test_a_packed_stream_resumes_with_the_rows_of_an_unbroken_one(folder: Path) -> None:
    for epoch in (0, 1):
        rows = check_cuts(lambda: PackedStream(documents(folder), 9, 11, 2), rows_of, epoch, [0, 1, 3, 4, 9, 16])
        tokens = Counter(token for row in rows for token in row[:9] if token)
        assert tokens == Counter(token for row in documents(folder) for token in row["input_ids"])
        assert len(rows) * 9 < 1.25 * sum(tokens.values())
    everything = samples_of(ShuffledStream(stream(), SAMPLES))
    assert sorted(everything) == list(range(SAMPLES)) != everything


@pytest.mark.parametrize(
    "make", [Lazy, Counting, lambda: ShuffledStream(Lazy(), 5)], ids=["lazy", "counting", "nested"]
)
def test_a_second_epoch_resumes_whenever_the_stream_sets_its_position(make: Callable[[], Any]) -> None:
    unbroken = ShuffledStream(make(), BUFFER, seed=1)
    epochs = []
    for epoch in range(3):
        unbroken.set_epoch(epoch)
        epochs.append(samples_of(unbroken))
    assert [sorted(samples) for samples in epochs] == [list(range(SAMPLES))] * 3
    for cut in (1, BUFFER - 1, BUFFER, BUFFER + 3):
        begun = ShuffledStream(make(), BUFFER, seed=1)
        samples_of(begun)
        begun.set_epoch(1)
        samples_of(itertools.islice(begun, cut))
        resumed = ShuffledStream(make(), BUFFER, seed=1)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        resumed.set_epoch(1)
        assert samples_of(resumed) == epochs[1][cut:], cut
        resumed.set_epoch(2)
        assert samples_of(resumed) == epochs[2], cut


def test_a_new_fit_after_a_finished_one_was_resumed_reads_everything(tmp_path: Path) -> None:
    def fit(loader: Any, resume: Path | None = None) -> Trainer:
        trainer = Trainer(max_epochs=1, **QUIET)
        trainer.fit(Noting(str(tmp_path), 99), loader, ckpt_path=resume)
        return trainer

    finished = fit(DataLoader(ShuffledStream(stream(), BUFFER), 2))
    finished.save_checkpoint(tmp_path / "end")
    same = DataLoader(ShuffledStream(stream(), BUFFER), 2)
    assert fit(same, tmp_path / "end").global_step == finished.global_step
    assert fit(same).global_step == finished.global_step


def test_other_shards_at_a_resume_are_refused() -> None:
    begun = ShuffledStream(stream(), BUFFER)
    next(iter(begun))
    rows = [{"x": x} for x in range(SAMPLES)]
    one = ShuffledStream(datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=1), BUFFER)
    with pytest.raises(ConfigurationError, match="num_shards=1"):
        one.load_state_dict(begun.state_dict())


def test_a_stream_goes_on_after_a_resume_and_starts_over_at_the_next_pass() -> None:
    for make in (stream, Counting, lambda: ShuffledStream(stream(), 5, seed=1)):
        shuffled = ShuffledStream(make(), BUFFER)
        whole = samples_of(shuffled)
        assert samples_of(shuffled) == whole
        half = iter(shuffled)
        for _ in range(20):
            next(half)
        state = shuffled.state_dict()
        half.close()
        again = ShuffledStream(make(), BUFFER)
        for _ in range(2):
            again.load_state_dict(state)
            assert samples_of(again) == whole[20:]
        assert samples_of(again) == whole
        # A state is of one epoch.
        again.load_state_dict(state)
        again.set_epoch(1)
        other = samples_of(again)
        assert other != whole and (make is Counting or sorted(other) == sorted(whole))


@pytest.mark.parametrize("cut", range(0, SAMPLES + 1, 5))
def test_a_resume_reads_no_more_than_the_buffer_again(cut: int) -> None:
    begun = ShuffledStream(Counting(), BUFFER)
    samples = samples_of(itertools.islice(begun, cut))
    source = Counting()
    resumed = ShuffledStream(source, BUFFER)
    resumed.load_state_dict(begun.state_dict())
    samples += samples_of(resumed)
    assert sorted(samples) == list(range(SAMPLES))
    assert source.reads <= SAMPLES - cut + BUFFER
    assert SAMPLES - source.reads == cut // BUFFER * BUFFER


def test_no_more_than_the_buffer_is_in_memory() -> None:
    alive = most = 0

    class Sample:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    class Source(Counting):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(SAMPLES):
                yield Sample()

    for sample in ShuffledStream(Source(), BUFFER):
        del sample
    assert most <= BUFFER + 1 and alive == 0


def test_samples_are_mixed_within_the_buffer() -> None:
    count, size = 20_000, 100
    order = torch.tensor(samples_of(ShuffledStream(Counting(count), size, seed=1)))
    moved = (order - torch.arange(count)).double()
    # The mean distance of two places drawn at random from `size` is a third of it.
    assert moved.abs().mean() == pytest.approx(size / 3, rel=0.02)
    assert moved.abs().max() < size
    within = order.view(-1, size) % size
    assert within.double().mean(0).sub((size - 1) / 2).abs().max() < 4 * size / (12 * count / size) ** 0.5
    neighbours = torch.corrcoef(torch.stack([within[:, :-1].flatten(), within[:, 1:].flatten()]).double())[0, 1]
    assert abs(neighbours) < 0.03


# in a run -------------------------------------------------------------------------------------------------------------
class Noting(TrainModule):
    """Notes the samples of each batch, and saves after a number of batches."""

    def __init__(self, path: str | None, at: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.path, self.at, self.seen = path, at, []  # type: ignore[var-annotated]

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch["x"].tolist()))
        return (self.weight - batch["x"].double()).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path is not None and self.trainer.progress.batches == self.at:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.5)


def split_by_node(data: Any) -> Any:
    import torch.distributed as dist
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(data, dist.get_rank(), dist.get_world_size())


def loader_of(kind: str, workers: int) -> Any:
    data = stream().shuffle(seed=5, buffer_size=1, max_buffer_input_shards=1 if workers else 3)
    data = split_by_node(data) if kind == "split" else data
    data = data if kind == "plain" else ShuffledStream(data, BUFFER, seed=1)
    if kind in ("stateful", "plain") or (kind == "split" and workers):
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, 3, num_workers=workers)
    return DataLoader(data, 3, num_workers=workers)


def run(ranks: int, kind: str, workers: int, path: str | None, at: int, resume: str | None, options: Any) -> Any:
    """Returns the final weight and the batches that this process trained on."""
    module = Noting(path, at)
    strategy = "ddp" if ranks > 1 else "single_device"
    trainer = Trainer(**QUIET, strategy=strategy, precision="64-true", max_epochs=2, **options)
    trainer.fit(module, loader_of(kind, workers), ckpt_path=resume)
    assert trainer.progress.samples == 2 * SAMPLES
    return float(module.weight.detach()), module.seen


def check_resume(kind: str, workers: int, tmp_path: Path, at: int, **options: Any) -> list[Any]:
    """Checks that a run that is saved after `at` batches resumes exactly; returns its batches."""
    path = str(tmp_path / f"{kind}-{workers}-{at}")
    weight, seen = run(1, kind, workers, path, at, None, options)
    assert run(1, kind, workers, None, 0, path, options) == (weight, seen[at:]), at
    return list(seen)


def each_once(seen: list[tuple[int, list[int]]]) -> bool:
    epochs = [sorted(x for epoch, batch in seen if epoch == number for x in batch) for number in range(2)]
    return epochs == [list(range(SAMPLES))] * 2


@pytest.mark.parametrize(
    ("kind", "workers"), [("torch", 0), ("stateful", 0), ("plain", 0), ("stateful", 2), ("plain", 2)]
)
def test_a_run_on_a_stream_resumes_at_the_next_sample(kind: str, workers: int, tmp_path: Path) -> None:
    # Batch 16 ends the epoch.
    for at in (1, 5, 15, 16, 20) if workers == 0 else (5, 16, 20):
        whole = check_resume(kind, workers, tmp_path, at)
    assert each_once(whole)
    assert [batch for epoch, batch in whole if epoch] != [batch for epoch, batch in whole if not epoch]


@pytest.mark.parametrize("kind", ["shards in turn", "concatenated"])
def test_streams_that_workers_cannot_resume_are_refused(kind: str, tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def fit(resume: str | None) -> None:
        data = stream().shuffle(buffer_size=1)
        data = datasets.concatenate_datasets([stream(), stream().map(double)]) if kind == "concatenated" else data
        loader = StatefulDataLoader(ShuffledStream(data, BUFFER), 3, num_workers=2)
        Trainer(max_steps=6, **QUIET).fit(Noting(str(tmp_path / "saved"), 5), loader, ckpt_path=resume)

    match = "max_buffer_input_shards=1" if kind == "shards in turn" else "interleave_datasets"
    with pytest.warns(UserWarning, match=match):
        fit(None)
    with pytest.raises(ConfigurationError, match=match):
        fit(str(tmp_path / "saved"))


@pytest.mark.parametrize("persistent", [False, True])
def test_interleaved_streams_resume_in_workers(persistent: bool) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(epoch: int) -> tuple[Any, Any]:
        both = datasets.interleave_datasets([stream(), stream().map(double)], probabilities=[0.5, 0.5], seed=1)
        data = ShuffledStream(both, 5)
        data.set_epoch(epoch)
        return data, StatefulDataLoader(data, 3, num_workers=2, persistent_workers=persistent)

    def read(batches: Any) -> list[list[int]]:
        return [batch["x"].tolist() for batch in batches]

    data, loader = make(0)
    first = read(loader)
    data.set_epoch(1)
    second = read(loader)
    assert first != second
    for cut in (2, 5, len(second) - 1):
        _, loader = make(1)
        begun = iter(loader)
        assert read(itertools.islice(begun, cut)) == second[:cut]
        data, again = make(1)
        again.load_state_dict(loader.state_dict())
        assert read(again) == second[cut:]
        data.set_epoch(0)
        assert read(again) == first


def on_ranks(folder: str, kinds: list[tuple[str, int]]) -> list[Any]:
    """Returns for each kind of loader the end and the batches of a run, and those of its resume."""
    found = []
    for kind, workers in kinds:
        path, options = str(Path(folder) / f"{kind}-{workers}"), {"use_distributed_sampler": kind != "split"}
        straight = run(2, kind, workers, path, 3, None, options)
        found.append((straight, run(2, kind, workers, None, 0, path, options)))
    return found


@pytest.mark.parametrize(
    "kinds",
    [
        [("torch", 0), ("split", 2)],
        pytest.param([("stateful", 2), ("split", 0)], marks=pytest.mark.full),
    ],
)
def test_two_ranks_share_a_stream_and_resume(kinds: list[tuple[str, int]], tmp_path: Path) -> None:
    for results in zip(*run_world(2, on_ranks, str(tmp_path), kinds), strict=True):
        for (weight, seen), resumed in results:
            assert resumed == (weight, seen[3:])
        assert each_once([batch for (_, seen), _ in results for batch in seen])
    # The position is that of the stream, so another number of ranks goes on with the next sample.
    kind, workers = kinds[0]
    _, whole = run(1, kind, workers, None, 0, None, {})
    _, seen = run(1, kind, workers, None, 0, str(tmp_path / f"{kind}-{workers}"), {})
    assert seen == whole[6:]


def test_workers_of_a_plain_loader_resume_by_reading_again(tmp_path: Path) -> None:
    assert each_once(check_resume("torch", 2, tmp_path, 5, allow_replay=True))
    with pytest.raises(ConfigurationError, match="worker processes.*StatefulDataLoader"):
        run(1, "torch", 2, None, 0, str(tmp_path / "torch-2-5"), {})


# refusals -------------------------------------------------------------------------------------------------------------
def test_streams_that_cannot_resume_are_refused_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="buffer_size=0"):
        ShuffledStream(stream(), 0)
    with pytest.raises(ConfigurationError, match="length=1"):
        PackedStream(stream(), 1)
    with pytest.raises(ConfigurationError, match="a list.*Define the two methods"):
        ShuffledStream([1, 2])
    for shuffled in (stream().shuffle(buffer_size=9), stream().shuffle(buffer_size=9).map(double)):
        with pytest.raises(ConfigurationError, match="shuffle buffer is not in its state"):
            ShuffledStream(shuffled)


def test_an_empty_stream_is_an_error_before_the_first_step() -> None:
    trainer = Trainer(max_steps=1, **QUIET)
    with pytest.raises(ConfigurationError, match="no samples"):
        trainer.fit(Noting(None, 0), DataLoader(ShuffledStream(stream().filter(lambda row: False)), 2))
    assert trainer.global_step == 0


def test_a_state_of_another_order_or_with_damage_is_refused() -> None:
    state = ShuffledStream(stream(), BUFFER).state_dict()
    for other in (ShuffledStream(stream(), 9), ShuffledStream(stream(), BUFFER, seed=1)):
        with pytest.raises(ConfigurationError, match=f"from a run with .*={BUFFER if other.seed == 0 else 0}"):
            other.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="length=8"):
        PackedStream(stream(), 8).load_state_dict(PackedStream(stream(), 9).state_dict())
    for name, value in (("drawn", -1), ("epoch", None), ("ended", 3)):
        with pytest.raises(StateError, match=name):
            ShuffledStream(stream(), BUFFER).load_state_dict({**state, name: value})
    begun = ShuffledStream(Counting(), BUFFER)
    samples_of(itertools.islice(begun, 6))
    shorter = ShuffledStream(Counting(5), BUFFER)
    shorter.load_state_dict(begun.state_dict())
    with pytest.raises(StateError, match="drawn is 6, but the block has 5 rows"):
        samples_of(shorter)


@pytest.mark.parametrize("stateful", [False, True])
def test_the_buffer_of_datasets_is_refused_at_a_resume_and_read_again_on_request(
    stateful: bool, tmp_path: Path
) -> None:
    def fit(resume: str | None, **options: Any) -> list[Any]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        module = Noting(None if resume else str(tmp_path / "saved"), 5)
        data = stream().shuffle(seed=1, buffer_size=BUFFER)
        loader = StatefulDataLoader(data, 3) if stateful else DataLoader(data, 3)
        Trainer(max_epochs=2, **QUIET, **options).fit(module, loader, ckpt_path=resume)
        return module.seen

    with pytest.warns(UserWarning, match="leyden.hf.ShuffledStream"):
        straight = fit(None)
    with pytest.raises(ConfigurationError, match="leyden.hf.ShuffledStream"):
        fit(str(tmp_path / "saved"))
    assert fit(str(tmp_path / "saved"), allow_replay=True) == straight[5:]


def test_a_stream_that_is_split_already_is_not_split_again() -> None:
    from datasets.distributed import split_dataset_by_node

    from leyden.data.sharding import DataRanks
    from leyden.data.streams import shard

    loader = DataLoader(ShuffledStream(split_dataset_by_node(stream(), 0, 2)), 2)
    with pytest.raises(ConfigurationError, match="use_distributed_sampler=False"):
        shard(loader, DataRanks(0, 2))
    with pytest.raises(ConfigurationError, match="rank 0 of 2, but this is rank 0 of 3"):
        shard(loader, DataRanks(0, 3), presharded=True)


def test_a_stream_to_validate_on_is_read_in_each_pass_after_a_resume(tmp_path: Path) -> None:
    class Validating(Noting):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated = getattr(self, "validated", 0) + len(batch["x"])

    def fit(resume: str | None, epochs: int) -> int:
        module = Validating(str(tmp_path / "saved"), 16) if resume is None else Validating(None, 0)
        trainer = Trainer(max_epochs=epochs, num_sanity_val_steps=0, **QUIET)
        trainer.fit(module, DataLoader(stream(), 3), DataLoader(stream(), 3), ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(tmp_path / "ended")
        return int(module.validated)

    assert fit(None, 1) == SAMPLES
    assert fit(str(tmp_path / "ended"), 3) == 2 * SAMPLES


def test_a_second_fit_begins_at_the_start_of_a_stream_that_the_first_one_resumed(tmp_path: Path) -> None:
    path, loader = str(tmp_path / "saved"), DataLoader(stream(), 3)
    Trainer(max_epochs=1, **QUIET).fit(Noting(path, 5), DataLoader(stream(), 3))
    for resume, batches in ((path, 11), (None, 16)):
        module = Noting(None, 0)
        Trainer(max_epochs=1, **QUIET).fit(module, loader, ckpt_path=resume)
        assert len(module.seen) == batches

"""What Leyden reads of the streams of Hugging Face `datasets` beyond their public methods.

All private names of `datasets` are in this file. Nothing imports `datasets` here: a stream is known by its attributes,
and any other data set passes through unchanged.
"""

from __future__ import annotations

from typing import Any

from leyden.core.errors import ConfigurationError
from leyden.data.generators import parts_of

_UNRESUMED_IN_WORKERS = {
    "InterleavedShardsExamplesIterable": "a stream in worker processes that reads several shards in turn. Set "
    "max_buffer_input_shards=1 in its shuffle()",
    "VerticallyConcatenatedMultiSourcesExamplesIterable": "a concatenated stream in worker processes. Use "
    "interleave_datasets",
}
"""Stages whose state a worker cannot load, because it has another form on part of the shards (`datasets` 5.1, 5.2)."""


def why_inexact(loader: Any) -> str | None:
    """Returns why the state of a stream in a loader loses samples, and the fix; None if it loses none.

    A buffer of one sample loses none: it shuffles the shards alone.
    """
    workers: Any = getattr(loader, "num_workers", 0)
    for part in parts_of(loader):
        for stage in _stages(part):
            kind = type(stage).__name__
            if kind == "BufferShuffledExamplesIterable" and stage.buffer_size > 1:
                return (
                    "the stream's shuffle buffer is not in its state. Shuffle with leyden.hf.ShuffledStream(stream, "
                    "buffer_size=…), and leave out shuffle(buffer_size=…), or set buffer_size=1 there, which shuffles "
                    "the shards alone"
                )
            if kind in _UNRESUMED_IN_WORKERS and workers:
                return f"`datasets` cannot resume {_UNRESUMED_IN_WORKERS[kind]}, or use num_workers=0"
    return None


def _stages(stream: Any) -> list[Any]:
    """Returns the stages that the examples of a stream pass through."""
    stages = [stream]
    for stage in stages:
        inner = [getattr(stage, name, None) for name in ("_ex_iterable", "ex_iterable")]
        stages += [each for each in (*inner, *getattr(stage, "ex_iterables", ())) if each is not None]
    return stages[1:]


def begin_anew(loader: Any) -> None:
    """Makes the streams in a loader begin their next pass at the start.

    A stream begins every pass of an epoch at the position that was loaded last, also the passes after the first one.
    Those of `leyden.hf` have a method `begin_anew` for it.
    """
    for part in parts_of(loader):
        if getattr(part, "_starting_state_dict", None) is not None:
            part._starting_state_dict = None
        own = getattr(part, "begin_anew", None)
        if callable(own):
            own()


def check_split(parts: list[Any], rank: int, ranks: int, presharded: bool) -> None:
    """Checks that streams split by `split_dataset_by_node` are not split again, and are for this rank.

    Raises:
        ConfigurationError: if samples would be lost or repeated.
    """
    for part in parts:
        split = getattr(part, "_distributed", None)
        if split is None or not hasattr(part, "_ex_iterable"):
            continue
        if (split.rank, split.world_size) != (rank, ranks):
            raise ConfigurationError(
                f"split_dataset_by_node made the stream for rank {split.rank} of {split.world_size}, but this is rank "
                f"{rank} of {ranks}. Leave the split out, because Leyden shards the loader, or pass it this run's rank "
                "and number of ranks, and the Trainer use_distributed_sampler=False."
            )
        if not presharded:
            raise ConfigurationError(
                "split_dataset_by_node has split the stream over the ranks, and Leyden would split each part again. "
                "Set use_distributed_sampler=False, or leave the split out."
            )

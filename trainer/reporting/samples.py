"""The dataset indices of the samples in a training batch, or in its accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.data.indices import BatchIndices
    from leyden.trainer.run import Run


def sample_indices(
    run: Run, window_start: int | None = None, all_ranks: bool = False, batch_idx: int | None = None
) -> list[Any] | None:
    """Returns the sample indices of the current or most recent training batch; see `Trainer.sample_indices`.

    None if they are unknown.

    Args:
        run: a fit.
        window_start: the first batch of the window, to include all of its batches; None for one batch.
        all_ranks: True for the samples of all ranks.
        batch_idx: the index of an earlier batch of this epoch to use instead.
    """
    cursor, progress, logs = run.loaders.cursor, run.progress, run.logs
    if cursor is None or (all_ranks and run.strategy.data_size > 1 and not cursor.shares):
        return None
    if batch_idx is not None:
        return _listed(cursor.indices(batch_idx, batch_idx + 1), all_ranks) if batch_idx >= 0 else None
    is_inside = logs.batch is not None and run.state.pass_of is None
    stop = max(progress.batch, logs.batch_idx + 1 if is_inside else 0)
    found = cursor.indices(stop - 1 if window_start is None else window_start, stop) if stop else None
    return _listed(found, all_ranks)


def _listed(found: list[BatchIndices] | None, all_ranks: bool) -> list[Any] | None:
    if found is None:
        return None
    return [index for batch in found for index in (batch.everywhere if all_ranks else batch.here)]

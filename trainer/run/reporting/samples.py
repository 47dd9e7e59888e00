"""Which samples of the data set a training batch, or the window that it belongs to, is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.trainer.data.indices import BatchIndices
    from leyden.trainer.run.state import Run


def sample_indices(
    run: Run, window_start: int | None = None, all_ranks: bool = False, batch_idx: int | None = None
) -> list[Any] | None:
    """Returns the indices of the samples of the training batch that runs or ran last; see `Trainer.sample_indices`.

    Args:
        run: a fit.
        window_start: the first batch of the window, for all of its batches; None for the batch alone.
        all_ranks: of all ranks' samples.
        batch_idx: of an earlier batch of this epoch, in place of the last one.
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

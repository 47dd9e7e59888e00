"""Explains the error that ends a run: where it happened, in which batch, and what to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.core.devices import used_memory
from leyden.core.errors import ConfigurationError, LeydenError, add_note, is_out_of_memory
from leyden.core.given import in_known_names
from leyden.core.text import listed, size_of
from leyden.core.tree import in_one_line

if TYPE_CHECKING:
    from leyden.data.indices import BatchIndices
    from leyden.strategies.base import Strategy
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run import Run


def where(run: Run) -> str:
    """Returns the current position of a run, in a few words."""
    state, progress, logs = run.state, run.progress, run.logs
    trained = f"step {progress.global_step} (epoch {progress.epoch}, batch {progress.batch})"
    if state.pass_of is None:
        return f"{trained} in {state.stage}"
    loader = "" if logs.dataloader_idx is None else f" of loader {logs.dataloader_idx}"
    evaluation = "the sanity check" if state.sanity_checking else state.pass_of
    evaluated = f"batch {logs.batch_idx}{loader} in {evaluation}"
    return f"{evaluated}, at {trained}" if state.stage == "fit" and not state.sanity_checking else evaluated


def annotate(run: Run, error: BaseException, place: str) -> None:
    """Adds notes to an error from inside the loop: where it happened, the shapes of the batch, and what to try.

    Errors from before the loop get no notes, because they explain themselves. The place, that of `where`, is empty if
    the strategy reports it.
    """
    batch = run.logs.batch
    trains = run.state.stage == "fit" and run.loaders.train_loader is not None
    if not isinstance(error, Exception) or is_out_of_memory(error) or (batch is None and not trains):
        return
    shapes = "" if batch is None else f"the batch was {in_one_line(batch, shortened=True)}"
    parts = [f"this was {place}" if place else "", shapes, _samples(run)]
    note = "; ".join(part for part in parts if part)
    if note:
        add_note(error, f"leyden: {note}.")
    fix = _suggestion(error)
    if fix is not None:
        add_note(error, f"leyden: {fix}")


def _samples(run: Run) -> str:
    """Returns a note that lists the samples of the training batch; empty if they are unknown."""
    if run.logs.batch is None or run.state.stage != "fit" or run.state.pass_of is not None:
        return ""
    try:
        found = sample_indices(run)
    except Exception:
        # A user's sampler may fail here, and must not replace the error that is being reported.
        return ""
    return f"its samples are {listed(found)} of the data set" if found else ""


SUGGESTIONS = (
    (
        r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)",
        r"a Linear layer with in_features=\3 got \2 features: change its in_features, or reshape its input, for "
        "example with flatten(1). The shape of the batch is above.",
    ),
    (
        r"mat1 and mat2 must have the same dtype|expected scalar type|expected m1 and m2 to have the same dtype|"
        r"same dtype",
        "the batch and the weights have different dtypes: return float32 (x.float()) and class indices as int64 "
        "(y.long()) from the dataset, and set any other precision with precision=….",
    ),
    (
        r"Target -?\d+ is out of bounds|nll_loss.*Assertion `t >= 0",
        "a class index exceeds the outputs of the model: classes count from 0, and the last layer needs as many "
        "outputs as there are classes.",
    ),
    (
        r"index out of range in self",
        "an Embedding got an index ≥ its num_embeddings: compare num_embeddings with batch.max() and with the size of "
        "the tokenizer.",
    ),
    (
        r"Expected input batch_size|must match the size of tensor|shape mismatch|size mismatch|Expected target size|"
        r"input and target|is invalid for input of size|expected input\[.*to have \d+ channels|"
        r"must match the existing size|Sizes of tensors must match",
        "compare the two shapes with that of the batch above: a DataLoader stacks samples along the first dimension, "
        "and images are (samples, channels, height, width).",
    ),
    (
        r"stack expects each tensor to be equal size",
        "the samples of a batch differ in shape: pad or crop them to one shape in the dataset, or pass the DataLoader "
        "a collate_fn that pads.",
    ),
    (
        r"returned nan values in its|\bnan\b.*\bloss\b|\bloss\b.*\bnan\b|Found NaN|input contains NaN",
        "look for a division, log or sqrt of 0 there (add an eps). Try a lower learning rate, gradient_clip_val=1.0, "
        "or precision='bf16-mixed' or '32-true' instead of '16-mixed'.",
    ),
)
"""Patterns of torch's error messages, each with what to try. These are the most frequent errors of first scripts."""


def _suggestion(error: Exception) -> str | None:
    """Returns what to try against an error of torch; None for an unknown error, and for one of Leyden's own."""
    if isinstance(error, LeydenError):
        return None
    text = str(error)
    for pattern, fix in SUGGESTIONS:
        found = re.search(pattern, text, re.DOTALL)
        if found is not None:
            return found.expand(fix) if "\\" in fix else fix
    return None


def out_of_memory(run: Run, error: BaseException) -> BaseException:
    """Returns an error of the same type whose message adds where it happened, memory use, and what to try."""
    device = run.strategy.root_device
    use = ""
    if (memory := used_memory(device)) is not None:
        taken, peak, total = memory
        use = f" {size_of(taken)} are in use, {size_of(peak)} at the peak, of {size_of(total)}."
    progress = run.progress
    batch = in_one_line(run.logs.batch, shortened=True) if run.logs.batch is not None else "none"
    message = (
        f"out of memory on {device} in step {progress.global_step}, epoch {progress.epoch}, batch {progress.batch} "
        f"(batch: {batch}).{use} Try (1) accumulate_grad_batches='auto', or a smaller batch_size with a larger "
        "accumulate_grad_batches, which keeps the global batch, (2) precision='bf16-mixed', (3) activation "
        f"checkpointing (torch.utils.checkpoint) or a sharding strategy. The error was: {error}"
    )
    try:
        return type(error)(message)
    except TypeError:
        # A subclass whose constructor takes other arguments.
        return RuntimeError(message)


def in_better_words(run: Run, error: BaseException, owners: Iterable[object]) -> BaseException:
    """Returns an error that explains the cause and the fix if these are known, else the original error."""
    if is_out_of_memory(error) and not isinstance(error, LeydenError):
        return out_of_memory(run, error)
    unknown = in_known_names(error, owners)
    if unknown is not None:
        return unknown
    hint = run.strategy.explain(error) or _hint(error)
    return error if hint is None else ConfigurationError(f"{hint} The error was: {error}")


def _hint(error: BaseException) -> str | None:
    """Returns the fix for a device mismatch in torch, whose message does not name one; None for any other error."""
    text = str(error)
    if isinstance(error, RuntimeError) and (
        "Expected all tensors to be on the same device" in text or "is on meta device" in text or "device meta" in text
    ):
        return (
            "Some tensors are not on the module's device. Batches are moved automatically unless "
            "transfer_batch_to_device is overridden. Create new tensors with device=self.device, and register "
            "constants with self.register_buffer."
        )
    return None


def checked_for_nan(training_step: Callable[..., Any], progress: Progress, strategy: Strategy) -> Callable[..., Any]:
    """Wraps the training step for `detect_anomaly`: checks that the loss is finite, which synchronizes the device."""

    def checked(*args: Any) -> Any:
        outputs = training_step(*args)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # Only the last stage of a pipeline has the loss. A rehearsed step has no effect, so its loss may be anything.
        counts = strategy.outputs.are_here and not strategy.outputs.are_rehearsed
        if counts and isinstance(loss, Tensor) and not bool(torch.isfinite(loss).all()):
            raise LeydenError(
                f"the loss is {loss.detach().tolist()} in epoch {progress.epoch}, batch {progress.batch}, step "
                f"{progress.global_step}: look at that batch, lower the learning rate, or clip (gradient_clip_val)."
            )
        return outputs

    return checked


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

"""ReplayedStep, a callback that reports on one step of a run and ends the run after it, for `leyden replay`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.strategies.local_weights import local_part
from leyden.trainer.checkpoint.digests import DigestReader, merged
from leyden.trainer.format.tensors import is_sharded

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


Measured: TypeAlias = tuple[bool, dict[str, float]]
"""Whether it is of a part of a gradient, and the measures."""


class ReplayedStep(Callback):
    """Reports on one step: its samples, losses, gradients and the weights after it; then ends the run and process.

    The report is written as soon as the gradients are known, so that it is there if the step raises an error.

    Args:
        step: the step, from 1.
        report: the file, of JSON.
    """

    # Before all others, such as a guard that ends the run or clears gradients.
    order: ClassVar[int] = -2000
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, step: int, report: Path) -> None:
        self._step, self._path = step, report
        self._found: dict[str, Any] = {}
        self._losses: list[float] = []
        self._bad: list[dict[str, Any]] = []
        self._gradients: dict[str, Measured] = {}

    def _is_due(self, trainer: Trainer) -> bool:
        return trainer.global_step == self._step - 1

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._found = {"from": trainer.global_step}

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._is_due(trainer):
            self._bad += _not_finite(batch, trainer.sample_indices())

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        if self._is_due(trainer):
            self._losses.append(float(loss.detach()))

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        if not self._is_due(trainer):
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                name = names.get(id(parameter), f"parameter {number}")
                self._gradients[name] = is_sharded(parameter.grad), _measured(parameter.grad)
        self._note_step(trainer)

    def _note_step(self, trainer: Trainer) -> None:
        """Gathers what the ranks have found of the step, and writes it."""
        strategy, progress = trainer.strategy, trainer.progress
        own = (strategy.data_rank, self._losses, self._bad, trainer.sample_indices(window=True), self._gradients)
        ranks = strategy.ranks.all_gather_object(own)
        shares = {rank: (losses, bad, samples) for rank, losses, bad, samples, _ in ranks}
        self._found |= {
            "step": self._step,
            "epoch": progress.epoch,
            "batch": progress.batch,
            "losses": [losses for losses, _, _ in shares.values()],
            "bad": [bad for _, rank_bad, _ in shares.values() for bad in rank_bad],
            "samples": [samples for _, _, samples in shares.values()],
            "gradients": _over_ranks(found for *_, found in ranks),
        }
        self._write(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < self._step or "weights" in self._found:
            return
        if "step" not in self._found:
            # An engine that steps by itself shows no gradients.
            self._note_step(trainer)
        strategy = trainer.strategy
        held = DigestReader().held(strategy, module, lambda _, tensor: trainer.is_global_zero or is_sharded(tensor))
        digests = merged(strategy.ranks.all_gather_object(held))
        self._found["weights"] = {name: [digest.form, digest.value] for name, digest in digests.items()}
        everywhere = strategy.ranks.all_gather_object(_bad_weights(module))
        self._found["bad_weights"] = list(dict.fromkeys(name for names in everywhere for name in names))
        self._write(trainer)
        trainer.signals.leave()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step < self._step:
            self._found["ended"] = trainer.global_step
            self._write(trainer)
            trainer.signals.leave()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if isinstance(exception, Exception) and self._found:
            self._found["error"] = f"{type(exception).__name__}: {exception}"
            self._found.setdefault("at", trainer.global_step)
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self._path.write_text(json.dumps(self._found, default=str), encoding="utf-8")


def _not_finite(batch: Any, indices: list[Any] | None) -> Iterator[dict[str, Any]]:
    """The samples of a batch that have nan or infinity in them, each with the tensor in which it is."""
    for place, tensor in _leaves(batch, ""):
        if not tensor.is_floating_point() or tensor.dim() == 0 or bool(tensor.isfinite().all()):
            continue
        fits = indices is not None and len(indices) == len(tensor)
        rows = (~tensor.isfinite()).flatten(1).any(1) if tensor.dim() > 1 else ~tensor.isfinite()
        for row in rows.nonzero().flatten().tolist():
            yield {"row": row, "index": indices[row] if fits and indices is not None else None, "place": place}


def _leaves(batch: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each with the way to it."""
    if isinstance(batch, Tensor):
        yield place, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{place}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            yield from _leaves(value, f"{place}[{number}]")


def _measured(grad: Tensor) -> dict[str, float]:
    """The sum of squares, the largest value and the numbers of nan and infinity in this rank's part of a gradient.

    Of a part that several ranks hold, the first of them measures it.
    """
    here = local_part(grad)
    values = here.coalesce().values() if here.is_sparse else here
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.double() if values.dtype is torch.float64 else values.float()
    if _is_copy(grad):
        values = values.flatten()[:0]
    finite = values[values.isfinite()]
    return {
        "squares": float(values.double().square().sum()),
        "largest": float(finite.abs().max()) if finite.numel() else 0.0,
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
        "of": values.numel(),
    }


def _is_copy(grad: Any) -> bool:
    """True if a rank before this one in the mesh holds the same part of a DTensor."""
    if not hasattr(grad, "device_mesh"):
        return False
    place = grad.device_mesh.get_coordinate() or ()
    return any(index and kind.is_replicate() for index, kind in zip(place, grad.placements, strict=False))


def _over_ranks(found: Iterable[dict[str, Measured]]) -> dict[str, dict[str, float]]:
    """The measures of all ranks together: shards are added up, and of what a rank holds whole the first one counts."""
    total: dict[str, dict[str, float]] = {}
    for own in found:
        for name, (is_part, measures) in own.items():
            if name not in total:
                total[name] = dict(measures)
            elif is_part:
                before = total[name]
                for key, value in measures.items():
                    before[key] = max(before[key], value) if key == "largest" else before[key] + value
    return total


def _bad_weights(module: nn.Module) -> list[str]:
    """The parameters that are not finite in this rank's part of them."""
    return [name for name, p in module.named_parameters() if not bool(local_part(p).isfinite().all())]

"""ReplayedStep, the callback of `leyden replay`, which reports on one step of a run and then ends the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.checkpoint.digests import DigestReader, merged
from leyden.checkpoint.format.tensors import is_sharded
from leyden.strategies.base import Strategy
from leyden.strategies.local_weights import local_part

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


Measured: TypeAlias = tuple[bool, dict[str, float]]
"""Whether the gradient is sharded, and its measures."""


class ReplayedStep(Callback):
    """Reports on one step (its samples, losses and gradients, and the resulting weights), then ends the process.

    The report, a JSON file, is first written once the gradients are known, so it exists even if the step raises an
    error. Steps count from 1.
    """

    # Before all other callbacks, such as a guard that ends the run or clears gradients.
    order: ClassVar[int] = -2000
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, step: int, report: Path) -> None:
        self._step, self._path = step, report
        self._report: dict[str, Any] = {}
        self._losses: list[float] = []
        self._bad_samples: list[dict[str, Any]] = []
        self._gradients: dict[str, Measured] = {}

    def _is_due(self, trainer: Trainer) -> bool:
        return trainer.global_step == self._step - 1

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._report = {"from": trainer.global_step}

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._is_due(trainer):
            self._bad_samples += _non_finite_samples(batch, trainer.sample_indices())

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
                self._gradients[name] = is_sharded(parameter.grad), _measure(parameter.grad)
        self._report_step(trainer)

    def _report_step(self, trainer: Trainer) -> None:
        """Gathers the ranks' findings about the step and writes them."""
        strategy, progress = trainer.strategy, trainer.progress
        samples = trainer.sample_indices(window=True)
        own = (strategy.data_rank, self._losses, self._bad_samples, samples, self._gradients)
        ranks = strategy.ranks.all_gather_object(own)
        shares = {rank: (losses, bad, samples) for rank, losses, bad, samples, _ in ranks}
        self._report |= {
            "step": self._step,
            "epoch": progress.epoch,
            "batch": progress.batch,
            "losses": [losses for losses, _, _ in shares.values()],
            "bad": [bad for _, rank_bad, _ in shares.values() for bad in rank_bad],
            "samples": [samples for _, _, samples in shares.values()],
            "gradients": _combined(gradients for *_, gradients in ranks),
        }
        self._write(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < self._step or "weights" in self._report:
            return
        if "step" not in self._report:
            # An engine that takes its own steps (DeepSpeed) gives no access to gradients.
            self._report_step(trainer)
        strategy = trainer.strategy
        held = DigestReader().held(strategy, module, lambda _, tensor: trainer.is_global_zero or is_sharded(tensor))
        digests = merged(strategy.ranks.all_gather_object(held))
        self._report["weights"] = {name: [digest.form, digest.value] for name, digest in digests.items()}
        gathered = strategy.ranks.all_gather_object(_non_finite_weights(module, strategy))
        self._report["bad_weights"] = list(dict.fromkeys(name for names in gathered for name in names))
        self._write(trainer)
        trainer.signals.leave()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step < self._step:
            self._report["ended"] = trainer.global_step
            self._write(trainer)
            trainer.signals.leave()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if isinstance(exception, Exception) and self._report:
            self._report["error"] = f"{type(exception).__name__}: {exception}"
            self._report.setdefault("at", trainer.global_step)
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self._path.write_text(json.dumps(self._report, default=str), encoding="utf-8")


def _non_finite_samples(batch: Any, indices: list[Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the samples of a batch that contain nan or infinity, each with the place of the tensor."""
    for place, tensor in _leaves(batch, ""):
        if not tensor.is_floating_point() or tensor.dim() == 0 or bool(tensor.isfinite().all()):
            continue
        fits = indices is not None and len(indices) == len(tensor)
        rows = (~tensor.isfinite()).flatten(1).any(1) if tensor.dim() > 1 else ~tensor.isfinite()
        for row in rows.nonzero().flatten().tolist():
            yield {"row": row, "index": indices[row] if fits and indices is not None else None, "place": place}


def _leaves(batch: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a batch, each with its place, such as `['input'][0]`."""
    if isinstance(batch, Tensor):
        yield place, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{place}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            yield from _leaves(value, f"{place}[{number}]")


def _measure(grad: Tensor) -> dict[str, float]:
    """Returns the sum of squares, the largest value and the counts of nan and inf in this rank's part of a gradient.

    If several ranks hold the same part, only the first of them measures it.
    """
    local = local_part(grad)
    values = local.coalesce().values() if local.is_sparse else local
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.double() if values.dtype is torch.float64 else values.float()
    if _is_replica(grad):
        values = values.flatten()[:0]
    finite = values[values.isfinite()]
    return {
        "squares": float(values.double().square().sum()),
        "largest": float(finite.abs().max()) if finite.numel() else 0.0,
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
        "of": values.numel(),
    }


def _is_replica(grad: Any) -> bool:
    """Returns True if an earlier rank of the mesh holds the same part of a DTensor."""
    if not hasattr(grad, "device_mesh"):
        return False
    coordinate = grad.device_mesh.get_coordinate() or ()
    return any(index and kind.is_replicate() for index, kind in zip(coordinate, grad.placements, strict=False))


def _combined(ranks: Iterable[dict[str, Measured]]) -> dict[str, dict[str, float]]:
    """Combines the measures of all ranks: sums those of shards, and takes the first rank's of whole gradients."""
    combined: dict[str, dict[str, float]] = {}
    for gradients in ranks:
        for name, (is_shard, measures) in gradients.items():
            if name not in combined:
                combined[name] = dict(measures)
            elif is_shard:
                total = combined[name]
                for key, value in measures.items():
                    total[key] = max(total[key], value) if key == "largest" else total[key] + value
    return combined


def _non_finite_weights(module: nn.Module, strategy: Strategy) -> list[str]:
    """Returns the names of the parameters whose part on this rank contains nan or infinity."""
    held = {id(parameter) for parameter in strategy.held(module.parameters())}
    named = ((name, p) for name, p in module.named_parameters() if id(p) in held)
    return [name for name, p in named if not bool(local_part(p).isfinite().all())]

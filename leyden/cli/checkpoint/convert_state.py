"""Converts the state of a run for `leyden convert`: optimizers, schedulers, counters and random numbers, where
possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from leyden.accelerator.records.saving import KIND
from leyden.checkpoint.foreign import load_weights_only
from leyden.checkpoint.format.codec import check_encodable
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.writer import CheckpointWriter
from leyden.compat.accelerate.folder import set_host_random
from leyden.compat.lightning.state import position_of
from leyden.core.errors import ConfigurationError, StateError
from leyden.data.rng import rng_state
from leyden.trainer.events.progress import Progress

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's own modules. A state dict lists them among the parameters."""


@dataclass
class Taken:
    """The state of a run, read from another trainer's checkpoint.

    Attributes:
        optimizers: states of optimizers, keyed by parameter names.
        schedulers: states of schedulers, as they saved them.
        progress: the run's counters.
        rng: random numbers of the first rank; None if unknown.
        left: what is not converted, with the reason.
        files: names of the files that are converted.
    """

    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    rng: dict[str, Any] | None = None
    left: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if only weights were found."""
        return not (self.optimizers or self.schedulers or self.rng or self.progress != Progress())

    @property
    def words(self) -> str:
        """A short summary."""
        parts = [(len(self.optimizers), "optimizer"), (len(self.schedulers), "scheduler")]
        found = [f"{count} {name}{'s' * (count > 1)}" for count, name in parts if count]
        return ", ".join([*found, *(["random numbers"] if self.rng is not None else [])])

    def take_step_states(self, states: Mapping[str, Any], schedulers: Mapping[str, Any], names: Names) -> None:
        """Takes all optimizers and schedulers, or none: they are identified only by their number."""
        try:
            optimizers = [_named(where, state, names) for where, state in states.items()]
            for where, state in schedulers.items():
                check_encodable(state, where=where)
        except ConfigurationError as error:
            self.left += [str(error).rstrip("."), *(at for at in (*states, *schedulers) if at not in str(error))]
            return
        self.optimizers, self.schedulers = optimizers, list(schedulers.values())
        self.files += [*states, *schedulers]

    def take_random(self, path: Path, trust: bool) -> None:
        """Takes the random numbers of the first rank, and the steps that Accelerate counted."""
        try:
            states = load_weights_only(path, trust=trust)
            set_host_random(states)
        except (CheckpointError, KeyError, TypeError, ValueError, RuntimeError):
            self.left.append(f"{path.name} (random numbers; {'unreadable' if trust else 'a pickle, see --trust'})")
            return
        self.rng = rng_state(devices=False)
        self.files.append(path.name)
        step = states.get("step")
        step = step if isinstance(step, int) else 0
        self.progress = Progress(global_step=step, stepped=step)

    def write(self, writer: CheckpointWriter) -> None:
        """Writes the state so that a Trainer or an Accelerator can resume it, with the data from the beginning."""
        writer.optimizers(self.optimizers)
        writer.state("schedulers", {"schedulers": self.schedulers, "precision": {}, "strategy": {}})
        writer.state("callbacks", {})
        counts = {"epoch": self.progress.epoch, "global_step": self.progress.global_step}
        own_loop = {"kind": KIND, "models": 1, "steps": self.progress.global_step, "registered": [], "trackers": {}}
        writer.state("user", {"checkpoint": counts, "datamodule": {}, **own_loop})
        place: dict[str, Any] = {"loader": None, "loaders": None, "logs": None, "metrics": {}, "buffers": {}}
        writer.state("rank-0", {**place, "seed": 0, "rng": self.rng}, of_rank=True)


@dataclass(frozen=True)
class Names:
    """Names for the parameters of an optimizer, which other trainers save by their order.

    Attributes:
        weights: the weights of the checkpoint.
        order: the parameters' names in the model's order; None to use the order of the weights.
        prefix: put in front of each name that is written.
    """

    weights: Mapping[str, Tensor]
    order: list[str] | None = None
    prefix: str = ""

    @property
    def known(self) -> list[str]:
        if self.order is None:
            return _parameters(self.weights)
        missing = [name for name in self.order if name not in self.weights]
        if missing:
            raise ConfigurationError(
                f"--like: the model has {missing[0]!r}, and the weights do not: give the class they belong to."
            )
        return self.order


def named(state: Any, known: Names) -> dict[str, Any]:
    """Returns the state of an optimizer keyed by parameter names.

    This works if there is a single group with as many parameters as the weights, and all shapes match.

    Raises:
        ConfigurationError: if the names cannot be determined.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise ConfigurationError("is not the state of an optimizer")
    groups = state["param_groups"]
    if len(groups) != 1:
        raise ConfigurationError(f"has {len(groups)} groups of parameters, and does not record their names")
    names, weights, prefix = known.known, known.weights, known.prefix
    places = list(groups[0]["params"])
    if len(places) != len(names):
        raise ConfigurationError(f"has {len(places)} parameters, and the weights {len(names)}: their names are unknown")
    by_name = dict(zip(names, places, strict=True))
    for name, place in by_name.items():
        for entry, value in state["state"].get(place, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != weights[name].shape:
                raise ConfigurationError(
                    f"has {entry} of shape {tuple(value.shape)} where {name} has {tuple(weights[name].shape)}: its "
                    "parameters are in another order"
                )
    found = {
        "state": {
            prefix + name: dict(state["state"][place]) for name, place in by_name.items() if place in state["state"]
        },
        "param_groups": [{**groups[0], "params": [prefix + name for name in names]}],
        "other": {},
        "host": {},
        "dtypes": {},
        "extra": {},
    }
    check_encodable(found)
    return found


def _parameters(weights: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of parameters in their order, tied ones once."""
    seen: set[int] = set()
    names = []
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or name.rpartition(".")[2] in STATISTICS:
            continue
        if tensor.numel() and tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        names.append(name)
    return names


def of_lightning(loaded: Mapping[str, Any], names: Names) -> Taken:
    """Reads the state in a `.ckpt` of Lightning."""
    taken = Taken()
    states = {f"optimizer {i}": state for i, state in enumerate(loaded.get("optimizer_states") or [])}
    schedulers = {f"scheduler {i}": state for i, state in enumerate(loaded.get("lr_schedulers") or [])}
    taken.take_step_states(states, schedulers, names)
    stood = Progress()
    try:
        stood = position_of(loaded, window=lambda progress: 1, steps=lambda counted, batches: counted).progress
    except StateError as error:
        taken.left.append(f"the counters: {error}")
    if stood.batch and not stood.ended:
        place = f"epoch {stood.epoch} (batch {stood.batch})"
        taken.left.append(f"the position in {place}: the epoch starts from the beginning")
    taken.progress = Progress(
        epoch=stood.epoch + stood.ended, global_step=stood.global_step, stepped=stood.stepped, batches=stood.batches
    )
    taken.left += [
        key
        for key in ("callbacks", "MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
        if loaded.get(key)
    ]
    return taken


def of_accelerate(folder: Path, names: Names, trust: bool, model: int) -> Taken:
    """Reads the state in a folder of Accelerate's `save_state`."""
    taken = Taken()
    states, schedulers = (_read(folder, stem, trust, taken.left) for stem in ("optimizer", "scheduler"))
    if model or (folder / "model_1.safetensors").exists() or (folder / "pytorch_model_1.bin").exists():
        # Nothing records which optimizer belongs to which model.
        taken.left += sorted([*states, *schedulers])
    elif states and names.order is None and any(folder.glob("*.safetensors")):
        why = "safetensors does not record the order of parameters; give --like package.module:Class"
        taken.left += [f"{name} ({why})" for name in states] + list(schedulers)
    else:
        taken.take_step_states(states, schedulers, names)
    ranks = sorted(folder.glob("random_states_*.pkl"))
    if ranks:
        taken.take_random(ranks[0], trust)
        taken.left += [path.name for path in ranks[1:]]
    rest = ("sampler*.bin", "dl_state*.bin", "scaler*.pt", "custom_checkpoint_*.pkl", "optimizer_*/")
    taken.left += [path.name for pattern in rest for path in sorted(folder.glob(pattern))]
    return taken


def _read(folder: Path, stem: str, trust: bool, left: list[str]) -> dict[str, Any]:
    """Reads the files of one kind that torch's safe loader accepts."""
    found = {}
    for path in sorted(folder.glob(f"{stem}*.bin")):
        try:
            found[path.name] = load_weights_only(path, trust=trust)
        except CheckpointError:
            left.append(f"{path.name} (torch's safe loader refuses it)")
    return found


def _named(where: str, state: Any, names: Names) -> dict[str, Any]:
    try:
        return named(state, names)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}, which {error}") from error

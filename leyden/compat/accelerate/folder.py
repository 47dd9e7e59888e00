"""Loading of folders that Accelerate's own `save_state` wrote: pickles, read only if the caller trusts them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from leyden.checkpoint.folder import is_checkpoint
from leyden.checkpoint.foreign import load_foreign
from leyden.checkpoint.format.errors import CheckpointError
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.data.rng import set_live_state

if TYPE_CHECKING:
    from leyden.accelerator.accelerator import Accelerator

SIGNS = (
    "random_states_*.pkl",
    "optimizer.bin",
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model_fsdp_*",
    "optimizer_0",
)


def is_folder(path: Path) -> bool:
    """Returns True for a folder of Accelerate's `save_state`, recognized by its file names."""
    return path.is_dir() and not is_checkpoint(path) and any(any(path.glob(sign)) for sign in SIGNS)


class AccelerateFolder:
    """A folder of Accelerate's `save_state`, read completely before anything in the run changes.

    Raises:
        CheckpointError: if a file is missing or unreadable.
        ConfigurationError: if its contents do not match the Accelerator's objects.
    """

    def __init__(self, path: Path, accelerator: Accelerator, strict: bool) -> None:
        self.path, self._accelerator, self._strict = path, accelerator, strict
        if not accelerator.strategy.replicates or accelerator.strategy.drives_one:
            raise CheckpointError(
                path,
                f"was written by Accelerate, and {accelerator.strategy.name} has no whole model to load it into. Run "
                f"`leyden convert {path} OUT` to get a checkpoint that every strategy loads.",
            )
        self._weights = self._all("model", accelerator.bare_models, ("model{}.safetensors", "pytorch_model{}.bin"))
        self._optimizers = self._all("optimizer", accelerator.optimizers, ("optimizer{}.bin",))
        self._schedulers = self._all("scheduler", accelerator.prepared_schedulers, ("scheduler{}.bin",))
        self._registered = [
            self._read(f"custom_checkpoint_{number}.pkl") for number in range(len(accelerator.registered))
        ]
        scaler = path / "scaler.pt"
        self._scaler = self._read(scaler.name) if scaler.is_file() else None
        self._random = self._read(f"random_states_{accelerator.process_index}.pkl")
        self._ranks = len(list(path.glob("random_states_*.pkl")))
        for number, (model, weights) in enumerate(zip(accelerator.bare_models, self._weights, strict=True)):
            self._check_weights(number, model, weights)
        for number, (optimizer, state) in enumerate(zip(accelerator.optimizers, self._optimizers, strict=True)):
            saved, own = (
                [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
            )
            if saved != own:
                raise ConfigurationError(
                    f"{path}: optimizer {number} was saved with groups of {saved} parameters, but now has {own}. "
                    "Create it with the same parameter groups."
                )

    def _all(self, kind: str, own: list[Any], patterns: tuple[str, ...]) -> list[Any]:
        """Reads one file for each prepared object; the first file has no number."""

        def named(number: int) -> str | None:
            names = [pattern.format(f"_{number}" if number else "") for pattern in patterns]
            return next((name for name in names if (self.path / name).is_file()), None)

        files = [named(number) for number in range(len(own) + 1)]
        saved = files.index(None) if None in files else len(files)
        if saved != len(own):
            count = f"more than {len(own)}" if saved > len(own) else str(saved)
            raise ConfigurationError(
                f"{self.path} has {count} {kind}s in single files, but this Accelerator has {len(own)}. Prepare the "
                "same objects, in the same order, before load_state. For shards of FSDP or DeepSpeed, use "
                "`leyden convert`."
            )
        return [self._read(str(name)) for name in files[: len(own)]]

    def _read(self, name: str) -> Any:
        return load_foreign(self.path / name, trust=True)

    def _check_weights(self, number: int, model: nn.Module, weights: Mapping[str, Any]) -> None:
        own = model.state_dict()
        # Accelerate omits the second name of tied weights.
        loaded = {tensor.data_ptr() for name, tensor in own.items() if name in weights}
        missing = [name for name, tensor in own.items() if name not in weights and tensor.data_ptr() not in loaded]
        extra = [name for name in weights if name not in own]
        if self._strict and (missing or extra):
            what = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which the model lacks"
            raise ConfigurationError(f"{self.path}: model {number} {what}. load_state(strict=False) ignores it.")
        for name, tensor in own.items():
            if name in weights and weights[name].shape != tensor.shape:
                raise ConfigurationError(
                    f"{self.path}: {name} of model {number} was saved with shape {tuple(weights[name].shape)}, but now "
                    f"has {tuple(tensor.shape)}."
                )

    def load(self) -> None:
        """Loads everything, random states last. Loaders start from the beginning, or at `skip_first_batches`."""
        accelerator = self._accelerator
        remaining = accelerator.state_hooks.run_before_load(accelerator.bare_models, self.path)
        for model, weights in zip(accelerator.bare_models, self._weights, strict=True):
            if any(model is other for other in remaining):
                model.load_state_dict(weights, strict=False)
        for optimizer, state in zip(accelerator.optimizers, self._optimizers, strict=True):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(accelerator.prepared_schedulers, self._schedulers, strict=True):
            scheduler.load_state_dict(state)
        if self._schedulers and self._ranks > 1:
            warn(
                f"{self.path} was saved on {self._ranks} ranks. Without split_batches, Accelerate's schedulers count "
                f"{self._ranks} steps per optimizer step; Leyden's count one."
            )
        if self._scaler is not None and accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(self._scaler)
        for obj, state in zip(accelerator.registered, self._registered, strict=True):
            obj.load_state_dict(state)
        step = self._random.get("step", 0)
        accelerator.restore_counters(step if isinstance(step, int) else 0)
        set_host_random(self._random)
        if "torch_cuda_manual_seed" in self._random and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self._random["torch_cuda_manual_seed"])


def set_host_random(states: Mapping[str, Any]) -> None:
    """Sets the generators of Python, torch on the CPU and NumPy to the states of a file `random_states_<rank>.pkl`."""
    found = {"python": states["random_state"], "torch": states["torch_manual_seed"]}
    if "numpy_random_seed" in states:
        found["numpy"] = states["numpy_random_seed"]
    set_live_state(found)

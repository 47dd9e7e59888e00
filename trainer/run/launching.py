"""How a run starts its ranks: at its first fit, validate, test or predict, unless torchrun or another starter has done so."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.environment import rank_environment
from leyden.trainer.run.build import unwrapped

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

_started_in: str | None = None
with suppress(OSError):
    # Ranks run the command line anew, so they begin where this process did.
    _started_in = os.getcwd()


def launch(trainer: Trainer, *run: Any, **loaders: Any) -> Any:
    """Starts the ranks that the Trainer's strategy plans, as its `start_method` says.

    Args:
        trainer: whose ranks are not there yet.
        *run: the arguments of `Trainer._carry_out`, which a forked or spawned rank calls.
        **loaders: its keyword arguments.

    Returns:
        What the run returns. In a script it never returns: the process exits with the status of its ranks.
    """
    method = trainer.strategy.ranks.start_method
    if method == "script":
        _script(trainer)
    if trainer.num_nodes > 1:
        raise ConfigurationError(
            f"start_method={method!r} starts the ranks of one machine, and num_nodes={trainer.num_nodes}: use strategy='ddp' in a "
            "script, or torchrun."
        )
    from leyden.strategies.launch.functions import run_function

    _, model, _, goal, *_ = run
    if goal.continues:
        raise ConfigurationError(
            "ckpt_path='current' needs optimizers, which do not come back from ranks that are forked or spawned: save a checkpoint "
            "and give its path."
        )
    module, _ = unwrapped(model)
    found = run_function(method, trainer.num_devices, _on_rank, trainer, run, loaders)
    _take_back(trainer, module, found)
    return found["result"]


def _script(trainer: Trainer) -> NoReturn:
    from leyden.strategies.launch.script import machines_of, run_ranks

    machines = machines_of(trainer.num_nodes)
    raise SystemExit(run_ranks(trainer.num_devices, machines, _started_in))


def _on_rank(trainer: Trainer, run: tuple[Any, ...], loaders: dict[str, Any]) -> dict[str, Any] | None:
    """The run itself; rank 0 returns what the caller's Trainer and module take over."""
    trainer.strategy.ranks.take_place(rank_environment())
    # Those that the caller knows; a `setup` may add others.
    callbacks = list(trainer.callbacks)
    result = trainer._carry_out(*run, **loaders)
    weights = trainer.strategy.full_state_dict(trainer.module)
    if not trainer.is_global_zero:
        return None
    found = {
        "result": result,
        "weights": weights,
        "progress": trainer.progress.to_dict(),
        "logs": trainer.logs.state_dict(trainer.module),
        "callbacks": [_plain_attributes(callback) for callback in callbacks],
        "attributes": _plain_attributes(trainer.module),
        "last_checkpoint": trainer.last_checkpoint,
        "should_stop": trainer.should_stop,
    }
    return map_tensors(found, lambda tensor: tensor.detach().cpu())


def _take_back(trainer: Trainer, module: Any, found: dict[str, Any]) -> None:
    """The caller's objects, as they would be if the run had been here."""
    if set(module.state_dict()) != set(found["weights"]):
        # Parts that only a run builds.
        module.configure_model()
    module.load_state_dict(found["weights"])
    module._join(trainer)
    trainer._run.take_back(module, found)
    trainer.last_checkpoint = found["last_checkpoint"]
    vars(module).update(found["attributes"])
    for callback, attributes in zip(trainer.callbacks, found["callbacks"], strict=True):
        vars(callback).update(attributes)


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """What an object knows, as far as it is plain data: not files, connections, the Trainer, or what torch keeps in a module."""
    private = isinstance(owner, nn.Module)
    return {
        name: value
        for name, value in vars(owner).items()
        if _is_plain(value) and not (private and name.startswith("_"))
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    return isinstance(
        value, (bool, int, float, complex, str, bytes, type(None), Path, timedelta, Tensor)
    ) and not isinstance(value, nn.Parameter)

"""Starts the ranks of a run, at the Trainer's first fit, validate, test or predict.

A process started by torchrun or another launcher already is a rank, and starts none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.core.environment import STARTED_IN, is_submitit_task
from leyden.core.errors import ConfigurationError
from leyden.core.tree import map_tensors
from leyden.data.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.checkpoint.format.bucket import Place
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.events.preemption import Preemption
    from leyden.trainer.module import TrainModule
    from leyden.trainer.run import Run


def start_ranks(
    ranks: Ranks, preemption: Preemption | None, on_rank: Callable[..., dict[str, Any] | None], *args: Any
) -> dict[str, Any]:
    """Starts the planned ranks of a run, by their `start_method`.

    Args:
        ranks: the planned ranks.
        preemption: the handling of preemptions; None without one.
        on_rank: the function that a forked or spawned rank calls.
        *args: the arguments of `on_rank`.

    Returns:
        The value that `on_rank` returned on rank 0. Never returns if the method is "script": the process exits with
        the status of its ranks.

    Raises:
        ConfigurationError: if ranks cannot be started from this process; names the fix.
    """
    method = ranks.start_method
    if is_submitit_task() and (method == "script" or preemption is not None):
        raise ConfigurationError(
            f"the Trainer would start {ranks.local_size} ranks in one task of submitit, which preempts and requeues "
            f"only its own tasks: have it start one for each rank, with executor.update_parameters(tasks_per_node="
            f"{ranks.local_size}), and leave out devices."
        )
    if method == "script":
        from leyden.launch.elastic import SAVING
        from leyden.launch.script import machines_of, run_ranks

        # Ranks end themselves at the end of the grace period; the launcher allows them a little longer.
        patience = None
        if preemption is not None:
            patience = SAVING if preemption.grace is None else preemption.grace + 30
        # Ranks run the command line again, so they start in the folder in which this process started.
        raise SystemExit(run_ranks(ranks.local_size, machines_of(ranks.num_nodes), STARTED_IN or None, patience))
    if ranks.num_nodes > 1:
        raise ConfigurationError(
            f"start_method={method!r} starts the ranks of one machine only, but num_nodes={ranks.num_nodes}: use "
            "strategy='ddp' in a script, or torchrun."
        )
    from leyden.launch.functions import run_function

    # A forked process reseeds Python's generator, and a spawned one reseeds all generators.
    random = (torch.initial_seed(), rng_state(devices=False))
    found: dict[str, Any] = run_function(method, ranks.local_size, _with_random_numbers, random, on_rank, *args)
    return found


def _with_random_numbers(
    random: tuple[int, dict[str, Any]], on_rank: Callable[..., dict[str, Any] | None], *args: Any
) -> dict[str, Any] | None:
    """Calls `on_rank` with the random state of the parent process, which ranks of a script reproduce by running it."""
    seed, state = random
    # Seeds the devices too, since the recorded state covers the CPU only.
    torch.manual_seed(seed)
    set_rng_state(state)
    return on_rank(*args)


def final_state(run: Run, callbacks: Iterable[Callback], result: Any, last_checkpoint: Place | None) -> dict[str, Any]:
    """Returns the data that rank 0 sends to the parent process when the run has ended.

    Args:
        run: the run. Every rank calls this, because the weights may be sharded.
        callbacks: the callbacks that the parent process knows.
        result: the run's return value.
        last_checkpoint: the path of the last checkpoint; None if there is none.
    """
    found = {
        "weights": run.strategy.full_state_dict(run.module),
        "result": result,
        "progress": run.progress.to_dict(),
        "logs": run.logs.state_dict(),
        "callbacks": [_plain_attributes(callback) for callback in callbacks],
        "attributes": _plain_attributes(run.module),
        "last_checkpoint": last_checkpoint,
        "history": run.history.state_dict(),
        "should_stop": run.should_stop,
        "folder": run.folder,
    }
    return map_tensors(found, lambda tensor: tensor.detach().cpu())


def take_over(module: TrainModule, callbacks: Iterable[Callback], found: Mapping[str, Any]) -> None:
    """Brings the module and callbacks into the state that they would have if the run had used this process.

    Args:
        module: the module of this process.
        callbacks: the callbacks of this process.
        found: the value that `final_state` returned on rank 0.
    """
    if set(module.state_dict()) != set(found["weights"]):
        # Some modules create their layers only during a run.
        module.configure_model()
    module.load_state_dict(found["weights"])
    for owner, attributes in zip((module, *callbacks), (found["attributes"], *found["callbacks"]), strict=True):
        vars(owner).update(attributes)


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """Returns the attributes that hold plain data: no files, connections or Trainer, no internals of `nn.Module`."""
    skips_private = isinstance(owner, nn.Module)
    return {
        name: value
        for name, value in vars(owner).items()
        if _is_plain(value) and not (skips_private and name.startswith("_"))
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    return isinstance(
        value, (bool, int, float, complex, str, bytes, type(None), Path, timedelta, Tensor)
    ) and not isinstance(value, nn.Parameter)

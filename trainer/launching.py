"""When a run starts its ranks: at its first fit, validate, test or predict, unless somebody has started them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from leyden.strategies.errors import ConfigurationError

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
        *run: the arguments of `Trainer._run`, which a forked or spawned rank calls.
        **loaders: its keyword arguments.

    Returns:
        What the run gives back. A script never comes back: it exits with the status of its ranks.
    """
    if trainer.strategy.start_method == "script":
        _script(trainer)
    raise ConfigurationError(f"start_method={trainer.strategy.start_method!r} is not known.")


def _script(trainer: Trainer) -> NoReturn:
    from leyden.strategies.launch.script import machines_of, run_ranks

    machines = machines_of(trainer.num_nodes)
    raise SystemExit(run_ranks(trainer.num_devices, machines, _started_in))

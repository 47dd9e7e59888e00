"""Ranks from a script: this process becomes the agent of torch's elastic engine, and each rank runs the script."""

from __future__ import annotations

import multiprocessing
import os
import sys

from leyden.core.environment import STARTER, is_interactive
from leyden.core.errors import ConfigurationError
from leyden.launch.elastic import Machines, engine_config, run_engine
from leyden.launch.processes import temporary, threads_each


def obstacle() -> str | None:
    """Returns why ranks cannot run this process's script again, or None if they can."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "pytest is running this process"
    if is_interactive():
        return "this is an interactive session"
    if multiprocessing.parent_process() is not None:
        return "this process was started by multiprocessing"
    if file is None or not os.path.exists(file):
        return "there is no script file (python -c, or a script from stdin)"
    return None


def machines_of(num_nodes: int) -> Machines:
    """Reads NODE_RANK, MASTER_ADDR and MASTER_PORT, required if the user starts the script on each machine.

    Raises:
        ConfigurationError: if a variable is missing, or out of range.
    """
    if num_nodes == 1:
        return Machines()
    values = {name: os.environ.get(name, "") for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in values.items() if not value]
    if missing or not values["NODE_RANK"].isdigit() or not values["MASTER_PORT"].isdigit():
        raise ConfigurationError(
            f"num_nodes={num_nodes}: start the script on each machine with NODE_RANK (0 to {num_nodes - 1}), "
            f"MASTER_ADDR and MASTER_PORT (of machine 0) in its environment"
            f"{', which lacks ' + ' and '.join(missing) if missing else ''}; or use `leyden "
            f"launch`, torchrun --nnodes={num_nodes} or srun."
        )
    node_rank = int(values["NODE_RANK"])
    if node_rank >= num_nodes:
        raise ConfigurationError(f"NODE_RANK={node_rank} must be below num_nodes={num_nodes}. Machines count from 0.")
    return Machines(num_nodes, node_rank, values["MASTER_ADDR"], int(values["MASTER_PORT"]))


def run_ranks(count: int, machines: Machines, folder: str | None, patience: float | None) -> int:
    """Runs this process's own command line on several ranks, and waits for them.

    Args:
        count: ranks on this machine.
        machines: all machines of the launch.
        folder: working directory in which the command line was entered. None for the present one.
        patience: seconds that ranks have to exit cleanly after a signal. None for torch's 30.

    Returns:
        The exit status: 0 if all ranks succeeded, else that of the first rank to fail, with 128 + n for signal n.

    Raises:
        ConfigurationError: if ranks cannot run this command line again.
    """
    why = obstacle()
    if why is not None:
        raise ConfigurationError(
            f"strategy='ddp' starts its ranks by running the script again, but {why}. Use strategy='ddp_notebook' "
            "(forks the ranks; nothing is imported again) or 'ddp_spawn' (needs classes in importable files), or move "
            "the code to a script."
        )
    variables = {
        STARTER: "script",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_each(count)),
    }
    with temporary("ranks") as logs:
        config = engine_config(count, machines, str(logs), patience)
        return run_engine(config, sys.executable, sys.orig_argv[1:], variables, folder)

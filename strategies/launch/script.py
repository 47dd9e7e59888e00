"""Ranks from a plain script: this process becomes the agent of torch's elastic engine, and ranks run the script."""

from __future__ import annotations

import multiprocessing
import os
import sys

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.elastic import Machines, engine_config, run_engine
from leyden.strategies.launch.environment import STARTER, is_interactive
from leyden.strategies.launch.processes import temporary, threads_each


def obstacle() -> str | None:
    """Why ranks cannot run this process's script again; None if they can."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "pytest runs this"
    if is_interactive():
        return "this is an interactive session"
    if multiprocessing.parent_process() is not None:
        return "this is a process of multiprocessing"
    if file is None or not os.path.exists(file):
        return "there is no script file (python -c, or a script from stdin)"
    return None


def machines_of(num_nodes: int) -> Machines:
    """Reads NODE_RANK, MASTER_ADDR and MASTER_PORT, which a script that is started on each machine needs.

    Raises:
        ConfigurationError: if one of them is missing.
    """
    if num_nodes == 1:
        return Machines()
    values = {name: os.environ.get(name, "") for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in values.items() if not value]
    if missing or not values["NODE_RANK"].isdigit() or not values["MASTER_PORT"].isdigit():
        raise ConfigurationError(
            f"num_nodes={num_nodes}: start the script on each machine with NODE_RANK (0 to {num_nodes - 1}), "
            "MASTER_ADDR and MASTER_PORT (of machine 0) in its "
            f"environment{', now without ' + ' and '.join(missing) if missing else ''}; or with torchrun "
            f"--nnodes={num_nodes}, or srun."
        )
    node_rank = int(values["NODE_RANK"])
    if node_rank >= num_nodes:
        raise ConfigurationError(f"NODE_RANK={node_rank} and num_nodes={num_nodes}: count machines from 0.")
    return Machines(num_nodes, node_rank, values["MASTER_ADDR"], int(values["MASTER_PORT"]))


def run_ranks(
    count: int, machines: Machines | None = None, folder: str | None = None, patience: float | None = None
) -> int:
    """Runs this process's own command line on so many ranks, and waits for them.

    Args:
        count: ranks of this machine.
        machines: where several take part.
        folder: the working directory that the command line was given in.
        patience: seconds that ranks have to end in order after a signal; None for torch's 30.

    Returns:
        The exit status: 0 if all ranks ended well, else that of the first that did not, 128 + n for signal n.

    Raises:
        ConfigurationError: if there is no command line that ranks could run again.
    """
    why = obstacle()
    if why is not None:
        raise ConfigurationError(
            f"strategy='ddp' starts its ranks by running the script anew, and {why}. Use strategy='ddp_notebook' "
            "(ranks are forked; nothing is imported anew) or 'ddp_spawn' (for classes in files that can be imported), "
            "or put it into a script."
        )
    variables = {
        STARTER: "script",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_each(count)),
    }
    with temporary("ranks") as logs:
        config = engine_config(count, machines or Machines(), str(logs), patience)
        return run_engine(config, sys.executable, sys.orig_argv[1:], variables, folder)

"""Which rank this process is, from the variables that torchrun, SLURM or a launcher of ours have set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from leyden.strategies.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """A process's place among the ranks of a run.

    Attributes:
        rank: from 0 to `world_size` - 1, over all machines.
        local_rank: the same on this machine.
        world_size: ranks on all machines.
        local_world_size: ranks on this machine.
        node_rank: which machine this is.
        starter: who started it: "torchrun", "slurm" or "spawn".
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    starter: str = "torchrun"


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Reads this process's rank; None where nobody has started ranks.

    Args:
        environ: the variables; those of this process if left out.

    Raises:
        ConfigurationError: if they contradict each other; names them.

    Example:
        >>> rank_environment({}) is None
        True
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    names = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    values: dict[str, int] = {}
    for name, default in names.items():
        text = environ.get(name, default)
        if not text.isdigit():
            raise ConfigurationError(
                f"the environment variable {name}={text!r} is no number: start ranks with torchrun."
            )
        values[name] = int(text)
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise ConfigurationError(
            f"the environment says RANK={values['RANK']} of WORLD_SIZE={values['WORLD_SIZE']}: unset both, or start "
            "ranks with torchrun."
        )
    return RankEnvironment(
        values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"], values["LOCAL_WORLD_SIZE"], values["GROUP_RANK"]
    )

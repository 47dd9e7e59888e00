"""The keys of a configuration file for TPUs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.cli.settings import Settings


def variables(settings: Settings) -> dict[str, str]:
    """The environment variables of `tpu_env`.

    Raises:
        ConfigurationError: for an entry that is none.

    Example:
        >>> from leyden.trainer.cli.settings import parse
        >>> variables(parse({"distributed_type": "XLA", "tpu_env": ["PJRT_DEVICE=TPU"]}))
        {'PJRT_DEVICE': 'TPU'}
    """
    if settings.kind != "XLA":
        return {}
    found = {}
    for entry in settings.get("tpu_env") or []:
        name, equals, value = str(entry).partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigurationError(f"tpu_env: {entry!r} sets nothing: give NAME=value.")
        found[name.strip()] = value
    return found


def check_pod(settings: Settings) -> None:
    """Raises where a whole pod is meant, whose hosts only Google's own tool reaches; names its command."""
    if settings.kind != "XLA" or not settings.get("tpu_use_cluster", False):
        return
    name, zone = settings.get("tpu_name") or "NAME", settings.get("tpu_zone")
    on_host = ["sudo"] * bool(settings.get("tpu_use_sudo", False)) + ["leyden", "launch", "--tpu", "SCRIPT"]
    command = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", str(name), *(["--zone", str(zone)] if zone else [])]
    raise ConfigurationError(
        "tpu_use_cluster: the hosts of a pod are reached by Google's own tool, so start all of them with "
        f"`{shlex.join([*command, '--worker=all', '--command', shlex.join(on_host)])}`, and set tpu_use_cluster: false in the file that "
        "the hosts read."
    )

"""Starts the ranks of a plan on this machine, and reports the first one that failed in one block of text."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.numa.binding import AffinityMode, NumaOptions

from leyden.cli.launch.plan import LaunchPlan
from leyden.cli.launch.rank import TRACE
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.core.text import aligned
from leyden.core.user_code import is_users
from leyden.launch.elastic import MEETING_SECONDS, SAVING, Ended, Machines, engine_config, run_engine
from leyden.launch.processes import temporary


def start(plan: LaunchPlan, command: list[str]) -> int:
    """Runs a command on the ranks of this machine and waits for them.

    If this process is a rank itself, it becomes the command and never returns.

    Args:
        plan: says which ranks to start.
        command: a program and its arguments.

    Returns:
        The exit status.
    """
    if plan.rank is not None:
        sys.stdout.flush()
        os.execvpe(command[0], command, {**os.environ, **plan.variables()})
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"there is no program {command[0]}: give its path.")
    kept = plan.elastic.log_dir
    if kept is not None:
        os.makedirs(kept, exist_ok=True)
    with temporary("launch") if kept is None else nullcontext(Path(kept)) as logs:
        return _run(plan, command, logs)


def _run(plan: LaunchPlan, command: list[str], logs: Path) -> int:
    elastic, machines = plan.elastic, Machines(port=plan.port, further=plan.elastic.rdzv_conf)
    if plan.machines > 1 or elastic.endpoint:
        meeting = plan.machines, plan.machine_rank, plan.address, plan.port, plan.backend
        machines = Machines(*meeting, elastic.rdzv_id or "", elastic.rdzv_conf, plan.least_machines)
    patience = SAVING if plan.launched.resume else None
    config = engine_config(plan.per_machine, machines, str(logs), patience, **_elastic_settings(plan, logs))
    failures: list[Ended] = []
    try:
        status = run_engine(config, command[0], command[1:], plan.variables(), report=failures.append)
    except RendezvousError as error:
        if getattr(error, "took_part", True) is False:
            print(f"leyden launch: {error}, before this one could join: nothing is left to do.", file=sys.stderr)
            return 0
        kept = f"; the logs of this machine's ranks are in {logs}" if elastic.log_dir is not None else ""
        raise LeydenError(f"{_lost(plan, error)}{kept}.") from error
    if failures:
        text = block(failures[0], _folder(logs, failures[0]), elastic.log_dir is not None)
        print(text, file=sys.stderr, flush=True)
    return status


def _lost(plan: LaunchPlan, error: Exception) -> str:
    """Describes how this machine lost the others."""
    place = f"{plan.address}:{plan.port}"
    if not plan.least_machines:
        return (
            f"the machines lost each other at {place} ({error}): the main one has ended, or did not answer within "
            f"{MEETING_SECONDS} s. The output of its ranks says why"
        )
    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {plan.least_machines} machines came to {place} in time: start more, and this one again"
    if hasattr(error, "took_part"):
        return f"{error}; the output of their ranks says why"
    return f"the main machine at {place} has ended, or cannot be reached. The same command continues the run"


def _elastic_settings(plan: LaunchPlan, logs: Path) -> dict[str, Any]:
    """Returns the fields of torch's LaunchConfig that the plan decides, except those of the rendezvous."""
    elastic = plan.elastic
    tee = elastic.tee if elastic.tee is not None else "3" if elastic.log_dir else "0"
    try:
        streams = Std.from_str(tee)
    except ValueError:
        raise ConfigurationError(f"--tee {tee}: give 0, 1, 2 or 3, or by local rank, as 0:3,1:0.") from None
    found: dict[str, Any] = {
        "max_restarts": plan.max_restarts,
        "monitor_interval": elastic.monitor_interval,
        "role": elastic.role,
        "logs_specs": DefaultLogsSpecs(log_dir=str(logs), tee=streams),
        "log_line_prefix_template": "[rank ${rank}] ",
    }
    if plan.binds_cpus:
        found["numa_options"] = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    return found


def _folder(logs: Path, ended: Ended) -> Path:
    """Returns the log folder of a rank. torch makes one for each attempt, with one for each rank of this machine."""
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda path: (path.stat().st_mtime, path.name))
    return (attempts[-1] if attempts else logs) / str(ended.failure.local_rank)


def block(ended: Ended, folder: Path, is_kept: bool) -> str:
    """Formats the first failure: the traceback if there is one, then rank, host, exception, line and log file.

    Args:
        ended: the rank that failed first, and how it ended.
        folder: its log folder.
        is_kept: the folder outlasts the launch (`--log_dir`).
    """
    failure = ended.failure
    found = failure.error_file_data.get("message") if os.path.isfile(failure.error_file) else None
    said: dict[str, Any] = found if isinstance(found, dict) else {}
    trace = folder / TRACE
    text = trace.read_text(encoding="utf-8", errors="replace") if trace.is_file() else ""
    text = text.partition("\nExtension modules:")[0]
    exception = said.get("exception") or said.get("message") or ended.words()
    files = (folder / "stderr.log", trace, folder / "stdout.log")
    rows = [
        ("rank", f"{ended.rank} (local {failure.local_rank}, process {failure.pid})"),
        ("host", str(said.get("host") or socket.gethostname())),
        ("exception", str(exception).split("; all ranks were terminated", 1)[0]),
        ("line", str(said.get("line") or _crash_line(text) or "unknown: nothing recorded it")),
    ]
    if is_kept:
        rows.append(("log file", str(next((path for path in files if path.is_file()), folder))))
    listed = "\n".join(f"  {row}" for row in aligned(rows))
    blamed = f"rank {ended.rank} failed first; all ranks were terminated" if not ended.others else ended.others
    head = f"leyden launch: {blamed}."
    return "\n".join(part for part in (text.rstrip(), head, listed) if part)


def _crash_line(text: str) -> str:
    """Returns the innermost line of a traceback that faulthandler wrote when a signal struck."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith('File "')]
    own = [line for line in lines if is_users(line.split('"')[1])] or lines
    return own[0].replace('File "', "", 1).replace('", ', ", ", 1) if own else ""

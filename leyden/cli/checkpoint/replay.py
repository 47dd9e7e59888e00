"""`leyden replay` repeats one step of a run, from the last checkpoint before it, and reports what happens."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from leyden.checkpoint.folder import all_checkpoints, is_checkpoint
from leyden.checkpoint.format.digests import read_digests
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.reader import CheckpointReader
from leyden.cli.checkpoint.bisect import file_of, files_below
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.core.paths import local_path
from leyden.core.text import aligned, listed, printable
from leyden.launch.processes import temporary
from leyden.trainer.arguments.replay import Replay
from leyden.trainer.reporting.command import Command
from leyden.trainer.saved.checkpoint_folders import CHECKPOINTS
from leyden.trainer.saved.identity import Identity
from leyden.trainer.saved.resuming import progress_of

SHOWN = 20
"""Number of parameters in the report: first those with non-finite gradients, then those with the largest."""


@click.command("replay")
@click.argument("run")
@click.option("--step", type=click.IntRange(1), required=True, help="The step, counted from 1 as in messages.")
@click.option("--digests", metavar="PATH", help="The run's digest file, or its folder. By default, RUN is searched.")
@click.option("-y", "--yes", is_flag=True, help="Run the command that the checkpoint names without asking.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(run: str, step: int, digests: str | None, yes: bool, words: tuple[str, ...]) -> int:
    """Repeat step N of RUN, and report its samples, loss, gradients and weights.

    RUN is the folder of the run (version_N), or one above it that holds several, of which the newest is taken; or a
    folder of checkpoints, or a checkpoint. The run continues from its last valid checkpoint before the step and ends
    after the step. It is started with COMMAND, or else with the
    command that originally started it, which is shown first. A replay changes nothing in the run's folder: loggers are
    off, and no checkpoint is written.

    A run that rolled back (NonFiniteGuard("rollback")) took some steps twice. The replay shows the first time.
    """
    reader = checkpoint_before(Path(local_path(run, "RUN")), step)
    passed_over = passed_over_after(Path(run), reader)
    recorded = _recorded(digests or run, step, named=digests is not None)
    command_line = _command(reader, list(words), yes)
    with temporary("replay") as folder:
        replay = Replay(str(reader.folder.absolute()), step, str(folder))
        environ = {**os.environ, **replay.variables()}
        try:
            status = subprocess.run(command_line.words, cwd=command_line.folder, env=environ).returncode
        except OSError as error:
            raise ConfigurationError(
                f"{printable(command_line.words[0])} cannot be started in {printable(command_line.folder)} "
                f"({error.strerror}). Give the command after --."
            ) from error
        found = json.loads(replay.report.read_text(encoding="utf-8")) if replay.report.is_file() else {}
    if "step" not in found:
        raise LeydenError(_unreached(step, found, status, command_line))
    click.echo("\n".join(_report(found, reader.folder, recorded, passed_over)))
    return 0


def checkpoint_before(run: Path, step: int) -> CheckpointReader:
    """Returns the last valid checkpoint of a run before a step.

    Raises:
        LeydenError: if there is none; lists the steps of the existing checkpoints.
    """
    if not run.is_dir():
        raise ConfigurationError(
            f"{run} is not a folder. Give the run's folder, such as logs/version_0, or its folder of checkpoints."
        )
    found = _resumable(run)
    if not found:
        raise LeydenError(f"{run} holds no checkpoint from which a run can continue.")
    newest = max(found, key=lambda reader: reader.manifest.save_counter)
    mine = Identity.read(newest)
    found = [reader for reader in found if Identity.read(reader) == mine]
    before = [reader for reader in found if _step_of(reader) < step]
    for reader in sorted(before, key=lambda one: (_step_of(one), one.manifest.save_counter), reverse=True):
        try:
            reader.verify()
        except CheckpointError as error:
            click.echo(f"leyden replay: skipping a damaged checkpoint: {error}", err=True)
            continue
        return reader
    steps = ", ".join(str(number) for number in sorted({_step_of(reader) for reader in found}))
    raise LeydenError(
        f"{run} has no valid checkpoint before step {step}, only of step {steps}. Keep more of them with "
        "ModelCheckpoint(every_n_train_steps=…, save_top_k=-1)."
    )


def _checkpoints(run: Path) -> Iterator[Path]:
    if is_checkpoint(run):
        yield run
        return
    home = _home(run)
    for folder in (home, *sorted(path for path in home.iterdir() if path.is_dir() and not is_checkpoint(path))):
        yield from all_checkpoints(folder)


def _home(run: Path) -> Path:
    """Returns a run's folder of checkpoints; that of the run that saved last, for a folder of several runs."""
    if (run / CHECKPOINTS).is_dir():
        return run / CHECKPOINTS
    homes = [path for path in run.glob(f"**/version_*/{CHECKPOINTS}") if all_checkpoints(path)]
    return max(homes, key=lambda home: CheckpointReader(all_checkpoints(home)[-1]).manifest.saved_at, default=run)


def _step_of(reader: CheckpointReader) -> int:
    return int(reader.manifest.progress["global_step"])


def passed_over_after(run: Path, reader: CheckpointReader) -> int:
    """Returns how many batches a rollback skipped between a checkpoint and the next one."""
    after = [one for one in _resumable(run) if one.manifest.save_counter > reader.manifest.save_counter]
    for following in sorted(after, key=lambda one: one.manifest.save_counter):
        # A damaged checkpoint has no counters to read.
        with suppress(CheckpointError):
            return max(progress_of(following).passed_over - progress_of(reader).passed_over, 0)
    return 0


def _resumable(run: Path) -> list[CheckpointReader]:
    readers = [CheckpointReader(path) for path in _checkpoints(run)]
    return [reader for reader in readers if reader.has("user")]


def _command(reader: CheckpointReader, words: list[str], yes: bool) -> Command:
    """Returns the command that starts the script: the given one, or the run's own if the user confirms it.

    A checkpoint may come from an untrusted source, so its command never runs without confirmation.
    """
    if words:
        return Command(words, os.getcwd())
    command_line = Command.read(reader)
    if command_line is None:
        raise ConfigurationError(
            f"{reader.path} does not record the command that started its run. Give it, as in `leyden replay RUN --step "
            "N -- python train.py`."
        )
    if not command_line.is_whole:
        raise ConfigurationError(
            f"the run was started by `{command_line}`, whose secrets were not saved. Give the command after --."
        )
    click.echo(f"the run was started in {printable(command_line.folder)} by\n  {command_line}", err=True)
    if not yes and not sys.stdin.isatty():
        raise ConfigurationError(
            "running this needs confirmation, and there is no terminal. Pass --yes, or the command after --."
        )
    if not yes:
        click.confirm("Run it?", abort=True, err=True)
    return command_line


def _unreached(step: int, found: dict[str, Any], status: int, command_line: Command) -> str:
    if "error" in found:
        return f"the run failed in step {found['at'] + 1}, before step {step}: {found['error']}"
    if "ended" in found:
        return f"the run ends at step {found['ended']}, before step {step}: its limits say so."
    if status:
        return f"`{command_line}` ended with exit code {status} before step {step}."
    return f"`{command_line}` ended without a fit: give the command that trains, after --."


def _recorded(run: str, step: int, named: bool) -> dict[str, list[str]] | None:
    """Returns the digests that the run recorded after the step, each with the tensor's form, or None."""
    below = files_below(Path(run))
    if not named and len(below) != 1:
        return None
    file = file_of(run) if named else below[0]
    record = next((record for record in read_digests(file) if record.step == step), None)
    return None if record is None else {name: [one.form, one.value] for name, one in record.digests.items()}


# the report -----------------------------------------------------------------------------------------------------------
def _report(
    found: dict[str, Any], checkpoint: Path, recorded: dict[str, list[str]] | None, passed_over: int
) -> list[str]:
    """Formats the report, line by line."""
    rows = [
        ("step", f"{found['step']} (epoch {found['epoch']}, batch {found['batch']}), from {checkpoint}"),
        ("loss", "; ".join(", ".join(f"{loss:.6g}" for loss in losses) for losses in found["losses"]) or "unknown"),
        ("samples", "; ".join("unknown" if indices is None else listed(indices) for indices in found["samples"])),
    ]
    rows += [("data", text) for text in _bad_data(found["bad"])] or [("data", "all values are finite")]
    gradients = found["gradients"]
    bad = [name for name, measures in gradients.items() if measures["nan"] or measures["inf"]]
    total = math.sqrt(sum(measures["squares"] for measures in gradients.values()))
    if gradients:
        finite = f"not finite in {len(bad)} of {len(gradients)} parameters" if bad else "finite"
        rows.append(("gradient", f"norm {total:.6g}, {finite}"))
    else:
        rows.append(("gradient", "unknown: the strategy's engine keeps it"))
    rows += [("error", found["error"])] if "error" in found else []
    if passed_over:
        # The recorded digests may be from the second time.
        recorded = None
        again = f"the run rolled back after this checkpoint and skipped {passed_over} batches"
        rows.append(("taken", f"for the first time: {again}, so it may have repeated the step on later batches"))
    rows += [("weights", text) for text in _weights(found, recorded)]
    return [*aligned(rows, gap="   "), *_table(gradients, bad)]


def _bad_data(bad: list[dict[str, Any]]) -> list[str]:
    texts = []
    for one in bad:
        sample = f"row {one['row']} of the batch" if one["index"] is None else f"sample {one['index']}"
        texts.append(f"{sample} is not finite{' in batch' + one['place'] if one['place'] else ''}")
    return texts


def _weights(found: dict[str, Any], recorded: dict[str, list[str]] | None) -> Iterator[str]:
    if "weights" not in found:
        yield "the step was not taken"
        return
    bad = found["bad_weights"]
    yield f"not finite after the step: {listed(bad)}" if bad else "finite after the step"
    if recorded is None:
        return
    here: dict[str, list[str]] = found["weights"]
    alike = [name for name, (form, _) in recorded.items() if name in here and here[name][0] == form]
    if len(alike) < len(recorded):
        yield f"{len(recorded) - len(alike)} tensors are sharded differently here; their digests cannot be compared"
    differ = [name for name in alike if here[name] != recorded[name]]
    if alike:
        yield (
            f"differ from those that the run recorded: {listed(differ)}"
            if differ
            else "equal to those that the run recorded"
        )


def _table(gradients: dict[str, dict[str, float]], bad: list[str]) -> list[str]:
    order = sorted(gradients, key=lambda name: (name not in bad, -gradients[name]["squares"]))
    if not order:
        return []
    rows: list[tuple[str, ...]] = [("parameter", "norm", "largest", "nan", "inf", "of")]
    for name in order[:SHOWN]:
        found = gradients[name]
        numbers = (f"{math.sqrt(found['squares']):.4g}", f"{found['largest']:.4g}")
        rows.append((name, *numbers, *(f"{found[key]:.0f}" for key in ("nan", "inf", "of"))))
    more = [f"and {len(order) - SHOWN} more"] if len(order) > SHOWN else []
    return ["", *aligned(rows, right=range(1, 6)), *more]

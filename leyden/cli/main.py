"""The `leyden` command: finds the subcommand and imports it only when it is run."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from leyden.cli.configuration.stages import is_stage
from leyden.core.environment import rank_environment, with_variables
from leyden.core.errors import LeydenError, nearest

COMMANDS: dict[str, tuple[str, str]] = {
    "new": ("new.new", "Write a small project that trains, as a start for your own."),
    "fit": ("configuration.stages:fit", "Train the module of a configuration (also validate, test, predict)."),
    "validate": ("configuration.stages:validate", "Validate the module of a configuration."),
    "predict": ("configuration.stages:predict", "Run predict_step of the module of a configuration."),
    "config": ("settings.wizard", "Ask how to run on this machine, and save the answers to a file."),
    "launch": ("launch.launch", "Run a script on all ranks of this machine, or of several."),
    "env": ("env", "Print versions and hardware of this machine, for a bug report."),
    "test": (
        "launch.launch:selftest_command",
        "Test the module of a configuration (--config, --model); without one, test the ranks themselves.",
    ),
    "estimate": (
        "estimate.estimate",
        "Estimate the parameters of a model and the memory to train it (also estimate-memory).",
    ),
    "plan": (
        "estimate.placements",
        "Print where a mesh of ranks puts every parameter of a model, and the bytes on each rank.",
    ),
    "runs": ("runs", "List the runs below a folder, with state, step, best metric and last checkpoint."),
    "checkpoint": ("checkpoint.checkpoints", "List, verify and show checkpoints."),
    "report": ("report", "Draw one or more runs in an HTML file: curves, times, checkpoints, and why they ended."),
    "bisect": ("checkpoint.bisect", "Name the first step after which the weights of two runs differ."),
    "replay": ("checkpoint.replay", "Run one step of a run again, and report what happens in it."),
    "merge": (
        "checkpoint.checkpoints:merge_command",
        "Write the weights of a sharded checkpoint to one file (also merge-weights).",
    ),
    "migrate": (
        "leyden.compat.migrate.migrate",
        "Rewrite imports and names of Lightning and Accelerate in scripts, and list what is left.",
    ),
    "convert": ("checkpoint.convert", "Convert a checkpoint of Lightning or Accelerate."),
}
"""Each command's module under `leyden.cli`, with the name in it if that is not `command`, and its help."""
ALIASES = {"estimate-memory": "estimate", "merge-weights": "merge"}


class Commands(click.Group):
    """The commands of `COMMANDS`, imported when they are run; their help needs no import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        place = module if module.startswith("leyden.") else f"leyden.cli.{module}"
        # torch reads the level when it is imported. An agent that loses a connection says so itself, in one line.
        quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        with with_variables(quiet if ".launch." in place else {}):
            command = getattr(importlib.import_module(place), attribute or "command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in (*COMMANDS, *ALIASES) and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}. {nearest(args[0], COMMANDS, [*COMMANDS])}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        # Of every command: --num-processes is --num_processes.
        "token_normalize_func": lambda name: name.replace("-", "_"),
    },
    help="Leyden on the command line. `leyden COMMAND --help` shows the options of a command.",
)
@click.version_option(sys.modules["leyden"].__version__, message="leyden %(version)s")
def leyden() -> None:
    """The group that holds all commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: without the program's name; by default those of this process.

    Returns:
        The exit status. An error is reported in one line, with status 2.
    """
    try:
        result = leyden.main(list(arguments) if arguments is not None else None, "leyden", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        print("\nleyden: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        if _is_users(error, sys.argv[1:] if arguments is None else arguments):
            raise
        print(f"leyden: {_report(error)}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


def _is_users(error: Exception, words: Sequence[str]) -> bool:
    """Returns True for an error of the module that a command runs, or of a rank, which others than the user read."""
    return is_stage(list(words)) and (not isinstance(error, LeydenError) or rank_environment() is not None)


def _report(error: Exception) -> str:
    """Describes an error in one line, without a traceback.

    Raises:
        Exception: the error itself, under LEYDEN_DEBUG=1.
    """
    if isinstance(error, LeydenError):
        return str(error)
    if os.environ.get("LEYDEN_DEBUG") == "1":
        raise error
    if isinstance(error, OSError) and error.strerror:
        return f"{str(error.filename)[:200]}: {error.strerror}." if error.filename is not None else f"{error.strerror}."
    if isinstance(error, (MemoryError, RecursionError)):
        return f"the input is too large or nested too deeply ({type(error).__name__})."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    return f"{type(error).__name__}: {error} ({place}). This is a bug in Leyden: LEYDEN_DEBUG=1 shows the traceback."

"""`leyden fit`, `validate`, `test` and `predict` run any module and DataModule that a configuration names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

import click

STAGES = ("fit", "validate", "test", "predict")
OPTIONS = ("-c", "--config", "--print_config", "--ckpt_path", "--weights_only", "--verbose", "--seed_everything")
SHORT = re.compile(r"-c(?!$)")
"""-c with its file in the same word."""
GROUPS = ("--trainer", "--model", "--data", "--optimizer", "--lr_scheduler")


def is_stage(words: Sequence[str]) -> bool:
    """Returns True for a command line that runs a user's module.

    `leyden test` on its own, or with the flags of `leyden launch`, tests the ranks instead.

    Example:
        >>> is_stage(["test", "--num_processes", "2"]), is_stage(["test", "--config=run.yaml"])
        (False, True)
        >>> is_stage(["test", "-crun.yaml"])
        True
    """
    if not words or words[0] != "test":
        return bool(words) and words[0] in STAGES
    names = [word.partition("=")[0] for word in words[1:]]
    return any(
        name in OPTIONS or bool(SHORT.match(name)) or name.partition(".")[0].rstrip("+") in GROUPS for name in names
    )


def run(words: Sequence[str]) -> int:
    """Runs a stage. Modules can be imported from the current folder, as with `python -m`."""
    from leyden.cli.configuration.leyden_cli import LeydenCLI

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    LeydenCLI(args=list(words), parser_kwargs={"prog": "leyden"})
    return 0


def _command(stage: str) -> click.Command:
    """The stage among the commands of `leyden --help`; its own help is jsonargparse's."""

    @click.command(
        stage,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    )
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def command(words: tuple[str, ...]) -> int:
        return run([stage, *words])

    return command


fit, validate, predict = (_command(stage) for stage in STAGES if stage != "test")

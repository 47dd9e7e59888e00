"""The parser of a `LeydenCLI`: jsonargparse's, with groups for modules, callbacks, optimizers and schedulers."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.cli.configuration.class_paths import LRSchedulerTypeTuple
from leyden.cli.configuration.passed_on import passed_on
from leyden.cli.configuration.writable import LOST, writable
from leyden.core.errors import ConfigurationError, kind_of, needs
from leyden.trainer.datamodule import DataModule
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer

with needs("jsonargparse", "cli", "LeydenCLI"):
    from jsonargparse import ArgumentParser, set_parsing_settings
    from jsonargparse.typing import class_from_function

AUTOMATIC = "AUTOMATIC"
"""The `link_to` of an optimizer or scheduler that the CLI turns into `configure_optimizers`."""
NOISE = (
    *("Does not validate against any", "- Does not validate against any", "Subtypes: ", "Errors:", "Given value"),
    *("- Expected a path but ", "- Expected a <class 'NoneType'>"),
)
"""Prefixes of lines that only list alternatives."""
KINDS = (Trainer, TrainModule, DataModule, Callback)

Classes = type | tuple[type, ...]


class GroupHelp(argparse._HelpAction):
    """Shows the options of a single group, while `--help` shows those of all groups."""

    def __call__(self, parser: Any, *args: Any) -> None:
        formatter = parser._get_formatter()
        group = self.option_strings[0].removesuffix("help")
        formatter.start_section(f"options of {group.strip('-.')}")
        formatter.add_arguments(
            [action for action in parser._actions if any(name.startswith(group) for name in action.option_strings)]
        )
        formatter.end_section()
        sys.stdout.write(formatter.format_help())
        parser.exit()


class LeydenArgumentParser(ArgumentParser):
    """jsonargparse's parser with groups for Trainers, modules, callbacks, optimizers and schedulers.

    Args:
        *args: arguments of jsonargparse's ArgumentParser.
        description: first paragraph of the help.
        env_prefix: prefix of environment variables.
        **kwargs: arguments of jsonargparse's ArgumentParser: `default_env`, `default_config_files`, `parser_mode`, ….

    Attributes:
        callback_keys: names of the groups that hold a callback.
        optimizer_groups: maps each optimizer group to its classes and its `link_to`.
        lr_scheduler_groups: the same for schedulers.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Fits, validates, tests and predicts with Leyden's Trainer.",
        env_prefix: str = "LEYDEN",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, description=description, env_prefix=env_prefix, **kwargs)
        # fsspec, which torch depends on, reads configurations from s3://, gs:// and so on.
        set_parsing_settings(config_read_mode_fsspec_enabled=True)
        self.callback_keys: list[str] = []
        self.optimizer_groups: dict[str, tuple[Classes, str]] = {}
        self.lr_scheduler_groups: dict[str, tuple[Classes, str]] = {}
        self._ignored_in_files: set[str] = set()

    def add_leyden_class_args(
        self,
        leyden_class: Callable[..., Any],
        nested_key: str | None,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Adds the arguments of a Trainer, TrainModule, DataModule or Callback as a group.

        Args:
            leyden_class: the class, or a function whose annotation says that it returns one.
            nested_key: the name of the group. None adds the options without a group.
            subclass_mode: True to accept `class_path` and `init_args` of any subclass.
            required: True if the user must choose a class, in subclass mode.

        Returns:
            The names of the added arguments.
        """
        cls: Any = leyden_class if isinstance(leyden_class, type) else class_from_function(leyden_class)
        if not issubclass(cls, KINDS):
            names = ", ".join(kind.__name__ for kind in KINDS[:-1])
            raise ConfigurationError(
                f"{nested_key}: {kind_of(leyden_class)} is not a {names} or {KINDS[-1].__name__}. Give such a class, "
                "or a function with such a return annotation."
            )
        if nested_key is not None and issubclass(cls, Callback):
            self.callback_keys.append(nested_key)
        if nested_key is not None and subclass_mode:
            self.add_subclass_arguments(cls, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        # The CLI itself builds the Trainer, with the callbacks of other groups.
        made_here = not issubclass(cls, Trainer)
        added: list[str] = self.add_class_arguments(
            cls, nested_key, fail_untyped=False, instantiate=made_here, sub_configs=True
        )
        if nested_key is not None and f"{nested_key}.help" not in added:
            self.add_argument(f"--{nested_key}.help", action=GroupHelp, help="Show these options alone, and exit.")
        return added

    add_lightning_class_args = add_leyden_class_args
    """Lightning's name of the method."""

    def add_optimizer_args(
        self, optimizer_class: Classes = (Optimizer,), nested_key: str = "optimizer", link_to: str = AUTOMATIC
    ) -> None:
        """Adds a group for an optimizer.

        Args:
            optimizer_class: a class, whose arguments are added, or a tuple of classes, to accept any subclass of them.
            nested_key: the name of the group.
            link_to: the argument that receives the optimizer's `class_path` and `init_args`. By default, the CLI makes
                `configure_optimizers` from them.
        """
        self.optimizer_groups[nested_key] = (optimizer_class, link_to)
        self._add_group(optimizer_class, nested_key, skip={"params"})

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Classes = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Adds a group for a scheduler. The arguments are those of `add_optimizer_args`."""
        self.lr_scheduler_groups[nested_key] = (lr_scheduler_class, link_to)
        self._add_group(lr_scheduler_class, nested_key, skip={"optimizer"})

    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *args: Any, **kwargs: Any) -> list[str]:
        """Adds the arguments of a class, including those that it forwards. See jsonargparse's ArgumentParser."""
        added: list[str] = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        known = {action.dest for action in self._actions}
        for name, kind in passed_on(theclass).items():
            dest = name if nested_key is None else f"{nested_key}.{name}"
            if dest not in known:
                # Unset arguments are not forwarded, so no saved configuration has torch's defaults.
                self.add_argument(f"--{dest}", type=kind, default=argparse.SUPPRESS, help="Passed on.")
                added.append(dest)
        return added

    def _add_group(self, classes: Classes, nested_key: str, skip: set[str]) -> None:
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": skip}
        if isinstance(classes, tuple):
            self.add_subclass_arguments(classes, nested_key, required=False, **options)
        else:
            self.add_class_arguments(classes, nested_key, sub_configs=True, **options)

    def ignore_in_files(self, names: Iterable[str]) -> None:
        """Ignores arguments of other subcommands in files. On the command line they are still errors.

        Args:
            names: arguments of all subcommands. This parser's own arguments are read as usual.
        """
        self._ignored_in_files = set(names) - {action.dest for action in self._actions}

    def _load_config_parser_mode(self, content: str, *args: Any, **kwargs: Any) -> Any:
        # Every configuration file passes through here, including default files and those named by a variable.
        config = super()._load_config_parser_mode(content, *args, **kwargs)  # type: ignore[no-untyped-call]
        for name in self._ignored_in_files:
            config.pop(name, None)
        return config

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Dumps a configuration as jsonargparse does, without arguments that a file cannot represent.

        A default such as a lambda cannot be written. It is left out, so the default applies again. A warning names any
        other argument that is left out. `skip_none` is Lightning's name for `skip_unset`.
        """
        if "skip_none" in kwargs:
            kwargs["skip_unset"] = kwargs.pop("skip_none")
        return str(super().dump(*args, **kwargs))

    def _dump_cleanup_actions(self, cfg: Any, actions: Any, dump_kwargs: Any, prefix: str = "") -> None:
        # jsonargparse converts values for writing here, in every format and for each file of a configuration.
        raw = cfg.clone()
        super()._dump_cleanup_actions(cfg, actions, dump_kwargs, prefix)  # type: ignore[no-untyped-call]
        # The arguments of a group come before the group.
        for action in sorted(actions, key=lambda action: -action.dest.count(".")):
            dest = prefix + action.dest
            if dest not in cfg:
                continue
            kept = writable(cfg[dest], raw.get(dest), action.default, f"--{action.dest}")
            if kept is LOST:
                cfg.pop(dest)
            elif kept is not cfg[dest]:
                cfg[dest] = kept

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Prints the message and exits with status 2. jsonargparse would print all options first."""
        if not self.exit_on_error or os.environ.get("JSONARGPARSE_DEBUG") not in (None, "", "false"):
            return super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "")
        text = in_few_words(message) + _meant(message, parser)
        sys.stderr.write(f"{command}: {text}\n{command} --help lists the options.\n")
        self.exit(2)


UNKNOWN = re.compile(r"(?:unrecognized arguments: -{1,2}|(?i:option|key) ['\"]|invalid choice: ')([\w.-]+)")
"""The name of an option or subcommand that a parser does not know, in a message of jsonargparse."""


def _meant(message: str, parser: Any) -> str:
    """Returns " Did you mean …?" for a message about an unknown option or subcommand; "" if none is similar."""
    found = UNKNOWN.search(message)
    if found is None:
        return ""
    subparsers = getattr(getattr(parser, "_subcommands_action", None), "choices", None) or {}
    options = {action.dest for each in (parser, *subparsers.values()) for action in each._actions}
    known, cutoff = (subparsers, 0.6) if found[0].startswith("invalid choice") else (options, 0.75)
    close = difflib.get_close_matches(found[1], known, n=1, cutoff=cutoff)
    dashes = "--" if found[0].endswith(f"-{found[1]}") else ""
    return f". Did you mean {dashes}{close[0]}?" if close and close[0] != found[1] else ""


def in_few_words(message: str) -> str:
    r"""Shortens a message of jsonargparse: drops the types that the user did not mean.

    Example:
        >>> in_few_words("the following arguments are required: fit.model")
        'the following arguments are required: --model'
        >>> print(in_few_words("model:\n  Errors:\n  - Expected a dot import path string: Net"))
        model:
          - No class Net is imported. Give its full path, such as package.module.Net.
    """
    lines = [line for line in message.splitlines() if line.strip() and not line.lstrip().startswith(NOISE)]
    text = "\n".join(lines) or message
    text = re.sub(
        r"Expected a dot import path string: (\w+)",
        r"No class \1 is imported. Give its full path, such as package.module.\1.",
        text,
    )
    return re.sub(r"required: (?:\w+\.)?(model|data)\b", r"required: --\1", text)

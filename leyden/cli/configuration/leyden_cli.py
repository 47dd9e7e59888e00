"""LeydenCLI: a command line for a Trainer, a TrainModule and a DataModule, derived from their annotations."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.callbacks.save_config import SaveConfigCallback
from leyden.checkpoint.format.secrets import masked_names
from leyden.cli.configuration.class_paths import ArgsType, ReduceLROnPlateau, import_own, instantiate_class
from leyden.cli.configuration.writable import is_same
from leyden.core.environment import rank_environment
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.data.rng import seed_everything
from leyden.trainer.datamodule import DataModule
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer

if TYPE_CHECKING:
    from leyden.cli.configuration.argument_parser import LeydenArgumentParser

SUBCOMMANDS = {
    "fit": "Train a module.",
    "validate": "Run one epoch of validation.",
    "test": "Run one epoch of test.",
    "predict": "Run predict_step on every batch.",
}
GIVEN_HERE = frozenset({"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders", "unknown"})
"""Arguments of the Trainer's methods that the CLI itself passes, or that a configuration cannot represent."""


class LeydenCLI:
    """Parses a command line and configuration files, builds what they describe, and runs it.

    The options are the arguments of the Trainer, of the module, of the DataModule and of `fit`, `validate`, `test` and
    `predict`; annotations and docstrings become types and help. It needs `pip install 'leyden[cli]'`; see
    docs/configuration.md. Names and defaults are those of Lightning's `LightningCLI`.

    Args:
        model_class: a TrainModule, or a function that returns one. With None, `--model` chooses any.
        datamodule_class: a DataModule, or a function that returns one. With None, `--data` chooses any, or none.
        save_config_callback: callback that saves the configuration with the run. None does not save it.
        save_config_kwargs: arguments of that callback: `config_filename`, `overwrite`, `multifile`.
        trainer_class: the Trainer, a subclass, or a function that returns one.
        trainer_defaults: arguments that replace the Trainer's defaults. Callbacks are added to those in the
            configuration.
        seed_everything_default: default of `--seed_everything`. A number; True for `seed_everything()`, which reads
            LEYDEN_SEED or uses 0; False to leave random numbers unseeded.
        parser_kwargs: arguments of the parser. Under the name of a subcommand, arguments of that subcommand's parser.
        parser_class: a subclass of `LeydenArgumentParser`.
        subclass_mode_model: True to accept any subclass of `model_class`, by `class_path`.
        subclass_mode_data: True to accept any subclass of `datamodule_class`, by `class_path`.
        args: the command line as a list, or a configuration as a dict or Namespace. Default: the process's command
            line.
        run: False to add no subcommands and run nothing. Use `trainer`, `model` and `datamodule` yourself.
        auto_configure_optimizers: True to add `--optimizer` and `--lr_scheduler`, which then define
            `configure_optimizers`.
        load_from_checkpoint_support: ignored; accepted for scripts written for Lightning. Names in a checkpoint are
            never imported.

    Attributes:
        parser: the parser.
        subcommand: the subcommand on the command line. None with `run=False`.
        config: the parsed configuration, with that of the subcommand under its name.
        config_init: the same configuration after its objects were built.
        trainer: the Trainer.
        model: the module.
        datamodule: the DataModule, or None.

    Example:
        >>> cli = LeydenCLI(TrainModule, run=False, args=["--trainer.max_epochs=3", "--trainer.logger=False"])
        >>> cli.trainer.max_epochs
        3
    """

    def __init__(
        self,
        model_class: type[TrainModule] | Callable[..., TrainModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LeydenArgumentParser] | None = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.model_class = TrainModule if model_class is None else model_class
        self.datamodule_class = datamodule_class
        self.subclass_mode_model = subclass_mode_model or model_class is None
        self.subclass_mode_data = subclass_mode_data or datamodule_class is None
        self.auto_configure_optimizers = auto_configure_optimizers
        self.subcommand: str | None = None
        self._parsers: dict[str | None, LeydenArgumentParser] = {}
        self._method_options: dict[str, list[str]] = {}

        import_own()
        names = self.subcommands()
        kwargs = {key: value for key, value in self.parser_kwargs.items() if key not in names}
        self.setup_parser(run, kwargs, {name: self.parser_kwargs.get(name, {}) for name in names})
        self.parse_arguments(self.parser, args)
        self.subcommand = self.config["subcommand"] if run else None
        self._fill_in_secrets()
        self._show_files()
        self._seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run(self.subcommand)

    # for subclasses to override ---------------------------------------------------------------------------------------
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Maps each subcommand, a method of the Trainer, to those of its arguments that are not options."""
        return {name: set(GIVEN_HERE) for name in SUBCOMMANDS}

    def init_parser(self, **kwargs: Any) -> LeydenArgumentParser:
        """Creates a parser. `kwargs` are the `parser_kwargs`."""
        from leyden.cli.configuration.argument_parser import LeydenArgumentParser

        parser = (self.parser_class or LeydenArgumentParser)(**kwargs)
        parser.add_argument("-c", "--config", action="config", help="A configuration file, YAML or JSON; or its text.")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, dict[str, Any]]
    ) -> None:
        """Creates the parser from `main_kwargs`, and those of the subcommands from `subparser_kwargs`."""
        names = self.subcommands()
        self.parser = self.init_parser(**main_kwargs)
        self._parsers = {None: self.parser}
        if not add_subcommands:
            self._add_arguments(self.parser)
            # This parser also accepts a configuration that a fit has saved.
            self._add_arguments_of("fit", self.parser, names["fit"])
            self.parser.ignore_in_files(self._all_options(names))
            return
        group = self.parser.add_subcommands(help="leyden's, each with --help of its own:")
        for name, left_out in names.items():
            kwargs = subparser_kwargs.get(name, {})
            self._parsers[name] = parser = self.init_parser(**kwargs)
            self._add_arguments(parser)
            self._add_arguments_of(name, parser, left_out)
            # All subcommands share one file, so it may have arguments that only another subcommand accepts.
            parser.ignore_in_files(self._all_options(names))
            text = SUBCOMMANDS.get(name) or inspect.getdoc(getattr(_owner(self.trainer_class), name))
            group.add_subcommand(name, parser, help=text)
            if "default_env" in kwargs:
                # add_subcommand has overwritten it with the parent parser's setting.
                parser.default_env = kwargs["default_env"]

    def add_default_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
        """Adds `--seed_everything`."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="Seed of all random numbers. True: LEYDEN_SEED, or else 0. False: none.",
        )

    def add_core_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
        """Adds the groups `trainer`, `model` and `data`."""
        parser.add_leyden_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        for name, value in defaults.items():
            try:
                parser.set_defaults({name: value})
            except ValueError as error:
                raise ConfigurationError(
                    f"trainer_defaults: options cannot override {name.partition('.')[2]}={value!r}. For an object, "
                    "give {'class_path': …, 'init_args': {…}} or jsonargparse.lazy_instance(cls, …)."
                ) from error
        parser.add_leyden_class_args(self.model_class, "model", self.subclass_mode_model)
        if self.datamodule_class is None:
            parser.add_leyden_class_args(DataModule, "data", subclass_mode=True, required=False)
        else:
            parser.add_leyden_class_args(self.datamodule_class, "data", self.subclass_mode_data)

    def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
        """Override this to add arguments, links and mandatory callbacks to the parser of each subcommand."""

    def link_optimizers_and_lr_schedulers(self, parser: LeydenArgumentParser) -> None:
        """Links each optimizer or scheduler group that was added with a `link_to`."""
        for key, (classes, link_to) in {**parser.optimizer_groups, **parser.lr_scheduler_groups}.items():
            if link_to == "AUTOMATIC":
                continue
            if isinstance(classes, tuple):
                parser.link_arguments(key, link_to)
            else:
                parser.link_arguments(key, link_to, compute_fn=partial(_described, classes))

    def parse_arguments(self, parser: LeydenArgumentParser, args: ArgsType) -> None:
        """Parses the arguments and stores the result in `self.config`."""
        if args is None or isinstance(args, list):
            self.config = parser.parse_args(args)
        else:
            self.config = parser.parse_object(_plain(args))

    def before_instantiate_classes(self) -> None:
        """Override this to run code before anything is built."""

    def instantiate_classes(self) -> None:
        """Builds the module, the DataModule and the Trainer."""
        self.config_init = self._built()
        own = self._of_subcommand(self.config_init)
        self.model: TrainModule = own["model"]
        self.datamodule: DataModule | None = own.get("data")
        self._give_optimizers(own)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override this to run code after everything is built and before anything runs."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the Trainer; `kwargs` take precedence over the configuration."""
        own, parser = self._of_subcommand(self.config_init), self._parsers[self.subcommand]
        arguments = {**_as_dict(own.get("trainer") or {}), **kwargs}
        callbacks = _as_list(arguments.pop("callbacks", None))
        callbacks += [own[key] for key in parser.callback_keys]
        callbacks += _as_list(self.trainer_defaults.get("callbacks"))
        if self.save_config_callback is not None and not arguments.get("fast_dev_run"):
            config = self._of_subcommand(self.config)
            callbacks.append(self.save_config_callback(parser, config, **self.save_config_kwargs))
        # Defaults are not passed, so `leyden launch` can still fill them.
        defaults = {name: p.default for name, p in _parameters(self.trainer_class).items()}
        given = {name: value for name, value in arguments.items() if not is_same(value, defaults.get(name, ...))}
        if "callbacks" in defaults:
            given["callbacks"] = callbacks
        elif callbacks:
            warn(
                f"{_owner(self.trainer_class).__name__} has no argument callbacks, so the configuration is not saved "
                "and the CLI's other callbacks are not added."
            )
        return self.trainer_class(**given)

    @staticmethod
    def configure_optimizers(
        module: TrainModule, optimizer: Optimizer, lr_scheduler: Any = None
    ) -> Optimizer | dict[str, Any] | tuple[list[Optimizer], list[Any]]:
        """Returns the value of `configure_optimizers` for a module whose optimizer comes from `--optimizer`.

        As in Lightning, this is the optimizer, `([optimizer], [lr_scheduler])`, or a dict for ReduceLROnPlateau.

        Override this to change the scheduler's interval, for example.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            watched = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": watched}
        return [optimizer], [lr_scheduler]

    # from arguments to a run ------------------------------------------------------------------------------------------
    def _add_arguments(self, parser: LeydenArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizer_groups:
                parser.add_optimizer_args()
            if not parser.lr_scheduler_groups:
                parser.add_lr_scheduler_args()
        self.link_optimizers_and_lr_schedulers(parser)

    def _add_arguments_of(self, name: str, parser: LeydenArgumentParser, left_out: set[str]) -> None:
        """Adds the arguments of a Trainer method, except those whose names the user's own options take."""
        left_out = left_out | {"self"} | {action.dest for action in parser._actions}
        skip = left_out & set(_arguments_of(self.trainer_class, name))
        self._method_options[name] = parser.add_method_arguments(_owner(self.trainer_class), name, skip=skip)

    def _all_options(self, names: dict[str, set[str]]) -> set[str]:
        """Returns the arguments of all methods that are subcommands."""
        return {
            argument
            for name, left_out in names.items()
            for argument in _arguments_of(self.trainer_class, name)
            if argument not in left_out
        }

    def _fill_in_secrets(self) -> None:
        """Takes values that a saved configuration has only in masked form from the environment.

        Raises:
            ConfigurationError: if one is not there either; names its option and its variable.
        """
        for place in list(masked_names(self.config)):
            name = place.replace(".init_args.", ".")
            variable = f"{self.parser_kwargs.get('env_prefix', 'LEYDEN')}_{name.replace('.', '__')}".upper()
            option = f"--{name}" if self.subcommand is None else f"--{name.removeprefix(f'{self.subcommand}.')}"
            if "[" in name:
                raise ConfigurationError(
                    f"{option} is masked in the configuration, because it looked like a secret: write the value into "
                    "the file."
                )
            if variable not in os.environ:
                raise ConfigurationError(
                    f"{option} is masked in the configuration, because it looked like a secret: pass {option}=…, or "
                    f"set the environment variable {variable}."
                )
            self.config[place] = os.environ[variable]

    def _show_files(self) -> None:
        """Prints which files decide what runs: they are trusted like code."""
        own = self._of_subcommand(self.config)
        if self.subcommand is None or (own.get("trainer") or {}).get("verbose") is False:
            return
        files = [str(getattr(path, "absolute", path)) for path in own.get("config") or () if path is not None]
        ranks = rank_environment()
        # The process that started ranks from a script has shown them already.
        if files and (ranks is None or (ranks.rank == 0 and ranks.starter != "script")):
            print(f"configuration: {', '.join(files)}, trusted like code: it may call any function", flush=True)

    def _seed(self) -> None:
        config = self._of_subcommand(self.config)
        seed = config.get("seed_everything")
        if seed is None or seed is False:
            return
        # The saved configuration gets the number, so the run can be repeated.
        config["seed_everything"] = seed_everything(None if seed is True else seed, workers=True)

    def _of_subcommand(self, config: Any) -> Any:
        return config if self.subcommand is None else config[self.subcommand]

    def _built(self) -> Any:
        try:
            return self.parser.instantiate(self.config)
        except ValueError as error:
            # jsonargparse keeps only the message of an error from an optional class.
            found: BaseException | None = error
            while found is not None and not _is_foreign(found):
                found = found.__cause__
            if found is None or found is error:
                raise
            raise found from found.__cause__

    def _give_optimizers(self, own: Any) -> None:
        """Gives the module a `configure_optimizers` with the optimizer and scheduler of the configuration."""
        parser = self._parsers[self.subcommand]
        kinds = {"optimizer": parser.optimizer_groups, "scheduler": parser.lr_scheduler_groups}
        found: dict[str, Any] = {}
        for kind, groups in kinds.items():
            automatic = [key for key, (_, link_to) in groups.items() if link_to == "AUTOMATIC"]
            if len(automatic) > 1:
                raise ConfigurationError(
                    f"{' and '.join(automatic)} are {kind}s of the same module. Link them to arguments of the module, "
                    f"for example with parser.add_optimizer_args(nested_key={automatic[1]!r}, link_to='model.…')."
                )
            for key in automatic:
                classes = groups[key][0]
                value = _as_dict(own.get(key))
                if value is not None:
                    found[kind] = value if isinstance(classes, tuple) else _described(classes, value)
        if "optimizer" not in found:
            if "scheduler" in found:
                raise ConfigurationError("--lr_scheduler needs an optimizer. Give --optimizer too.")
            return
        if type(self.model).configure_optimizers not in (TrainModule.configure_optimizers, self.configure_optimizers):
            warn(f"{type(self.model).__name__}.configure_optimizers is not called: --optimizer replaces it.")
        configure = partial(_configured, self.model, self.configure_optimizers, **found)
        vars(self.model)["configure_optimizers"] = configure

    def _run(self, subcommand: str) -> None:
        before, after = (getattr(self, f"{when}_{subcommand}", None) for when in ("before", "after"))
        if before is not None:
            before()
        # A subclass may define its own `fit`.
        method = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        own = self._of_subcommand(self.config_init)
        arguments = {name: own[name] for name in self._method_options[subcommand] if name in own}
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        method(model=self.model, **arguments)
        if after is not None:
            after()


def _configured(
    module: TrainModule,
    configure: Callable[..., Any],
    optimizer: dict[str, Any],
    scheduler: dict[str, Any] | None = None,
) -> Any:
    """Builds the optimizer for a module's parameters, and its scheduler."""
    made = instantiate_class(module.parameters(), optimizer)
    return configure(module, made, None if scheduler is None else instantiate_class(made, scheduler))


def _described(cls: type, init_args: Any) -> dict[str, Any]:
    """Returns `class_path` and `init_args` for a group that has only the arguments of a known class."""
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": _as_dict(init_args)}


def _as_dict(config: Any) -> Any:
    return config.as_dict() if hasattr(config, "as_dict") else config


def _plain(values: Any) -> Any:
    """Converts argparse's Namespaces, which jsonargparse does not accept, to dicts."""
    if type(values) is argparse.Namespace:
        values = vars(values)
    return {name: _plain(value) for name, value in values.items()} if type(values) is dict else values


def _as_list(callbacks: Callback | list[Callback] | None) -> list[Callback]:
    return [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)


def _owner(trainer_class: Any) -> type:
    return trainer_class if isinstance(trainer_class, type) else Trainer


def _arguments_of(trainer_class: Any, method: str) -> Iterable[str]:
    return inspect.signature(getattr(_owner(trainer_class), method)).parameters


def _parameters(trainer_class: Any) -> dict[str, inspect.Parameter]:
    """Returns the arguments of a Trainer subclass, including those that it forwards to Leyden's Trainer."""
    own = dict(inspect.signature(trainer_class).parameters)
    passes_on = any(p.kind is p.VAR_KEYWORD for p in own.values())
    return {**(inspect.signature(Trainer).parameters if passes_on else {}), **own}


def _is_foreign(error: BaseException) -> bool:
    """Returns True for an error raised outside of jsonargparse."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not trace.tb_frame.f_globals.get("__name__", "").startswith("jsonargparse")

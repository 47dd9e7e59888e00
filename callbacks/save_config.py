"""SaveConfigCallback, which keeps the resolved configuration of a run beside what the run writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.format import staging

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class SaveConfigCallback(Callback):
    """Saves the configuration that a `LeydenCLI` has parsed, once, before training; only the first rank writes.

    A fit saves it in the folder of its first logger that has one, and without any in `default_root_dir`, as
    `config_filename`. `validate`, `test` and `predict` save theirs as `test-config.yaml` and so on. A file with the
    same content stays as it is. A fit that begins anew refuses to replace another run's configuration; one that
    resumes, and an evaluation, keep the earlier file as `config-1.yaml`.

    Args:
        parser: the parser of the subcommand, whose `dump` writes.
        config: what it has parsed.
        config_filename: the file's name.
        overwrite: replace another run's file.
        multifile: write the files that the configuration was read from, each by its name; a file that is there already
            is an error unless `overwrite` is set. Not on ranks that are spawned.
        save_to_log_dir: False saves nothing but what `save_config` of a subclass does.
    """

    state_per_rank = False

    def __init__(
        self,
        parser: Any,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigurationError(
                "save_to_log_dir=False saves no configuration at all: override save_config of SaveConfigCallback, or "
                "give LeydenCLI(save_config_callback=None)."
            )

    def __getstate__(self) -> dict[str, Any]:
        """For ranks that are spawned: a parser may hold what cannot be sent to them, and its text can."""
        return {**vars(self), "parser": _Text(self.parser.dump(self.config, skip_unset=False))}

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            self._save_once(trainer, module, stage)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Later than `setup`, since a run that resumes continues in its earlier folder.
        self._save_once(trainer, module, "fit")

    def save_config(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Override this to save the configuration elsewhere, too, such as to a logger; called on the first rank.

        `self.parser.dump(self.config)` is the text.
        """

    def _save_once(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        if self.save_to_log_dir:
            self._save(_folder_of(trainer), stage, replaces=stage != "fit" or trainer.ckpt_path is not None)
        self.save_config(trainer, module, stage)

    def _save(self, folder: Path, stage: str, replaces: bool) -> None:
        path = folder / (self.config_filename if stage == "fit" else f"{stage}-{self.config_filename}")
        folder.mkdir(parents=True, exist_ok=True)
        if self.multifile and hasattr(self.parser, "save"):
            self.parser.save(self.config, path, skip_unset=False, overwrite=self.overwrite, multifile=True)
            return
        text = self.parser.dump(self.config, skip_unset=False)
        if path.exists() and not self.overwrite:
            if path.read_text(encoding="utf-8") == text:
                return
            if not replaces:
                raise ConfigurationError(
                    f"{path} is the configuration of another run: give this one a folder of its own, by "
                    "--trainer.default_root_dir or a logger; remove the file; or replace it with "
                    "LeydenCLI(save_config_kwargs={'overwrite': True})."
                )
            os.replace(path, _free_name(path))
        temporary = staging.sibling(path, "tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


class _Text:
    """Stands in for a parser on a spawned rank.

    Args:
        text: what the parser has dumped.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def dump(self, *args: Any, **kwargs: Any) -> str:
        return self.text


def _folder_of(trainer: Trainer) -> Path:
    if trainer.log_dir is None:
        for logger in trainer.loggers:
            # W&B names its folder when its run begins.
            _ = logger.experiment
    return Path(trainer.log_dir or trainer.default_root_dir)


def _free_name(path: Path) -> Path:
    number = 1
    while (found := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return found

"""SaveConfigCallback, which keeps the resolved configuration of a run beside what the run writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.run_loggers import folder_of
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.format import staging

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

WHOLE = ".whole"
"""The configuration's name where no part can have it."""


class SaveConfigCallback(Callback):
    """Saves the configuration that a `LeydenCLI` has parsed, once, before training; only the first rank writes.

    A fit saves it in the folder of its first logger that has one, and without any in `default_root_dir`, as
    `config_filename`. `validate`, `test` and `predict` save theirs as `test-config.yaml` and so on. A file with the
    same content stays as it is. A fit that begins anew refuses to replace another run's configuration; one that
    resumes, and an evaluation, keep the earlier file as `config-1.yaml`, and several files in a folder `config-1`.

    Args:
        parser: the parser of the subcommand, whose `dump` writes.
        config: what it has parsed.
        config_filename: the file's name.
        overwrite: replace another run's file.
        multifile: write a file for each that the configuration was read from, by its name, which `config_filename`
            then names. Those of an evaluation are in a folder, such as `test-config`.
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
        """For ranks that are spawned: a parser may hold what cannot be sent to them, and its texts can."""
        return {**vars(self), "parser": _Texts(self.parser.dump(self.config, skip_unset=False), self._texts())}

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
            self._save(folder_of(trainer), stage, replaces=stage != "fit" or trainer.ckpt_path is not None)
        self.save_config(trainer, module, stage)

    def _save(self, folder: Path, stage: str, replaces: bool) -> None:
        texts = self._texts()
        name = self.config_filename
        if stage != "fit" and len(texts) > 1:
            # Parts have the names of the fit's, which stay as they are.
            folder /= f"{stage}-{Path(name).stem}"
        elif stage != "fit":
            name = f"{stage}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        files = {folder / (part or name): text for part, text in texts.items()}
        if not self.overwrite:
            there = {path: path.read_text(encoding="utf-8") for path in files if path.exists()}
            if there == files:
                return
            changed = [path for path, text in there.items() if files[path] != text]
            if changed:
                _set_aside(folder / name, changed, self.multifile, replaces)
        for path, text in files.items():
            temporary = staging.sibling(path, "tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)

    def _texts(self) -> dict[str, str]:
        """What is saved, by name: parts first, and last the configuration itself, whose name here is empty."""
        if isinstance(self.parser, _Texts):
            return self.parser.texts
        if not self.multifile:
            return {"": self.parser.dump(self.config, skip_unset=False)}
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder, WHOLE)
            try:
                self.parser.save(self.config, whole, skip_unset=False, multifile=True)
            except ValueError as error:
                if "Refusing to overwrite" not in str(error):
                    raise
                twice = Path(str(error).rpartition(": ")[2]).name
                raise ConfigurationError(
                    f"multifile: two files of the configuration are called {twice}: rename one of them."
                ) from error
            parts = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir() if path != whole}
            if self.config_filename in parts:
                raise ConfigurationError(
                    f"multifile: a part of the configuration is called {self.config_filename}, as the configuration "
                    "itself will be: rename the part, or give another config_filename."
                )
            return {**parts, "": whole.read_text(encoding="utf-8")}


class _Texts:
    """Stands in for a parser on a spawned rank.

    Args:
        text: the whole configuration, as the parser dumps it.
        texts: the files that are saved.
    """

    def __init__(self, text: str, texts: dict[str, str]) -> None:
        self.text, self.texts = text, texts

    def dump(self, *args: Any, **kwargs: Any) -> str:
        return self.text


def _set_aside(whole: Path, changed: list[Path], has_parts: bool, may: bool) -> None:
    """Keeps the configuration that is in the folder under another name, with the parts that it names.

    Args:
        whole: the configuration's file.
        changed: the files there that will be replaced.
        has_parts: whether there may be several files.
        may: False raises an error.
    """
    if not may or not whole.exists():
        whose = "the configuration of another run" if whole.exists() else "no part of a configuration that a run saved"
        raise ConfigurationError(
            f"{changed[0]} is {whose}: give this one a folder of its own, by --trainer.default_root_dir or a logger; "
            "remove the file; or replace it with LeydenCLI(save_config_kwargs={'overwrite': True})."
        )
    parts = _parts_of(whole) if has_parts else []
    if not parts:
        os.replace(whole, _free_name(whole))
        return
    target = _free_name(whole.with_suffix(""))
    temporary = staging.sibling(target, "tmp")
    temporary.mkdir()
    for path in (whole, *parts):
        shutil.copy2(path, temporary)
    os.rename(temporary, target)


def _parts_of(whole: Path) -> list[Path]:
    """The files beside a configuration that it names."""
    import yaml

    named: set[str] = set()
    values = [yaml.safe_load(whole.read_text(encoding="utf-8"))]
    while values:
        value = values.pop()
        if isinstance(value, str):
            named.add(value)
        elif isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value
    return sorted(path for path in whole.parent.iterdir() if path.name in named and path.is_file())


def _free_name(path: Path) -> Path:
    number = 1
    while (found := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return found

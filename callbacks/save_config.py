"""SaveConfigCallback, the callback that saves a run's resolved configuration in the run's folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import folder_of
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.secrets import OWNERS, is_marked, masked_values
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

WHOLE = ".whole"
"""Temporary name of the main file. No part of a configuration can have it."""


class SaveConfigCallback(Callback):
    """Saves the configuration that a `LeydenCLI` has parsed, once per run and before training, on rank 0.

    A fit saves it as `config_filename` in the run's folder; an evaluation in that of its first logger, or else in
    `default_root_dir`.
    `validate`, `test` and `predict` save theirs as `test-config.yaml` and so on. A file with the same content is left
    alone. A new fit refuses to replace another run's configuration. A resumed fit and an evaluation rename the earlier
    file to `config-1.yaml`, or move several files to a folder `config-1`. What looks like a secret is masked, in the
    files and in the attribute `config`.

    Args:
        parser: the parser of the subcommand; its `dump` formats the configuration.
        config: the parsed configuration.
        config_filename: the name of the file.
        overwrite: replace another run's file.
        multifile: write one file for each file that the configuration was read from, under the same name;
            `config_filename` then refers to them. The files of an evaluation go to a folder, such as `test-config`.
        save_to_log_dir: whether to write these files. If not, only `save_config` of a subclass is called.
    """

    state_per_rank = False
    uses_run_folder = True

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
        self.config = masked_values(config)
        self._unmasked = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigurationError(
                "save_to_log_dir=False saves no configuration at all: override SaveConfigCallback.save_config, or pass "
                "LeydenCLI(save_config_callback=None)."
            )

    def __getstate__(self) -> dict[str, Any]:
        # For spawned ranks: a parser may not be picklable, so its texts are sent instead.
        texts = _Texts(self.parser.dump(self.config, skip_unset=False), self._texts())
        return {**vars(self), "parser": texts, "_unmasked": None}

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            self._save_once(trainer, module, stage)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Not in `setup`: a resumed run returns to its earlier folder after that.
        self._save_once(trainer, module, "fit")

    def save_config(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Override this to also save the configuration elsewhere, such as to a logger. Called on rank 0.

        `self.parser.dump(self.config)` returns its text.
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
            # A folder of its own, since the parts have the same names as those of the fit.
            folder /= f"{stage}-{Path(name).stem}"
        elif stage != "fit":
            name = f"{stage}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        files = {folder / (part or name): text for part, text in texts.items()}
        if not self.overwrite:
            existing = {path: path.read_text(encoding="utf-8") for path in files if path.exists()}
            if existing == files:
                return
            changed = [path for path, text in existing.items() if files[path] != text]
            if changed:
                _set_aside(folder / name, changed, self.multifile, replaces)
        for path, text in files.items():
            with staging.replacing(path, OWNERS if is_marked(text) else None) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def _texts(self) -> dict[str, str]:
        """Returns the texts to save by file name: the parts, then the main file under the name "". Masks secrets."""
        if isinstance(self.parser, _Texts):
            return self.parser.texts
        return {name: _masked(name, text) for name, text in self._whole_texts().items()}

    def _whole_texts(self) -> dict[str, str]:
        if not self.multifile:
            return {"": self.parser.dump(self._unmasked, skip_unset=False)}
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder, WHOLE)
            try:
                self.parser.save(self._unmasked, whole, skip_unset=False, multifile=True)
            except ValueError as error:
                if "Refusing to overwrite" not in str(error):
                    raise
                duplicate = Path(str(error).rpartition(": ")[2]).name
                raise ConfigurationError(
                    f"multifile: two files of the configuration are called {duplicate}. Rename one of them."
                ) from error
            parts = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir() if path != whole}
            if self.config_filename in parts:
                raise ConfigurationError(
                    f"multifile: a part of the configuration is called {self.config_filename}, like the main file. "
                    "Rename the part, or use another config_filename."
                )
            return {**parts, "": whole.read_text(encoding="utf-8")}


def _masked(name: str, text: str) -> str:
    """Masks the secrets in the text of a configuration file, whose own form is kept if there are none."""
    import yaml

    values = yaml.safe_load(text)
    masked = masked_values(values)
    if masked is values:
        return text
    if name.endswith(".json"):
        return json.dumps(masked, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(masked, sort_keys=False, allow_unicode=True))


class _Texts:
    """Stands in for a parser on a spawned rank, with the text that it dumps and the texts of the files, by name."""

    def __init__(self, text: str, texts: dict[str, str]) -> None:
        self.text, self.texts = text, texts

    def dump(self, *args: Any, **kwargs: Any) -> str:
        return self.text


def _set_aside(whole: Path, changed: list[Path], has_parts: bool, is_allowed: bool) -> None:
    """Renames a configuration's main file, `whole`, whose `changed` files are about to be replaced, and its parts.

    Raises:
        ConfigurationError: if the files may not be replaced.
    """
    if not is_allowed or not whole.exists():
        kind = "the configuration of another run" if whole.exists() else "not part of a saved configuration"
        raise ConfigurationError(
            f"{changed[0]} is {kind}. Use another folder (--trainer.default_root_dir, or a logger), remove the file, "
            "or replace it with LeydenCLI(save_config_kwargs={'overwrite': True})."
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
    """Returns the files in a configuration's folder that it refers to."""
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

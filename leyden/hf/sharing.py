"""Shares a trained model: as a folder beside the best checkpoint, and on the hub with a card."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.checkpoint.format.manifest import MANIFEST
from leyden.checkpoint.format.secrets import masked_values
from leyden.core.errors import ConfigurationError, needs
from leyden.core.paths import local_path
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.hf.module import HFModule
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class SavePretrained(Callback):
    """Writes the best checkpoint of a fit as a folder for transformers, and uploads it to the hub if asked.

    The folder is written when the fit ends; of a run that is killed, when its resume ends. Without a checkpoint it
    holds the last weights. An upload that fails is a warning, since the folder is complete; `module.push_to_hub`
    repeats it.

    Args:
        folder: the folder to write; by default `pretrained` in the run's folder.
        merged: see `HFModule.save_pretrained`.
        push_to_hub: the repository on the hub, such as "me/model"; None for no upload.
        private: whether a new repository is private.
        token: a token of the hub; by default the one that `hf auth login` stored.

    Example:
        >>> SavePretrained(merged=True).push_to_hub is None
        True
    """

    # After ModelCheckpoint, which waits for its last save.
    order: ClassVar[int] = 210

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        merged: bool = False,
        push_to_hub: str | None = None,
        private: bool = True,
        token: str | None = None,
    ) -> None:
        self.folder = None if folder is None else os.path.abspath(local_path(folder, "folder"))
        self.merged, self.push_to_hub, self.private = merged, push_to_hub, private
        self._token = token

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if not callable(getattr(module, "save_pretrained", None)):
            raise ConfigurationError(f"SavePretrained is for HFModule, and {type(module).__name__} is none.")

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.fast_dev_run:
            return
        checkpoint = trainer.checkpoint_callback
        best = getattr(checkpoint, "best_model_path", "") or None
        folder = self.folder or os.path.join(trainer.run_folder or trainer.default_root_dir, "pretrained")
        is_plugins = trainer.checkpoint_io is not None and not os.path.isfile(os.path.join(best or "", MANIFEST))
        if best is not None and is_plugins:
            warn(f"SavePretrained writes the last weights: a CheckpointIO plugin keeps the best ones, at {best}.")
            best = None
        module.save_pretrained(folder, merged=self.merged, ckpt_path=best)
        if self.push_to_hub is None or not trainer.is_global_zero:
            return
        try:
            url = upload(Path(folder), self.push_to_hub, module, private=self.private, token=self._token)
        except Exception as error:
            warn(f"{folder} is complete, but its upload to {self.push_to_hub} failed: {type(error).__name__}: {error}")
        else:
            trainer.print(f"uploaded    {url}")


def upload(
    folder: Path,
    repo_id: str,
    module: HFModule,
    *,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload by Leyden",
) -> str:
    """Uploads a folder of `save_pretrained` with a model card, and returns the address of the commit.

    The commit is one step: a repository never holds half an upload. Files that an upload before has brought to the hub
    are not sent again.
    """
    with needs("huggingface_hub", "hf", "push_to_hub"):
        from huggingface_hub import HfApi

    (folder / "README.md").write_text(card(module), encoding="utf-8")
    api = HfApi(token=token)
    name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    done = api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message=commit_message)
    return str(done.commit_url)


def card(module: HFModule) -> str:
    """Returns a model card with the metrics of the last evaluation and the hyperparameters, without secrets."""
    is_adapter = hasattr(module.model, "get_base_model")
    base = module.hparams.get("model") or getattr(module.model, "name_or_path", "")
    head = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", "tags:", "- leyden"]
    if base and not Path(str(base)).exists():
        head.append(f"base_model: {base}")
    metrics = {} if module._trainer is None else module.trainer.callback_metrics
    values = {name: float(value) for name, value in sorted(metrics.items()) if _is_number(value)}
    shown = masked_values(
        {name: value for name, value in module.hparams.items() if name not in ("model", "peft_config")}
    )
    lines = [*head, "---", "", "# Trained with Leyden", ""]
    lines += _table("metric", {name: f"{value:.6g}" for name, value in values.items()})
    lines += _table("hyperparameter", {name: f"`{value!r}`" for name, value in shown.items()})
    return "\n".join(lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    return (
        [f"| {title} | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
        if rows
        else []
    )

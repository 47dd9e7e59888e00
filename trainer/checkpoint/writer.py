"""Writing a checkpoint: into a temporary sibling, and then by one rename into its place."""

from __future__ import annotations

import datetime
import errno
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.trainer.checkpoint import staging
from leyden.trainer.checkpoint.codec import encode
from leyden.trainer.checkpoint.errors import CheckpointError
from leyden.trainer.checkpoint.folder import highest_counter, is_checkpoint
from leyden.trainer.checkpoint.manifest import (
    EXTRA,
    LAYOUT,
    MANIFEST,
    MODEL,
    OPTIMIZERS,
    PROGRESS,
    FileEntry,
    Manifest,
    unsafe,
)
from leyden.trainer.checkpoint.safefile import write_file, write_tensors
from leyden.trainer.checkpoint.tensors import TensorCollector, check_tensor, part_key, split

if TYPE_CHECKING:
    from typing_extensions import Self


class CheckpointWriter:
    """Writes one checkpoint, which is there in whole after `commit` and not at all before.

    Args:
        path: the folder to be. If it is there already, `-v1`, `-v2`, … is appended.
        overwrite: replace a checkpoint of that name; the old one is deleted only after the new one is in place.

    Raises:
        CheckpointError: from every method, if something cannot be written; names the path and the cause. The previous
            checkpoints stay as they are.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with CheckpointWriter(f"{folder}/step=1") as writer:
        ...     writer.model({"weight": torch.zeros(2)})
        ...     path = writer.commit(progress={"epoch": 0, "global_step": 1})
        >>> path.name
        'step=1'
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        # Absolute, since the user's code may change the working directory before the commit.
        self._target = Path(os.path.abspath(path))
        self._overwrite = overwrite
        self._files: dict[str, FileEntry] = {}
        self._open = False
        if overwrite and os.path.lexists(self._target) and not is_checkpoint(self._target):
            raise CheckpointError(self._target, "is no checkpoint and is not overwritten. Choose another path.")
        with self._writing(self._target):
            self._target.parent.mkdir(parents=True, exist_ok=True)
            staging.sweep(self._target.parent)
            self._folder = staging.sibling(self._target, "tmp")
            self._folder.mkdir()
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    @property
    def folder(self) -> Path:
        """The temporary folder, into which other ranks write their files."""
        return self._folder

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """What was written so far; ranks send it to the one that commits."""
        return dict(self._files)

    def add(self, files: Mapping[str, FileEntry]) -> None:
        """Takes files into the manifest that others wrote, flushed, into `folder`."""
        for name, entry in files.items():
            self._claim(name)
            self._files[name] = entry

    def json(self, name: str, obj: Any) -> None:
        """Writes `name.json`, plain JSON that anybody can read.

        Args:
            name: the file's name, with or without `.json`.
            obj: what `json.dumps` takes; no nan or inf, which are no JSON.
        """
        name = name if name.endswith(".json") else f"{name}.json"
        try:
            data = json.dumps(obj, indent=1, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                self._target / name, f"cannot be written as plain JSON: {error}. Use state()."
            ) from error
        self._write(name, lambda path: write_file(path, [data]))

    def state(self, name: str, tree: Any, where: str | None = None) -> None:
        """Writes any tree of state: `name.json`, and `name.safetensors` if there are tensors in it.

        Args:
            name: such as `rank-0`, `callbacks`, `user`.
            tree: any nest of the kinds that `codec.encode` knows.
            where: what errors call its root; the name if left out.

        Raises:
            UnsupportedStateError: if a part cannot be saved; names its key path.
        """
        collector = TensorCollector()
        encoded = encode(tree, collector, where or name)
        tensors = collector.finish()
        file = f"{name}.safetensors" if tensors else None
        if file is not None:
            self._write(file, lambda path: write_tensors(path, tensors))
        self._compact(f"{name}.json", {"tensors": file, "tree": encoded})

    def model(self, state_dict: Mapping[str, Any]) -> None:
        """Writes `model.safetensors`, as any reader of safetensors takes it, and `layout.json`.

        A tensor that stands under several names is stored once, under the first. Entries that are no tensors go to
        `model-extra.json`.

        Raises:
            UnsupportedStateError: if a tensor cannot be saved; names it.
        """
        layout: dict[str, Any] = {}
        stored: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for name, value in state_dict.items():
            if not isinstance(value, Tensor):
                extra[name] = value
                continue
            check_tensor(value, f"state_dict[{name!r}]")
            first = seen.setdefault(_identity(value), name)
            if first != name:
                layout[name] = {"alias_of": first}
                continue
            spec, parts = split(value)
            spec["parts"] = {}
            for part, tensor in parts.items():
                key = part_key(name, part)
                stored[key] = tensor
                # One shard, which begins at the origin. More of them are what sharded writing adds.
                spec["parts"][part] = {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "shards": [[MODEL, key, [0] * tensor.dim()]],
                }
            layout[name] = spec
        aliases = {name: spec["alias_of"] for name, spec in layout.items() if "alias_of" in spec}
        self._write(MODEL, lambda path: write_tensors(path, stored, {**aliases, "format": "pt"}))
        self._compact(LAYOUT, {"tensors": layout, "extra": list(extra)})
        if extra:
            self.state(EXTRA, extra, where="state_dict")

    def optimizers(self, states: list[dict[str, Any]]) -> None:
        """Writes `optimizer-<i>.safetensors` for each optimizer and one `optimizer.json`.

        Args:
            states: what `optimizers.to_named` gives, one for each optimizer.

        Raises:
            UnsupportedStateError: if a part cannot be saved; names its key path.
        """
        described = []
        for index, state in enumerate(states):
            collector = TensorCollector()
            encoded = encode(state, collector, f"optimizers[{index}]")
            tensors = collector.finish()
            file = f"optimizer-{index}.safetensors" if tensors else None
            if file is not None:
                # Bound now: the loop goes on before a later reader of this lambda would look.
                self._write(file, lambda path, tensors=tensors: write_tensors(path, tensors))  # type: ignore[misc]
            described.append({"tensors": file, "tree": encoded})
        self._compact(OPTIMIZERS, {"optimizers": described})

    def commit(self, *, progress: Mapping[str, Any], world_size: int = 1, strategy: str = "single_device") -> Path:
        """Puts the checkpoint in its place.

        Args:
            progress: `Progress.to_dict()`, written to `progress.json`; its epoch and global_step into the manifest.
            world_size: ranks that wrote it.
            strategy: name of the strategy.

        Returns:
            The folder, whose name has `-v1` … appended if the path was taken.
        """
        self.json(PROGRESS, dict(progress))
        with self._writing(self._target):
            parent = self._target.parent
            manifest = Manifest(
                files=self._files,
                save_counter=highest_counter(parent) + 1,
                saved_at=datetime.datetime.now(datetime.timezone.utc).isoformat(),
                progress={key: progress[key] for key in ("epoch", "global_step") if key in progress},
                world_size=world_size,
                strategy=strategy,
                versions={"leyden": _version(), "torch": str(torch.__version__)},
            )
            write_file(self._folder / MANIFEST, [manifest.to_bytes()])
            for folder in {(self._folder / name).parent for name in self._files} | {self._folder}:
                staging.fsync_folder(folder)
            path = self._replace() if self._overwrite and os.path.lexists(self._target) else self._place()
            self._open = False
            staging.fsync_folder(parent)
        return path

    def abort(self) -> None:
        """Removes what was written. After `commit` it does nothing."""
        if self._open:
            self._open = False
            shutil.rmtree(self._folder, ignore_errors=True)

    def _place(self) -> Path:
        """Renames into the first free name. Another writer may take it in between; then the rename fails."""
        for version in itertools.count():
            path = self._target if version == 0 else self._target.with_name(f"{self._target.name}-v{version}")
            if os.path.lexists(path):
                continue
            try:
                os.rename(self._folder, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue
            return path
        raise AssertionError("unreachable: itertools.count does not end")

    def _replace(self) -> Path:
        """Killed between the two renames, the next `sweep` puts the old one back."""
        aside = staging.sibling(self._target, "old")
        os.rename(self._target, aside)
        try:
            os.rename(self._folder, self._target)
        except OSError:
            os.rename(aside, self._target)
            raise
        staging.fsync_folder(self._target.parent)
        shutil.rmtree(aside, ignore_errors=True)
        return self._target

    def _compact(self, name: str, obj: Any) -> None:
        data = json.dumps(obj, separators=(",", ":"), allow_nan=False).encode()
        self._write(name, lambda path: write_file(path, [data]))

    def _write(self, name: str, write: Callable[[Path], FileEntry]) -> None:
        self._claim(name)
        path = self._folder / name
        with self._writing(self._target / name):
            if "/" in name:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = write(path)

    def _claim(self, name: str) -> None:
        if not self._open:
            raise CheckpointError(self._target / name, "cannot be written: the checkpoint is committed or aborted.")
        reason = "which is written by commit" if name == MANIFEST else unsafe(name)
        if reason or name in self._files:
            raise CheckpointError(self._target / name, f"cannot be written as {name!r}, {reason or 'which is there'}.")

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            raise CheckpointError(path, f"cannot be written: {error.strerror or error}. {_advice(error)}") from error


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.shape, tensor.stride())


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free space or keep fewer checkpoints; earlier ones are whole."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Make the folder writable, or choose another; earlier checkpoints are whole."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "A file stands where a folder is needed: choose another path."
    return "Earlier checkpoints are whole."


def _version() -> str:
    return str(getattr(sys.modules.get("leyden"), "__version__", "unknown"))

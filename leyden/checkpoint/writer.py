"""Writes a checkpoint, in a folder or in a bucket."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.copies import Content, Copies, Tensors, Text
from leyden.checkpoint.folder import highest_counter
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of
from leyden.checkpoint.format.codec import encode
from leyden.checkpoint.format.errors import CheckpointError, UnsupportedStateError
from leyden.checkpoint.format.manifest import (
    EXTRA,
    LAYOUT,
    MANIFEST,
    MAX_PARTS,
    MODEL,
    OPTIMIZERS,
    PROGRESS,
    FileEntry,
    Manifest,
    parts_in,
    unsafe,
)
from leyden.checkpoint.format.shard_table import Table, file_name, spread, whole_table
from leyden.checkpoint.format.tensors import (
    TensorCollector,
    address_of,
    check_tensor,
    dtype_named,
    is_sharded,
    local_part,
    part_key,
    split,
)
from leyden.checkpoint.nodes import ship
from leyden.checkpoint.shard_plan import ShardPlans
from leyden.checkpoint.staged import Staged, StagedFolder, StagedUpload, free_path, upload
from leyden.strategies.fragment import Fragment

if TYPE_CHECKING:
    from typing_extensions import Self


class CheckpointWriter:
    """Writes one checkpoint. It appears only on `commit`, and is then complete.

    Args:
        path: the folder to write, or its URL in a bucket. If it exists, `-v1`, `-v2`, … is appended.
        overwrite: replace an existing checkpoint or empty folder at `path`. The old one is deleted only after the new
            one is in place.
        ranks: the ranks that write the checkpoint together. Each creates a writer and calls the same methods. All
            write to one place, and rank 0 commits when all are done. If one fails, all raise, and what was written is
            removed.
        places: folders, and the number of levels to search below each. The new checkpoint gets a higher save counter
            than any checkpoint found there, or in the folder that holds `path`.
        plans: cached plans from this run's earlier saves, which say which rank writes which shard. None plans from
            scratch.
        copies: snapshots the tensors, so that `commit` can write the files later. None writes each file immediately.
        check: called just before the checkpoint becomes visible; raises to prevent that.
        counters: the highest save counters that this run's earlier saves have found, by place.
        upload_to: a URL in a bucket, whose name the checkpoint gets. `commit` completes it at `path`, replaces what is
            there, and then uploads it. `overwrite` is for the URL.

    Raises:
        CheckpointError: from every method, if something cannot be written; names the path and the cause. Earlier
            checkpoints are left intact.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with CheckpointWriter(f"{folder}/step=1") as writer:
        ...     writer.model({"weight": torch.zeros(2)})
        ...     path = writer.commit(progress={"epoch": 0, "global_step": 1})
        >>> path.name
        'step=1'
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | BucketPath,
        *,
        overwrite: bool = False,
        ranks: CheckpointRanks | None = None,
        places: Sequence[tuple[Place, int]] = (),
        plans: ShardPlans | None = None,
        copies: Copies | None = None,
        check: Callable[[], None] = lambda: None,
        counters: dict[tuple[Place, int], int] | None = None,
        upload_to: BucketPath | None = None,
    ) -> None:
        self._ranks = CheckpointRanks() if ranks is None else ranks
        self._open = False
        self._overwrites = overwrite
        target = place_of(path, "path")
        if upload_to is not None:
            url = upload_to
            name = self._ranks.first(lambda: self._free_name(url))
            upload_to, target, overwrite = url.with_name(name), target.with_name(name), True
        self._upload_to = upload_to
        # Absolute, since user code may change the working directory before the commit.
        self._target: Place = target if isinstance(target, BucketPath) else Path(os.path.abspath(target))
        self._staged: Staged = (
            StagedUpload(self._target, overwrite)
            if isinstance(self._target, BucketPath)
            else StagedFolder(self._target, overwrite)
        )
        self._places: set[tuple[Place, int]] = {((upload_to or self._target).parent, 0), *places}
        self._counters = {} if counters is None else counters
        self._check = check
        self._is_prevented = False
        self._files: dict[str, FileEntry] = {}
        self._copies = copies
        self._deferred: dict[str, Content] = {}
        """Contents of the files that `write` or `commit` writes, by file name."""
        self._plan_digests: dict[str, str] = {}
        """Digest of the plan for each group of tensors, by file stem; all ranks must have planned the same."""
        self._plans = ShardPlans() if plans is None else plans
        self._substitutes: Mapping[str, Tensor] = {}
        self._left_out: Collection[str] = ()
        begun = self._ranks.keep(self._begin)
        self._open = True
        try:
            self._ranks.each(lambda: self._staged.join(begun))
        except BaseException:
            self.abort()
            raise

    def _free_name(self, url: BucketPath) -> str:
        with self._write_errors(url):
            return url.name if self._overwrites else free_path(url).name

    def _begin(self) -> str:
        with self._write_errors(self._target):
            return self._staged.begin()

    @property
    def planned(self) -> Place:
        """The path that `commit` will give the checkpoint, unless another process takes that name first."""
        return self._upload_to or self._staged.planned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # Report first, then remove: the other ranks may still be writing, and have stopped once they answer.
            self._ranks.report(error)
        self.abort()

    def beside(self) -> None:
        """Switches to a separate process group, so that a background thread can write the rest of the checkpoint.

        Every rank calls it.
        """
        self._ranks = self._ranks.beside()

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the state that all ranks share."""
        return self._ranks.rank == 0

    @property
    def folder(self) -> Path:
        """A local folder for files of user code; see `adopt`. For a bucket each rank has its own."""
        return self._staged.folder

    def adopt(self) -> None:
        """Adds files that user code has written into `folder`. All ranks call it before they write anything else.

        Of files with the same name in several folders, the first rank's is taken.
        """
        # The files of all ranks are complete.
        self._ranks.gather(None)
        found = self._ranks.gather(self._staged.found(self.is_first))
        for name in found[self._ranks.rank]:
            if any(name in others for others in found[: self._ranks.rank]):
                continue
            self._check_name(name)
            with self._write_errors(self._target / name):
                self._files[name] = self._staged.add(name)
        self._ranks.gather(None)

    def json(self, name: str, obj: Any) -> None:
        """Writes `name.json` as plain JSON that any program can read. Rank 0 writes it for all ranks.

        `obj` is one that `json.dumps` accepts, without nan and inf, which JSON lacks.
        """
        name = name if name.endswith(".json") else f"{name}.json"
        try:
            data = json.dumps(obj, indent=1, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                self._target / name, f"cannot be written as plain JSON: {error}. Use state()."
            ) from error
        if self.is_first:
            self._write(name, Text(data))

    def substitute(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes `model` write these tensors, such as averaged weights, in place of the ones of the same name."""
        self._substitutes = tensors

    def leave_out(self, names: Collection[str]) -> None:
        """Makes `model` leave out the entries of these names."""
        self._left_out = names

    def state(
        self, name: str, tree: Any, where: str | None = None, *, of_rank: bool = False, sharded: bool = False
    ) -> None:
        """Writes any tree of state to `name.json`, and its tensors to `name.safetensors`.

        Args:
            name: the name of the state, such as `rank-0`, `callbacks` or `user`.
            tree: any nest of types that `codec.encode` supports.
            where: the name of the tree's root in error messages; `name` by default.
            of_rank: the state belongs to this rank alone, under a name of its own. Otherwise rank 0 writes it for all.
            sharded: every rank passes the tree, and each writes its own shards of the DTensors in it.

        Raises:
            UnsupportedStateError: if a part cannot be saved; names its key path.
        """
        collector = TensorCollector(sharded)
        encoded = encode(tree, collector, where or name)
        tensors = collector.finish() if sharded or of_rank or self.is_first else {}
        if any(is_sharded(tensor) for tensor in tensors.values()):
            tables = self._write_tensors(name, tensors, ())
            self._write_json(f"{name}.json", {"tensors": tables, "tree": encoded}, where=where or name)
            return
        if not (of_rank or self.is_first):
            return
        file = f"{name}.safetensors" if tensors else None
        if file is not None:
            self._write(file, Tensors(tensors))
        self._write_json(f"{name}.json", {"tensors": file, "tree": encoded}, of_rank, where or name)

    def model(self, state_dict: Mapping[str, Any], replicated: Collection[str] = ()) -> None:
        """Writes `model.safetensors`, which any reader of safetensors can load, and `layout.json`.

        A tensor with several names is stored once, under the first. Entries that are not tensors go to
        `model-extra.json`. Several ranks write `model-00001-of-0000n.safetensors` and so on. If tensors are sharded,
        each rank writes its shards. Otherwise, if the tensors have 64 MiB or more in total, they are divided among the
        ranks, and an index file lets transformers read them.

        The names are the same on every rank. Any rank may write the replicated ones, which are identical on all. Rank 0
        writes the rest.

        Raises:
            UnsupportedStateError: if a tensor cannot be saved; names it.
        """
        layout: dict[str, Any] = {}
        stored: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        first_names: dict[tuple[Any, ...], str] = {}
        for name, own in state_dict.items():
            if name in self._left_out:
                continue
            value = self._substitutes.get(name, own)
            if not isinstance(value, Tensor):
                extra[name] = value
                continue
            check_tensor(value, f"state_dict[{name!r}]", sharded=True)
            first_name = first_names.setdefault(_storage_key(value), name)
            if first_name != name:
                layout[name] = {"alias_of": first_name}
                continue
            spec, parts = split(value)
            spec["parts"] = {part: part_key(name, part) for part in parts}
            stored |= {part_key(name, part): tensor for part, tensor in parts.items()}
            layout[name] = spec
        aliases = {name: spec["alias_of"] for name, spec in layout.items() if "alias_of" in spec}
        movable = {
            key for name in replicated if "parts" in layout.get(name, {}) for key in layout[name]["parts"].values()
        }
        tables = self._write_tensors("model", stored, movable, {**aliases, "format": "pt"})
        for spec in layout.values() if self.is_first else ():
            if "parts" in spec:
                spec["parts"] = {part: tables[key] for part, key in spec["parts"].items()}
        self._write_index(tables)
        self._write_json(LAYOUT, {"tensors": layout, "extra": list(extra)})
        if extra:
            self.state(EXTRA, extra, where="state_dict")

    def _write_index(self, tables: Mapping[str, Table]) -> None:
        """Writes the index with which transformers finds whole tensors in several files. It cannot merge shards."""
        files = {key: [shard[0] for shard in table["shards"]] for key, table in tables.items()}
        is_whole = all(len(names) == 1 for names in files.values())
        if is_whole and any(names != [MODEL] for names in files.values()):
            total = sum(math.prod(table["shape"]) * dtype_named(table["dtype"]).itemsize for table in tables.values())
            weight_map = {key: names[0] for key, names in files.items()}
            self.json(f"{MODEL}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _write_tensors(
        self, stem: str, tensors: dict[str, Tensor], movable: Collection[str], metadata: Mapping[str, str] | None = None
    ) -> dict[str, Table]:
        """Writes tensors that every rank holds, whole or in shards. Each tensor or shard is written once.

        Returns:
            The tensors' tables. Other ranks than 0 may get none.
        """
        if any(is_sharded(tensor) for tensor in tensors.values()):
            from leyden.checkpoint.shards import plan

            shard_plan, mine = plan(tensors, stem, self._ranks, self._plans)
            tables = {key: shard_plan.tables[key] for key in tensors if self.is_first}
            planned = [*tensors, shard_plan.described]
        else:
            owners = spread(tensors, movable, self._ranks.size)
            writers = sorted({0, *owners.values()})
            names = {rank: file_name(stem, number, len(writers)) for number, rank in enumerate(writers)}
            tables = {
                key: whole_table(tensor.dtype, tuple(tensor.shape), names[owners[key]], key)
                for key, tensor in tensors.items()
            }
            own = {key: tensor for key, tensor in tensors.items() if owners[key] == self._ranks.rank}
            mine = {names[self._ranks.rank]: own} if self._ranks.rank in names else {}
            planned = [json.dumps(tables)]
        self._plan_digests[stem] = hashlib.sha256("\n".join(planned).encode()).hexdigest()
        for name, own in mine.items():
            self._write(name, Tensors(own, metadata))
        return tables

    def optimizers(self, states: list[dict[str, Any]]) -> None:
        """Writes the results of `to_named`: `optimizer-<i>.safetensors` for each optimizer and one `optimizer.json`.

        Raises:
            UnsupportedStateError: if a part cannot be saved; names its key path.
        """
        described = []
        for index, state in enumerate(states):
            collector = TensorCollector(sharded=True)
            encoded = encode(state, collector, f"optimizers[{index}]")
            tensors = collector.finish()
            tables: dict[str, Table] = {}
            if tensors:
                # Parameters outside the module may differ between ranks, so rank 0 writes their state.
                movable = {key for key in tensors if not key.startswith("state.__extra__")}
                tables = self._write_tensors(f"optimizer-{index}", tensors, movable)
            described.append({"tensors": tables or None, "tree": encoded})
        self._write_json(OPTIMIZERS, {"optimizers": described})

    def write(self) -> None:
        """Writes the deferred files, once their copies are complete. Later files are written immediately."""
        deferred, self._deferred, self._copies = self._deferred, {}, None
        for name, content in deferred.items():
            self._write_now(name, content)

    def commit(
        self,
        *,
        progress: Mapping[str, Any],
        world_size: int = 1,
        strategy: str = "single_device",
        data_ranks: Sequence[int] = (),
    ) -> Place:
        """Completes the checkpoint, and makes it visible to readers.

        Args:
            progress: `Progress.to_dict()`, written to `progress.json`. Its epoch and global_step also go into the
                manifest.
            world_size: the number of ranks that wrote the checkpoint.
            strategy: the name of the strategy.
            data_ranks: the data rank of each rank. If left out, each rank is its own data rank.

        Returns:
            The checkpoint's folder, with `-v1`, … appended to its name if the path was taken; its URL if it is
            uploaded.
        """
        self.write()
        self.json(PROGRESS, dict(progress))
        self._flush()
        written = self._ranks.gather((self._files, self._plan_digests))
        if len(self._ranks.keepers) > 1:
            ship([files for files, _ in written], self.folder, self._ranks)
        manifest = self._ranks.first(lambda: self._build_manifest(written, progress, world_size, strategy, data_ranks))
        path = self._ranks.first(lambda: self._commit(manifest))
        if len(self._ranks.keepers) > 1:
            # Machines that keep a folder of their own use the name that was free on the first machine.
            self._target = self._target.with_name(path.name)
            path = self._ranks.keep(lambda: path if self.is_first else self._commit(manifest, same_name=True))
        self._open = False
        if self._upload_to is None:
            return path
        assert isinstance(self._target, Path)
        return upload(self._target, manifest, self._upload_to, self._ranks, self._overwrites, self._check_commit)

    def _flush(self) -> None:
        """Waits until every file that this rank has written is on disk."""
        try:
            self._staged.flush()
        except OSError as error:
            with self._write_errors(self._target / (error.filename or "")):
                raise

    def _build_manifest(
        self,
        written: list[tuple[dict[str, FileEntry], dict[str, str]]],
        progress: Mapping[str, Any],
        world_size: int,
        strategy: str,
        data_ranks: Sequence[int],
    ) -> Manifest:
        """Builds the manifest of all ranks' files, after checking that all ranks planned the same tensors.

        `written` has for each rank its files and the digests of its plans.
        """
        for rank, (files, digests) in enumerate(written[1:], 1):
            for stem in digests.keys() | self._plan_digests.keys():
                if digests.get(stem) != self._plan_digests.get(stem):
                    raise CheckpointError(
                        self._target,
                        f"cannot be written: the tensors of {stem!r} on rank {rank} differ from those on rank 0.",
                    )
            for name, entry in files.items():
                self._check_name(name)
                self._files[name] = entry
        return Manifest(
            files=self._files,
            save_counter=self._next_counter(),
            saved_at=datetime.datetime.now(datetime.timezone.utc).isoformat(),
            progress={key: progress[key] for key in ("epoch", "global_step") if key in progress},
            world_size=world_size,
            strategy=strategy,
            versions={"leyden": _version(), "torch": str(torch.__version__)},
            data_ranks=tuple(data_ranks) if len(set(data_ranks)) < len(data_ranks) else (),
            save_id=self._staged.save_id,
        )

    def _next_counter(self) -> int:
        """Returns a counter above those of all checkpoints in the places."""
        counters = self._counters
        for place in self._places:
            # A bucket takes a request for each manifest, and only this run saves there.
            if place not in counters or isinstance(place[0], Path):
                counters[place] = highest_counter(*place)
        counter = max(counters[place] for place in self._places) + 1
        counters.update(dict.fromkeys(self._places, counter))
        return counter

    def _commit(self, manifest: Manifest, same_name: bool = False) -> Place:
        with self._write_errors(self._target):
            path = self._staged.commit(manifest, same_name, self._check_commit)
        self._open = False
        return path

    def prevent(self) -> None:
        """Prevents a commit that a thread has not begun: the run has ended, and another may take its folder."""
        self._is_prevented = True

    def _check_commit(self) -> None:
        if self._is_prevented:
            raise CheckpointError(self._target, "is not saved: its run has ended.")
        self._check()

    def abort(self) -> None:
        """Removes what was written. A no-op after `commit`."""
        if self._open:
            self._open = False
            self._staged.abort(self._ranks.is_keeper)

    def _write_json(self, name: str, obj: Any, of_rank: bool = False, where: str | None = None) -> None:
        """Writes compact JSON on rank 0, or on every rank if `of_rank`. With `where`, refuses more than MAX_PARTS."""
        if not (of_rank or self.is_first):
            return
        data = json.dumps(obj, separators=(",", ":"), allow_nan=False).encode()
        if where is not None and parts_in(data) > MAX_PARTS:
            kind = f"a nest of {parts_in(data)} lists and dicts"
            raise UnsupportedStateError(where, kind, f"Save tensors or arrays: a reader accepts up to {MAX_PARTS}.")
        self._write(name, Text(data))

    def _write(self, name: str, content: Content) -> None:
        self._check_name(name)
        if self._copies is None:
            self._write_now(name, content)
        else:
            self._deferred[name] = self._copies.of(name, content)

    def _write_now(self, name: str, content: Content) -> None:
        with self._write_errors(self._target / name):
            self._files[name] = self._staged.write(name, content)

    def _check_name(self, name: str) -> None:
        """Raises if no file of this name can be added."""
        if not self._open:
            raise CheckpointError(self._target / name, "cannot be written: the checkpoint is committed or aborted.")
        reason = "which commit writes" if name == MANIFEST else unsafe(name)
        if reason or name in self._files or name in self._deferred:
            raise CheckpointError(self._target / name, f"cannot be written as {name!r}, {reason or 'which exists'}.")

    @contextmanager
    def _write_errors(self, path: Place) -> Iterator[None]:
        """Turns an OSError in the block into a CheckpointError with advice. A single process also aborts the save."""
        try:
            yield
        except OSError as error:
            if self._ranks.size == 1:
                self.abort()
            raise CheckpointError(path, f"cannot be written: {error.strerror or error}. {_advice(error)}") from error


def _storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors that are the same view of the same memory, such as tied weights."""
    if isinstance(tensor, Fragment):
        return (id(tensor),)
    if is_sharded(tensor):
        # A rank may hold no rows of a small tensor, so its local part may have no address.
        local = local_part(tensor)
        return (local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, local.shape)
    if tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    place = (tensor.device, address_of(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.shape, tensor.stride())


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free space or keep fewer checkpoints; earlier ones are whole."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Make the folder writable, or choose another; earlier checkpoints are whole."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "A file is in the way of a folder: choose another path."
    return "Earlier checkpoints are whole."


def _version() -> str:
    return str(getattr(sys.modules.get("leyden"), "__version__", "unknown"))

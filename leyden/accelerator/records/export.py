"""Export of weights for other tools, as size-limited safetensors or torch.save of tensors (Leyden's only pickle)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leyden.checkpoint.format import staging
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.paths import local_path
from leyden.core.tree import map_tensors
from leyden.strategies.fsdp.guard import ShardPickleError, is_part
from leyden.strategies.xla.moving import on_host

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def parse_size(size: int | str) -> int:
    """Returns the bytes of a size such as "5GB", "200 MiB" or a number.

    Example:
        >>> parse_size("2KiB"), parse_size("1.5MB"), parse_size(7)
        (2048, 1500000, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", str(size), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise ConfigurationError(f"max_shard_size={size!r}: use a number of bytes, or a string like '5GB' or '200MiB'.")
    return int(float(found[1]) * UNITS[found[2].upper()])


def write_weights(
    state: Mapping[str, Any], folder: str | os.PathLike[str], max_shard_size: int | str, safe: bool, is_writer: bool
) -> None:
    """Writes weights in the layout that transformers loads; tensors that share memory are written once.

    Values that are no tensors are left out, and files of an earlier call are removed.
    """
    limit = parse_size(max_shard_size)
    if not is_writer:
        return
    place = Path(local_path(folder, "save_directory"))
    if place.is_file():
        raise ConfigurationError(f"save_model(save_directory={str(folder)!r}) is a file. Pass a folder.")
    place.mkdir(parents=True, exist_ok=True)
    # On the host, since XLA's tensors have no address that would show which ones share memory.
    tensors = _distinct(on_host(state))
    shards = _split(tensors, limit)
    first = SAFE if safe else PICKLED
    stem, ending = first.rsplit(".", 1)
    written: dict[str, str] = {}
    for old in [*place.glob(f"{stem}*.{ending}"), *place.glob(f"{first}.index.json")]:
        old.unlink()
    for number, shard in enumerate(shards, start=1):
        name = first if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{ending}"
        save_tensors(shard, place / name, safe)
        written.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": written}
        (place / f"{first}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def save_tensors(state: Any, path: Path, safe: bool) -> None:
    """Writes one file atomically, through a temporary sibling."""
    with staging.replacing(path) as temporary:
        if safe:
            from safetensors.torch import save_file

            save_file({name: _contiguous(tensor) for name, tensor in state.items()}, temporary, {"format": "pt"})
        else:
            torch.save(state, temporary)


def _contiguous(tensor: Tensor) -> Tensor:
    """Returns the tensor contiguous and in its own storage: safetensors refuses views of a shared one."""
    shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.detach().clone(memory_format=torch.contiguous_format) if shares else tensor.detach().contiguous()


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with plain tensors instead of DTensors of one rank; tied tensors stay tied."""
    done: dict[int, Any] = {}
    for value in state.values():
        done[id(value)] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: done[id(value)] for name, value in state.items()}


def check_object(obj: Any) -> None:
    """Checks the argument of `save`. Every rank calls this before one of them writes, so that an error stops all.

    Raises:
        ConfigurationError: if it holds anything but tensors and plain values, the only ones that load without running
            code.
        ShardPickleError: if it holds shards. `save` does not gather them, since scripts may call it on the main rank
            only, where a collective would hang.
    """
    if isinstance(obj, nn.Module):
        raise ConfigurationError("save writes tensors, but got a module. Pass its state_dict(), or use save_model.")
    where = _not_plain(obj, "obj")
    if where is not None:
        raise ConfigurationError(
            f"save writes tensors and plain values, but {where}, and loading it would run code. Remove it, or register "
            "it for save_state with register_for_checkpointing."
        )
    map_tensors(obj, _refuse_part)


def _refuse_part(tensor: Tensor) -> Tensor:
    if is_part(tensor):
        raise ShardPickleError(
            f"save got a tensor of shape {tuple(tensor.shape)} that is sharded across ranks. Call state = "
            "accelerator.get_state_dict(model) on every rank, then accelerator.save(state, path); or "
            "accelerator.save_model(model, folder)."
        )
    return tensor


def save_object(obj: Any, path: str | os.PathLike[str], safe: bool | None) -> None:
    """Writes an object that `check_object` accepted, in the format of the file's suffix if `safe` is None."""
    target = Path(local_path(path, "f"))
    safe = target.suffix == ".safetensors" if safe is None else safe
    target.parent.mkdir(parents=True, exist_ok=True)
    if not safe:
        if isinstance(obj, Mapping):
            plain = _unwrapped(obj)
            obj = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in plain.items()}
        save_tensors(obj, target, safe=False)
        return
    if not isinstance(obj, Mapping) or not all(isinstance(value, Tensor) for value in obj.values()):
        raise ConfigurationError(f"{target.name}: safetensors can only hold a dict of tensors. Use the suffix .bin.")
    save_tensors(_distinct(on_host(_unwrapped(obj))), target, safe=True)


def _not_plain(item: Any, where: str) -> str | None:
    """Describes the first entry that is neither a tensor nor a plain value; None if there is none."""
    if type(item) in (int, float, bool, str, bytes, complex, type(None)) or isinstance(
        item, (Tensor, torch.Size, torch.dtype, torch.device)
    ):
        return None
    if isinstance(item, Mapping):
        found = (_not_plain(value, f"{where}[{key!r}]") for key, value in item.items())
    elif type(item) in (list, tuple, set):
        found = (_not_plain(value, f"{where}[{number}]") for number, value in enumerate(item))
    else:
        return f"{where} is {kind_of(item)}"
    return next((entry for entry in found if entry is not None), None)


def _distinct(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors with tied ones only once: safetensors refuses duplicates, and the model ties them again."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def _split(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    return shards

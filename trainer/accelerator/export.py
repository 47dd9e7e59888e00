"""Writes weights for other tools: safetensors split by size, or torch.save of tensors alone (Leyden's only pickle)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError, kind_of
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
        raise ConfigurationError(f"max_shard_size={size!r}: give bytes as a number, or text such as '5GB' or '200MiB'.")
    return int(float(found[1]) * UNITS[found[2].upper()])


def whole_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with whole tensors on the CPU. If it holds shards, every rank must call this."""

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()

    return {name: whole(value) for name, value in state.items()}


def write_weights(
    state: Mapping[str, Any], folder: str | os.PathLike[str], max_shard_size: int | str, safe: bool, is_writer: bool
) -> None:
    """Writes weights as transformers and safetensors load them; tensors that share memory are written once.

    Args:
        state: whole tensors by their names; what is no tensor is left out.
        folder: made if it is not there; files of an earlier call are removed.
        max_shard_size: a file's most bytes; a tensor above it has a file of its own.
        safe: safetensors; False for torch's format.
        is_writer: this rank writes.
    """
    limit = parse_size(max_shard_size)
    if not is_writer:
        return
    place = Path(folder)
    if place.is_file():
        raise ConfigurationError(f"save_model(save_directory={str(folder)!r}): a file has that name. Give a folder.")
    place.mkdir(parents=True, exist_ok=True)
    # XLA's tensors have no address, by which those that share their memory are known.
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


def save_tensors(state: Mapping[str, Tensor], path: Path, safe: bool) -> None:
    """Writes one file, into a temporary sibling first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if safe:
            from safetensors.torch import save_file

            save_file({name: _own(tensor) for name, tensor in state.items()}, temporary, {"format": "pt"})
        else:
            torch.save(dict(state), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _own(tensor: Tensor) -> Tensor:
    """Returns the tensor contiguous and in memory of its own: safetensors refuses views of one storage."""
    shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.detach().clone(memory_format=torch.contiguous_format) if shares else tensor.detach().contiguous()


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns plain tensors for DTensors of one rank; tied tensors stay tied."""
    done: dict[int, Any] = {}
    for value in state.values():
        done[id(value)] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: done[id(value)] for name, value in state.items()}


def check_object(obj: Any) -> None:
    """Checks what `save` is given. Every rank calls this before one writes, so that an error stops all of them.

    Raises:
        ConfigurationError: if it holds anything but tensors and plain values, which alone load without running code.
        ShardPickleError: if it holds shards. They are not gathered here: some scripts call `save` on the main rank
            alone, which would wait for ever.
    """
    if isinstance(obj, nn.Module):
        raise ConfigurationError(
            "save writes tensors, and was given a module: give its state_dict(), or use save_model."
        )
    where = _not_plain(obj, "obj")
    if where is not None:
        raise ConfigurationError(
            f"save writes tensors and plain values, and {where}, which could only be loaded by running code: take it "
            "out, or register it for save_state with register_for_checkpointing."
        )
    map_tensors(obj, _refuse_part)


def _refuse_part(tensor: Tensor) -> Tensor:
    if is_part(tensor):
        raise ShardPickleError(
            f"save was given a tensor of the shape {tuple(tensor.shape)} that is sharded over the ranks. Call state = "
            "accelerator.get_state_dict(model) on every rank, then accelerator.save(state, path); or "
            "accelerator.save_model(model, folder)."
        )
    return tensor


def save_object(obj: Any, path: str | os.PathLike[str], safe: bool | None) -> None:
    """Writes an object that `check_object` accepted, in the format of the file's suffix."""
    target = Path(path)
    safe = target.suffix == ".safetensors" if safe is None else safe
    target.parent.mkdir(parents=True, exist_ok=True)
    if not safe:
        save_tensors(whole_state(obj) if isinstance(obj, Mapping) else obj, target, safe=False)
        return
    if not isinstance(obj, Mapping) or not all(isinstance(value, Tensor) for value in obj.values()):
        raise ConfigurationError(f"{target.name}: safetensors hold a dict of tensors. Use a name that ends in .bin.")
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
    """Returns tied tensors once: safetensors refuses duplicates, and a model ties them again when it is built."""
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

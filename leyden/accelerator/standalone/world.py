"""Functions of `accelerate.utils` that need no Accelerator: collectives, seeding, saving and more."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from leyden.accelerator.loop.collectives import Collectives, check_tensors, synchronize_generators
from leyden.accelerator.prepared.preparing import in_float32, unwrap
from leyden.accelerator.ranks import Alone, RankControl, joined_strategy
from leyden.accelerator.records.export import check_object, save_object
from leyden.core.environment import rank_environment
from leyden.core.tree import BUILTIN, map_tensors, move_to_device
from leyden.data.rng import seed_everything

T = TypeVar("T")


def world() -> Collectives:
    """Returns the collectives of the ranks that this process belongs to.

    Example:
        >>> world().gather(torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    return Collectives(joined_strategy(), Alone())


def gather(tensor: T) -> T:
    """See `Accelerator.gather`."""
    return world().gather(tensor)


def gather_object(object: list[Any]) -> list[Any]:
    """See `Accelerator.gather_object`."""
    return world().gather_object(object)


def reduce(tensor: T, reduction: str = "mean", scale: float = 1.0) -> T:
    """See `Accelerator.reduce`; here the mean is the default, as in `accelerate.utils`."""
    return world().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """See `Accelerator.pad_across_processes`."""
    return world().pad_across_processes(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Blocks until every rank has called this function."""
    world().wait_for_everyone()


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Copies one rank's tensors to every rank in place, and returns them.

    Args:
        tensor: a tensor, or any nested structure of tensors of the same shape on every rank.
        from_process: the source rank.
    """
    check_tensors(tensor, "broadcast")
    ranks = joined_strategy().ranks

    def one(part: Tensor) -> Tensor:
        with torch.no_grad():
            return part.copy_(ranks.broadcast(part.detach(), from_process))

    return map_tensors(tensor, one) if ranks.world_size > 1 else tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the list's objects with one rank's objects on every rank, in place, and returns the list."""
    object_list[:] = world().broadcast(object_list, from_process)
    return object_list


def send_to_device(
    tensor: T, device: torch.device | str, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> T:
    """Moves every tensor of a nested structure to a device.

    Args:
        tensor: any nested structure.
        device: the target device.
        non_blocking: accepted for Accelerate's scripts; copies are asynchronous whenever that is safe.
        skip_keys: keys of a dict whose values are not moved.

    Example:
        >>> send_to_device({"x": torch.ones(1), "name": "a"}, "cpu")
        {'x': tensor([1.]), 'name': 'a'}
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    if not skipped or type(tensor) not in BUILTIN or not isinstance(tensor, dict):
        return move_to_device(tensor, device)
    moved = {key: value if key in skipped else move_to_device(value, device) for key, value in tensor.items()}
    return moved  # type: ignore[return-value]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds Python, NumPy and torch on every device.

    Args:
        seed: 0 to 2**32 - 1.
        device_specific: use seed + rank on each rank.
        deterministic: make torch refuse nondeterministic operations.

    Example:
        >>> set_seed(42)
    """
    place = rank_environment()
    seed_everything(seed + (place.rank if device_specific and place is not None else 0))
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Sets generators to rank 0's state: "torch", "cuda", "numpy", "python", and "generator" for the given one."""
    kinds = [str(getattr(kind, "value", kind)) for kind in rng_types]
    strategy = joined_strategy()
    synchronize_generators(strategy, kinds)
    if generator is not None and "generator" in kinds:
        generator.set_state(strategy.ranks.broadcast(generator.get_state()))


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """See `Accelerator.save`."""
    check_object(obj)
    state = RankControl(joined_strategy())
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        save_object(obj, f, safe_serialization or None)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Returns a tqdm bar; with `main_process_only`, only the first rank of each machine shows it."""
    from tqdm.auto import tqdm as bar

    if main_process_only and "disable" not in kwargs:
        kwargs["disable"] = not RankControl(joined_strategy()).is_local_main_process
    return bar(*args, **kwargs)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """See `Accelerator.unwrap_model`."""
    return unwrap(model, keep_fp32_wrapper, keep_torch_compile)


def convert_to_fp32(tensor: T) -> T:
    """Converts the half-precision tensors of a nested structure to float32."""
    return map_tensors(tensor, in_float32)

"""Converts tensors of every kind to the plain dense tensors that safetensors can hold, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from leyden.checkpoint.format.errors import UnsupportedStateError
from leyden.strategies import local_weights
from leyden.strategies.fragment import Fragment

Spec: TypeAlias = dict[str, Any]

NATIVE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
# One-byte dtypes that most readers of safetensors do not support; stored as uint8.
_BYTES = tuple(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name))
# Dtypes that are stored as another dtype.
TRANSLATED = (*_REAL, *_BYTES)
# Classes whose tensors are only values. A backend written in Python has a class of its own.
PLAIN = {Tensor, nn.Parameter}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*NATIVE, *_REAL, *_BYTES)}
_COMPRESSED = {
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}


# The most elements that a tensor may have if its memory holds fewer, as after `expand`. Using such a tensor may take
# memory for all elements.
MAX_REPEATED = 2**26


def is_sharded(tensor: Tensor) -> bool:
    """Returns True for a DTensor or a Fragment, which is divided among ranks."""
    return isinstance(tensor, Fragment) or local_weights.is_dtensor(tensor)


def local_part(tensor: Any) -> Tensor:
    """Returns this rank's part of a tensor: a DTensor's shard, a Fragment's elements, or a plain tensor itself."""
    if isinstance(tensor, Fragment):
        return tensor.flat
    return local_weights.local_part(tensor) if is_sharded(tensor) else tensor


def address_of(tensor: Tensor) -> int:
    """Returns a tensor's memory address. XLA tensors have none, so a number that identifies the tensor is returned."""
    if tensor.device.type == "xla":
        from leyden.strategies.xla.moving import number

        return number(tensor)
    return tensor.data_ptr()


def check_tensor(tensor: Tensor, where: str, sharded: bool = False) -> None:
    """Raises if a tensor cannot be saved. `sharded` accepts a DTensor or a Fragment.

    Raises:
        UnsupportedStateError: names `where` and the kind of tensor.
    """
    hint = "Convert it to a plain tensor first."
    if nn.parameter.is_lazy(tensor):
        raise UnsupportedStateError(where, "a lazy parameter without a shape", "Run the module once before saving.")
    if is_sharded(tensor) and tensor.dtype in TRANSLATED:
        raise UnsupportedStateError(where, f"a sharded tensor of {tensor.dtype}", "Keep its parts as real tensors.")
    if type(tensor) not in PLAIN and not (sharded and is_sharded(tensor)):
        raise UnsupportedStateError(where, f"a tensor of the class {type(tensor).__name__}", hint)
    if tensor.is_meta:
        raise UnsupportedStateError(where, "a tensor on the meta device, without data", "Materialize it first.")
    if tensor.is_quantized:
        raise UnsupportedStateError(where, f"a quantized tensor ({tensor.dtype})", "Save tensor.dequantize().")
    if tensor.is_nested:
        raise UnsupportedStateError(where, "a nested tensor", "Save tensor.unbind() instead.")
    if tensor.layout not in (torch.strided, torch.sparse_coo, *_COMPRESSED):
        raise UnsupportedStateError(where, f"a tensor of the layout {tensor.layout}", hint)
    if not is_sharded(tensor) and tensor.numel() > MAX_REPEATED and _repeats(tensor):
        kind = f"an expanded tensor of {tensor.numel()} elements"
        raise UnsupportedStateError(where, kind, "Save the tensor that it was expanded from.")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise UnsupportedStateError(where, f"a tensor of {tensor.dtype}", hint)


def split(tensor: Tensor) -> tuple[Spec, dict[str, Tensor]]:
    """Splits a checked tensor into plain tensors.

    Returns:
        A spec (dtype, shape, and strides or layout if they are unusual), and the plain tensors to store by name. For a
        strided tensor this is one tensor under ""; for a sparse tensor its indices and values.
    """
    spec: Spec = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if tensor.device.type != "cpu":
        spec["device"] = tensor.device.type
    # Detach first: only then do a sparse tensor's values share memory with it.
    detached = tensor.detach()
    if is_sharded(tensor):
        return spec, {"": detached}
    if tensor.layout is torch.strided:
        if not detached.is_contiguous() and _is_dense(detached.shape, detached.stride()):
            spec["strides"] = list(detached.stride())
        return spec, {"": _to_stored(detached)}
    if tensor.layout is torch.sparse_coo:
        spec |= {"layout": "coo", "coalesced": detached.is_coalesced()}
        return spec, {"indices": detached._indices(), "values": _to_stored(detached._values())}
    spec["layout"] = _COMPRESSED[tensor.layout]
    by_row = spec["layout"] in ("csr", "bsr")
    compressed = detached.crow_indices() if by_row else detached.ccol_indices()
    plain = detached.col_indices() if by_row else detached.row_indices()
    return spec, {"compressed": compressed, "plain": plain, "values": _to_stored(detached.values())}


def part_names(spec: Spec) -> tuple[str, ...]:
    """Returns the names of the plain tensors into which `split` divides the tensor of a spec."""
    layout = spec.get("layout")
    return ("",) if layout is None else ("indices", "values") if layout == "coo" else ("compressed", "plain", "values")


def part_key(key: str, part: str) -> str:
    """Returns the name under which one part of the tensor `key` is stored in the file."""
    return f"{key}::{part}" if part else key


def join(spec: Spec, parts: Mapping[str, Tensor]) -> Tensor:
    """Rebuilds a tensor from the parts that `split` returned.

    Raises:
        ValueError: if spec and parts contradict each other. torch's own checks may raise other errors.
    """
    dtype, shape = dtype_named(spec["dtype"]), _sizes(spec["shape"])
    layout = spec.get("layout")
    if "" in parts and is_sharded(parts[""]):
        # A sharded tensor was read directly into its final memory, in the right dtype and memory order.
        return parts[""]
    if layout is None:
        tensor = _from_stored(parts[""], dtype, shape)
        if "strides" in spec:
            strides = _sizes(spec["strides"])
            if len(strides) != len(shape) or not _is_dense(shape, strides):
                raise ValueError(f"the strides {strides} do not fit the shape {shape}")
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device).copy_(tensor)
        return tensor
    values = _from_stored(parts["values"], dtype, None)
    if layout == "coo":
        coalesced = bool(spec.get("coalesced", False))
        return torch.sparse_coo_tensor(parts["indices"], values, shape, check_invariants=True, is_coalesced=coalesced)
    layouts = {name: known for known, name in _COMPRESSED.items()}
    return torch.sparse_compressed_tensor(
        parts["compressed"], parts["plain"], values, shape, layout=layouts[layout], check_invariants=True
    )


class TensorCollector:
    """Collects the tensors of a tree. Tensors that share memory are stored once, and share memory again when read.

    This applies to tensors of the same dtype and storage. Views that overlap but differ are stored as the stretch of
    memory that they cover together. `sharded` accepts DTensors and Fragments, and keeps them sharded.
    """

    def __init__(self, sharded: bool = False) -> None:
        self._sharded = sharded
        self._entries: list[tuple[Tensor, Spec, str]] = []
        self._keys: set[str] = set()

    def put(self, tensor: Tensor, where: str, key: str) -> Spec:
        """Adds a tensor, under the name `key` if that is free. `where` is its key path, for errors.

        Returns:
            The tensor's spec, a JSON object that `finish` fills in.

        Raises:
            UnsupportedStateError: if the tensor cannot be saved.
        """
        check_tensor(tensor, where, self._sharded)
        spec: Spec = {}
        self._entries.append((tensor, spec, key))
        return spec

    def finish(self) -> dict[str, Tensor]:
        """Fills in the specs. Returns the plain tensors to store, by key."""
        stored: dict[str, Tensor] = {}
        for group in _shared_groups([tensor for tensor, _, _ in self._entries]):
            entries = [self._entries[index] for index in group]
            first = entries[0][0]
            views = {(t.storage_offset(), t.shape, t.stride()) for t, _, _ in entries if t.layout is torch.strided}
            if len(views) > 1 or (not is_sharded(first) and _repeats(first)):
                self._store_stretch(entries, stored)
                continue
            shared_spec, parts = split(first)
            key = self._unique_key(entries[0][2])
            stored.update({part_key(key, name): part for name, part in parts.items()})
            for tensor, spec, _ in entries:
                spec.update(shared_spec, key=key, **_flags(tensor))
        return stored

    def _store_stretch(self, entries: list[tuple[Tensor, Spec, str]], stored: dict[str, Tensor]) -> None:
        """Stores the stretch of memory that overlapping views cover, and describes each as a view of it."""
        tensors = [tensor for tensor, _, _ in entries]
        start = min(tensor.storage_offset() for tensor in tensors)
        end = max(_end(tensor) for tensor in tensors)
        # Storages shared with NumPy may start at one address and differ in length. The longest contains the others.
        owner = max(tensors, key=lambda tensor: tensor.untyped_storage().nbytes()).detach()
        key = self._unique_key(entries[0][2])
        stored[key] = _to_stored(torch.as_strided(owner, (end - start,), (1,), start))
        for tensor, spec, _ in entries:
            spec.update(split(tensor)[0], strides=list(tensor.stride()), **_flags(tensor))
            spec.update(base=key, offset=tensor.storage_offset() - start, stretch=end - start)

    def _unique_key(self, wanted: str) -> str:
        key, count = wanted or "value", 0
        while key in self._keys or key == "__metadata__":
            count += 1
            key = f"{wanted}~{count}"
        self._keys.add(key)
        return key


class TensorSource:
    """Supplies the tensors for the specs that a `TensorCollector` wrote."""

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        self._stored = stored
        self._plain: dict[tuple[Any, ...], Tensor] = {}
        """Restored tensors by view, without `requires_grad` and not as parameters."""
        self._flagged: dict[tuple[Any, ...], Tensor] = {}
        """Restored tensors with `requires_grad` or as parameters, by view and flags."""

    def get(self, spec: Spec) -> Tensor:
        """Returns the tensor of a spec. Specs of the same view of the same memory get the same object.

        Raises:
            ValueError: if the spec does not fit the stored tensors. KeyError, TypeError and torch's RuntimeError are
                raised too.
        """
        shape, strides = tuple(spec["shape"]), tuple(spec.get("strides", ()))
        view = (spec.get("key"), spec.get("base"), spec.get("offset"), shape, strides, spec["dtype"])
        flags = (spec.get("parameter"), spec.get("requires_grad"))
        if view not in self._plain:
            self._plain[view] = self._view(spec) if "base" in spec else self._whole(spec)
        plain = self._plain[view]
        if not any(flags):
            return plain
        if (view, flags) not in self._flagged:
            self._flagged[(view, flags)] = _with_flags(plain.detach(), spec)
        return self._flagged[(view, flags)]

    def _whole(self, spec: Spec) -> Tensor:
        return join(spec, {name: self._stored[part_key(spec["key"], name)] for name in part_names(spec)})

    def _view(self, spec: Spec) -> Tensor:
        dtype, count = dtype_named(spec["dtype"]), spec["stretch"]
        memory = _from_stored(self._stored[spec["base"]], dtype, (count,))
        shape, strides, offset = _sizes(spec["shape"]), _sizes(spec["strides"]), spec["offset"]
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if type(offset) is not int or offset < 0 or (0 not in shape and last >= count):
            raise ValueError(f"a view of shape {shape} extends beyond its memory")
        if math.prod(shape) > max(count, MAX_REPEATED):
            raise ValueError(f"a view expands the {count} elements of its memory to {math.prod(shape)}")
        return torch.as_strided(memory, shape, strides, offset)


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype of this name, such as "float32".

    Raises:
        ValueError: if saved tensors cannot have such a dtype.
    """
    if name not in DTYPES:
        raise ValueError(f"{name!r} is not a dtype that this Leyden knows")
    dtype: torch.dtype = DTYPES[name]
    return dtype


def _to_stored(tensor: Tensor) -> Tensor:
    """Returns a view of a dense tensor in a dtype that the file can hold."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    if tensor.dtype in _BYTES:
        return tensor.view(torch.uint8)
    return tensor.resolve_neg()


def stored_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns the dtype and shape with which a dense tensor is stored in the file."""
    if dtype in _REAL:
        return _REAL[dtype], (*shape, 2)
    return (torch.uint8 if dtype in _BYTES else dtype), shape


def _from_stored(stored: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None) -> Tensor:
    wanted, form = stored_form(dtype, shape if shape is not None else tuple(stored.shape))
    if stored.dtype != wanted or (shape is not None and tuple(stored.shape) != form):
        raise ValueError(f"{stored.dtype} {tuple(stored.shape)} is stored instead of {dtype} {shape}")
    if dtype in _REAL:
        return torch.view_as_complex(stored)
    return stored.view(dtype) if dtype in _BYTES else stored


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{values!r} are not sizes")
    return sizes


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Returns True if the elements fill their memory without gap or overlap, in some order of the dimensions."""
    expected = 1
    if 0 in shape:
        return False
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    # A dimension of size 1 may have any stride, and torch would allocate memory for a large one.
    return all(stride <= expected for stride in strides)


def _repeats(tensor: Tensor) -> bool:
    """Returns True if elements of a tensor share memory with each other, as after `expand`."""
    return tensor.layout is torch.strided and tensor.numel() > max(_end(tensor) - tensor.storage_offset(), 0)


def _end(tensor: Tensor) -> int:
    """Returns the index in its storage just after a tensor's last element."""
    reach: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start + reach + 1 if tensor.numel() else start


def _shared_groups(tensors: list[Tensor]) -> list[list[int]]:
    """Groups the indices of tensors that share memory, in order of appearance."""
    buckets: dict[tuple[Any, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        plain = tensor.layout is torch.strided and not is_sharded(tensor)
        if plain and tensor.device.type == "xla":
            owner: tuple[Any, ...] = (tensor.device, tensor.dtype, address_of(tensor))
        elif plain and tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            owner = (tensor.device, tensor.dtype, tensor.untyped_storage().data_ptr())
        else:
            owner = (id(tensor),)
        buckets.setdefault(owner, []).append(index)
    groups: list[list[int]] = []
    for owner, members in buckets.items():
        if len(members) == 1 or len(owner) == 1:
            groups.append(members)
            continue
        end = -1
        for index in sorted(members, key=lambda index: (tensors[index].storage_offset(), index)):
            if tensors[index].storage_offset() >= end:
                groups.append([])
            groups[-1].append(index)
            end = max(end, _end(tensors[index]))
    return sorted(sorted(group) for group in groups)


def _flags(tensor: Tensor) -> Spec:
    """Returns the entries of a spec that mark a parameter, or a leaf that requires gradients."""
    if isinstance(tensor, nn.Parameter):
        return {"parameter": True, "requires_grad": tensor.requires_grad}
    return {"requires_grad": True} if tensor.requires_grad and tensor.is_leaf else {}


def _with_flags(tensor: Tensor, spec: Spec) -> Tensor:
    if spec.get("parameter"):
        return nn.Parameter(tensor, requires_grad=bool(spec.get("requires_grad", True)))
    return tensor.requires_grad_()

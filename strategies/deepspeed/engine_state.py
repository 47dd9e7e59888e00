"""The state of DeepSpeed's engine by parameter: each rank's ranges of the flat buffers as Fragments.

DeepSpeed steps flat float32 copies of the parameters (the master weights). Each rank has a range of them, and optimizer
state in tensors of the same length. Checkpoints do not contain these flat buffers. They store master weights and
optimizer state under the names of the parameters, so that this strategy and all others can resume from each other's
checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError
from leyden.strategies.fragment import Fragment

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """This rank's range of one parameter, and its position in the flat master buffer.

    Attributes:
        parameter: the module's parameter.
        shape: shape of the whole parameter, whose own data may be empty.
        flat: the master buffer, the key of the optimizer's state.
        offset: index of the range's first element in `flat`.
        start: index of the range's first element in the flattened parameter.
        count: number of elements; 0 on a rank without any.
        optimizer: the optimizer that steps `flat`.
    """

    parameter: nn.Parameter
    shape: torch.Size
    flat: Tensor
    offset: int
    start: int
    count: int
    optimizer: Optimizer

    @property
    def is_copy(self) -> bool:
        """True if the master weights have another dtype than the parameter."""
        return self.flat.dtype != self.parameter.dtype

    def of(self, buffer: Tensor) -> Tensor:
        """Returns the range of a buffer with the layout of `flat`, as a view."""
        return buffer.detach().reshape(-1).narrow(0, self.offset, self.count)

    def fragment(self, buffer: Tensor | None = None) -> Fragment:
        """Returns the range of `flat`, or of a buffer with its layout, as a Fragment."""
        buffer = self.flat if buffer is None else buffer
        return Fragment(self.of(buffer), self.shape, self.start, self.state)

    def state(self, entry: str, dtype: torch.dtype) -> Tensor:
        """Returns the range of an entry of the optimizer's state, in the dtype of `flat`. New entries are zeros."""
        state = self.optimizer.state[self.flat]
        buffer = state.get(entry)
        if not isinstance(buffer, Tensor) or buffer.shape != self.flat.shape:
            state[entry] = torch.zeros_like(self.flat, requires_grad=False)
        return self.of(state[entry])


def pieces_of(engine: Any) -> dict[int, Piece]:
    """Returns this rank's piece of each trained parameter, by the parameter's id.

    Returns an empty dict if the optimizer steps the parameters themselves.

    Raises:
        ConfigurationError: if the state is offloaded to NVMe, or DeepSpeed's optimizer is of an unknown class.
    """
    sharded = engine.optimizer
    # If nothing is trained, DeepSpeed sets a placeholder for the optimizer.
    if engine.basic_optimizer is None or sharded is engine.basic_optimizer:
        return {}
    if getattr(sharded, "swap_optimizer", False):
        raise ConfigurationError(
            "Checkpoints do not support optimizer state that is offloaded to NVMe. Use offload_optimizer='cpu', or "
            "enable_checkpointing=False."
        )
    if hasattr(sharded, "fp32_partitioned_groups_flat"):
        pieces = _stage_3_pieces(sharded)
    elif hasattr(sharded, "single_partition_of_fp32_groups"):
        pieces = _stage_1_and_2_pieces(sharded)
    elif hasattr(sharded, "fp32_groups_flat_partition"):
        pieces = _bf16_pieces(sharded)
    elif hasattr(sharded, "fp32_groups_flat"):
        pieces = _fused_pieces(sharded)
    elif hasattr(sharded, "fp32_groups"):
        pieces = _unfused_pieces(sharded)
    else:
        raise ConfigurationError(f"Checkpoints do not support DeepSpeed's {type(sharded).__name__}. Use a ZeRO stage.")
    return {id(piece.parameter): piece for piece in pieces}


def _stage_1_and_2_pieces(sharded: Any) -> Iterator[Piece]:
    """Stages 1 and 2: the parameters of a group are consecutive, and each rank has an equal part of them.

    DeepSpeed's own attribute of parameters, `_hp_mapping`, is wrong with round_robin_gradients.
    """
    for index, flat in enumerate(sharded.single_partition_of_fp32_groups):
        parameters, offsets = sharded.round_robin_bit16_groups[index], sharded.round_robin_bit16_offsets[index]
        rank = dist.get_rank(group=sharded.real_dp_process_group[index])
        yield from _partitioned(sharded.optimizer, zip(parameters, offsets, strict=True), flat, rank)


def _bf16_pieces(sharded: Any) -> Iterator[Piece]:
    """Bf16 weights at stage 1 with float32 gradients: partitioned like stages 1 and 2, but by another class."""
    for index, flat in enumerate(sharded.fp32_groups_flat_partition):
        rank = dist.get_rank(group=sharded.real_dp_process_group[index])
        yield from _partitioned(sharded.optimizer, _consecutive(sharded.bf16_groups[index]), flat, rank)


def _fused_pieces(sharded: Any) -> Iterator[Piece]:
    """Stage 0 in half precision with one of DeepSpeed's optimizers: every rank has all parameters, consecutively."""
    for parameters, flat in zip(sharded.fp16_groups, sharded.fp32_groups_flat, strict=True):
        yield from _partitioned(sharded.optimizer, _consecutive(parameters), flat, 0)


def _unfused_pieces(sharded: Any) -> Iterator[Piece]:
    """Stage 0 in half precision with other optimizers: every rank has all master weights, each in its own tensor."""
    for parameters, masters in zip(sharded.fp16_groups, sharded.fp32_groups, strict=True):
        for p, master in zip(parameters, masters, strict=True):
            yield Piece(p, p.shape, master, 0, 0, p.numel(), sharded.optimizer)


def _stage_3_pieces(sharded: Any) -> Iterator[Piece]:
    """Stage 3: every rank has an equal part of each parameter, the last one padded."""
    flats = sharded.fp32_partitioned_groups_flat
    for index, parameters in enumerate(sharded.fp16_groups):
        # With a partial offload, a second optimizer steps some groups on the device.
        on_host = not sharded.offload_optimizer or sharded.subgroup_to_device[index] == "cpu"
        optimizer = sharded.optimizer if on_host else sharded.backup_optimizer
        for p in parameters:
            group, offset, _ = sharded.grad_position[sharded.get_param_id(p)]
            start, count = _stage_3_range(p)
            yield Piece(p, p.ds_shape, flats[group], offset, start, count, optimizer)


def _consecutive(parameters: Sequence[Any]) -> Iterable[tuple[Any, int]]:
    """Returns consecutive parameters with their offsets in the flat buffer."""
    return zip(parameters, itertools.accumulate((p.numel() for p in parameters[:-1]), initial=0), strict=True)


def _partitioned(optimizer: Optimizer, offsets: Iterable[tuple[Any, int]], flat: Tensor, rank: int) -> Iterator[Piece]:
    """Yields the pieces of parameters in a buffer that is split into equal parts, of which `flat` is this rank's."""
    begin, size = rank * flat.numel(), flat.numel()
    for p, offset in offsets:
        first, last = max(offset, begin), min(offset + p.numel(), begin + size)
        if first < last:
            yield Piece(p, p.shape, flat, first - begin, first - offset, last - first, optimizer)
        else:
            yield Piece(p, p.shape, flat, 0, 0, 0, optimizer)


def _stage_3_range(parameter: Any) -> tuple[int, int]:
    """Returns start and length of this rank's range of a parameter sharded by stage 3."""
    size = parameter.ds_tensor.ds_numel
    start = min(size * dist.get_rank(group=getattr(parameter, "ds_process_group", None)), parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def weights(module: nn.Module, pieces: Mapping[int, Piece]) -> dict[str, Any]:
    """Returns the module's state dict, with this rank's Fragment in place of each sharded parameter."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    # Tied parameters share one Fragment.
    fragments: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        owner = parameters.get(name)
        if id(owner) in pieces:
            state[name] = fragments.setdefault(id(owner), pieces[id(owner)].fragment())
        elif hasattr(owner, "ds_id"):
            state[name] = fragments.setdefault(id(owner), _frozen_fragment(owner))
        else:
            state[name] = value
    return state


def _frozen_fragment(parameter: Any) -> Fragment:
    """Returns this rank's range of a parameter sharded by stage 3 that no optimizer steps."""
    start, count = _stage_3_range(parameter)
    return Fragment(parameter.ds_tensor.detach().reshape(-1)[:count], parameter.ds_shape, start)


def release(module: Any) -> None:
    """Frees gathered parameters after their shards were written to."""
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.partition()


@torch.no_grad()
def refresh(engine: Any) -> None:
    """Copies master weights that were written to into the parameters. Every rank calls it."""
    sharded = engine.optimizer
    if hasattr(sharded, "fp32_partitioned_groups_flat"):
        sharded._partition_all_parameters()
        for number in range(len(sharded.fp16_groups)):
            sharded._reassign_or_swap_out_partitioned_parameters(number)
        if sharded.persistent_parameters:
            sharded.persistent_parameters[0].all_gather(sharded.persistent_parameters)
        sharded.invalidate_secondary_tensor()
    elif hasattr(sharded, "update_lp_params"):
        sharded.update_lp_params()
    else:
        for piece in pieces_of(engine).values():
            piece.parameter.copy_(piece.of(piece.flat).view(piece.shape))


class NamedOptimizer:
    """An optimizer of flat buffers as a checkpoint stores it: its groups and state refer to the module's parameters.

    Args:
        optimizer: the optimizer that the engine steps.
        groups: the parameters of each of its groups.
        pieces: the parameters' pieces, by parameter id.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Tensor]], pieces: Mapping[int, Piece]) -> None:
        self.optimizer, self._groups = optimizer, [list(group) for group in groups if group]
        self._pieces = [(index, pieces[id(p)]) for index, p in enumerate(self._parameters()) if id(p) in pieces]
        self.state: dict[Tensor, Any] = {}
        """Always empty, since `load_state_dict` loads into the wrapped optimizer."""
        self.dtypes = {piece.parameter: piece.flat.dtype for _, piece in self._pieces}
        """Dtypes of the master weights, by parameter."""

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._groups for parameter in group]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        pairs = zip(self.optimizer.param_groups, self._groups, strict=True)
        return [{**group, "params": list(own)} for group, own in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the format of torch's optimizers, with element-wise state as this rank's Fragments."""
        state = {}
        for index, piece in self._pieces:
            entries = piece.optimizer.state.get(piece.flat, {})
            if entries:
                state[index] = {key: self._saved(piece, key, value) for key, value in entries.items()}
        first, groups = 0, []
        for group in self.param_groups:
            groups.append({**group, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return {"state": state, "param_groups": groups}

    def _saved(self, piece: Piece, key: str, value: Any) -> Any:
        if key == "step" and not isinstance(value, Tensor):
            # In the form of torch's optimizers, which may load it.
            return torch.tensor(float(value))
        if not isinstance(value, Tensor):
            return value
        if key != "step" and value.shape == piece.flat.shape:
            return piece.fragment(value)
        if value.numel() == 1:
            return value.detach().clone()
        raise ConfigurationError(
            f"{type(self.optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {piece.flat.numel()} "
            "elements of several parameters, so it cannot be assigned to any of them. Use an optimizer with "
            "element-wise state, such as Adam."
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of `state_dict`, or the state of a torch optimizer under another strategy."""
        for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            # In place, since schedulers and the engine hold the groups. Options that were not saved keep their values.
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._drop_unsaved(state_dict["state"])
        steps: dict[Tensor, float] = {}
        for index, piece in self._pieces:
            for key, value in state_dict["state"].get(index, {}).items():
                if key == "step":
                    # The buffer has one count for all its parameters: the largest, if some took part in fewer steps.
                    steps[piece.flat] = max(float(value), steps.get(piece.flat, 0.0))
                else:
                    _load_entry(piece, key, value)
        for _, piece in self._pieces:
            if piece.flat in steps:
                count = steps.pop(piece.flat)
                piece.optimizer.state[piece.flat]["step"] = _step_count(piece.optimizer, piece.flat, count)

    def _drop_unsaved(self, saved: Mapping[int, Any]) -> None:
        """Drops or zeroes state that is not in the checkpoint: of later steps, or of parameters without state then."""
        entries: dict[Tensor, set[str]] = {}
        for index, piece in self._pieces:
            entries.setdefault(piece.flat, set()).update(saved.get(index, {}))
        for index, piece in self._pieces:
            state = piece.optimizer.state.get(piece.flat, {})
            for key in list(state):
                if key not in entries[piece.flat]:
                    del state[key]
                elif key not in saved.get(index, {}) and _is_elementwise(state[key], piece.flat):
                    piece.of(state[key]).zero_()
            if not state:
                piece.optimizer.state.pop(piece.flat, None)


def _is_elementwise(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _load_entry(piece: Piece, key: str, value: Any) -> None:
    """Loads one entry of a parameter's optimizer state."""
    if isinstance(value, Tensor) and value.shape == piece.shape:
        target = piece.state(key, value.dtype)
        if isinstance(value, Fragment):
            source = value.flat
        else:
            source = value.reshape(-1)[piece.start : piece.start + piece.count]
        # The same memory if a reader has already filled it in place.
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        return
    state = piece.optimizer.state[piece.flat]
    state[key] = value.detach().clone().to(piece.flat.device) if isinstance(value, Tensor) else value


def _step_count(optimizer: Optimizer, flat: Tensor, count: float) -> Any:
    """Returns the number of steps in the optimizer's own format."""
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        return int(count)
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return torch.tensor(count, device=flat.device if on_device else "cpu")


def counters(engine: Any) -> dict[str, Any]:
    """Returns the engine's counters: steps, samples, and the state of its loss scaler."""
    state: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS}
    scaler = _scaler(engine)
    if scaler is not None:
        state["scaler"] = {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
    autocast = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        state["autocast"] = autocast.state_dict()
    return state


def restore_counters(engine: Any, state: Mapping[str, Any]) -> None:
    """Restores the result of `counters`. Ignores entries saved by another strategy."""
    for name in COUNTERS:
        if name in state:
            setattr(engine, name, state[name])
    scaler = _scaler(engine)
    if scaler is not None:
        for name, value in state.get("scaler", {}).items():
            if name in SCALER and hasattr(scaler, name):
                setattr(scaler, name, value)
    autocast = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None and state.get("autocast"):
        autocast.load_state_dict(dict(state["autocast"]))


def _scaler(engine: Any) -> Any:
    """Returns the object that holds the loss scale: a scaler, or DeepSpeed's config of the loss scale."""
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)

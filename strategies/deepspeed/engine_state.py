"""The state of DeepSpeed's engine, parameter by parameter: each rank's stretches of its flat memory are Fragments of
the whole.

DeepSpeed steps flat float32 copies of the parameters (the master weights), of which each rank has a stretch, and keeps
the optimizer's state in tensors as long. A checkpoint knows neither: it holds the master weights under the names of the
parameters, and the state under the same names, so that every other strategy can go on from them, and this one from
theirs.
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

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fragment import Fragment

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Where this rank has its stretch of one parameter.

    Attributes:
        parameter: of the module.
        shape: of the whole parameter, whose own data may be empty.
        flat: the master memory, which the optimizer's state is keyed by.
        place: where the stretch begins in it.
        start: where it begins in the parameter.
        count: its elements; 0 on a rank that has none of them.
        optimizer: the one that steps the memory.
    """

    parameter: nn.Parameter
    shape: torch.Size
    flat: Tensor
    place: int
    start: int
    count: int
    optimizer: Optimizer

    @property
    def is_copy(self) -> bool:
        """True if the master holds more than the parameter does."""
        return self.flat.dtype != self.parameter.dtype

    def of(self, memory: Tensor) -> Tensor:
        """The stretch, of memory as long as the master's."""
        return memory.detach().reshape(-1).narrow(0, self.place, self.count)

    def fragment(self, memory: Tensor | None = None) -> Fragment:
        """The stretch of the master, or of such memory."""
        memory = self.flat if memory is None else memory
        return Fragment(self.of(memory), self.shape, self.start, self.memory)

    def memory(self, entry: str, dtype: torch.dtype) -> Tensor:
        """The stretch of an entry of the optimizer's state, which begins as zeros. It has the dtype of the master."""
        state = self.optimizer.state[self.flat]
        held = state.get(entry)
        if not isinstance(held, Tensor) or held.shape != self.flat.shape:
            state[entry] = torch.zeros_like(self.flat, requires_grad=False)
        return self.of(state[entry])


def pieces_of(engine: Any) -> dict[int, Piece]:
    """Returns this rank's piece of each trained parameter, by its id; none if the optimizer steps the parameters.

    Raises:
        ConfigurationError: if the memory is on a disk, or of a kind that is not known.
    """
    sharded = engine.optimizer
    # Where nothing is trained, DeepSpeed puts a holder of the parameters in the optimizer's place.
    if engine.basic_optimizer is None or sharded is engine.basic_optimizer:
        return {}
    if getattr(sharded, "swap_optimizer", False):
        raise ConfigurationError(
            "the optimizer's state is offloaded to NVMe, which Leyden's checkpoints do not read or write: use "
            "offload_optimizer='cpu', or enable_checkpointing=False."
        )
    if hasattr(sharded, "fp32_partitioned_groups_flat"):
        found = _of_stage_3(sharded)
    elif hasattr(sharded, "single_partition_of_fp32_groups"):
        found = _of_stages_1_and_2(sharded)
    elif hasattr(sharded, "fp32_groups_flat_partition"):
        found = _of_bf16(sharded)
    elif hasattr(sharded, "fp32_groups_flat"):
        found = _of_fused_optimizer(sharded)
    elif hasattr(sharded, "fp32_groups"):
        found = _by_itself(sharded.optimizer, sharded.fp16_groups, sharded.fp32_groups)
    else:
        raise ConfigurationError(
            f"checkpoints of DeepSpeed's {type(sharded).__name__} are not known: use a ZeRO stage."
        )
    return {id(piece.parameter): piece for piece in found}


def _of_stages_1_and_2(sharded: Any) -> Iterator[Piece]:
    """Stages 1 and 2: the parameters of a group lie one after the other, and each rank has as long a part of them.

    What DeepSpeed itself notes at each parameter (`_hp_mapping`) is wrong with round_robin_gradients.
    """
    for number, flat in enumerate(sharded.single_partition_of_fp32_groups):
        parameters, offsets = sharded.round_robin_bit16_groups[number], sharded.round_robin_bit16_offsets[number]
        rank = dist.get_rank(group=sharded.real_dp_process_group[number])
        yield from _dealt(sharded.optimizer, zip(parameters, offsets, strict=True), flat, rank)


def _of_bf16(sharded: Any) -> Iterator[Piece]:
    """Bf16 weights at stage 1 with gradients in float32: the same, by another class."""
    for number, flat in enumerate(sharded.fp32_groups_flat_partition):
        rank = dist.get_rank(group=sharded.real_dp_process_group[number])
        yield from _dealt(sharded.optimizer, _in_a_row(sharded.bf16_groups[number]), flat, rank)


def _of_fused_optimizer(sharded: Any) -> Iterator[Piece]:
    """Stage 0 in half precision with an optimizer of DeepSpeed's: every rank has all of them, one after the other."""
    for parameters, flat in zip(sharded.fp16_groups, sharded.fp32_groups_flat, strict=True):
        yield from _dealt(sharded.optimizer, _in_a_row(parameters), flat, 0)


def _in_a_row(parameters: Sequence[Any]) -> Iterable[tuple[Any, int]]:
    """Parameters that lie one after the other, each with the place where it begins."""
    return zip(parameters, itertools.accumulate((p.numel() for p in parameters[:-1]), initial=0), strict=True)


def _dealt(optimizer: Optimizer, placed: Iterable[tuple[Any, int]], flat: Tensor, rank: int) -> Iterator[Piece]:
    begin, size = rank * flat.numel(), flat.numel()
    for p, offset in placed:
        first, last = max(offset, begin), min(offset + p.numel(), begin + size)
        if first < last:
            yield Piece(p, p.shape, flat, first - begin, first - offset, last - first, optimizer)
        else:
            yield Piece(p, p.shape, flat, 0, 0, 0, optimizer)


def _of_stage_3(sharded: Any) -> Iterator[Piece]:
    """Stage 3: of each parameter every rank has as many elements, the last ones padded."""
    flats = sharded.fp32_partitioned_groups_flat
    for number, parameters in enumerate(sharded.fp16_groups):
        # With a part of the offload, some groups are stepped on the device by a twin of the optimizer.
        on_host = not sharded.offload_optimizer or sharded.subgroup_to_device[number] == "cpu"
        optimizer = sharded.optimizer if on_host else sharded.backup_optimizer
        for p in parameters:
            group, place, _ = sharded.grad_position[sharded.get_param_id(p)]
            start, count = _partition(p)
            yield Piece(p, p.ds_shape, flats[group], place, start, count, optimizer)


def _by_itself(optimizer: Optimizer, groups: Sequence[Any], masters: Sequence[Any]) -> Iterator[Piece]:
    """Stage 0 in half precision: every rank has all master weights, each in memory of its own."""
    for parameters, copies in zip(groups, masters, strict=True):
        for p, master in zip(parameters, copies, strict=True):
            yield Piece(p, p.shape, master, 0, 0, p.numel(), optimizer)


def _partition(parameter: Any) -> tuple[int, int]:
    """Start and length of this rank's stretch of a parameter that stage 3 holds."""
    size = parameter.ds_tensor.ds_numel
    start = min(size * dist.get_rank(group=getattr(parameter, "ds_process_group", None)), parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def weights(module: nn.Module, pieces: Mapping[int, Piece]) -> dict[str, Any]:
    """The module's state dict, with this rank's stretch in the place of each parameter that the ranks share."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    # One for tied ones.
    made: dict[int, Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        owner = parameters.get(name)
        if id(owner) in pieces:
            found[name] = made.setdefault(id(owner), pieces[id(owner)].fragment())
        elif hasattr(owner, "ds_id"):
            found[name] = made.setdefault(id(owner), _stored(owner))
        else:
            found[name] = value
    return found


def _stored(parameter: Any) -> Fragment:
    """The stretch of a parameter that stage 3 holds and no optimizer steps."""
    start, count = _partition(parameter)
    return Fragment(parameter.ds_tensor.detach().reshape(-1)[:count], parameter.ds_shape, start)


def release(module: Any) -> None:
    """Frees gathered parameters after their stretches were written to."""
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.partition()


@torch.no_grad()
def refresh(engine: Any) -> None:
    """Gives the parameters the values of master weights that were written to; every rank calls it."""
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
    """An optimizer of flat memory as a checkpoint knows it: its groups and state are the module's parameters'.

    Args:
        optimizer: that the engine steps.
        groups: the parameters of each of its groups.
        pieces: their places in the flat memory.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Tensor]], pieces: Mapping[int, Piece]) -> None:
        self.optimizer, self._groups = optimizer, [list(group) for group in groups if group]
        self._pieces = [(place, pieces[id(p)]) for place, p in enumerate(self._parameters()) if id(p) in pieces]
        self.state: dict[Tensor, Any] = {}
        """Empty: `load_state_dict` puts everything in its place."""
        self.dtypes = {piece.parameter: piece.flat.dtype for _, piece in self._pieces}
        """The dtypes of the master weights, which the optimizer steps."""

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._groups for parameter in group]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        pairs = zip(self.optimizer.param_groups, self._groups, strict=True)
        return [{**group, "params": list(own)} for group, own in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Returns what torch's optimizers do; state of single elements as this rank's Fragments."""
        state = {}
        for place, piece in self._pieces:
            entries = piece.optimizer.state.get(piece.flat, {})
            if entries:
                state[place] = {key: self._saved(piece, key, value) for key, value in entries.items()}
        first, groups = 0, []
        for group in self.param_groups:
            groups.append({**group, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return {"state": state, "param_groups": groups}

    def _saved(self, piece: Piece, key: str, value: Any) -> Any:
        if key == "step" and not isinstance(value, Tensor):
            # As torch's optimizers have it, which may be the next to go on with it.
            return torch.tensor(float(value))
        if not isinstance(value, Tensor):
            return value
        if key != "step" and value.shape == piece.flat.shape:
            return piece.fragment(value)
        if value.numel() == 1:
            return value.detach().clone()
        raise ConfigurationError(
            f"{type(self.optimizer).__name__} keeps {key!r} in the shape {tuple(value.shape)} for {piece.flat.numel()} "
            "elements of several parameters, which belongs to none of them: use an optimizer whose state is of single "
            "elements, as Adam's."
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, here or of an optimizer of torch's under another strategy."""
        for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            # In place, since schedulers and the engine refer to it. Options that were not saved stay.
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._forget_others(state_dict["state"])
        steps: dict[Tensor, float] = {}
        for place, piece in self._pieces:
            for key, value in state_dict["state"].get(place, {}).items():
                if key == "step":
                    # One number for all parameters of the memory: one that was left out of some steps has the others'.
                    steps[piece.flat] = max(float(value), steps.get(piece.flat, 0.0))
                else:
                    _take(piece, key, value)
        for _, piece in self._pieces:
            if piece.flat in steps:
                piece.optimizer.state[piece.flat]["step"] = _step(piece.optimizer, piece.flat, steps.pop(piece.flat))

    def _forget_others(self, saved: Mapping[int, Any]) -> None:
        """Drops state that a checkpoint does not have: of later steps, or of parameters that had none yet."""
        entries: dict[Tensor, set[str]] = {}
        for place, piece in self._pieces:
            entries.setdefault(piece.flat, set()).update(saved.get(place, {}))
        for place, piece in self._pieces:
            state = piece.optimizer.state.get(piece.flat, {})
            for key in list(state):
                if key not in entries[piece.flat]:
                    del state[key]
                elif key not in saved.get(place, {}) and _is_spread(state[key], piece.flat):
                    piece.of(state[key]).zero_()
            if not state:
                piece.optimizer.state.pop(piece.flat, None)


def _is_spread(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _take(piece: Piece, key: str, value: Any) -> None:
    """Puts an entry of the state of one parameter in its place."""
    if isinstance(value, Tensor) and value.shape == piece.shape:
        target = piece.memory(key, value.dtype)
        if isinstance(value, Fragment):
            source = value.flat
        else:
            source = value.reshape(-1)[piece.start : piece.start + piece.count]
        # A reader has filled it already.
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        return
    state = piece.optimizer.state[piece.flat]
    state[key] = value.detach().clone().to(piece.flat.device) if isinstance(value, Tensor) else value


def _step(optimizer: Optimizer, flat: Tensor, count: float) -> Any:
    """The number of steps in the form in which the optimizer counts them."""
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        return int(count)
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return torch.tensor(count, device=flat.device if on_device else "cpu")


def counters(engine: Any) -> dict[str, Any]:
    """Returns the engine's counters: steps, samples, and the state of its loss scaler."""
    found: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS}
    scaler = _scaler(engine)
    if scaler is not None:
        found["scaler"] = {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
    autocast = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        found["autocast"] = autocast.state_dict()
    return found


def restore_counters(engine: Any, state: Mapping[str, Any]) -> None:
    """Restores what `counters` returned; what another strategy saved is left alone."""
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
    """Returns the object that holds the loss scale: a scaler, or an optimizer without one."""
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)

"""Ranks in a torch process group: how they join it, communicate, and leave it."""

from __future__ import annotations

import copy
import gc
import hashlib
import inspect
import multiprocessing.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from leyden.core.devices import (
    find_device,
    find_devices,
    make_current,
    parse_devices,
    runtime_of,
    shows_one,
    with_index,
)
from leyden.core.environment import DEVICE_IN_USE, RankEnvironment, check_launched, check_one_rank, rank_environment
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.tree import map_tensors
from leyden.launch.failure import LEAVE, FirstFailure, end_with_parent, ended_after, leave_stdin_to_rank_0
from leyden.launch.meeting import meet
from leyden.strategies.base import RunSettings, Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.ranks import Ranks

T = TypeVar("T")
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class GroupRanks(Ranks):
    """The ranks of a torch process group.

    Before the ranks are started, the properties describe the plan: `world_size` ranks, with this process as rank 0.

    Args:
        devices: the devices of this machine's ranks, one each. Default: the run's devices.
        num_nodes: number of machines. Default: the run's `num_nodes`.
        backend: "gloo", "nccl", …. Default: chosen by the device.
        timeout: how long a collective waits for the other ranks.
        start_method: one of `start_methods`.

    Raises:
        ConfigurationError: if the start method is unknown.
    """

    start_methods: tuple[str, ...] = ("script", "spawn", "fork", "notebook")

    def __init__(
        self,
        devices: Sequence[torch.device] | None = None,
        num_nodes: int | None = None,
        backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: str = "script",
    ) -> None:
        if start_method not in self.start_methods:
            raise ConfigurationError(
                f"start_method={start_method!r} is not known. {nearest(start_method, self.start_methods)}"
            )
        super().__init__()
        self.start_method = start_method
        self._given_devices = None if devices is None else [with_index(device) for device in devices]
        self._given_nodes = num_nodes
        self.devices = self._given_devices or self.devices
        self.num_nodes = num_nodes or 1
        self.backend = backend
        self.timeout = timeout
        self.environment = rank_environment()
        self.host_group: Any = None

    # the plan ---------------------------------------------------------------------------------------------------------
    def plan(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        """Plans ranks from the run's arguments. Devices and machines given to the constructor take precedence.

        Raises:
            ConfigurationError: if a device does not exist, or a different number of ranks is already started.
        """
        environment, given = self.environment, parse_devices(devices) is not None or self._given_devices is not None
        plan = self._given_devices or self._find_devices(accelerator, devices)
        self.num_nodes = self._given_nodes or num_nodes
        if plan[0].type == "mps":
            raise ConfigurationError("Several ranks need accelerator='cpu', since MPS has one device.")
        if environment is None:
            if self.num_nodes == 1:
                check_launched()
            self.devices = plan
            return
        check_one_rank(environment, len(plan) if given or plan[0].type != "cpu" else 1)
        ranks_differ = given and len(plan) != environment.local_world_size
        nodes_differ = (given or self.num_nodes > 1) and self.num_nodes != environment.num_nodes
        if ranks_differ or nodes_differ:
            raise ConfigurationError(
                f"{environment.starter} started {environment.world_size} ranks ({environment.local_world_size} on this "
                f"machine, from the environment's {environment.size_variable}), but the Trainer was given devices="
                f"{len(plan) if given else devices!r} × num_nodes={self.num_nodes}. Leave both out to use these ranks, "
                "or use strategy='single_device' to run in this process alone."
            )
        self.num_nodes = environment.num_nodes
        count = environment.local_world_size
        if plan[0].type != "cpu" and not given:
            # A launcher may show each rank only its own GPU, as device 0.
            if 1 < len(plan) < count:
                raise ConfigurationError(
                    f"{environment.starter} started {count} ranks on a machine with {len(plan)} GPUs. Start one rank "
                    "per GPU."
                )
            plan = plan[:count]
        self.devices = [plan[index % len(plan)] for index in range(count)]

    def _find_devices(self, accelerator: str, devices: Any) -> list[torch.device]:
        """Returns the devices that the run's arguments name for this machine's ranks."""
        environment, count = self.environment, parse_devices(devices)
        count_matches = environment is not None and 1 < environment.local_world_size == count
        if count_matches and shows_one(find_device(accelerator).type):
            # The launcher shows each rank only its own GPU.
            return find_devices(accelerator, 1) * environment.local_world_size  # type: ignore[union-attr]
        return find_devices(accelerator, devices)

    @property
    def are_planned(self) -> bool:
        return self.environment is None and self.world_size > 1

    def become_rank(self, environment: RankEnvironment | None) -> None:
        self.environment = environment

    # this rank --------------------------------------------------------------------------------------------------------
    @property
    def global_rank(self) -> int:
        return self.environment.rank if self.environment is not None else 0

    @property
    def local_rank(self) -> int:
        return self.environment.local_rank if self.environment is not None else 0

    @property
    def node_rank(self) -> int:
        return self.environment.node_rank if self.environment is not None else 0

    @property
    def world_size(self) -> int:
        return self.environment.world_size if self.environment is not None else len(self.devices) * self.num_nodes

    @property
    def local_size(self) -> int:
        return self.environment.local_world_size if self.environment is not None else len(self.devices)

    # the process group ------------------------------------------------------------------------------------------------
    def configure_group(self, backend: str | None = None, timeout: timedelta | None = None) -> None:
        self.backend, self.timeout = backend or self.backend, timeout or self.timeout

    @property
    def default_backend(self) -> str:
        """The backend of the process group if none is given.

        A GPU has the one that is registered with torch for its type, such as nccl for cuda; XLA has none. gloo serves
        CPU tensors: offloaded gradients, and tensors that a user gathers. The group lasts as long as the process, so
        gloo is included even if only a later run needs it.
        """
        kind = self.device.type
        backend = dist.Backend.default_device_backend_map.get(kind, "gloo")
        return "gloo" if backend == "gloo" else f"cpu:gloo,{kind}:{backend}"

    def use_device(self) -> None:
        """Makes this rank's GPU the current device. Until then, calls without a device argument use the first GPU.

        Raises:
            ConfigurationError: in a rank forked from a process that had already initialized the GPU.
        """
        runtime = runtime_of(self.device)
        if hasattr(runtime, "_is_in_bad_fork") and runtime._is_in_bad_fork():
            raise ConfigurationError(DEVICE_IN_USE)
        make_current(self.device)

    @property
    def is_joined(self) -> bool:
        return self.host_group is not None

    def join(self) -> None:
        self.use_device()
        if not dist.is_initialized():
            self._make_group(self.backend or self.default_backend)
        elif dist.get_world_size() != self.world_size:
            raise ConfigurationError(
                f"This process has a process group of {dist.get_world_size()} rank(s), but the run has "
                f"{self.world_size}. Forked ranks inherit the process group of an earlier run. Use "
                "start_method='spawn', or start the run in a new process."
            )
        if self.host_group is None:
            self.host_group = _host_group(self.timeout)
        if _first_failure is not None:
            _first_failure.begin_run()

    def _make_group(self, backend: str) -> None:
        """Creates the process group, which lasts as long as the process.

        The next run uses it too, and so does a script that communicates with the other ranks afterwards. Leaving and
        rejoining would need a new store each time: under torchrun the second group reads the first one's addresses and
        hangs (tried with torch 2.13).
        """
        end_with_parent()
        leave_stdin_to_rank_0(self.global_rank)
        is_host = self._init_group(backend)
        # A finalizer, since children of multiprocessing exit without running atexit handlers.
        multiprocessing.util.Finalize(None, _leave, exitpriority=100)
        if self.world_size > 1:
            _watch(self.global_rank, self.world_size, is_host)

    def _init_group(self, backend: str) -> bool:
        """Calls `init_process_group` with the store of the launcher's environment, or for this process alone.

        Returns:
            True if the group's store lives in this process.
        """
        environment = self.environment
        store: Any
        if environment is None:
            rank, size, store, is_host = 0, 1, dist.HashStore(), True  # type: ignore[attr-defined]
        else:
            rank, size = environment.rank, environment.world_size
            store, is_host = meet(environment, self.timeout)
        # torch then makes the groups of a mesh's dimension by a single split, and not one by one.
        bound = self.device if backends_in(backend).get(self.device.type) == "nccl" else None
        dist.init_process_group(backend, timeout=self.timeout, device_id=bound, store=store, rank=rank, world_size=size)
        return is_host

    def beside(self) -> GroupRanks:
        ranks = copy.copy(self)
        ranks.host_group = _background_group(self.timeout)
        return ranks

    def mesh(self, sizes: Mapping[str, int], joined: Sequence[str] = ()) -> DeviceMesh:
        """Returns the mesh of all ranks. Every rank must call it.

        Its process groups last as long as the process, and later runs of the process use them again.

        Args:
            sizes: the size of each dimension, by name.
            joined: neighboring dimensions whose ranks also form one group. torch finds it, and reduces a norm over all
                of these dimensions in a single all-reduce.
        """
        made, key = _meshes.setdefault(dist.group.WORLD, {}), (self.device.type, *sizes.items())
        if key not in made:
            made[key] = self._make_mesh(sizes)
        mesh = made[key]
        groups = mesh.get_all_groups()
        if joined:
            groups.append(mesh[tuple(joined)]._flatten("_".join(joined)).get_group())
        for group in groups:
            # torch makes them with a default of its own.
            if not {"gloo", "nccl"}.isdisjoint(backends_in(dist.get_backend(group)).values()):
                dist.distributed_c10d._set_pg_timeout(self.timeout, group)
        return mesh

    def _make_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        return _first_failure is None or _first_failure.report(error, where)

    def end_run(self) -> None:
        # Objects that hold the group, such as DDP's reducer, must be collected before the group ends.
        gc.collect()
        if _first_failure is not None and not _first_failure.reported:
            _first_failure.end_run()

    # collectives ------------------------------------------------------------------------------------------------------
    def barrier(self) -> None:
        dist.barrier(group=self.host_group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        box = [self._sendable(obj)]
        dist.broadcast_object_list(box, src=src, group=self.host_group)
        return obj if self.global_rank == src else box[0]

    def all_gather_object(self, obj: T) -> list[T]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, self._sendable(obj), group=self.host_group)
        return gathered

    def gather_object(self, obj: T, dst: int = 0) -> list[T] | None:
        gathered: list[Any] | None = [None] * self.world_size if self.global_rank == dst else None
        dist.gather_object(self._sendable(obj), gathered, dst=dst, group=self.host_group)
        return gathered

    def _sendable(self, obj: Any) -> Any:
        return obj if self.device.type == "cpu" else map_tensors(obj, travelling)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads and tensor.requires_grad:
            gathered: Tensor = _GatherWithGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
            return gathered
        return _gather(tensor.detach(), group)

    def reduce(self, tensor: Tensor, group: Any = None, reduction: str = "mean") -> Tensor:
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduction={reduction!r} is not known. {nearest(reduction, REDUCTIONS)}")
        total = tensor.detach().clone()
        dist.all_reduce(total, REDUCTIONS[reduction], group=group)
        return total / dist.get_world_size(group) if reduction in ("mean", "avg") else total

    def any(self, flag: bool) -> bool:
        return self.exchange_flags([flag])()[0]

    def exchange_flags(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        reduced = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8)
        work = dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self.host_group, async_op=True)

        def wait() -> list[bool]:
            work.wait()
            return [bool(flag) for flag in reduced.tolist()]

        return wait

    def differing(self, text: str, group: Any = None) -> list[str]:
        group = self.host_group if group is None else group
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        device = torch.device("cpu") if "cpu" in backends_in(dist.get_backend(group)) else self.device
        # One all-reduce for both ends: the smallest digest is the negated largest of the negated ones.
        reduced = torch.tensor([digest, -digest], device=device)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
        largest, negated_smallest = reduced.tolist()
        if largest == -negated_smallest:
            return []
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, text, group=group)
        return gathered

    def aborts_on_shapes(self, tensors: Sequence[Tensor], group: Any = None) -> bool:
        backend = dist.get_backend(group)
        return backend == "gloo" or ("cpu:gloo" in backend and any(tensor.device.type == "cpu" for tensor in tensors))


class ProcessGroupStrategy(Strategy):
    """Base class of the strategies whose ranks communicate through torch.distributed.

    Args:
        devices: the devices of this machine's ranks, one each. Default: the Trainer's devices.
        num_nodes: number of machines. Default: the Trainer's `num_nodes`.
        precision: precision of parameters, inputs and the forward pass. Default: 32-true.
        process_group_backend: "gloo", "nccl", …. Default: chosen by the device.
        timeout: how long a collective waits for the other ranks.
        start_method: how ranks that are not running yet are started. "script" runs the script again for each rank;
            "spawn", "fork" and "notebook" run functions of this process.
    """

    ranks: GroupRanks

    def __init__(
        self,
        devices: Sequence[torch.device] | None = None,
        num_nodes: int | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: str = "script",
    ) -> None:
        super().__init__(precision, GroupRanks(devices, num_nodes, process_group_backend, timeout, start_method))
        self.sync_batchnorm = False
        """True if batch norm computes its statistics over all ranks."""

    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        self.ranks.plan(accelerator, devices, num_nodes)

    def check_settings(self, settings: RunSettings) -> None:
        if settings.sync_batchnorm:
            if self.root_device.type == "cpu":
                raise ConfigurationError(
                    "sync_batchnorm=True needs GPUs, since torch's SyncBatchNorm does not run on the CPU. Leave it out."
                )
            self.sync_batchnorm = True

    def setup_environment(self) -> None:
        super().setup_environment()
        remember(self)

    def synchronize_buffers(self) -> None:
        broadcast_all(buffer.detach() for module in self.modules for buffer in module.buffers())


GROUP_SETTINGS = frozenset(inspect.signature(ProcessGroupStrategy).parameters)
"""The arguments that all process-group strategies accept."""


def backends_in(name: str) -> Mapping[str, str]:
    """Returns the backend of each type of device in a name such as "nccl" or "cpu:gloo,cuda:nccl"."""
    return dist.distributed_c10d.BackendConfig(dist.Backend(name)).get_device_backend_map()


class Travelling:
    """A GPU tensor in an object pickled for other ranks. It is unpickled on the receiving rank's own GPU.

    A plain tensor would be unpickled on the sender's GPU and take memory there.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return _arrived, (self.tensor.detach().cpu(), self.tensor.device.type)


def travelling(tensor: Tensor) -> Any:
    """Wraps a GPU tensor for pickling to other ranks. Returns any other tensor unchanged."""
    return Travelling(tensor) if tensor.device.type != "cpu" else tensor


def _arrived(tensor: Tensor, kind: str) -> Tensor:
    return tensor.to(with_index(kind))


def _gather(tensor: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


class _GatherWithGradient(torch.autograd.Function):
    """An all-gather whose backward gives each rank the gradient of its part, summed over the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


# Process-wide, like the process group itself.
_first_failure: FirstFailure | None = None
_host: Any = None
_background: Any = None
_joined: WeakSet[Strategy] = WeakSet()
_meshes: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()
"""The meshes of a process group, by device and dimensions."""


def remember(strategy: Strategy) -> None:
    """Registers a strategy that has joined its ranks for `current`, without keeping it alive."""
    _joined.add(strategy)


def current() -> Strategy | None:
    """Returns a strategy that has joined its ranks in this process, or None."""
    return next((strategy for strategy in _joined if strategy.ranks.is_joined), None)


def end_all_ranks(error: BaseException, where: str = "") -> None:
    """Ends the other ranks of this process's group, whatever they are doing. The caller raises the error on this rank.

    Args:
        error: the reason that the other ranks report.
        where: the place in the run where the error was raised.
    """
    if _first_failure is not None:
        _first_failure.report(error, where)


def _watch(rank: int, size: int, is_host: bool) -> None:
    global _first_failure
    _first_failure = FirstFailure(dist.distributed_c10d._get_default_store(), rank, size, is_host)


def _host_group(timeout: timedelta) -> Any:
    """Returns the default group if its backend is gloo, or else an additional gloo group, created once."""
    global _host
    if _host is None and dist.get_backend() == "gloo":
        _host = dist.group.WORLD
    elif _host is None:
        _host = dist.new_group(backend="gloo", timeout=timeout)
    return _host


def _background_group(timeout: timedelta) -> Any:
    """Returns a gloo group of all ranks for background threads, created once.

    Collectives of two threads in one group abort the process (tried).
    """
    global _background
    if _background is None:
        _background = dist.new_group(backend="gloo", timeout=timeout)
    return _background


def _leave() -> None:
    """Leaves the process group. The only place where a process does so.

    If a process exits without leaving, gloo aborts it in one run of three (tried).
    """
    global _first_failure, _host, _background
    watch, _first_failure, _host, _background = _first_failure, None, None, None
    failed = watch is not None and (watch.reported or watch.follows)
    if watch is not None:
        watch.close()
    if not dist.is_initialized() or (failed and "nccl" in dist.get_backend()):
        # After a failure NCCL would wait for ranks that have exited.
        return
    # After a failure gloo would wait for stopped ranks, so a deadline applies.
    with ended_after(LEAVE) if failed else nullcontext():
        gc.collect()
        dist.destroy_process_group()


BUCKET = 25 * 2**20
"""Size of a buffer in bytes, as in torch's DDP."""


def broadcast_all(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Copies one rank's values to every rank, in place."""
    for bucket in buckets_of(tensors):
        # As bytes, since backends do not support every dtype.
        _through_buffer(bucket, lambda buffer: dist.broadcast(buffer.view(torch.uint8), source))


def sum_all(tensors: Iterable[Tensor]) -> None:
    """Sums tensors over the ranks, in place."""
    dense = []
    for tensor in tensors:
        if tensor.is_sparse:
            dist.all_reduce(tensor)
        else:
            dense.append(tensor)
    for bucket in buckets_of(dense):
        _through_buffer(bucket, dist.all_reduce)


def buckets_of(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divides tensors by dtype and device into buckets that fit a buffer. A larger tensor gets a bucket of its own."""
    found: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        if key not in found or sizes[key] + tensor.nbytes > BUCKET:
            found.setdefault(key, []).append([])
            sizes[key] = 0
        found[key][-1].append(tensor)
        sizes[key] += tensor.nbytes
    return [bucket for buckets in found.values() for bucket in buckets]


def _through_buffer(tensors: Sequence[Tensor], communicate: Callable[[Tensor], Any]) -> None:
    """Copies tensors to a flat buffer, communicates it, and copies the result back."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    communicate(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

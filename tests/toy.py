"""A device that is not the CPU, in Python: tensors on `toy` keep their values in the CPU's memory, and hide them.

torch's experimental Python backend for PrivateUse1 carries it: a wrapper tensor whose every operation reaches
`__torch_dispatch__`. It behaves as a GPU does where the CPU would forgive:

- A tensor of the CPU and one of the device in the same operation raise.
- Whatever makes the host wait for the device is recorded with the line that caused it: see `Waits`.
- A non-blocking copy to the host is only queued. Read before its event or stream is waited for, it is nan; a source
  that is overwritten before the copy's stream is waited for arrives overwritten.
- Random numbers come from the device's own generator, and memory is counted and limited in bytes.

Importing this file makes `toy` the accelerator of the process.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from leyden.checkpoint.format.tensors import PLAIN

aten = torch.ops.aten
HERE = str(Path(__file__).resolve())
TORCH = str(Path(torch.__file__).parent)
ROOT = str(Path(__file__).resolve().parents[1])

READS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default),
    *(aten.masked_select.default, aten._unique2.default, aten.unique_dim.default),
}
"""Operations whose result the host needs, so that it waits for the device."""


# waits and queued copies ----------------------------------------------------------------------------------------------
class Waits:
    """Records what makes the host wait for the device, while it is entered.

    Attributes:
        found: a pair for each wait: what waited, and the line of Leyden or a test that caused it ("file:line").
    """

    active: Waits | None = None

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def __enter__(self) -> Waits:
        Waits.active = self
        return self

    def __exit__(self, *error: Any) -> None:
        Waits.active = None


def waited(what: str) -> None:
    """Notes that the host waited for the device, which also finishes the copies queued on the default stream."""
    if Waits.active is not None:
        Waits.active.found.append((what, line_of_caller()))
    DEFAULT_STREAM.finish()


def line_of_caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((HERE, TORCH, "<")):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename).resolve()
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{frame.f_lineno}"


class QueuedCopy:
    """A copy to the host that has not run yet: until then its target is nan, or the largest number of its type."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = target, source
        if target.dtype != torch.bool:
            target.fill_(float("nan") if target.is_floating_point() else torch.iinfo(target.dtype).max)

    def capture(self) -> None:
        """Keeps the values that the source has now: later work of the device comes after the copy."""
        self.source = self.source.clone()

    def run(self) -> None:
        self.target.copy_(self.source)


class Stream:
    """A queue of the device. Computations take effect at once, whatever their stream; only copies to the host wait."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.lock = threading.RLock()
        self.queued: list[QueuedCopy] = []
        self.started = self.finished = 0
        self.ordered_after = 0
        """The number of writes that the default stream had enqueued when this stream last waited for it."""

    @property
    def device(self) -> torch.device:
        return torch.device("toy", 0)

    def copy(self, target: Tensor, source: DeviceTensor) -> None:
        copy = QueuedCopy(target, source.raw)
        with self.lock:
            if self is DEFAULT_STREAM:
                copy.capture()
            elif source.held.written > self.ordered_after:
                raise RuntimeError("a copy on a side stream, which has not waited for the work that writes its source")
            self.queued.append(copy)
            self.started += 1

    def finish(self, until: int | None = None) -> None:
        with self.lock:
            while self.queued and (until is None or self.finished < until):
                self.queued.pop(0).run()
                self.finished += 1

    def capture(self) -> None:
        with self.lock:
            for copy in self.queued:
                copy.capture()

    def wait_stream(self, other: Stream) -> None:
        other.capture()
        self.ordered_after = Held.writes

    def wait_event(self, event: Event) -> None:
        self.ordered_after = max(self.ordered_after, event.writes)
        if event.stream is not None:
            event.stream.capture()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if self is not DEFAULT_STREAM:
            # A copy takes its time, in which the default stream works on, unless that waits.
            until, deadline = Held.writes + 40, time.monotonic() + 0.05
            while Held.writes < until and time.monotonic() < deadline:
                time.sleep(0.001)
        self.finish()

    def query(self) -> bool:
        return not self.queued

    def __enter__(self) -> None:
        self.before = current_stream()
        LOCAL.stream = self

    def __exit__(self, *error: Any) -> None:
        LOCAL.stream = self.before


class Event:
    """A place in a stream, for which the host or another stream can wait."""

    def __init__(self, enable_timing: bool = False, **others: Any) -> None:
        self.stream: Stream | None = None
        self.place = self.writes = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.place, self.writes = self.stream.started, Held.writes

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.finish(self.place)

    def query(self) -> bool:
        return self.stream is None or self.stream.finished >= self.place


LOCAL = threading.local()
DEFAULT_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    return getattr(LOCAL, "stream", DEFAULT_STREAM)


# memory ---------------------------------------------------------------------------------------------------------------
class Memory:
    """The device's memory, in bytes."""

    def __init__(self) -> None:
        self.used = self.peak = 0
        self.limit: int | None = None

    def take(self, size: int) -> None:
        # An error in backward, which runs in torch's thread for the device, ends the process (torch 2.13).
        in_forward = threading.current_thread() is threading.main_thread()
        if in_forward and self.limit is not None and self.used + size > self.limit:
            raise torch.OutOfMemoryError(f"toy out of memory: {self.used} of {self.limit} bytes used, {size} wanted")
        self.used += size
        self.peak = max(self.peak, self.used)

    def free(self, size: int) -> None:
        self.used -= size

    @contextlib.contextmanager
    def limited(self, size: int) -> Iterator[None]:
        """Lets the device run out of memory when more than `size` bytes are in use."""
        self.limit = size
        try:
            yield
        finally:
            self.limit = None


MEMORY = Memory()


class Held:
    """The memory of one storage, in use as long as a tensor holds this object.

    Attributes:
        written: the number of the last write to it, in the order of all writes on the device.
    """

    writes = 0
    by_address: ClassVar[WeakValueDictionary[int, Held]] = WeakValueDictionary()

    def __init__(self, size: int) -> None:
        MEMORY.take(size)
        weakref.finalize(self, MEMORY.free, size).atexit = False
        self.write()

    def write(self) -> None:
        Held.writes += 1
        self.written = Held.writes

    @staticmethod
    def of(raw: Tensor) -> Held:
        storage = raw.untyped_storage()
        if not storage.nbytes():
            return Held(0)
        held = Held.by_address.get(storage.data_ptr())
        if held is None:
            held = Held.by_address[storage.data_ptr()] = Held(storage.nbytes())
        return held


# torch.toy ------------------------------------------------------------------------------------------------------------
GENERATOR = torch.Generator()


class Properties:
    name, total_memory = "Toy", 2**30


class Runtime:
    """`torch.toy`, with the names that `torch.cuda` and `torch.xpu` have."""

    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(lambda device=None: DEFAULT_STREAM)
    stream = staticmethod(lambda stream: stream)
    default_generators = (GENERATOR,)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """There is one device in a process."""

    def device_count(self) -> int:
        return 1

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        waited("synchronize")

    def manual_seed(self, seed: int) -> None:
        GENERATOR.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = "toy") -> Tensor:
        return GENERATOR.get_state()

    def set_rng_state(self, state: Tensor, device: Any = "toy") -> None:
        GENERATOR.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def get_device_name(self, device: Any = None) -> str:
        return Properties.name

    def get_device_properties(self, device: Any = None) -> Properties:
        return Properties()

    def empty_cache(self) -> None:
        """There is no cache."""

    def memory_allocated(self, device: Any = None) -> int:
        return MEMORY.used

    def max_memory_allocated(self, device: Any = None) -> int:
        return MEMORY.peak

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": MEMORY.used, "allocated_bytes.all.peak": MEMORY.peak}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        MEMORY.peak = MEMORY.used


_setup_privateuseone_for_python_backend("toy", backend_module=Runtime())
# torch's own function returns a stream in C++, which would take this file's events for its own.
torch.accelerator.current_stream = current_stream  # type: ignore[assignment]


# tensors --------------------------------------------------------------------------------------------------------------
class DeviceTensor(Tensor):
    """A tensor on the device.

    Attributes:
        raw: its values, in the CPU's memory.
        held: the memory that it shares with its views.
    """

    raw: Tensor
    held: Held
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("toy", 0),
            requires_grad=False,
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw, self.held = raw, Held.of(raw)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, dict(kwargs or {}))

    # `Module.to` swaps a parameter's contents by these two. Without them it would untie shared weights.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> DeviceTensor:
        return DeviceTensor(inner["raw"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a pickled tensor of the device arrives on the sender's device: send one of the CPU")

    def _set_data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, DeviceTensor):
            self.raw, self.held = value.raw, value.held

    data = property(lambda self: self.detach(), _set_data)

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def record_stream(self, stream: Any) -> None:
        """Memory is freed when no tensor uses it, whatever the streams do."""

    def tolist(self) -> Any:
        waited("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert toy:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __format__(self, spec: str) -> str:
        waited("format")
        return format(self.raw.item() if self.dim() == 0 else self.raw, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        waited("repr")
        return f"{self.raw!r} on toy"


def raw_of(tensor: Any) -> Any:
    return tensor.raw if isinstance(tensor, DeviceTensor) else tensor


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the values."""
    if torch.is_inference_mode_enabled() and func._can_decompose():
        # Elsewhere torch has split it already.
        return func.decompose(*args, **kwargs)
    if func is aten._to_copy.default:
        return to_copy(*args, **kwargs)
    if func is aten.copy_.default:
        return copy_into(*args, **kwargs)
    values = tree_leaves((args, kwargs))
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and value.dim() > 0:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} got toy:0 and {value.device}")
    if func in READS or (func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])):
        waited(str(func))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    raw_args, raw_kwargs = tree_map_only(DeviceTensor, raw_of, (args, kwargs))
    draws = torch.Tag.nondeterministic_seeded in func.tags and raw_kwargs.get("generator") is None
    with drawing_from_the_device() if draws else contextlib.nullcontext():
        result = func(*raw_args, **raw_kwargs)
    # A view of a tensor that autograd tracks stays one, also where new tensors are not.
    is_view = torch.is_inference_mode_enabled() and not any(
        map(Tensor.is_inference, [v for v in values if isinstance(v, DeviceTensor)])
    )
    is_view &= func._schema.returns[0].alias_info is not None if func._schema.returns else False
    with torch.inference_mode(False) if is_view else contextlib.nullcontext():
        return wrapped(func, args, kwargs, result)


@contextlib.contextmanager
def drawing_from_the_device() -> Iterator[None]:
    """Lets torch's default generator draw the numbers of the device's."""
    before = torch.get_rng_state()
    torch.set_rng_state(GENERATOR.get_state())
    try:
        yield
    finally:
        GENERATOR.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def wrapped(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """Returns an operation's result on the device: what an operation wrote in place is the very tensor given."""
    written: dict[int, Any] = {}
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for value in tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
                if isinstance(value, DeviceTensor):
                    value.held.write()
                    written[id(value.raw)] = value

    def wrap(tensor: Tensor) -> Any:
        # A functional collective wraps its result once more.
        tensor = tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
        return written[id(tensor)] if id(tensor) in written else DeviceTensor(tensor)

    return tree_map_only(Tensor, wrap, result)


def to_copy(source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    options.pop("pin_memory", None)
    kind = source.device.type if device is None else torch.device(device).type
    if not isinstance(source, DeviceTensor):
        if not non_blocking and source.numel():
            waited("blocking copy to the device")
        return DeviceTensor(aten._to_copy.default(source, **options, device="cpu"))
    if kind == "toy":
        return DeviceTensor(aten._to_copy.default(source.raw, **options))
    if kind != "cpu":
        return aten._to_copy.default(source.raw, **options, device=device)  # type: ignore[no-any-return]
    if not non_blocking:
        waited("blocking copy to the host")
        return aten._to_copy.default(source.raw, **options)  # type: ignore[no-any-return]
    target = aten._to_copy.default(source.raw, **options)
    current_stream().copy(target, source)
    return target  # type: ignore[no-any-return]


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, DeviceTensor):
        if not isinstance(source, DeviceTensor) and source.dim() and not non_blocking:
            waited("blocking copy to the device")
        target.raw.copy_(raw_of(source))
        target.held.write()
    elif non_blocking:
        current_stream().copy(target, source)  # type: ignore[arg-type]
    else:
        waited("blocking copy to the host")
        target.copy_(raw_of(source))
    return target


_kernels = torch.library.Library("aten", "IMPL")


def _factory(op: Any) -> Callable[..., DeviceTensor]:
    def kernel(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> DeviceTensor:
        return DeviceTensor(op(*args, **kwargs, device="cpu"))

    return kernel


_kernels.impl("empty.memory_format", _factory(aten.empty.memory_format), "PrivateUse1")
_kernels.impl("empty_strided", _factory(aten.empty_strided.default), "PrivateUse1")
_kernels.impl("_to_copy", to_copy, "PrivateUse1")


# The class of a registered backend's tensors is torch's own, but not if the backend is written in Python.
PLAIN.add(DeviceTensor)


# autocast: the operations of the tests, with the CPU's choices --------------------------------------------------------
LOWER = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv1d", "conv2d", "scaled_dot_product_attention")
RAISED = ("softmax.int", "log_softmax.int", "layer_norm", "cross_entropy_loss", "nll_loss", "mse_loss")
_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_WITHOUT_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _cast_first(name: str, cast: Callable[[Tensor], Tensor]) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_WITHOUT_AUTOCAST):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return op(*args, **kwargs)

    _kernels.impl(name, kernel, "AutocastPrivateUse1")


def _lowered(tensor: Tensor) -> Tensor:
    floats = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == "toy"
    return tensor.to(torch.get_autocast_dtype("toy")) if floats else tensor


for _name in LOWER:
    _cast_first(_name, _lowered)
for _name in RAISED:
    _cast_first(_name, lambda tensor: tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor)


# ranks ----------------------------------------------------------------------------------------------------------------
class Done(c10d.Work):
    """The work of a collective that has ended."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self.future


class ToyGroup(dist.ProcessGroup):
    """A process group that carries the device's values over gloo.

    Args:
        gloo: the group underneath.
        rank: this process's rank.
        size: number of ranks.
        carries_cpu: carry tensors of the CPU too, as a group with the backend "cpu:gloo,toy:toygloo" does. Otherwise
            they raise, as with NCCL alone.
    """

    pg_name = "0"

    def __init__(self, gloo: Any, rank: int, size: int, carries_cpu: bool) -> None:
        super().__init__(rank, size)
        self.gloo, self.carries_cpu = gloo, carries_cpu
        # For collectives that torch does not look up in Python.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def name(self) -> str:
        return "toygloo"

    getBackendName = name

    def barrier(self, opts: Any = None) -> Done:
        self.gloo.barrier().wait()
        return Done([])


CARRIED = {
    "allreduce": ("allreduce", c10d.AllreduceOptions),
    "broadcast": ("broadcast", c10d.BroadcastOptions),
    "reduce": ("reduce", c10d.ReduceOptions),
    "gather": ("gather", c10d.GatherOptions),
    "scatter": ("scatter", c10d.ScatterOptions),
    "allgather": ("allgather", c10d.AllgatherOptions),
    "all_gather_single": ("_allgather_base", c10d.AllgatherOptions),
    "_allgather_base": ("_allgather_base", c10d.AllgatherOptions),
    "reduce_scatter_single": ("_reduce_scatter_base", c10d.ReduceScatterOptions),
    "_reduce_scatter_base": ("_reduce_scatter_base", c10d.ReduceScatterOptions),
}
"""The collectives: gloo's method, and its options. The first argument is the output, in a list or not."""


def _carried(name: str, options: Any) -> Callable[..., Done]:
    def collective(self: ToyGroup, *args: Any, opts: Any = None) -> Done:
        if args and isinstance(args[-1], options):
            *args, opts = args  # type: ignore[assignment]
        if not self.carries_cpu and any(type(leaf) is Tensor for leaf in tree_leaves(args)):
            raise RuntimeError(f"{name}: no backend for tensors of the CPU")
        args = tuple([arg] if name == "allreduce" and isinstance(arg, Tensor) else arg for arg in args)
        getattr(self.gloo, name)(*tree_map_only(DeviceTensor, raw_of, args), opts or options()).wait()
        for tensor in tree_leaves(args[0]):
            if isinstance(tensor, DeviceTensor):
                tensor.held.write()
        return Done(args[0])

    return collective


for _name, (_own, _options) in CARRIED.items():
    setattr(ToyGroup, _name, _carried(_own, _options))

FUNCTIONAL = {
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
}
"""The collectives of functional ones, whose tensors `dispatch` has unwrapped, and gloo's methods.

torch would find them in C++, and call gloo while it holds the GIL. A worker of gloo that frees an earlier collective's
tensors needs the GIL, and holds the lock of gloo's queue: the rank would hang.
"""


def _unwrapped(name: str) -> Callable[..., Done]:
    def collective(self: ToyGroup, output: Any, *args: Any) -> Done:
        if isinstance(output, Tensor):
            getattr(self.gloo, name)(output, *args).wait()
            return Done([output])
        [parts, options] = args
        for whole, part in zip(output, parts, strict=True):
            getattr(self.gloo, name)(whole, part, options).wait()
        return Done(output)

    return collective


for _name, _own in FUNCTIONAL.items():
    setattr(ToyGroup, _name, _unwrapped(_own))


def _group(carries_cpu: bool) -> Callable[..., ToyGroup]:
    def group(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> ToyGroup:
        return ToyGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, carries_cpu)

    return group


# The first is the device's default.
dist.Backend.register_backend("toygloo", _group(carries_cpu=True), devices=["toy"])
dist.Backend.register_backend("toyalone", _group(carries_cpu=False), devices=["toy"])

"""The contents of a checkpoint's files, and snapshots of its tensors, copied in the background of the next step.

The next forward and backward pass runs meanwhile. The scheme is that of CheckFreq (Mohan et al., FAST 2021): weights
and optimizer state change only in an optimizer step, so only the step waits for copies that are still pending.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.checkpoint.format.bucket import Place
from leyden.checkpoint.format.manifest import FileEntry
from leyden.checkpoint.format.safefile import write_file, write_stream
from leyden.checkpoint.format.secrets import OWNERS, is_marked
from leyden.checkpoint.format.tensors import local_part
from leyden.checkpoint.format.unflushed import Unflushed
from leyden.core.devices import copies_aside, make_current, mark, pins_memory, runtime_of
from leyden.core.errors import LeydenError
from leyden.core.tree import leaves
from leyden.trainer.logging.values import read_back


class Content(ABC):
    """The content of one file, before it is written."""

    @abstractmethod
    def write(self, path: Place, unflushed: Unflushed) -> FileEntry:
        """Writes the content to a new file and returns the file's manifest entry.

        `unflushed` takes over the open file, and flushes it later.

        Raises:
            OSError: if the file cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Text(Content):
    """A file of JSON."""

    data: bytes

    def write(self, path: Place, unflushed: Unflushed) -> FileEntry:
        mode = OWNERS if is_marked(self.data.decode()) else 0o666
        return write_file(path, [self.data], unflushed=unflushed, mode=mode, size=len(self.data))


@dataclass(frozen=True, slots=True)
class Tensors(Content):
    """A safetensors file: plain dense tensors by key, and strings for its header."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None = None

    def write(self, path: Place, unflushed: Unflushed) -> FileEntry:
        forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return write_stream(path, forms, lambda name: self.tensors[name].detach(), self.metadata, unflushed)


Key: TypeAlias = tuple[str, str]
"""The name of a checkpoint's file, and the name of a tensor in it."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class WrittenWhileCopied(LeydenError):
    """Something other than an optimizer step changed a tensor while it was being copied for a checkpoint."""


class HostMemory:
    """Host buffers for copies, reused across saves. Copying into freshly allocated memory takes ten times as long.

    Buffers for tensors of a GPU are pinned, so the copy runs asynchronously.
    """

    def __init__(self) -> None:
        self._previous: dict[Key, Tensor] = {}
        """Buffers of the previous save that this save has not used yet."""
        self._used: dict[Key, Tensor] = {}

    def begin(self) -> None:
        """Starts a new save and frees the buffers that the previous save did not use."""
        self._previous, self._used = self._used, {}

    def room(self, key: Key, like: Tensor) -> Tensor:
        """Returns a contiguous CPU buffer for a copy of a tensor, which has the same key in every save."""
        buffer = self._previous.pop(key, None)
        pinned = pins_memory(like.device.type)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype or buffer.is_pinned() != pinned:
            # A save at the end of a validation runs in inference mode. A tensor created in that mode could not be
            # written outside of it later.
            with torch.inference_mode(False):
                buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
        self._used[key] = buffer
        return buffer


def calls_hooks(optimizer: Optimizer) -> bool:
    """Returns True if the optimizer's step calls registered pre-hooks, as the steps of torch's optimizers do."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def addresses_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """Returns the addresses of the memory that optimizers step: their parameters and their state.

    Skips optimizers whose step does not call torch's pre-hooks, and tensors that another thread must not copy: those on
    MPS (torch fails in two threads there), XLA, and the meta device.
    """
    found = set[int]()
    for optimizer in optimizers:
        if calls_hooks(optimizer):
            parameters = [group["params"] for group in optimizer.param_groups]
            found.update(map(_address, _tensors_in([parameters, list(optimizer.state.values())])))
    return found


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields this rank's part of every tensor in a nest of dicts, lists and tuples, if that part has memory."""
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            part = local_part(leaf)
            may_defer = part.device.type == "cpu" or copies_aside(part.device)
            if may_defer and part.layout is torch.strided and part.numel():
                yield part


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class _Copy:
    """A pending copy, made in the background.

    Attributes:
        key: the tensor's name.
        source: the tensor, whose memory an optimizer step changes.
        buffer: the host buffer to copy into.
        version: the source's version counter when the snapshot was taken. Every write increments it, except a write
            through `.data`.
    """

    key: Key
    source: Tensor
    buffer: Tensor
    version: int

    def is_torn(self) -> bool:
        """Returns True if the source has been written to since the snapshot was taken."""
        return self.source._version != self.version

    def differs(self) -> Tensor | float:
        """Returns whether source and copy differ in any bit: on the source's device, without waiting for it."""
        bits, device = _INTEGERS[self.source.element_size()], self.source.device
        source = self.source.reshape(-1).view(bits)
        copied = self.buffer.to(device, non_blocking=copies_aside(device)).reshape(-1).view(bits)
        return float(not torch.equal(source, copied)) if device.type == "cpu" else (source != copied).any()


class Copies:
    """A snapshot of one checkpoint's tensors: some copied eagerly, the rest by a background thread.

    Only memory that optimizers step is copied in the background. A run's first save does not know yet what else writes
    to that memory. It copies everything eagerly, and compares copies and tensors before the next step. Any tensor that
    differs was written by something other than a step, such as a `training_step` that normalizes its prototypes. Later
    saves copy these tensors eagerly.

    Args:
        memory: the host buffers, reused across saves.
        stepped: the addresses of memory that may be copied in the background.
        written: names of tensors in that memory that something other than a step writes. None on a run's first save,
            which finds them.
    """

    def __init__(self, memory: HostMemory, stepped: Collection[int], written: Collection[Key] | None) -> None:
        self._memory, self._stepped = memory, stepped
        self._written = written
        self._deferred: list[_Copy] = []
        """Copies of memory that optimizers step. On a first save they are made eagerly, and compared later."""
        self._queue: deque[_Copy] = deque()
        """Copies that no thread has started yet."""
        self._remaining = 0
        """Number of copies that are not finished; guarded by the lock."""
        self._lock = threading.Lock()
        self._copied = threading.Event()
        """Set once every copy has been made, or enqueued on the device."""
        self._decided = threading.Event()
        """Set once it is decided whether the copies form a consistent snapshot."""
        self._fault: str | None = None
        """Why the snapshot is inconsistent; None if it is not."""
        self._devices = set[torch.device]()
        """The device that tensors are copied from; a rank has at most one."""
        self._eager_done: Any = None
        """Recorded on the device after the eager copies."""
        self._stream: Any = None
        """The device's stream of the background copies; None on the CPU."""
        memory.begin()

    @property
    def is_first(self) -> bool:
        """True on a run's first save, which finds the tensors that something other than a step writes."""
        return self._written is None

    def of(self, file: str, content: Content) -> Content:
        """Returns the file's content with every tensor replaced by its copy, which may be filled later."""
        if not isinstance(content, Tensors):
            return content
        copied = {}
        for name, tensor in content.tensors.items():
            key, source = (file, name), tensor.detach()
            buffer = copied[name] = self._memory.room(key, source)
            may_defer = self._may_defer(key, source)
            if may_defer:
                self._deferred.append(_Copy(key, source, buffer, source._version))
            if self.is_first or not may_defer:
                buffer.copy_(source, non_blocking=copies_aside(source.device))
            if copies_aside(source.device):
                self._devices.add(source.device)
        return Tensors(copied, content.metadata)

    def _may_defer(self, key: Key, source: Tensor) -> bool:
        if not source.numel() or source.is_inference() or (self._written is not None and key in self._written):
            return False
        return _address(source) in self._stepped

    def begin(self) -> None:
        """Ends the collection of tensors, and queues the deferred copies for the background thread."""
        for device in self._devices:
            self._eager_done = mark(device)
            # The copies run after all work enqueued so far; work enqueued later does not wait for them.
            self._stream = runtime_of(device).Stream(device)
            self._stream.wait_event(self._eager_done)
        pending = [] if self.is_first else sorted(self._deferred, key=lambda copy: -copy.source.nbytes)
        self._remaining = len(pending)
        self._queue.extend(pending)
        if not pending:
            self._copied.set()
            self._decided.set()

    def run(self) -> None:
        """Makes the deferred copies in the background thread, and waits for those that the run's thread has taken."""
        for device in self._devices:
            # A thread begins on the first GPU, where every rank would take memory for a context of its own.
            make_current(device)
        self._drain_queue()
        self._copied.wait()
        if self._eager_done is not None:
            self._eager_done.synchronize()
        if self._stream is not None:
            self._stream.synchronize()

    def confirm(self) -> None:
        """Waits until the run has called `finish`, which decides whether the snapshot is consistent.

        The background thread cannot decide this on its own: torch increments a tensor's version only after the write.

        Raises:
            WrittenWhileCopied: if the snapshot is inconsistent.
        """
        self._decided.wait()
        if self._fault is not None:
            raise WrittenWhileCopied(self._fault)

    def abandon(self) -> None:
        """Abandons a snapshot that was never confirmed; the run has ended."""
        if not self._decided.is_set():
            self._fault = "the run ended with an error before every tensor had been copied"
            self._copied.set()
            self._decided.set()

    def finish(self) -> None:
        """Waits until all copies are made. The run calls it before anything changes a tensor of the deferred copies.

        Raises:
            WrittenWhileCopied: if something has already changed one.
        """
        # This thread helps with the copies that the background thread has not started.
        self._drain_queue()
        self._copied.wait()
        if self._stream is not None:
            # The device orders its next work after the copies, so the host need not wait.
            runtime_of(self._stream.device).current_stream(self._stream.device).wait_stream(self._stream)
        torn = None if self.is_first else next((copy for copy in self._deferred if copy.is_torn()), None)
        if torn is not None and not self._decided.is_set():
            self._fault = (
                f"{torn.key[1]!r} was written outside of an optimizer step while it was being copied, so the copy may "
                "mix old and new values. Call self.trainer.finish_copies() before the write, or write in a hook, which "
                "Leyden calls only after the copies. Or save with asynchronous=False."
            )
        self._decided.set()
        if self._fault is not None:
            raise WrittenWhileCopied(self._fault)

    def changed(self) -> Callable[[], set[Key]]:
        """Compares a first save's copies with their sources, before the first step after it.

        Returns:
            A function that reads the result: the names of tensors written since. A write that changes no value counts
            too, because `finish` detects later writes by the version counter.
        """
        torn = {copy.key for copy in self._deferred if copy.is_torn()}
        differ = {copy.key: copy.differs() for copy in self._deferred if copy.key not in torn}
        return lambda: torn | {key for key, number in read_back(differ).items() if number}

    def _drain_queue(self) -> None:
        """Makes queued copies until none is left. Two threads may run it at the same time."""
        with torch.no_grad():
            while True:
                try:
                    copy = self._queue.popleft()
                except IndexError:
                    return
                try:
                    if self._stream is None:
                        copy.buffer.copy_(copy.source)
                    else:
                        with runtime_of(self._stream.device).stream(self._stream):
                            copy.buffer.copy_(copy.source, non_blocking=True)
                finally:
                    with self._lock:
                        self._remaining -= 1
                        if not self._remaining:
                            self._copied.set()

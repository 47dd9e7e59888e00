"""Copies of what a checkpoint holds, which are made beside the next forward and backward pass.

CheckFreq (Mohan et al., FAST 2021) does so: weights and optimizer state change only in a step, so the step waits for
what is not copied yet, and nothing before it does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.strategies.errors import LeydenError
from leyden.trainer.checkpoint.contents import Content, Tensors
from leyden.trainer.format.tensors import is_sharded, local_part

Key: TypeAlias = tuple[str, str]
"""The name of a file of a checkpoint, and that of a tensor in it."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class WrittenWhileCopied(LeydenError):
    """Something other than an optimizer's step changed what was being copied for a checkpoint."""


class HostMemory:
    """Memory for copies, kept from one save to the next: a copy into fresh memory takes ten times as long.

    Memory for what comes from a GPU is pinned, so that the device copies by itself.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}
        self._used: dict[Key, Tensor] = {}

    def begin(self) -> None:
        """Begins a save: what the one before has not used is freed."""
        self._kept, self._used = self._used, {}

    def room(self, key: Key, like: Tensor) -> Tensor:
        """Returns contiguous memory on the CPU for a copy of a tensor.

        Args:
            key: the tensor's name.
            like: the tensor.
        """
        kept = self._kept.pop(key, None)
        pinned = like.device.type == "cuda"
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype or kept.is_pinned() != pinned:
            # A tensor made in inference mode, as at the end of a validation, could not be written outside of it.
            with torch.inference_mode(False):
                kept = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
        self._used[key] = kept
        return kept


def calls_hooks(optimizer: Optimizer) -> bool:
    """Returns True if the step of an optimizer calls the hooks that are registered before it, as torch's do."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def addresses_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """Returns the addresses of the memory that optimizers step: their parameters, and their state.

    Only of optimizers whose step calls torch's hooks, on a CPU or a GPU of torch's own: any other memory may change
    unnoticed.
    """
    found = set[int]()
    for optimizer in optimizers:
        if calls_hooks(optimizer):
            parameters = [group["params"] for group in optimizer.param_groups]
            found.update(map(_address, _tensors_in([parameters, list(optimizer.state.values())])))
    return found


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields this rank's part of every tensor in a nest of dicts, lists and tuples, if it has memory."""
    if isinstance(tree, Tensor):
        part = local_part(tree) if is_sharded(tree) else tree
        if part.layout is torch.strided and part.numel() and part.device.type in ("cpu", "cuda"):
            yield part
    elif isinstance(tree, Mapping):
        for entry in tree.values():
            yield from _tensors_in(entry)
    elif isinstance(tree, (list, tuple)):
        for entry in tree:
            yield from _tensors_in(entry)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that is made beside the run.

    Attributes:
        key: the tensor's name.
        source: the tensor, whose memory a step changes.
        room: the memory that it is copied to.
        version: of the source when it was taken; each write but one through `.data` adds one.
    """

    key: Key
    source: Tensor
    room: Tensor
    version: int

    def is_torn(self) -> bool:
        """Returns True if the source has been written to since it was taken."""
        return self.source._version != self.version

    def is_same(self) -> bool:
        """Returns True if source and copy have the same bits, with NaN equal to NaN."""
        bits = _INTEGERS[self.source.element_size()]
        source, copied = self.source.reshape(-1), self.room.to(self.source.device).reshape(-1)
        return torch.equal(source.view(bits), copied.view(bits))


class Copies:
    """Copies of the tensors of one checkpoint: some at once, others in a thread beside the run.

    Later is copied only the memory that optimizers step. Where nothing is known yet of what else writes to it, all is
    copied at once, and compared before the next step: what differs then was written by something else, such as a
    `training_step` that normalises its prototypes. The next saves copy that at once.

    Args:
        memory: that is kept between saves.
        stepped: the addresses of memory that is copied later.
        written: names of tensors in it that something other than a step writes; None if that is not known yet.
    """

    def __init__(self, memory: HostMemory, stepped: Collection[int], written: Collection[Key] | None) -> None:
        self._memory, self._stepped = memory, stepped
        self._written = written
        self._later: list[_Copy] = []
        self._queue: deque[_Copy] = deque()
        self._missing = 0
        """Copies that are not made yet; changed under the lock."""
        self._lock = threading.Lock()
        self._made = threading.Event()
        self._judged = threading.Event()
        """It is known whether the copies are of one moment."""
        self._fault: str | None = None
        self._devices = set[torch.device]()
        """The GPU that something is copied from; a rank has one."""
        self._taken: torch.cuda.Event | None = None
        """The device has made the copies that it was given at once."""
        self._stream: torch.cuda.Stream | None = None
        """On which the device makes the others; None on the CPU."""
        memory.begin()

    @property
    def is_first(self) -> bool:
        """True if it is to be found out what else writes to the memory."""
        return self._written is None

    def of(self, file: str, content: Content) -> Content:
        """Returns what is written in place of a file's content, once the copies are made."""
        if not isinstance(content, Tensors):
            return content
        copied = {}
        for name, tensor in content.tensors.items():
            key, source = (file, name), tensor.detach()
            room = copied[name] = self._memory.room(key, source)
            waits = self._may_wait(key, source)
            if waits:
                self._later.append(_Copy(key, source, room, source._version))
            if self.is_first or not waits:
                room.copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                self._devices.add(source.device)
        return Tensors(copied, content.metadata)

    def _may_wait(self, key: Key, source: Tensor) -> bool:
        if not source.numel() or source.is_inference() or (self._written is not None and key in self._written):
            return False
        return _address(source) in self._stepped

    def begin(self) -> None:
        """Ends the taking: from here on the thread copies what was left for later."""
        for device in self._devices:
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._taken.record(torch.cuda.current_stream(device))
            # It follows all work that the device has been given, and nothing that it is given later waits for it.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_event(self._taken)
        left = [] if self.is_first else sorted(self._later, key=lambda copy: -copy.source.nbytes)
        self._missing = len(left)
        self._queue.extend(left)
        if not left:
            self._made.set()
            self._judged.set()

    def run(self) -> None:
        """Makes the copies, in the thread beside the run, and waits until those of the others are made too."""
        self._work()
        self._made.wait()
        if self._taken is not None:
            self._taken.synchronize()
        if self._stream is not None:
            self._stream.synchronize()

    def confirm(self) -> None:
        """Waits until the run has reached a point at which it is known that all copies are of one moment.

        torch counts a write only after it, so that the thread cannot know by itself.

        Raises:
            WrittenWhileCopied: if they are not.
        """
        self._judged.wait()
        if self._fault is not None:
            raise WrittenWhileCopied(self._fault)

    def abandon(self) -> None:
        """Gives up what is not known to be of one moment, as the run is over."""
        if not self._judged.is_set():
            self._fault = "the run ended by an error before it had all been copied"
            self._made.set()
            self._judged.set()

    def finish(self) -> None:
        """Waits until everything is copied. It is called before anything changes what is copied later.

        Raises:
            WrittenWhileCopied: if something has changed it already.
        """
        # What the thread has not begun yet, this one copies.
        self._work()
        self._made.wait()
        if self._stream is not None:
            # The device's next work follows the copies; this process need not wait.
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        torn = None if self.is_first else next((copy for copy in self._later if copy.is_torn()), None)
        if torn is not None and not self._judged.is_set():
            self._fault = (
                f"{torn.key[1]!r} was written outside of an optimizer's step while it was being copied, and the "
                "checkpoint would hold numbers of two moments. Call self.trainer.finish_copies() before you write it, "
                "or write it in a hook, for which Leyden waits; or save with asynchronous=False."
            )
        self._judged.set()
        if self._fault is not None:
            raise WrittenWhileCopied(self._fault)

    def changed(self) -> set[Key]:
        """Returns the names of what has been written, before the first step after a first save."""
        # A write that changes nothing counts too: that is what `finish` can see after later saves.
        return {copy.key for copy in self._later if copy.is_torn() or not copy.is_same()}

    def _work(self) -> None:
        with torch.no_grad():
            while True:
                try:
                    copy = self._queue.popleft()
                except IndexError:
                    return
                try:
                    if self._stream is None:
                        copy.room.copy_(copy.source)
                    else:
                        with torch.cuda.stream(self._stream):
                            copy.room.copy_(copy.source, non_blocking=True)
                finally:
                    with self._lock:
                        self._missing -= 1
                        if not self._missing:
                            self._made.set()

"""A SummaryWriter for a resumed run whose clock is behind its earlier events: TensorBoard orders files by time."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def late_writer(folder: str, ahead: float, **kwargs: Any) -> SummaryWriter:
    """Returns a SummaryWriter whose event file and events carry a time ahead of the clock.

    tensorboard names event files and stamps events by the clock, without an argument for the time. So this repeats what
    its constructors of the file and of the writer do.

    Args:
        folder: the folder of the event files.
        ahead: seconds to add to the clock.
        **kwargs: as for SummaryWriter.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter, _AsyncWriter
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.writer import FileWriter

    class LateFile(EventFileWriter):  # type: ignore[misc]
        """An event file that is named after a time ahead of the clock."""

        def __init__(self, queue: int, seconds: float, suffix: str) -> None:
            now = time.time() + ahead
            self._logdir = folder
            path = Path(folder, f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.late{suffix}")
            self._async_writer = _AsyncWriter(RecordWriter(path.open("xb")), queue, seconds)
            self.add_event(Event(wall_time=now, file_version="brain.Event:2"))
            self.flush()

    class LateEvents(FileWriter):
        """Writes events with a time ahead of the clock."""

        def __init__(self, queue: int, seconds: float, suffix: str) -> None:
            self.event_writer = LateFile(queue, seconds, suffix)

        def add_event(self, event: Any, step: int | None = None, walltime: float | None = None) -> None:
            walltime = time.time() + ahead if walltime is None else walltime
            super().add_event(event, step, walltime)  # type: ignore[no-untyped-call]

    class LateWriter(SummaryWriter):
        """A SummaryWriter of late events."""

        file_writer: Any
        all_writers: Any

        def _get_file_writer(self) -> Any:
            if self.all_writers is None or self.file_writer is None:
                self.file_writer = LateEvents(self.max_queue, self.flush_secs, self.filename_suffix)
                self.all_writers = {folder: self.file_writer}
            return self.file_writer

    return LateWriter(log_dir=folder, **kwargs)

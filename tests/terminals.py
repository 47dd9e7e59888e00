"""A pseudo-terminal, and runs that show their progress on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from pathlib import Path
from typing import Any

from models import QUIET, Line
from torch import Tensor, ones
from tqdm import tqdm

from leyden.callbacks.base import Callback
from leyden.trainer.trainer import Trainer


class Net(Line):
    """Logs a value in every stage."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log("quiet", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", 0.5, prog_bar=True, batch_size=2, add_dataloader_idx=False)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", 0.25, batch_size=2)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch)


DATA = [ones(2, 2)] * 10


def trainer(root: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    options = {"default_root_dir": root, "max_epochs": 2, "enable_progress_bar": True}
    return Trainer(callbacks=list(callbacks), **{**QUIET, **options, **arguments})


END = b"\0"
"""Marks the end of a Terminal's output: Linux may drop unread output when the writing end of a terminal closes, so the
reader waits for this mark instead."""


class Terminal:
    """A pseudo-terminal of 40 lines that replaces streams and records what is written to them."""

    def __init__(self, *streams: str, columns: int = 140) -> None:
        self.names, self.columns = streams or ("stderr",), columns

    def __enter__(self) -> Terminal:
        # Not in a fixture: pytest replaces sys.stderr again before the test itself.
        self.reading, writing = pty.openpty()
        fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 40, self.columns, 0, 0))
        self.before = {name: getattr(sys, name) for name in self.names}
        self.writing = os.fdopen(writing, "w")
        for name in self.names:
            setattr(sys, name, self.writing)
        self.bytes = b""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        for name, stream in self.before.items():
            assert error[0] is not None or getattr(sys, name) is self.writing, f"sys.{name} was not restored"
            setattr(sys, name, stream)
        self.writing.write(END.decode())
        self.writing.flush()
        self.reader.join()
        self.writing.close()
        os.close(self.reading)
        assert not tqdm._instances, "a bar was left open"

    def read(self) -> None:
        while not self.bytes.endswith(END):
            self.bytes += os.read(self.reading, 65536)
        self.bytes = self.bytes.removesuffix(END)

    def drawn(self) -> list[str]:
        """Returns everything that was drawn, one line each, without colors and cursor movements."""
        lines = re.split(r"[\r\n]|\x1b\[\d*A", self.bytes.decode())
        return [line for text in lines if (line := re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text).strip())]

    def screen(self) -> list[str]:
        """Returns the lines visible at the end, with carriage returns and cursor movements applied."""
        rows, row, column = [""], 0, 0
        for text in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|[^\x1b]", self.bytes.decode()):
            number = int(match[1]) if (match := re.match(r"\x1b\[(\d+)", text)) else None
            if text in "\r\n":
                column, row = 0, row + (text == "\n")
                rows += [""] * (row == len(rows))
            elif text[0] != "\x1b":
                rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + 1 :]
                column += 1
            elif text[-1] == "A":
                row = max(0, row - (number or 1))
            elif text[-1] == "C":
                column += number or 1
            elif text[-1] == "K":
                rows[row] = "" if number == 2 else rows[row][:column]
        return [text.rstrip() for text in rows]

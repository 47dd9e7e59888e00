"""Reads W&B's offline files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(path: Path) -> Iterator[Any]:
    """Yields the protocol buffers of a .wandb file: a LevelDB log of 32 KiB blocks after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def files(root: Path) -> list[Path]:
    import wandb

    # wandb's own process may still be writing a finished run.
    wandb.teardown()
    return sorted(root.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def history(path: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def config(path: Path) -> dict[str, Any]:
    found = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "config":
            found.update({item.key: json.loads(item.value_json) for item in record.config.update})
    return found

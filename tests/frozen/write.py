"""Wrote this folder's checkpoints, and what their runs did next, with Leyden 2a2da38: tests/frozen/write.py FOLDER.

Kept as a record. Do not write the checkpoints again: every later version must resume these.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from frozen import runs
from ranks.world import run_world


def after(rank: dict[str, Any]) -> dict[str, Any]:
    """Returns what a rank did after its checkpoint."""
    return {**rank, "batches": rank["batches"][2 * runs.SAVED :]}


def main(folder: Path) -> None:
    home = Path(__file__).parent
    for kind, (_, size) in runs.STRATEGIES.items():
        root = folder / kind
        if size == 1:
            ranks = [runs.fit(kind, str(root), None)]
        else:
            ranks = run_world(size, runs.fit, kind, str(root), None)
        shutil.copytree(root / "saved" / f"step={runs.SAVED}", home / kind / "checkpoint")
        write(home / kind, ranks)
    ranks = [runs.own_loop(str(folder / "own_loop"), None)]
    shutil.copytree(folder / "own_loop", home / "own_loop" / "checkpoint")
    write(home / "own_loop", ranks)


def write(folder: Path, ranks: list[dict[str, Any]]) -> None:
    (folder / "after.json").write_text(json.dumps([after(rank) for rank in ranks]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

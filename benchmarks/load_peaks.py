"""Measures how much memory each rank takes at most while HFModule loads a pretrained model into shards.

    python benchmarks/load_peaks.py --ranks 2 4 --megabytes 1000

Each rank should take no more than its shard and the largest tensor. The table shows the anonymous memory of the
fullest rank (RssAnon of /proc), above what it had before it built the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from leyden import Trainer
from leyden.callbacks import Callback
from leyden.hf import HFModule
from leyden.strategies import FSDPStrategy

ROOT = Path(__file__).resolve().parent.parent


def resident() -> int:
    """Returns the bytes of anonymous memory that this process has now."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


class Peak(Callback):
    """Samples this process's memory from before the model is built until it is loaded, and writes the largest rise."""

    def __init__(self, out: Path) -> None:
        self._out, self._is_done, self._most = out, threading.Event(), 0

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._before = resident()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._is_done.wait(0.001):
            self._most = max(self._most, resident())

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self._is_done.set()
        self._thread.join()
        held = sum(parameter.to_local().numel() * 4 for parameter in module.parameters())
        largest = max(parameter.numel() * 4 for parameter in module.parameters())
        found = {"peak": self._most - self._before, "shard": held, "largest": largest}
        (self._out / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def load(folder: Path, out: Path) -> None:
    """Loads the model on this rank, which torchrun has started."""
    # The memory of imports is no part of the model's.
    from transformers import LlamaForCausalLM  # noqa: F401

    row = {"input_ids": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}
    module = HFModule(folder, lr=0.0, scheduler=None, optimizer="sgd")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        strategy=FSDPStrategy(), accelerator="cpu", max_steps=1, callbacks=[Peak(out)], verbose=False, **quiet
    )
    trainer.fit(module, torch.utils.data.DataLoader([row] * 8, 1))


def make(folder: Path, megabytes: int) -> None:
    """Writes a Llama of about this size in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # A layer of this width has 50 MB.
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 16_000}
    layers = max(1, (megabytes - 131) // 51)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--load", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        load(*args.load)
        return
    print(f"{'ranks':>5}{'peak':>10}{'shard':>10}{'largest tensor':>16}{'peak / (shard + largest)':>26}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "model")
        make(folder, args.megabytes)
        for ranks in args.ranks:
            out = Path(place, str(ranks))
            out.mkdir()
            command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__, "--load"]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-m", *command, str(folder), str(out)], env=environment, check=True)
            found = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
            most = max(found, key=lambda one: one["peak"])
            allowed = most["shard"] + most["largest"]
            sizes = "".join(
                f"{most[name] / 1e6:>{width}.0f}" for name, width in (("peak", 10), ("shard", 10), ("largest", 16))
            )
            print(f"{ranks:>5}{sizes}{most['peak'] / allowed:>26.2f}", flush=True)


if __name__ == "__main__":
    main()

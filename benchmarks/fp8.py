"""Measures tokens per second and memory in bf16 and in each fp8 recipe, compiled or not, in one interleaved run.

    python benchmarks/fp8.py         # a GPU with fp8 units: 8 blocks of width 4096
    python benchmarks/fp8.py --width 256 --depth 2 --length 64 --batch-size 8 --steps 5 --no-compile    # on a CPU

Trains the character GPT of examples/lm.py on random characters, with AdamW, in a barebones Trainer. The table shows
each contestant's median tokens per second, the median over the rounds of its ratio to bf16, and on a GPU torch's peak
memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
from typing import Any

import torch
from character_gpt import Clock, Windows, character_gpt
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies.precision import Float8Precision

ALPHABET = "".join(map(chr, range(64)))
RECIPES: dict[str, Any] = {
    "bf16-mixed": lambda: "bf16-mixed",
    "fp8 tensorwise": lambda: Float8Precision("tensorwise"),
    "fp8 rowwise": lambda: Float8Precision("rowwise"),
    "fp8 rowwise_with_gw_hp": lambda: Float8Precision("rowwise_with_gw_hp"),
}


def measure(name: str, model: Any, args: argparse.Namespace) -> tuple[float, float]:
    """Returns tokens per second, and peak memory in GiB.

    Args:
        name: one of `RECIPES`.
        model: the class to train.
    """
    torch.manual_seed(0)
    module = model(ALPHABET, args.length, args.width, args.width // 64, args.depth, lr=1e-4)
    if args.compile:
        for block in module.blocks:
            block.compile()
    clock = Clock(args.warm_up)
    data = Windows((args.warm_up + args.steps) * args.batch_size, args.length, len(ALPHABET))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            precision=RECIPES[name](),
            max_epochs=1,
            barebones=True,
            callbacks=[clock],
            default_root_dir=folder,
            devices=1,
        )
        trainer.fit(module, DataLoader(data, args.batch_size))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return args.steps * args.batch_size * args.length / clock.seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile each block")
    args = parser.parse_args()
    model = character_gpt()
    speeds: dict[str, list[float]] = {name: [] for name in RECIPES}
    peaks = dict.fromkeys(RECIPES, 0.0)
    for _ in range(args.repeats):
        for name in RECIPES:
            speed, peak = measure(name, model, args)
            speeds[name].append(speed)
            peaks[name] = max(peaks[name], peak)
    for name, values in speeds.items():
        ratio = statistics.median(value / base for value, base in zip(values, speeds["bf16-mixed"], strict=True))
        memory = f"   {peaks[name]:6.2f} GiB" if peaks[name] else ""
        print(f"{name:<24} {statistics.median(values):12.0f} tokens/s   × {ratio:.3f}{memory}")


if __name__ == "__main__":
    main()

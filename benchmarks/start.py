"""Measures starts: a first training step beside a raw loop, and the launch of a script beside torchrun.

    python benchmarks/start.py --repeats 7

Each start is a process of its own. The repeats of all contestants are interleaved, and the tables show medians; the
difference and the ratio are medians over the rounds, from the first contestant of the table.

The clock starts after the imports, before `Trainer(…)` or the raw loop's optimizer. "to the first step" lasts until the
first forward pass begins, "with the first step" until the data set is asked for the second batch. `leyden` is
barebones, and `leyden-full` has everything on (see `overhead.py`). torch imports `torch._dynamo` when the first
optimizer is created, which takes seconds and hides everything else; the last tables have it imported before the clock
starts. A launch is a whole command, from its start to its exit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"an empty script": "", "import torch": "import torch\n"}
STARTS = ("raw", "leyden", "leyden-full")


def first_step(name: str, warm: bool) -> None:
    """Prints the seconds to the first step, and with it, in this process."""
    import overhead
    import torch

    if warm:
        import torch._dynamo
    if name != "raw":
        from leyden import Trainer, TrainModule  # noqa: F401 - as a script does, before it builds anything

    marks: list[float] = []

    class Net(overhead.nn.Module):  # type: ignore[name-defined, misc]
        """The benchmark's net, which marks the start of each forward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = overhead.make_net()

        def forward(self, inputs: Any) -> Any:
            marks.append(time.perf_counter())
            return self.layers(inputs)

    class Three(overhead.Batches):  # type: ignore[name-defined, misc]
        """Three batches; marks the start of the second one."""

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if index == 1:
                marks.append(time.perf_counter())
            return super().__getitem__(index)

    net = Net()
    overhead.make_net = lambda: net
    torch.set_num_threads(1)
    batches = Three(3)
    with tempfile.TemporaryDirectory() as folder:
        with overhead.hidden():
            start = time.perf_counter()
            overhead.CONTESTANTS[name][1](batches, folder)
        print(marks[0] - start, marks[1] - start)


def seconds_to_first_step(name: str, warm: bool) -> tuple[float, float]:
    done = _run([sys.executable, __file__, "--start", name, *(["--warm"] if warm else [])])
    to_step, with_step = map(float, done.split())
    return to_step, with_step


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    _run(command)
    return time.perf_counter() - start


def _run(command: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def launches(script: Path) -> dict[str, list[str]]:
    """Returns the commands that run a script."""
    leyden = [sys.executable, "-m", "leyden", "launch", "--cpu", "--num_processes"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    commands = {"python": [sys.executable]}
    for ranks in ("1", "2"):
        commands |= {f"torchrun, {ranks}": [*torchrun, ranks], f"leyden launch, {ranks}": [*leyden, ranks]}
    return {name: [*command, str(script)] for name, command in commands.items()}


def show(title: str, times: dict[str, list[float]], bases: dict[str, str]) -> None:
    """Prints the medians, and the differences and ratios to each contestant's base."""
    print(f"\n{title:<40}{'seconds':>9}{'difference':>12}{'ratio':>8}  to")
    for name, taken in times.items():
        line = f"{name:<40}{statistics.median(taken):>9.3f}"
        if name in bases:
            pairs = list(zip(taken, times[bases[name]], strict=True))
            difference = statistics.median(own - base for own, base in pairs)
            ratio = statistics.median(own / base for own, base in pairs)
            line += f"{difference:>+12.3f}{ratio:>8.2f}  {bases[name]}"
        print(line)


def measure_steps(repeats: int, warm: bool) -> None:
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for repeat in range(repeats + 1):
        for name in STARTS:
            taken = seconds_to_first_step(name, warm)
            if repeat:  # the first round warms the file cache and writes byte code
                steps[name].append(taken)
    bases = dict.fromkeys(STARTS[1:], "raw")
    suffix = ", dynamo imported" if warm else ""
    for part, title in enumerate((f"to the first step{suffix}", f"with the first step{suffix}")):
        show(title, {name: [taken[part] for taken in rounds] for name, rounds in steps.items()}, bases)


def measure_launches(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        for title, text in SCRIPTS.items():
            script.write_text(text)
            commands = launches(script)
            times: dict[str, list[float]] = {name: [] for name in commands}
            for repeat in range(repeats + 1):
                for name, command in commands.items():
                    seconds = seconds_of(command)
                    if repeat:
                        times[name].append(seconds)
            show(title, times, {f"leyden launch, {ranks}": f"torchrun, {ranks}" for ranks in (1, 2)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=("step", "launch"), help="measure only the first step, or only launches")
    parser.add_argument("--start", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        return first_step(args.start, args.warm)

    if args.only != "launch":
        for warm in (False, True):
            measure_steps(args.repeats, warm)
    if args.only != "step":
        measure_launches(args.repeats)


if __name__ == "__main__":
    main()

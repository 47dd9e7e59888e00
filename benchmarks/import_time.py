"""Measures how long `import leyden`, and the imports of installed rivals, take beyond `import torch`.

    python benchmarks/import_time.py --repeats 7

It also prints that time as a share of torch's own, and how many modules of the package itself are loaded.

Each import runs in its own process. The repeats are interleaved, so a slow moment of the machine affects all of them.
The table compares the medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
from pathlib import Path

STATEMENTS = {
    "leyden": "import leyden",
    "leyden.Trainer": "from leyden import Trainer, TrainModule",
    "lightning": "import lightning",
    "pytorch_lightning": "import pytorch_lightning",
    "accelerate": "import accelerate",
    "ignite": "import ignite.engine",
    "transformers.Trainer": "from transformers import Trainer",
}
PROGRAM = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
COUNT = "import sys; {}; print(sum(name.partition('.')[0] == {!r} for name in sys.modules))"
ROOT = Path(__file__).resolve().parent.parent


def seconds(statement: str) -> float:
    """Times a statement in a new process, after the interpreter has started."""
    return answer(PROGRAM.format(statement))


def answer(program: str) -> float:
    """Runs a program in a new process; returns the number that it prints first."""
    # Import the checkout, installed or not, and not this folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # Installed packages have byte code, and so does a checkout after its first import.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=STATEMENTS, help="measure only these")
    args = parser.parse_args()

    sys.path.insert(0, str(ROOT))
    chosen = args.only or list(STATEMENTS)
    found = [name for name in chosen if importlib.util.find_spec(name.partition(".")[0]) is not None]
    statements = {"torch": "import torch", **{name: f"import torch; {STATEMENTS[name]}" for name in found}}
    for statement in statements.values():
        seconds(statement)  # warms the file cache and writes the byte code
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(args.repeats):
        for name, statement in statements.items():
            times[name].append(seconds(statement))

    base = statistics.median(times["torch"])
    print(f"{'import':<22}{'seconds':>9}{'beyond torch':>14}{'ratio':>8}{'modules':>9}")
    for name, taken in times.items():
        median = statistics.median(taken)
        modules = answer(COUNT.format(statements[name], name.partition(".")[0]))
        print(f"{name:<22}{median:>9.3f}{median - base:>+14.3f}{(median - base) / base:>8.2f}{modules:>9.0f}")
    missing = [name for name in chosen if name not in found]
    if missing:
        print(f"not installed: {', '.join(missing)}")


if __name__ == "__main__":
    main()

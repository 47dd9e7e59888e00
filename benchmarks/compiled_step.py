"""Compares `Trainer(compile="step")` with a raw loop whose whole step is one function of torch.compile.

    python benchmarks/compiled_step.py
    python benchmarks/compiled_step.py --repeats 9 --only raw-compiled leyden-step

AdamW on a CPU with one thread. "large" and "medium" are transformers whose steps take about 50 and 7 ms, and "tiny" is
two linear layers, where only the work around the step shows. The raw compiled loop writes AdamW out by hand and has no
optimizer object. Each contestant reads the same prepared batches through a DataLoader; processor time is read when the
data set returns batch `warm-up` and batch `warm-up + steps`, so compiling does not count. The repeats of all
contestants are interleaved. The table shows medians, and the median of the ratios of steps/s to the raw compiled loop
of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
WARM_UP, TAIL = 20, 20
RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


class Batches(Dataset[Any]):
    """One prepared batch, served again and again; records when the measurement starts and ends."""

    def __init__(self, batch: tuple[Tensor, Tensor], steps: int) -> None:
        self.batch, self.steps, self.served = batch, steps, 0
        self.start = self.end = 0.0

    def __len__(self) -> int:
        return WARM_UP + self.steps + TAIL

    def __getitem__(self, index: int) -> Any:
        self.served += 1
        if self.served == WARM_UP:
            self.start = time.process_time()
        elif self.served == WARM_UP + self.steps:
            self.end = time.process_time()
        return self.batch

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self, batch_size=1, collate_fn=_first)

    @property
    def microseconds(self) -> float:
        """The time per step."""
        return (self.end - self.start) / self.steps * 1e6


def _first(items: list[Any]) -> Any:
    return items[0]


class Classifier(nn.Module):
    """A transformer encoder with a mean over positions and a linear head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs).mean(1))  # type: ignore[no-any-return]


def make(size: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Returns a new network and its batch."""
    torch.manual_seed(0)
    if size == "tiny":
        net: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        return net, (torch.randn(8, 32), torch.randint(10, (8,)))
    width, layers = (256, 4) if size == "large" else (128, 2)
    return Classifier(width, layers), (torch.randn(8, 32, width), torch.randint(10, (8,)))


def raw_compiled(net: nn.Module, batches: Batches) -> None:
    parameters = list(net.parameters())
    means, squares = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    count = torch.zeros((), dtype=torch.float64)

    @torch.compile(fullgraph=True)
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(net(inputs), targets)
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            now = count + 1
            rate, root = RATE / (1 - BETAS[0] ** now), (1 - BETAS[1] ** now).sqrt()
            for parameter, grad, mean, square in zip(parameters, grads, means, squares, strict=True):
                parameter.mul_(1 - RATE * DECAY)
                mean.lerp_(grad, 1 - BETAS[0])
                square.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
                parameter.sub_(rate * mean / (square.sqrt() / root + EPS))
            count.copy_(now)
        return loss.detach()

    # torch.compile counts recompilations by code object, and each repeat compiles anew.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for inputs, targets in batches.loader():
            step(inputs, targets)


def raw(net: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), RATE, BETAS, EPS, DECAY)
    for inputs, targets in batches.loader():
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()


def leyden(net: nn.Module, batches: Batches, compiles: str | None = None) -> None:
    from leyden import Trainer, TrainModule

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), RATE, BETAS, EPS, DECAY)

    torch._dynamo.reset()
    module: Any = torch.compile(Module()) if compiles == "module" else Module()
    options: dict[str, Any] = {"compile": "step"} if compiles == "step" else {}
    Trainer(accelerator="cpu", max_epochs=1, barebones=True, **options).fit(module, batches.loader())


def leyden_module(net: nn.Module, batches: Batches) -> None:
    leyden(net, batches, "module")


def leyden_step(net: nn.Module, batches: Batches) -> None:
    leyden(net, batches, "step")


CONTESTANTS: dict[str, Callable[[nn.Module, Batches], None]] = {
    "raw-compiled": raw_compiled,
    "leyden-step": leyden_step,
    "leyden-module": leyden_module,
    "leyden-eager": leyden,
    "raw-eager": raw,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: 100 of large, 300 of medium, 3000 of tiny")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="run only these and the raw compiled loop")
    args = parser.parse_args()

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    chosen = [name for name in CONTESTANTS if args.only is None or name in args.only or name == "raw-compiled"]
    for size, steps in (("large", 100), ("medium", 300), ("tiny", 3000)):
        steps = args.steps or steps
        times: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(args.repeats):
            for name in chosen:
                net, batch = make(size)
                batches = Batches(batch, steps)
                CONTESTANTS[name](net, batches)
                times[name].append(batches.microseconds)
        print(f"\n{size:<16}{'µs per step':>12}{'steps/s':>10}{'ratio':>8}{'beyond raw':>12}")
        for name, taken in times.items():
            pairs = list(zip(times["raw-compiled"], taken, strict=True))
            ratio, beyond = statistics.median(r / t for r, t in pairs), statistics.median(t - r for r, t in pairs)
            own = statistics.median(taken)
            print(f"{name:<16}{own:>12.1f}{1e6 / own:>10.1f}{ratio:>8.3f}{beyond:>+12.1f}")


if __name__ == "__main__":
    main()

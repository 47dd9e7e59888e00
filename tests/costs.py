"""Counts what Leyden does in 100 steps, without a clock; `python tests/costs.py --write` records it in costs.json.

The scenarios are runs of the model in `benchmarks/overhead.py`, from step 200 to step 300:

- Python calls: calls of Leyden's own functions; a generator counts each time it continues.
- calls of others: calls by these of functions and methods that are not Leyden's, in Python or C.
- operations, tensors: what torch dispatches, and the new storages among its results, beyond the same loop by hand.
- messages: collectives of the first of two ranks, with those of DDP, FSDP and DTensor.

What differs between versions does not count: comprehensions, which Python 3.12 inlines; `detach`, which torch 2.9
dispatches twice; and the functions in UNSEEN.

For the sake of equal counts in every run, the bar never draws and the loader is always timed, since both go by the
clock, and the garbage collector is off. tp's sampled checks run once in the window, at step 256.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from ranks.share import Messages
from ranks.world import run_world
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
RECORDED = Path(__file__).with_suffix(".json")
STEPS = 100
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")
UNSEEN = ("__init__", "__new__", "is_partial", "is_replicate", "wait")
"""Others' functions that are written in C++ in some versions, where not every Python reports their calls."""
OWN, OTHERS = "Python calls", "calls of others"


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("overhead", ROOT / "benchmarks" / "overhead.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


overhead = _benchmark()


class Operations(TorchDispatchMode):
    """Counts operations, and the new storages among their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:
            self.counts[f"operation {func}"] += 1
        known = {tensor.untyped_storage()._cdata for tensor in _tensors([*args, *(kwargs or {}).values()])}
        self.counts["tensors"] += len({tensor.untyped_storage()._cdata for tensor in _tensors([out])} - known)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Calls:
    """Counts the calls of Leyden's functions, and the calls by them."""

    def __init__(self) -> None:
        self.counts = {OWN: 0, OTHERS: 0}
        self.functions = Counter[str]()

    def start(self) -> None:
        # A collection would run finalizers at a moment of its own.
        gc.disable()
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        called = argument.__name__ if event == "c_call" else frame.f_code.co_name
        caller = frame if event == "c_call" else frame.f_back
        if event not in ("c_call", "call") or called in INLINED:
            return
        if event == "call" and _is_leydens(frame):
            self._add(OWN, _name(frame))
        elif caller is not None and _is_leydens(caller) and called not in UNSEEN:
            self._add(OTHERS, f"{called} in {_name(caller)}")

    def _add(self, kind: str, function: str) -> None:
        self.counts[kind] += 1
        self.functions[function] += 1


class Dispatched:
    """Counts what a dispatch mode sees.

    Args:
        mode: a mode with `counts`; it is active during the whole run.
    """

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.counts: dict[str, int] = {}

    def start(self) -> None:
        self._before = dict(self.mode.counts)

    def stop(self) -> None:
        self.counts = {name: number - self._before.get(name, 0) for name, number in self.mode.counts.items()}


class Steps(overhead.Batches):  # type: ignore[name-defined, misc]
    """The benchmark's batches, which start and stop a counter.

    Args:
        counter: has `start` and `stop`.
        readers: number of ranks that share the batches.
    """

    def __init__(self, counter: Calls | Dispatched, readers: int) -> None:
        super().__init__(STEPS)
        self.counter, self.readers = counter, readers

    def __len__(self) -> int:
        return int(super().__len__()) * self.readers

    def __getitem__(self, index: int) -> Any:
        if self.served == overhead.WARM_UP:
            self.counter.start()
        elif self.served == overhead.WARM_UP + STEPS:
            self.counter.stop()
        return super().__getitem__(index)


def _is_leydens(frame: FrameType) -> bool:
    # By module, not by file: the methods of a dataclass have no file.
    return str(frame.f_globals.get("__name__")).startswith("leyden.")


def _name(frame: FrameType) -> str:
    while frame.f_code.co_name in INLINED and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_globals['__name__'].removeprefix('leyden.')}:{frame.f_code.co_name}"


# what runs ------------------------------------------------------------------------------------------------------------
def by_hand(steps: Steps, folder: str, accumulation: int = 1, clip: float | None = None, bf16: bool = False) -> None:
    net = overhead.make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for index, (inputs, targets) in enumerate(steps.loader()):
        if index % accumulation == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = F.cross_entropy(net(inputs), targets)
        (loss / accumulation if accumulation > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if (index + 1) % accumulation == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()


def evaluated_by_hand(steps: Steps, folder: str) -> None:
    net = overhead.make_net()
    with torch.inference_mode():
        for inputs, targets in steps.loader():
            F.cross_entropy(net(inputs), targets)


def fitted(steps: Steps, folder: str, everything: bool = False, scheduler: bool = False, **options: Any) -> None:
    from leyden import Trainer
    from leyden.callbacks import TQDMProgressBar
    from leyden.trainer.loops import loader_timer

    class Tiny(overhead.tiny(everything)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            if not scheduler:
                return optimizer
            steps = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            return [optimizer], [{"scheduler": steps, "interval": "step"}]

    if everything:
        options |= overhead.everything(folder)
        options["callbacks"].append(TQDMProgressBar(refresh_rate=10**6))
    else:
        options["barebones"] = True
    if options.get("strategy") == "tp":
        from leyden.strategies import MeshStrategy

        options["strategy"] = MeshStrategy(tp=2, plan={"net.0": "colwise", "net.2": "rowwise"})
    # Batches are timed until a clock says that it is enough.
    with patch.object(loader_timer, "MIN_SECONDS", math.inf):
        Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **options).fit(Tiny(), steps.loader())


def evaluated(steps: Steps, folder: str) -> None:
    from leyden import Trainer

    class Evaluated(overhead.tiny()):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    Trainer(accelerator="cpu", barebones=True, default_root_dir=folder).validate(Evaluated(), steps.loader())


def own_loop(steps: Steps, folder: str, accumulation: int = 1) -> None:
    from leyden import Accelerator

    if accumulation == 1:
        overhead.own_loop(Accelerator(cpu=True), steps)
        return
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    net = overhead.make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, steps.loader())
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            accelerator.backward(F.cross_entropy(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


Run = Callable[..., None]
Counts = dict[str, int]
# scenario → the run, and the same by hand
ALONE: dict[str, tuple[Run, Run]] = {
    "bare step": (fitted, by_hand),
    "everything on": (partial(fitted, everything=True), by_hand),
    "accumulation of 2, clipping, scheduler": (
        partial(fitted, scheduler=True, accumulate_grad_batches=2, gradient_clip_val=1.0),
        partial(by_hand, accumulation=2, clip=1.0),
    ),
    "bf16-mixed": (partial(fitted, precision="bf16-mixed"), partial(by_hand, bf16=True)),
    "evaluation": (evaluated, evaluated_by_hand),
    "own loop": (own_loop, by_hand),
    "own loop, accumulate() of 2": (partial(own_loop, accumulation=2), partial(by_hand, accumulation=2)),
}
# scenario on 2 ranks → the run
ON_RANKS: dict[str, Run] = {
    "ddp": partial(fitted, strategy="ddp"),
    "ddp, everything on": partial(fitted, strategy="ddp", everything=True),
    "fsdp": partial(fitted, strategy="fsdp"),
    "fsdp, everything on": partial(fitted, strategy="fsdp", everything=True),
    "tp": partial(fitted, strategy="tp"),
    "tp, everything on": partial(fitted, strategy="tp", everything=True),
    "own loop, ddp": own_loop,
}
SCENARIOS = (*ALONE, *ON_RANKS)


def _run(run: Run, counter: Calls | Dispatched, readers: int = 1) -> None:
    with tempfile.TemporaryDirectory() as folder, overhead.hidden(), getattr(counter, "mode", nullcontext()):
        run(Steps(counter, readers), folder)


def on_a_rank(scenario: str) -> tuple[Counts, Counts]:
    """Returns the counts of a scenario on this rank, and those of each function and kind of message."""
    calls, messages = Calls(), Dispatched(Messages())
    for counter in (calls, messages):
        _run(ON_RANKS[scenario], counter, readers=1 if scenario.startswith("tp") else 2)
    kinds = {f"message {kind}": number for kind, number in messages.counts.items() if number}
    return {**calls.counts, "messages": sum(kinds.values())}, {**calls.functions, **kinds}


def count(scenario: str) -> tuple[Counts, Counts]:
    """Returns the counts of a scenario, and those of each function, operation or kind of message."""
    if scenario in ON_RANKS:
        counts: tuple[Counts, Counts] = run_world(2, on_a_rank, scenario)[0]
        return counts
    calls, own, hand = Calls(), Dispatched(Operations()), Dispatched(Operations())
    for run, counter in zip((*ALONE[scenario][:1] * 2, ALONE[scenario][1]), (calls, own, hand)):
        _run(run, counter)
    beyond = {name: own.counts.get(name, 0) - hand.counts.get(name, 0) for name in {**own.counts, **hand.counts}}
    kinds = {name: number for name, number in beyond.items() if name.startswith("operation ") and number}
    totals = {"operations": sum(kinds.values()), "tensors": beyond["tensors"]}
    return {**calls.counts, **totals}, {**calls.functions, **kinds}


# the record -----------------------------------------------------------------------------------------------------------
def recorded(scenario: str) -> tuple[Counts, Counts]:
    """Returns what `count` returned when costs.json was written; nothing for a new scenario."""
    record = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"totals": {}, "details": {}}
    return record["totals"].get(scenario, {}), record["details"].get(scenario, {})


def changes(was: tuple[Counts, Counts], now: tuple[Counts, Counts]) -> str:
    """Returns the totals that differ, and the functions that account for them, a line each; "" if all are equal."""
    totals, details = (
        [
            f"{name}: {before.get(name, 0)} → {after.get(name, 0)}"
            for name in sorted({*before, *after})
            if before.get(name, 0) != after.get(name, 0)
        ]
        for before, after in zip(was, now)
    )
    return "\n".join([*totals, *(f"    {line}" for line in details)]) if totals else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the counts; say in the commit why they changed")
    args = parser.parse_args()
    counted = {}
    for scenario in SCENARIOS:
        counted[scenario] = count(scenario)
        print(f"{scenario}: {', '.join(f'{name} {number}' for name, number in counted[scenario][0].items())}")
        print("".join(f"    {line}\n" for line in changes(recorded(scenario), counted[scenario]).splitlines()), end="")
    if args.write:
        totals = {scenario: counts for scenario, (counts, _) in counted.items()}
        details = {scenario: dict(sorted(details.items())) for scenario, (_, details) in counted.items()}
        RECORDED.write_text(json.dumps({"totals": totals, "details": details}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Mutates checkpoints at random and resumes from them; test_fuzz.py runs a few cases.

    python tests/fuzz_checkpoints.py --count 5000 [--seed 0]

Every other checkpoint is forged: its checksums are recomputed, as an attacker would do. A resume must raise an error of
Leyden's own; or, from a checkpoint that was only damaged, end with the weights of a resume from the intact one. It must
take neither long nor much memory. A forged checkpoint may also load: a checksum does not prove who wrote a file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from forged import forge
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leyden import Trainer, TrainModule
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.checkpoint.format.manifest import MANIFEST
from leyden.core.errors import LeydenError

SECONDS = 30
MEMORY = 64 * 2**20
"""Bytes that a resume may use beyond twice the checkpoint's size: those of the run, and those the allocator keeps."""


class Net(TrainModule):
    """Has weights, buffers, a metric, hyperparameters, a scheduler and user state."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        import torchmetrics

        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(batch_idx)
        scores = self.net(x)
        self.accuracy(scores, y)
        loss = cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["seen"])


def train(folder: Path, steps: int, checkpoint: Path | None = None) -> dict[str, Tensor]:
    """Trains up to a step, from a checkpoint if one is given, and saves the last step; returns the weights."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
        max_steps=steps,
        val_check_interval=4,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=7, save_top_k=-1),
            ModelCheckpoint(folder / "best", monitor="val_loss", save_last=True),
            EarlyStopping("val_loss", patience=100),
        ],
    )
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    trainer.fit(module, loader, torch.utils.data.DataLoader(data, 20), ckpt_path=checkpoint)
    return dict(module.state_dict())


# Mutations. Each takes the bytes of a file, and returns new ones; None removes the file.

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, -(2**70), 0.5, -1e308, "", "x", "../x", "/etc/passwd", [], {}),
    *([0], [[]], {"a": 1}, "float32", "Infinity", [1, 2, 3], {"__class__": "os.system"}, "a" * 5000, [0] * 3000),
)


def _flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    place, count = rng.randrange(len(data)), rng.randrange(1, 64)
    return data[:place] + rng.randbytes(count) + data[place + count :]


def _zero(data: bytes, rng: random.Random) -> bytes:
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:begin] + bytes(end - begin) + data[end:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _lengthen(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 200))


def _repeat(data: bytes, rng: random.Random) -> bytes:
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[begin:]


def _remove(data: bytes, rng: random.Random) -> None:
    return None


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every place in a tree, as a container and a key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


def _change(tree: Any, rng: random.Random) -> None:
    """Changes one value, key or item of a tree."""
    places = list(_places(tree))
    if not places:
        return
    holder, key = rng.choice(places)
    value, how = holder[key], rng.randrange(7)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[rng.choice([f"{key}x", "", "a::b", "__metadata__"])] = holder.pop(key)
    elif how == 2 and isinstance(value, (int, float)):
        holder[key] = rng.choice([value + 1, value - 1, -value, value * 1000, float(value), str(value)])
    elif how == 3:
        source, place = rng.choice(places)
        if place in source if isinstance(source, dict) else place < len(source):
            holder[key] = json.loads(json.dumps(source[place]))
    elif how == 4 and isinstance(value, list):
        holder[key] = value * 2
    elif how == 5 and isinstance(value, str):
        holder[key] = value[: rng.randrange(len(value) + 1)] + rng.choice(["", "é", "\x00", "/..", "0"])
    else:
        holder[key] = rng.choice(ODD)


def _structure(data: bytes, rng: random.Random) -> bytes:
    """Changes a JSON file, or the header of a safetensors file."""
    with contextlib.suppress(ValueError):
        tree = json.loads(data)
        _change(tree, rng)
        return json.dumps(tree).encode()
    with contextlib.suppress(ValueError):
        size = int.from_bytes(data[:8], "little")
        tree = json.loads(data[8 : 8 + size])
        _change(tree, rng)
        text = json.dumps(tree).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]
    return _flip(data, rng)


_BYTES: tuple[Callable[[bytes, random.Random], bytes | None], ...] = (
    *(_flip, _overwrite, _zero, _cut, _lengthen, _repeat, _remove),
)


def mutate(folder: Path, number: int) -> str:
    """Mutates a checkpoint in place, with `number` as the seed; returns what was changed."""
    rng = random.Random(number)
    forged = bool(number % 2)
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)
        if not files:
            break
        path = rng.choice([file for file in files if not (forged and file.name == MANIFEST)] or files)
        # Random bytes are rarely valid JSON, so most would raise the same error.
        act = _structure if rng.random() < (0.8 if forged else 0.4) else rng.choice(_BYTES)
        data = act(path.read_bytes(), rng)
        done.append(f"{act.__name__.strip('_')} {path.name}")
        if forged:
            forge(folder, path.name, data)
        elif data is None:
            path.unlink()
        else:
            path.write_bytes(data)
    return f"{'forged' if forged else 'damaged'}: {', '.join(done)}"


# Outcomes.


def judge(number: int, place: Path, intact: Path, weights: dict[str, Tensor], steps: int) -> tuple[str, str]:
    """Resumes from a mutated copy of an intact checkpoint, in the new folder `place`.

    Returns:
        The outcome: "refused", "same" or "loaded", or a defect. And the mutation, with the error's text.
    """
    shutil.copytree(intact, place / "checkpoints" / intact.name)
    path = place / "checkpoints" / intact.name
    mutation = mutate(path, number)
    allowed = 2 * sum(file.stat().st_size for file in path.iterdir()) + MEMORY
    before = _resident("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            signal.alarm(SECONDS)
            found = train(place, steps, path)
            signal.alarm(0)
    except LeydenError as error:
        outcome, text = "refused", str(error)
    except TimeoutError:
        outcome, text = "SLOW", ""
    except BaseException as error:
        outcome, text = f"RAW {type(error).__name__}", traceback.format_exc()
    else:
        same = all(torch.equal(found[name], weights[name]) for name in weights)
        outcome, text = "same" if same else "loaded" if mutation.startswith("forged") else "OTHER NUMBERS", ""
    finally:
        signal.alarm(0)
    if _resident("VmHWM") - before > allowed:
        outcome = f"MEMORY {_resident('VmHWM') - before >> 20} MiB, {outcome}"
    return outcome, f"{mutation}: {text}"


def _resident(line: str) -> int:
    status = Path("/proc/self/status")
    return 1024 * int(status.read_text().partition(f"{line}:")[2].split()[0]) if status.exists() else 0


def _time_out(signum: int, frame: Any) -> None:
    raise TimeoutError


def work(numbers: range, intact: Path, folder: Path, steps: int) -> None:
    """Judges the mutations with some numbers, and prints a line of JSON before and after each."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _time_out)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # The first run imports modules, which must not count as memory of a resume.
        weights = train(folder / "expected", steps, intact)
    for number in numbers:
        place = folder / str(number)
        place.mkdir()
        print(json.dumps({"number": number}), flush=True)
        outcome, text = judge(number, place, intact, weights, steps)
        print(json.dumps({"number": number, "outcome": outcome, "text": text}), flush=True)
        shutil.rmtree(place)


def fuzz(numbers: range, folder: Path) -> tuple[Counter[str], list[str]]:
    """Judges mutations in child processes, since one may crash; returns the outcomes, and a text for each defect."""
    train(folder / "intact", 7)
    (intact,) = (folder / "intact" / "checkpoints").iterdir()
    outcomes: Counter[str] = Counter()
    defects: list[str] = []
    begin = numbers.start
    while begin < numbers.stop:
        command = [sys.executable, __file__, "--work", str(begin), str(numbers.stop), str(intact), str(folder)]
        child = subprocess.run(command, capture_output=True, text=True)
        at = begin
        for line in child.stdout.splitlines():
            report = json.loads(line)
            at = report["number"]
            if "outcome" in report:
                at += 1
                outcomes[report["outcome"]] += 1
                if report["outcome"] not in ("refused", "same", "loaded"):
                    defects.append(f"{report['number']}: {report['outcome']}: {report['text']}")
        if at < numbers.stop:
            outcomes["CRASHED"] += 1
            defects.append(f"{at}: the process ended with {child.returncode}: {child.stderr[-2000:]}")
            shutil.rmtree(folder / str(at), ignore_errors=True)
            at += 1
        shutil.rmtree(folder / "expected", ignore_errors=True)
        begin = at
    return outcomes, defects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first number")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.work:
        work(range(int(args.work[0]), int(args.work[1])), Path(args.work[2]), Path(args.work[3]), 9)
        return
    with tempfile.TemporaryDirectory() as folder:
        outcomes, defects = fuzz(range(args.seed, args.seed + args.count), Path(folder))
    print(*(f"{count} {outcome}" for outcome, count in outcomes.most_common()), sep=", ")
    print(*defects, sep="\n\n")
    sys.exit(bool(defects))


if __name__ == "__main__":
    main()

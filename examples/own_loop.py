# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains on scikit-learn's handwritten digits in a plain PyTorch loop; numbers mark the five lines that Leyden changes.

python examples/own_loop.py                                     one process
torchrun --nproc-per-node 2 examples/own_loop.py --cpu          two ranks, the same script
torchrun --nproc-per-node 2 examples/own_loop.py --cpu --tp 2   two ranks that share batches and split the head
python examples/own_loop.py --resume                            continues from the last checkpoint
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from leyden import Accelerator
from leyden.strategies import MeshStrategy

HEAD = {"4": "rowwise_split_input"}  # plan for --tp: each rank has a part of the head's inputs


def make_loaders(batch_size: int) -> tuple[DataLoader[list[Tensor]], DataLoader[list[Tensor]]]:
    """Splits the 1,797 images: 1,397 for training, 400 for test."""
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits))
    train, test = random_split(data, [1397, 400], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def make_model(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),  # (B, width, 8, 8)
        nn.ReLU(),
        nn.MaxPool2d(2),  # (B, width, 4, 4)
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--precision", default="no", help="no, bf16 or fp16")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tp", type=int, default=1, help="ranks over which the head is split (default: %(default)s)")
    parser.add_argument("--root", default="runs/own_loop", help="folder of checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --root")
    args = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(  # 1
        mixed_precision=args.precision,
        gradient_accumulation_steps=args.accumulate,
        cpu=args.cpu,
        strategy=MeshStrategy(tp=args.tp, plan=HEAD) if args.tp > 1 else "auto",
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = make_loaders(args.batch_size)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)  # 2
    checkpoint = Path(args.root) / "last"
    if args.resume:
        accelerator.load_state(checkpoint)

    for epoch in range(train.iteration if args.resume else 0, args.epochs):
        model.train()
        for images, digits in train:
            with accelerator.accumulate(model):  # 3
                with accelerator.autocast():
                    loss = F.cross_entropy(model(images), digits)
                accelerator.backward(loss)  # 4
                optimizer.step()
                optimizer.zero_grad()

        model.eval()
        right = total = 0
        for images, digits in test:
            with torch.no_grad():
                guesses = model(images).argmax(dim=1)  # (B,)
            guesses, digits = accelerator.gather_for_metrics((guesses, digits))  # 5
            right += int((guesses == digits).sum())
            total += len(digits)
        accelerator.print(f"epoch {epoch}: accuracy {right / total:.3f} of {total} images")
        # Saved at the end of the epoch: a resumed run continues with the next epoch and the current random state.
        accelerator.save_state(checkpoint)
    accelerator.end_training()


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains a character-level GPT on six of Shakespeare's plays.

python examples/lm.py                                                 one process
python examples/lm.py --strategy ddp --devices 2 --precision bf16     two processes, each with the whole model
python examples/lm.py --strategy fsdp --devices 2 --precision bf16    two processes, each with half of it
… --resume                                                            continues from the last checkpoint
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from leyden import Trainer, TrainModule
from leyden.callbacks import CSVLogger, LearningRateMonitor, ModelCheckpoint

PLAYS = Path(__file__).parent / "data" / "plays.txt"


class Characters(Dataset[Tensor]):
    """Text in windows of `length + 1` characters that overlap by one, so each character is predicted once."""

    def __init__(self, text: str, alphabet: str, length: int) -> None:
        index = {character: number for number, character in enumerate(alphabet)}
        self.ids = torch.tensor([index[character] for character in text], dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.ids[start : start + self.length + 1].long()  # (T + 1,)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on the normalized residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        )  # (B, H, T, D/H)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm2(x))


class CharacterGPT(TrainModule):
    """A small GPT over characters.

    Args:
        alphabet: the characters of its vocabulary, in the order of their ids.
        length: the context in characters.
        lr: the learning rate after its warm-up.
    """

    def __init__(
        self, alphabet: str, length: int = 128, width: int = 128, heads: int = 4, depth: int = 4, lr: float = 3e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.alphabet, self.length, self.lr = alphabet, length, lr
        self.characters = nn.Embedding(len(alphabet), width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(alphabet), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, characters)

    def loss(self, ids: Tensor) -> Tensor:
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1, betas=(0.9, 0.95))
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}

    @torch.no_grad()
    def write(self, start: str, count: int) -> str:
        """Continues a text, sampling one character at a time."""
        ids = torch.tensor([[self.alphabet.index(character) for character in start]])
        for _ in range(count):
            logits = self(ids[:, -self.length :])[0, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)[None]], dim=1)
        return "".join(self.alphabet[number] for number in ids[0])


def make_loaders(length: int, batch_size: int) -> tuple[str, DataLoader[Tensor], DataLoader[Tensor]]:
    """Returns the alphabet, nine tenths of the text for training, and the rest for validation."""
    text = PLAYS.read_text(encoding="ascii")
    alphabet, border = "".join(sorted(set(text))), len(text) * 9 // 10
    train, val = (Characters(part, alphabet, length) for part in (text[:border], text[border:]))
    return alphabet, DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="auto, ddp, fsdp, … (default: %(default)s)")
    parser.add_argument("--devices", default="auto", help="ranks on this machine (default: %(default)s)")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=-1, help="stop after this many optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per rank (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="characters in a window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--write", type=int, default=0, metavar="N", help="write N characters at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="runs/lm", help="folder of logs and checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --root")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    alphabet, train, val = make_loaders(args.length, args.batch_size)
    trainer = Trainer(
        strategy=args.strategy,
        devices=args.devices,
        accelerator=args.accelerator,
        precision=args.precision,
        max_epochs=args.epochs,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        default_root_dir=args.root,
        log_every_n_steps=10,
        logger=CSVLogger(args.root),
        callbacks=[ModelCheckpoint(every_n_train_steps=args.save_every, save_last=True), LearningRateMonitor("step")],
    )
    module = CharacterGPT(alphabet, args.length, args.width, depth=args.depth)
    trainer.fit(module, train, val, ckpt_path="auto" if args.resume else None)
    [metrics] = trainer.validate(module, val, verbose=False)
    if args.write and trainer.is_global_zero:
        written = CharacterGPT.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, map_location="cpu")
        print(written.write("HAMLET:\n", args.write))
    trainer.print(f"validation loss {metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()

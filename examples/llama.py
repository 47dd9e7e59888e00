# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "transformers>=4.40"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains a randomly initialized Llama from `transformers` on six of Shakespeare's plays, on any mesh of ranks.

python examples/llama.py                                                   one process
torchrun --nproc-per-node 4 examples/llama.py --tp 2                       two pairs: split in a pair, sharded over both
torchrun --nproc-per-node 4 examples/llama.py --tp 2 --sequence            the same, with norms and loss split too
torchrun --nproc-per-node 4 examples/llama.py --tp 2 --dp_replicate 2      two pairs: split in a pair, a copy on each
torchrun --nproc-per-node 4 examples/llama.py --pp 2                       a pipeline of two stages, each sharded
python examples/llama.py --devices 4 --tp 4                                starts its own ranks

The printed loss is the same on every mesh, because --batch-size is the total over all ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leyden import Trainer, TrainModule
from leyden.strategies import MeshStrategy

PLAYS = Path(__file__).parent / "data" / "plays.txt"


class Characters(Dataset[Tensor]):
    """Text in windows of `length + 1` characters that overlap by one, so each character is predicted once."""

    def __init__(self, text: str, length: int) -> None:
        self.alphabet = "".join(sorted(set(text)))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self.ids = torch.tensor([index[character] for character in text], dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.ids[start : start + self.length + 1].long()  # (T + 1,)


class Llama(TrainModule):
    """A small Llama over characters, with grouped-query attention; embedding and head are one tensor.

    Args:
        characters: how many there are; the vocabulary is padded, so that any small `tp` divides it.
        width: of the residual stream.
        depth: layers.
        lr: the learning rate.
    """

    def __init__(self, characters: int, width: int = 128, depth: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.lr = lr
        config = LlamaConfig(
            vocab_size=-(-characters // 64) * 64,
            hidden_size=width,
            intermediate_size=width * 3,
            num_hidden_layers=depth,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
        self.model: Any = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids, targets = batch[:, :-1], batch[:, 1:]
        # Passed explicitly: the model would derive them from its activations, which --sequence splits.
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        logits = self.model(ids, position_ids=positions, use_cache=False).logits  # (B, T, V)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95))


def sequence_plan(module: Llama) -> dict[str, str]:
    """Returns the model's own plan, extended so that each rank has a part of the sequence between split layers."""
    plan = {f"model.{pattern}": style for pattern, style in module.model.tp_plan.items()}
    return plan | {
        "model.model.layers.*.input_layernorm": "sequence",
        "model.model.layers.*.post_attention_layernorm": "sequence",
        "model.model.norm": "sequence",
        "model.lm_head": "loss",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp_replicate", type=int, default=1, help="copies of the model (default: %(default)s)")
    parser.add_argument("--dp_shard", type=int, default=-1, help="ranks that shard each copy; -1: all remaining ranks")
    parser.add_argument("--tp", type=int, default=1, help="ranks that split each layer (default: %(default)s)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: %(default)s)")
    parser.add_argument("--schedule", default="1F1B", help="schedule of the pipeline (default: %(default)s)")
    parser.add_argument("--sequence", action="store_true", help="split norms along the sequence, and the loss")
    parser.add_argument("--devices", default="auto", help="ranks on this machine (default: %(default)s)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="windows per step on all ranks (default: %(default)s)"
    )
    parser.add_argument("--length", type=int, default=128, help="characters in a window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="runs/llama", help="folder of logs and checkpoints (default: %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    data = Characters(PLAYS.read_text(encoding="ascii"), args.length)
    module = Llama(len(data.alphabet), args.width, args.depth)
    strategy = MeshStrategy(
        args.dp_replicate,
        args.dp_shard,
        args.tp,
        args.pp,
        plan=sequence_plan(module) if args.sequence else None,
        schedule=args.schedule,
    )
    trainer = Trainer(
        strategy=strategy,
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        default_root_dir=args.root,
        log_every_n_steps=10,
    )
    # Ranks that split a model read the same batches, so each data rank counts once.
    trainer.fit(module, DataLoader(data, args.batch_size // strategy.data_size, shuffle=True))
    trainer.print(f"mean loss of the steps {float(trainer.callback_metrics['loss_epoch']):.4f}")


if __name__ == "__main__":
    main()

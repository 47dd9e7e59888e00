# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "matplotlib>=3.8", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Uses a model without Leyden: its weights by safetensors in plain PyTorch, and as a program of torch.export.

python examples/inference.py                        trains the model of digits.py, exports it, and starts --predict
python examples/inference.py --checkpoint PATH      exports a checkpoint of digits.py instead of training
python examples/inference.py --predict              only classifies the test images, in a process without Leyden
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def make_net(width: int = 32) -> nn.Sequential:
    """The layers of `Digits` in digits.py, which is all that inference needs; layers of dropout keep the numbering."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(32 * width, 128),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(128, 10),
    )


def export(out: Path, checkpoint: str | None, steps: int) -> None:
    """Writes to `out` the weights, the program, and the test images with the logits that Leyden computes for them."""
    # Here and not above, since the process that predicts never imports Leyden.
    from digits import Digits, make_loaders

    from leyden import Trainer, seed_everything
    from leyden.checkpoint.merge import merge

    train, val, test = make_loaders(batch_size=32)
    if checkpoint is None:
        seed_everything(0)
        trainer = Trainer(accelerator="cpu", max_steps=steps, logger=False, default_root_dir=out)
        trainer.fit(Digits(), train, val)
        checkpoint = trainer.checkpoint_callback.best_model_path

    # One file of weights, whatever number of ranks wrote the checkpoint; the prefix is the module's attribute `net`.
    merge(checkpoint, out / "net.safetensors", module_prefix="net")

    module = Digits.load_from_checkpoint(checkpoint).eval()
    images, digits = next(iter(torch.utils.data.DataLoader(test.dataset, len(test.dataset))))
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(module.net, (images,), dynamic_shapes=({0: batch},))
    torch.export.save(program, out / "net.pt2")
    with torch.no_grad():
        save_file({"images": images, "digits": digits, "logits": module.net(images)}, out / "test.safetensors")


def predict(out: Path, picture: Path) -> None:
    """Classifies the test images with each of the two files, and draws some of them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    test = load_file(out / "test.safetensors")
    net = make_net()
    net.load_state_dict(load_file(out / "net.safetensors"))
    program = torch.export.load(out / "net.pt2").module()
    with torch.inference_mode():
        logits = net.eval()(test["images"])  # (B, 10)
        torch.testing.assert_close(logits, test["logits"])
        torch.testing.assert_close(program(test["images"]), test["logits"])
        torch.testing.assert_close(program(test["images"][:1]), test["logits"][:1])
    assert "leyden" not in sys.modules

    chosen = logits.argmax(dim=1)
    surest_last = logits.softmax(dim=1).max(dim=1).values.argsort()
    figure, axes = pyplot.subplots(2, 10, figsize=(8, 2.2), layout="compressed")
    for axis, index in zip(axes.flat, surest_last.tolist(), strict=False):
        axis.imshow(test["images"][index, 0], cmap="gray_r")
        right = chosen[index] == test["digits"][index]
        axis.set_title(f"{chosen[index]}" + ("" if right else f", is {test['digits'][index]}"), fontsize=9)
        axis.title.set_color("black" if right else "tab:red")
        axis.axis("off")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
    accuracy = (chosen == test["digits"]).float().mean()
    print(f"without Leyden: accuracy {accuracy:.3f}, logits as in training; the least certain images are in {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint", help="a checkpoint of digits.py, instead of training")
    parser.add_argument("--predict", action="store_true", help="use the files in --folder")
    parser.add_argument("--folder", default="out/inference", help="folder of the exported files (default: %(default)s)")
    parser.add_argument("--out", default="out/inference.png", help="the picture (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.predict:
        predict(Path(args.folder), Path(args.out))
        return
    export(Path(args.folder), args.checkpoint, args.steps)
    command = [sys.executable, __file__, "--predict", "--folder", args.folder, "--out", args.out]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

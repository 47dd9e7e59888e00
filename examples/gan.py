# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains two models with two optimizers: a Wasserstein GAN with gradient penalty (Gulrajani et al., 2017) for digits.

python examples/gan.py                                        one process
torchrun --nproc-per-node 2 examples/gan.py --cpu             two ranks
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Accelerator

NOISE = 16
SHADES = " .:-=+*#%@"


def make_models(width: int = 128) -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(
        nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
    )
    critic = nn.Sequential(
        nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
    )
    return generator, critic


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Returns how far the critic's gradient is from norm 1 on lines between real and generated images."""
    share = torch.rand(len(real), 1, device=real.device)  # (B, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()  # (B, 64)
    [gradient] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def drawn(image: Tensor) -> str:
    """Renders an image of 8 × 8 pixels as text."""
    rows = (image.view(8, 8).clamp(0, 1) * (len(SHADES) - 1)).round().int().tolist()
    return "\n".join("".join(SHADES[value] * 2 for value in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--precision", default="no", help="no, bf16 or fp16")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=args.precision, cpu=args.cpu)
    generator, critic = make_models()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True, drop_last=True)
    generator, critic, optimizer_g, optimizer_c, loader = accelerator.prepare(
        generator, critic, optimizer_g, optimizer_c, loader
    )
    mean = images.mean(dim=0).to(accelerator.device)

    for epoch in range(args.epochs):
        for index, (real,) in enumerate(loader):
            with accelerator.autocast():
                fake = generator(torch.randn(len(real), NOISE, device=accelerator.device))
                distance = critic(real).mean() - critic(fake.detach()).mean()
                loss = 10 * gradient_penalty(critic, real, fake.detach().float()) - distance
            accelerator.backward(loss)
            optimizer_c.step()
            optimizer_c.zero_grad()
            if index % 3 == 2:
                with accelerator.autocast():
                    loss = -critic(fake).mean()
                accelerator.backward(loss)
                optimizer_g.step()
                optimizer_g.zero_grad()
                optimizer_c.zero_grad()
        if epoch % 10 == 9:
            # A first measure of quality: the mean generated image must match the mean real one.
            with torch.no_grad():
                sample = accelerator.gather(generator(torch.randn(500, NOISE, device=accelerator.device)).float())
            away = (sample.mean(dim=0) - mean).abs().mean()
            accelerator.print(f"epoch {epoch + 1}: distance {distance.item():.3f}, mean image off by {away.item():.3f}")
    accelerator.print(drawn(sample[0]))
    accelerator.end_training()


if __name__ == "__main__":
    main()

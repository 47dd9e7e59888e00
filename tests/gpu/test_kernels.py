"""Attention kernels, torch.compile and LSTM: each gives the weights of the same fit without them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET, Regression, Squares, sgd_with_momentum
from same import weights_of
from samples import pairs
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from leyden import Trainer


def fitted(module: Squares, data: Any, device: torch.device, **arguments: Any) -> dict[str, Tensor]:
    """Trains a module, or one in torch.compile's wrapper; returns its weights and the epoch's loss."""
    trainer = Trainer(**{**QUIET, "accelerator": device.type, "devices": 1, "max_epochs": 1, **arguments})
    trainer.fit(module, data)
    found = weights_of(getattr(module, "_orig_mod", module))
    return {**found, "loss": trainer.callback_metrics["loss_epoch"].to(device)}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


class Attention(Squares):
    """Causal attention with a residual stream, by a kernel of choice."""

    def __init__(self, kernel: SDPBackend, width: int = 64, heads: int = 4) -> None:
        torch.manual_seed(0)
        super().__init__(nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}))
        self.kernel, self.heads = kernel, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.net["qkv"](x).chunk(3, -1))
        with sdpa_kernel(self.kernel):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.net["out"](attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss


def test_flash_attention_matches_plain_attention(device: torch.device) -> None:
    """torch raises if it cannot use the kernel that is asked for."""
    data = torch.randn(4, 8, 32, 64, generator=torch.Generator().manual_seed(1))
    flash, plain = (
        fitted(Attention(kernel), list(data), device, precision="bf16-mixed")
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    )
    assert_close(flash, plain, 2e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_module_matches_an_eager_one(mode: str, device: torch.device) -> None:
    """With "reduce-overhead" the GPU replays a graph, which overwrites the loss of the step before."""

    def module() -> Attention:
        return Attention(SDPBackend.MATH)

    data = list(torch.randn(6, 8, 32, 64, generator=torch.Generator().manual_seed(1)))
    options = {"mode": mode} if device.type == "cuda" else {"backend": "aot_eager"}
    compiled: Any = torch.compile(module(), **options)
    assert_close(fitted(compiled, data, device), fitted(module(), data, device), 1e-4)


class Recurrent(nn.Module):
    """cuDNN keeps the weights of an LSTM in one block of memory, as views; for the CPU, this does so by hand."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, dropout=dropout, batch_first=True), nn.Linear(16, 1)
        block = torch.cat([parameter.detach().flatten() for parameter in self.lstm.parameters()])
        start = 0
        for parameter in self.lstm.parameters():
            parameter.data = block[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unflatten(1, (2, 8)))[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_lstm_resumes_bit_for_bit(asynchronous: bool, device: torch.device, tmp_path: Path) -> None:
    loader = DataLoader(pairs(64, 16), 8, shuffle=True)

    def fit(module: Regression, path: Path | None = None, steps: int = -1) -> Trainer:
        arguments: Any = {"accelerator": device.type, "devices": 1, "max_epochs": 2, "default_root_dir": tmp_path}
        trainer = Trainer(**{**QUIET, **arguments}, max_steps=steps)
        trainer.fit(module, loader, ckpt_path=path)
        return trainer

    def recurrent(seed: int) -> Regression:
        torch.manual_seed(seed)
        # On a GPU, dropout between the layers draws from a state of cuDNN that torch cannot save.
        return Regression(Recurrent(0.2 if device.type == "cpu" else 0.0), sgd_with_momentum)

    whole, first, resumed = recurrent(1), recurrent(1), recurrent(2)
    with warnings.catch_warnings():
        # cuDNN would have to copy the weights in each step.
        warnings.filterwarnings("error", message=".*not part of single contiguous chunk")
        torch.manual_seed(5)
        fit(whole)
        torch.manual_seed(5)
        path = fit(first, steps=5).save_checkpoint(tmp_path / "saved", asynchronous=asynchronous)
        fit(resumed, path)
    blocks = {parameter.untyped_storage().data_ptr() for parameter in whole.net.lstm.parameters()}
    assert len(blocks) == 1
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())

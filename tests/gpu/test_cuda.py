"""Parity with the loop of plain PyTorch, no hidden synchronization, out of memory, and resumed random states."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from xxhash import xxh3_64_hexdigest

from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import CSVLogger, TQDMProgressBar
from leyden.checkpoint.format.digests import read_digests
from leyden.strategies.precision import MixedPrecision
from leyden.strategies.recomputing import recompute
from leyden.trainer.logging.values import read_back

pytestmark = pytest.mark.usefixtures("deterministic")
DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}


@pytest.fixture(scope="module")
def digits() -> TensorDataset:
    """The first 512 of scikit-learn's handwritten digits, 8 × 8 pixels."""
    bunch: Any = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(bunch.images[:512], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(bunch.target[:512]))


class Digits(TrainModule):
    """A small convolutional network.

    Args:
        **options: of AdamW.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3, **self.options)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


def trainer(folder: Path, device: torch.device, **arguments: Any) -> Trainer:
    return Trainer(**{**QUIET, "accelerator": device.type, "devices": 1, "default_root_dir": folder, **arguments})


def shuffled(data: TensorDataset, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, 64, shuffle=True, **settings)


def by_hand(loader: DataLoader[Any], precision: str, device: torch.device, **options: Any) -> Digits:
    """The loop of plain PyTorch: 2 epochs, windows of 3 of 8 batches, the last one of 2 divided by 2, and clipping."""
    torch.manual_seed(3)
    dtype = DTYPES.get(precision, torch.float32)
    module = Digits(**options).to(device, dtype)
    [optimizer], [config] = module.configure_optimizers()
    scheduler = config["scheduler"]
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
    half = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    for _ in range(2):
        for index, (images, labels) in enumerate(loader):
            if index % 3 == 0:
                optimizer.zero_grad()
            length = min(3, len(loader) - index // 3 * 3)
            with torch.autocast(device.type, half) if half else nullcontext():
                loss = nn.functional.cross_entropy(module(images.to(device, dtype)), labels.to(device))
            scaler.scale(loss / length).backward()
            if index % 3 == length - 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= scale:
                    scheduler.step()
    return module


def by_leyden(
    loader: DataLoader[Any], precision: str, device: torch.device, folder: Path, strategy: str = "auto", **options: Any
) -> tuple[Trainer, Digits]:
    """The same as a fit."""
    torch.manual_seed(3)
    module = Digits(**options)
    settings = {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0, "deterministic": True}
    fitted = trainer(folder, device, max_epochs=2, precision=precision, strategy=strategy, **settings)
    fitted.fit(module, loader)
    return fitted, module


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert x.device == y.device, name
        assert torch.equal(x, y), name


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", *DTYPES])
def test_weights_match_the_plain_loop_bit_for_bit(
    precision: str, device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    # In float16, AdamW's default of 1e-8 is 0.
    options = {"eps": 1e-4} if precision == "16-true" else {}
    expected = by_hand(shuffled(digits), precision, device, **options)
    _, module = by_leyden(shuffled(digits), precision, device, tmp_path, **options)
    assert_same_weights(module, expected)
    torch.manual_seed(3)
    assert not torch.equal(module.net[0].weight.cpu(), Digits().to(expected.dtype).net[0].weight)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_fused_and_foreach_optimizers_match_the_plain_loop(
    option: str, precision: str, device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    expected = by_hand(shuffled(digits), precision, device, **{option: True})
    assert_same_weights(by_leyden(shuffled(digits), precision, device, tmp_path, **{option: True})[1], expected)


def test_pinned_batches_from_workers_match_the_plain_loop(
    device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    settings: Any = {"num_workers": 2, "persistent_workers": True, "pin_memory": device.type == "cuda"}
    expected = by_hand(shuffled(digits, **settings), "32-true", device)
    assert_same_weights(by_leyden(shuffled(digits, **settings), "32-true", device, tmp_path)[1], expected)


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_schedulers_do_not_step_when_the_scaler_skips(
    option: str, device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    """The scale is too large at first; a fused optimizer skips in its kernel."""

    class HalvingRate(Digits):
        def configure_optimizers(self) -> Any:
            made = torch.optim.AdamW(self.parameters(), 1e-3, **{option: True})
            return [made], [{"scheduler": torch.optim.lr_scheduler.StepLR(made, 1, 0.5), "interval": "step"}]

    module = HalvingRate()
    run = trainer(tmp_path, device, max_epochs=1, plugins=MixedPrecision("16", init_scale=2.0**40))
    run.fit(module, DataLoader(digits, 64))
    skipped = run.global_step - run.progress.stepped
    assert run.global_step == 8 and skipped > 0
    assert run.optimizers[0].param_groups[0]["lr"] == 1e-3 * 0.5**run.progress.stepped


class RaiseOnSync(Callback):
    """Makes torch raise on implicit synchronization, from the first batch to the last."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        self.batches += 1

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_hundred_steps_do_not_sync(
    precision: str, device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    sync_guard = RaiseOnSync()
    run = trainer(
        tmp_path,
        device,
        max_epochs=13,
        max_steps=100,
        precision=precision,
        gradient_clip_val=1.0,
        log_every_n_steps=50,
        logger=CSVLogger(tmp_path),
        enable_progress_bar=True,
        callbacks=[sync_guard, TQDMProgressBar()],
    )
    pins = device.type == "cuda"
    run.fit(Digits(), shuffled(digits, pin_memory=pins), DataLoader(digits, 256, pin_memory=pins))
    assert sync_guard.batches == 100
    rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert len(rows) > 2


@pytest.mark.parametrize("where", ["number", "host", "device"])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_weighting_a_window_by_items_does_not_sync(
    where: str, strategy: str, device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    class Items(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")
            counts = {"number": 64, "host": torch.tensor(64), "device": torch.full((), 64, device=self.device)}
            return {"loss": loss, "num_items": counts[where]}

    sync_guard = RaiseOnSync()
    settings: Any = {"strategy": strategy, "accumulate_grad_batches": 3, "callbacks": [sync_guard]}
    trainer(tmp_path, device, max_epochs=2, **settings).fit(
        Items(), DataLoader(digits, 64, pin_memory=device.type == "cuda")
    )
    assert sync_guard.batches == 16


def test_a_synchronizing_step_raises(cuda: torch.device, digits: TensorDataset, tmp_path: Path) -> None:
    """Shows that RaiseOnSync detects synchronization."""

    class ReadsLoss(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    with pytest.raises(RuntimeError, match="synchroniz"):
        trainer(tmp_path, cuda, max_steps=3, callbacks=[RaiseOnSync()]).fit(ReadsLoss(), DataLoader(digits, 64))


def test_read_back_returns_the_values(device: torch.device) -> None:
    values: dict[str, Any] = {"a": torch.tensor(0.5, device=device), "b": 2, "c": torch.tensor(3, dtype=torch.int64)}
    values |= {f"many/{i}": torch.tensor(float(i), device=device, dtype=torch.bfloat16) for i in range(100)}
    numbers = read_back(values)
    assert list(numbers) == list(values)
    assert (numbers["a"], numbers["b"], numbers["c"]) == (0.5, 2.0, 3.0)
    assert [numbers[f"many/{i}"] for i in range(100)] == [float(i) for i in range(100)]


def test_digests_of_weights_match_their_bytes(device: torch.device, digits: TensorDataset, tmp_path: Path) -> None:
    module = Digits()
    trainer(tmp_path, device, max_steps=3, digest_every_n_steps=1).fit(module, DataLoader(digits, 64))
    *_, last = read_digests(next(tmp_path.rglob("digests.jsonl")))
    state = {name: value.cpu().numpy().tobytes() for name, value in module.state_dict().items()}
    assert {name: digest.value for name, digest in last.digests.items()} == {
        name: xxh3_64_hexdigest(value) for name, value in state.items()
    }


def test_out_of_memory_errors_say_where_and_what_to_try(
    device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    class Greedy(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                torch.empty(2**48, device=self.device)
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError if device.type == "cuda" else RuntimeError) as caught:
        trainer(tmp_path, device, max_epochs=1).fit(Greedy(), DataLoader(digits, 64))
    text = str(caught.value)
    assert "in step 2, epoch 0, batch 2" in text
    assert "(64, 1, 8, 8) float32" in text
    assert ("iB are in use" in text) == (device.type == "cuda")
    assert "(1)" in text
    assert "(2)" in text
    assert "(3)" in text


def test_batches_and_graphs_are_freed_after_a_fit(cuda: torch.device, digits: TensorDataset, tmp_path: Path) -> None:
    """Only weights, gradients and optimizer state remain."""

    def fit() -> tuple[Trainer, Digits]:
        run, module = trainer(tmp_path, cuda, max_epochs=1), Digits()
        run.fit(module, DataLoader(digits, 64), DataLoader(digits, 64))
        return run, module

    fit()  # cuBLAS and cuDNN take their workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    run, module = fit()
    kept = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters() if p.grad is not None)]
    kept += [part for state in run.optimizers[0].state.values() for part in state.values() if part.is_cuda]
    blocks = sum(-(-tensor.numel() * tensor.element_size() // 512) for tensor in kept)
    # Plus a few logged values in blocks of 512 bytes each; a single batch of images takes 32 blocks.
    assert torch.cuda.memory_allocated() - before <= (blocks + 16) * 512


def test_offloaded_inputs_of_recomputed_blocks_stay_on_the_host(cuda: torch.device) -> None:
    found: dict[bool, Any] = {}
    for offloads in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(256, 256), nn.GELU()).to(cuda)
        recompute([block], offloads)
        leaf = torch.randn(4096, 256, device=cuda, requires_grad=True)
        output = block(leaf * 2)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        output.sum().backward()
        assert leaf.grad is not None
        found[offloads] = held, leaf.grad.cpu(), block[0].weight.grad.cpu()
        del block, leaf, output
    assert found[False][0] - found[True][0] >= 4096 * 256 * 4
    assert all(map(torch.equal, found[False][1:], found[True][1:]))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_resuming_restores_the_devices_random_state(
    precision: str, device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    def fit(module: Digits, path: Path | None = None, **limits: Any) -> Trainer:
        run = trainer(tmp_path, device, precision=precision, deterministic=True, **limits)
        run.fit(module, DataLoader(digits, 64, shuffle=True), ckpt_path=path)
        return run

    torch.manual_seed(5)
    whole = Digits()
    fit(whole, max_epochs=2)

    torch.manual_seed(5)
    first = fit(Digits(), max_epochs=2, max_steps=5)
    saved = first.save_checkpoint(tmp_path / "saved")

    torch.manual_seed(99)
    torch.cuda.manual_seed_all(98)
    resumed = Digits()
    fit(resumed, saved, max_epochs=2)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_ddp_in_a_world_of_one_matches_the_plain_loop(
    precision: str, device: torch.device, digits: TensorDataset, tmp_path: Path
) -> None:
    expected = by_hand(shuffled(digits), precision, device)
    fitted, module = by_leyden(shuffled(digits), precision, device, tmp_path, strategy="ddp")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    assert torch.distributed.get_backend() == backend and fitted.strategy.name == "ddp"
    assert_same_weights(expected, module)

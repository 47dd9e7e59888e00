"""ModelCheckpoint(trainable_only=True): what it leaves out, what it compares, and that a resume changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from same import differences
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.callbacks import Callback, ModelCheckpoint, WeightAveraging
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.frozen import FrozenPart, digests_of
from leyden.checkpoint.reader import CheckpointReader
from leyden.strategies import DeepSpeedStrategy, SingleDeviceStrategy, XLAStrategy


class Tuned(TrainModule):
    """A frozen body, with batch norm, under a head that trains."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def loader() -> DataLoader[Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4, shuffle=True)


def fit(folder: Path, module: Tuned, *callbacks: Callback, ckpt_path: Any = None, **kwargs: Any) -> Trainer:
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, trainable_only=True)
    arguments = {**QUIET, "enable_checkpointing": True, "max_steps": 9, "verbose": False, **kwargs}
    trainer = Trainer(callbacks=[*callbacks, checkpoint], default_root_dir=folder, **arguments)
    torch.manual_seed(7)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def saved_names(path: Path) -> set[str]:
    return set(CheckpointReader(path).names())


def test_a_checkpoint_holds_what_trains_and_what_changed(tmp_path: Path) -> None:
    fit(tmp_path, Tuned())
    statistics = {f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert saved_names(tmp_path / "epoch=0-step=3") == {"head.weight", "head.bias", *statistics}
    frozen = FrozenPart.read(CheckpointReader(tmp_path / "epoch=0-step=3"))
    assert frozen is not None
    assert set(frozen.digests) == {f"body.{i}.{name}" for i in (0, 1, 3) for name in ("weight", "bias")}


@pytest.mark.parametrize("step", [3, 6])
def test_a_resume_ends_with_the_same_bits(step: int, tmp_path: Path) -> None:
    whole, resumed = Tuned(), Tuned()
    fit(tmp_path / "whole", whole)
    [path] = (tmp_path / "whole").glob(f"epoch=*-step={step}")
    fit(tmp_path / "resumed", resumed, ckpt_path=path)
    assert not differences(resumed.state_dict(), whole.state_dict())


class Follow(Callback):
    """Moves a frozen layer after the head, as a momentum encoder does, past autograd's version counters."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.body[3].bias.data.mul_(0.9).add_(0.1 * module.head.weight.detach().mean())


def test_a_frozen_weight_that_the_run_changes_is_saved(tmp_path: Path) -> None:
    whole, resumed = Tuned(), Tuned()
    fit(tmp_path / "whole", whole, Follow())
    path = tmp_path / "whole" / "epoch=0-step=3"
    assert "body.3.bias" in saved_names(path)
    fit(tmp_path / "resumed", resumed, Follow(), ckpt_path=path)
    assert not differences(resumed.state_dict(), whole.state_dict())


def test_a_layer_that_trained_before_it_was_frozen_is_saved(tmp_path: Path) -> None:
    module = Tuned()
    module.body[3].requires_grad_(True)
    trainer = fit(tmp_path, module, max_steps=3)
    module.body[3].requires_grad_(False)
    trainer.fit_loop.max_steps = 6
    trainer.fit(module, loader())
    assert "body.3.weight" in saved_names(tmp_path / "epoch=0-step=6")


def test_another_base_is_an_error_that_names_its_tensors(tmp_path: Path) -> None:
    fit(tmp_path, Tuned())
    path = tmp_path / "epoch=0-step=3"
    with pytest.raises(CheckpointError, match=r"body\.0\.bias, body\.0\.weight"):
        fit(tmp_path / "other", Tuned(seed=5), ckpt_path=path)
    with pytest.raises(CheckpointError, match=r"body\.0\.bias"):
        Tuned.load_from_checkpoint(path, seed=5)
    with pytest.raises(CheckpointError, match=r"body\.0\.bias"):
        Trainer(verbose=False, **QUIET).test(Tuned(seed=5), loader(), ckpt_path=path, verbose=False)


def test_a_module_with_other_layers_is_an_error_that_names_them(tmp_path: Path) -> None:
    fit(tmp_path, Tuned())
    larger = Tuned()
    larger.extra = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"Missing: extra\.bias, extra\.weight"):
        fit(tmp_path / "larger", larger, ckpt_path=tmp_path / "epoch=0-step=3")
    smaller = Tuned()
    del smaller.body[3]
    with pytest.raises(ConfigurationError, match=r"Unexpected: body\.3\.bias, body\.3\.weight"):
        fit(tmp_path / "smaller", smaller, ckpt_path=tmp_path / "epoch=0-step=3")


def test_a_checkpoint_is_loaded_and_tested_without_a_fit(tmp_path: Path) -> None:
    module = Tuned()
    fit(tmp_path, module, max_steps=3)
    path = tmp_path / "epoch=0-step=3"
    assert not differences(Tuned.load_from_checkpoint(path).state_dict(), module.state_dict())
    trainer = Trainer(verbose=False, **QUIET)
    again = trainer.test(Tuned(), loader(), ckpt_path=path, verbose=False)
    assert again == trainer.test(module, loader(), verbose=False)


def test_weights_only_and_trainable_only_hold_trained_weights_alone(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_weights_only=True, trainable_only=True, every_n_train_steps=1)
    trainer = Trainer(callbacks=[checkpoint], max_steps=1, verbose=False, **QUIET | {"enable_checkpointing": True})
    module = Tuned()
    trainer.fit(module, loader())
    assert not CheckpointReader(checkpoint.best_model_path).optimizer_count()
    assert not differences(Tuned.load_from_checkpoint(checkpoint.best_model_path).state_dict(), module.state_dict())


def test_a_resume_of_a_whole_checkpoint_notes_what_the_script_built(tmp_path: Path) -> None:
    whole = ModelCheckpoint(tmp_path / "whole", every_n_train_steps=3, save_top_k=-1)
    trainer = Trainer(callbacks=[whole], max_steps=3, verbose=False, **QUIET | {"enable_checkpointing": True})
    trainer.fit(Tuned(seed=5), loader())
    # The script now builds other frozen weights than the checkpoint has, so the new checkpoint must hold them.
    resumed = Tuned()
    fit(tmp_path / "resumed", resumed, ckpt_path=whole.best_model_path, max_steps=6)
    [path] = (tmp_path / "resumed").glob("epoch=*-step=6")
    assert "body.0.weight" in saved_names(path)
    assert not differences(Tuned.load_from_checkpoint(path).state_dict(), resumed.state_dict())


def test_averaged_weights_are_saved_in_place_of_the_trained_ones(tmp_path: Path) -> None:
    module = Tuned()
    fit(tmp_path, module, WeightAveraging(), max_steps=3)
    assert saved_names(tmp_path / "epoch=0-step=3") >= {"head.weight", "head.bias"}
    assert not differences(Tuned.load_from_checkpoint(tmp_path / "epoch=0-step=3").state_dict(), module.state_dict())


def test_weights_in_another_precision_are_compared_in_that_of_the_run(tmp_path: Path) -> None:
    module = Tuned()
    fit(tmp_path, module, precision="bf16-true", max_steps=3)
    loaded = Tuned.load_from_checkpoint(tmp_path / "epoch=0-step=3")
    assert torch.equal(loaded.head.weight, module.head.weight.float())
    with pytest.raises(CheckpointError, match=r"body\.0\.bias"):
        Tuned.load_from_checkpoint(tmp_path / "epoch=0-step=3", seed=5)


class Unfreeze(Callback):
    """Trains a frozen layer from the second epoch on."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.body[3].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.body[3].parameters())})


def test_a_layer_that_is_unfrozen_is_in_the_checkpoints_from_then_on(tmp_path: Path) -> None:
    whole, resumed = Tuned(), Tuned()
    trainer = fit(tmp_path / "whole", whole, Unfreeze(), max_steps=15)
    folder = tmp_path / "whole"
    assert "body.3.weight" not in saved_names(folder / "epoch=0-step=6")
    assert "body.3.weight" in saved_names(folder / "epoch=1-step=12")
    fit(tmp_path / "resumed", resumed, Unfreeze(), ckpt_path=folder / "epoch=0-step=6", max_steps=15)
    assert not differences(resumed.state_dict(), whole.state_dict())
    with pytest.raises(CheckpointError, match="trained since"):
        trainer.test(whole, loader(), ckpt_path=folder / "epoch=0-step=6", verbose=False)


def test_a_rollback_within_a_fit_ends_like_the_saved_step(tmp_path: Path) -> None:
    class Back(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5 and not hasattr(self, "before"):
                self.before = CheckpointReader(trainer.checkpoint_callback.best_model_path).model(["head.weight"])
                trainer.roll_back()
                self.after = module.head.weight.detach().clone()

    back = Back()
    fit(tmp_path, Tuned(), back)
    assert torch.equal(back.after, back.before["head.weight"])


class Refusing(SingleDeviceStrategy):
    refusals = {"trainable_only": "it keeps weights elsewhere"}  # noqa: RUF012


def test_a_strategy_that_cannot_compare_refuses_before_it_trains(tmp_path: Path) -> None:
    module = Tuned()
    with pytest.raises(ConfigurationError, match="it keeps weights elsewhere"):
        fit(tmp_path, module, strategy=Refusing())
    assert not list(tmp_path.glob("epoch=*"))
    for strategy in (DeepSpeedStrategy, XLAStrategy):
        assert "trainable_only" in strategy().refusals


def test_saving_so_without_a_note_of_the_start_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(max_steps=1, verbose=False, **QUIET)
    trainer.fit(Tuned(), loader())
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint\(trainable_only=True\)"):
        trainer.save_checkpoint(tmp_path / "one", trainable_only=True)
    assert not (tmp_path / "one").exists()


class Bits(nn.Module):
    """One tensor, as a buffer of any dtype."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300_000,), (3, 300_000), (600, 601), (2, 2, 5)], ids=str)
def test_each_single_element_changes_the_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = digests_of(Bits(tensor))["tensor"]
    assert digests_of(Bits(tensor.clone()))["tensor"] == before
    for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
        changed = tensor.clone()
        flat = changed.view(torch.uint8).view(-1) if changed.dim() else changed.reshape(1).view(torch.uint8)
        flat[place * tensor.element_size()] ^= 1
        if changed.dim():
            assert digests_of(Bits(changed))["tensor"] != before, place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex128], ids=str)
def test_changes_of_many_elements_do_not_cancel(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 41).view(8, 5).to(dtype)
    changes = [tensor.neg(), tensor * 2, torch.cat([tensor[:2].neg(), tensor[2:]])]
    if dtype == torch.int64:
        changes += [tensor + 2**62, tensor + 2**62 + 2**62]
    digests = [digests_of(Bits(one))["tensor"] for one in (tensor, *changes)]
    assert len(set(digests)) == len(digests)


def test_the_digest_is_of_values_in_their_places() -> None:
    tensor = torch.rand(4, 6)
    before = digests_of(Bits(tensor))
    assert digests_of(Bits(tensor.t().contiguous().t())) == before
    assert digests_of(Bits(tensor.flip(0))) != before
    assert digests_of(Bits(tensor.flip(1))) != before
    assert digests_of(Bits(tensor.view(6, 4))) != before
    assert digests_of(Bits(tensor.view(torch.int32))) != before
    assert digests_of(Bits(tensor.to_sparse())).keys() == before.keys()

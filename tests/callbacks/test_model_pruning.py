"""ModelPruning: equality with torch.nn.utils.prune, lasting zeros, resumes, and sharded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge_json
from models import QUIET, Line, Squares
from ranks.world import run_world
from same import numbers_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, prune
from torch.utils.data import DataLoader

from leyden import Callback, ConfigurationError, Trainer
from leyden.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from leyden.strategies import MeshStrategy

CLIP = 0.01
"""Below the norm of every gradient, so clipping always acts. Gradients of pruned weights must not count."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


class Pruned(Squares):
    """Has weight decay, momentum and clipping, each of which would change pruned weights."""

    def __init__(self) -> None:
        super().__init__(net(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1))


def data() -> DataLoader[Any]:
    return DataLoader(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), 4)  # type: ignore[arg-type]


def fit(callback: Any, module: Any = None, ckpt_path: Any = None, **arguments: Any) -> Any:
    module = module or Pruned()
    trainer = Trainer(**{**QUIET, "max_epochs": 3, "gradient_clip_val": CLIP, "callbacks": callback, **arguments})
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return module


def zeros(module: nn.Module) -> list[int]:
    return [int((parameter == 0).sum()) for parameter in module.parameters()]


def plain_loop(prune_once: Any) -> nn.Module:
    module = Pruned()
    optimizer, layers = module.configure_optimizers(), (module.net[0], module.net[2])
    for _ in range(3):
        for batch in data():
            optimizer.zero_grad()
            module.loss(batch).backward()
            assert clip_grad_norm_(module.parameters(), CLIP) > CLIP
            optimizer.step()
        # torch masks weights in the forward pass, and its pruning compares the weights of the last one.
        module(torch.zeros(1, 4))
        prune_once([(layer, name) for layer in layers for name in ("weight", "bias")])
    for layer in layers:
        for name in ("weight", "bias"):
            if hasattr(layer, f"{name}_mask"):
                prune.remove(layer, name)
    return module


@pytest.mark.parametrize("amount", [0.3, 7])
def test_global_pruning_equals_torch_bit_for_bit(amount: float) -> None:
    expected = plain_loop(lambda found: prune.global_unstructured(found, prune.L1Unstructured, amount=amount))
    module = fit(ModelPruning("l1_unstructured", amount=amount))
    assert numbers_of(module) == {name: expected.state_dict()[name].flatten().tolist() for name in module.state_dict()}
    assert sum(zeros(module)) == (38 if amount == 0.3 else 21)
    assert not prune.is_pruned(module)


def test_structured_pruning_equals_torch_bit_for_bit() -> None:
    expected = plain_loop(lambda found: [prune.ln_structured(found[0][0], "weight", amount=2, n=2, dim=0)])
    module = Pruned()
    arguments = {"amount": 2, "pruning_dim": 0, "pruning_norm": 2, "use_global_unstructured": False}
    fit(ModelPruning("ln_structured", [(module.net[0], "weight")], **arguments), module)
    assert numbers_of(module) == {name: expected.state_dict()[name].flatten().tolist() for name in module.state_dict()}
    assert zeros(module) == [24, 0, 0, 0]


class Smallest(prune.BasePruningMethod):
    """Prunes all weights below a bound."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        return default_mask * (t.abs() > self.amount)


def test_functions_choose_epochs_and_subclasses_choose_parameters() -> None:
    class PrunesWeights(ModelPruning):
        PARAMETER_NAMES = ("weight",)

        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            self.found = list(parameters_to_prune)
            return self.found[1:]

        def apply_pruning(self, amount: float) -> None:
            self.amounts = [*getattr(self, "amounts", []), amount]
            super().apply_pruning(amount)

    module = Pruned()
    callback = PrunesWeights(Smallest, amount=lambda epoch: 0.1 * epoch, apply_pruning=lambda epoch: epoch != 1)
    fit(callback, module)
    assert callback.found == [(module.net[0], "weight"), (module.net[2], "weight")]
    assert callback.amounts == [0.2]
    assert zeros(module)[2] > 0 == zeros(module)[0]
    assert zeros(fit(ModelPruning(prune.l1_unstructured, amount=None))) == [0] * 4
    assert zeros(fit(ModelPruning("random_unstructured", parameter_names=["bias"], amount=0.5)))[::2] == [0, 0]


def test_pruning_after_validation_skips_the_sanity_check(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="leyden")
    module = Pruned()
    callback = ModelPruning("L1_unstructured", amount=0.5, prune_on_train_epoch_end=False, verbose=2)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=callback)
    trainer.fit(module, data(), data())
    assert sum(zeros(module)) == 29
    lines = [record.getMessage() for record in caplog.records if record.filename == "model_pruning.py"]
    assert lines[0].endswith("raised the number of zero weights from 0/58 (0.00%) to 29/58 (50.00%).")
    assert len(lines) == 5 and lines[1].startswith("  net.0.weight, amount 0.5: 0/24 (0.00%) -> ")


def test_the_lottery_ticket_restores_the_initial_weights() -> None:
    first = net().state_dict()
    module = fit(ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=lambda epoch: epoch == 2))
    for name, tensor in module.net.state_dict().items():
        assert torch.equal(tensor, torch.where(tensor == 0, 0.0, first[name]))
    always = ModelPruning("l1_unstructured", use_lottery_ticket_hypothesis=True, resample_parameters=True, amount=0.2)
    module = fit(always)
    assert sum(zeros(module)) == 28
    assert not any(torch.equal(tensor, first[name]) for name, tensor in module.net.state_dict().items())


@pytest.mark.parametrize("lottery", [False, True])
def test_a_resume_is_exact_and_checkpoints_load_into_plain_modules(tmp_path: Path, lottery: bool) -> None:
    def callback() -> ModelPruning:
        return ModelPruning("random_unstructured", amount=0.2, use_lottery_ticket_hypothesis=lottery)

    straight = fit(callback())
    half = Trainer(**QUIET, max_epochs=2, gradient_clip_val=CLIP, callbacks=callback())
    half.fit(Pruned(), data())
    half.save_checkpoint(tmp_path / "half")
    plain = Pruned.load_from_checkpoint(tmp_path / "half")
    assert sum(zeros(plain)) == 21
    assert numbers_of(fit(callback(), ckpt_path=tmp_path / "half")) == numbers_of(straight)


@pytest.mark.parametrize(
    "averages", [EMAWeightAveraging(decay=0.5), StochasticWeightAveraging(0.01, swa_epoch_start=1)]
)
def test_averaged_weights_are_pruned_too(averages: Any) -> None:
    assert sum(zeros(fit([ModelPruning("l1_unstructured", amount=0.5), averages]))) == 51


def test_masks_stay_on_the_module_unless_pruning_is_permanent() -> None:
    callback = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False)
    module = fit(callback)
    assert prune.is_pruned(module) and "net.0.weight_mask" in module.state_dict()
    effective = module.net[0].weight.clone()
    callback.make_pruning_permanent(module)
    assert not prune.is_pruned(module) and torch.equal(module.net[0].weight, effective)


def test_continued_and_new_fits_keep_pruned_weights() -> None:
    callback = ModelPruning("l1_unstructured", amount=lambda epoch: 0.5 if epoch == 0 else 0)
    module, trainer = Pruned(), Trainer(**QUIET, max_epochs=1, callbacks=callback)
    trainer.fit(module, data())
    before = zeros(module)
    trainer.max_epochs = 3
    trainer.fit(module, data(), ckpt_path="current")
    assert zeros(module) == before and sum(before) == 29
    left = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False)
    module = fit(left, max_epochs=1)
    assert prune.is_pruned(module)
    fit(left, module, max_epochs=1)
    left.make_pruning_permanent(module)
    assert sum(zeros(module)) == 43


def test_a_rollback_undoes_later_pruning(tmp_path: Path) -> None:
    class RollsBack(Pruned):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(sum(zeros(self)))
            if len(self.seen) == 5:
                self.trainer.roll_back()

    module = RollsBack()
    callbacks = [ModelPruning("l1_unstructured", amount=0.5), ModelCheckpoint(tmp_path, every_n_train_steps=3)]
    fit(callbacks, module, enable_checkpointing=True)
    # The checkpoint is from the third batch, before its epoch was pruned. The sixth batch follows the rollback.
    assert module.seen[:6] == [0, 0, 0, 29, 29, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pruning_fn": "l2_unstructured"}, "l1_unstructured"),
        ({"pruning_fn": print}, "subclass of torch.nn.utils.prune.BasePruningMethod"),
        ({"pruning_fn": "ln_structured", "use_global_unstructured": False}, "set pruning_dim"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0, "use_global_unstructured": False}, "set pruning_norm"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "set use_global_unstructured=False"),
        ({"pruning_fn": "l1_unstructured", "amount": 1.5}, "from 0.0 to 1.0"),
        ({"pruning_fn": "l1_unstructured", "amount": True}, "amount=True"),
        ({"pruning_fn": "l1_unstructured", "verbose": 3}, "give 0, 1 or 2"),
        ({"pruning_fn": "l1_unstructured", "resample_parameters": True}, "use_lottery_ticket_hypothesis=True"),
    ],
)
def test_invalid_arguments_raise(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ModelPruning(**arguments)


def test_unsupported_parameters_and_callbacks_raise_before_the_first_step() -> None:
    with pytest.raises(ConfigurationError, match="of a module that is not part of Line"):
        fit(ModelPruning("l1_unstructured", [(nn.Linear(1, 1), "weight")]), Line(4))
    with pytest.raises(ConfigurationError, match="Linear has no parameter 'weights'"):
        fit(ModelPruning("l1_unstructured", [(nn.Linear(1, 1), "weights")]), Line(4))
    with pytest.raises(ConfigurationError, match="found nothing to prune"):
        fit(ModelPruning("l1_unstructured", parameter_names=["gain"]), Line(4))
    with pytest.raises(ConfigurationError, match="cannot prune that many weights"):
        fit(ModelPruning("l1_unstructured", amount=40))
    tied = Pruned()
    tied.net[2].weight = nn.Parameter(tied.net[0].weight.detach().T.contiguous())
    tied.also = tied.net[2]
    with pytest.raises(ConfigurationError, match="would untie its shared weights"):
        fit(ModelPruning("l1_unstructured", make_pruning_permanent=False), tied)
    with pytest.raises(ConfigurationError, match="averages have replaced the weights"):
        fit([ModelPruning("l1_unstructured", prune_on_train_epoch_end=False), EMAWeightAveraging()])
    module = Line(4)
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="LBFGS evaluates the loss within a step"):
        fit(ModelPruning("l1_unstructured"), module, gradient_clip_val=None)


class SeedsByRank(Callback):
    """Seeds each rank differently."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        torch.manual_seed(trainer.global_rank)


def on_ranks(folder: str) -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        for method in ("l1_unstructured", "random_unstructured"):
            found[strategy, method] = numbers_of(
                fit([SeedsByRank(), ModelPruning(method, amount=0.2)], strategy=strategy)
            )
    path = Path(folder) / "half"
    half = Trainer(
        **QUIET,
        strategy="fsdp",
        max_epochs=2,
        gradient_clip_val=CLIP,
        callbacks=[ModelPruning("l1_unstructured", amount=0.2)],
    )
    half.fit(Pruned(), data())
    half.save_checkpoint(path)
    for strategy in ("fsdp", "ddp"):
        again = fit(ModelPruning("l1_unstructured", amount=0.2), strategy=strategy, ckpt_path=path)
        found[strategy, "resumed"] = numbers_of(again)
    return found


def test_ranks_and_shards_prune_the_same_weights(tmp_path: Path) -> None:
    first, second = run_world(2, on_ranks, str(tmp_path))
    assert first == second
    flat = {
        key: torch.tensor([value for values in found.values() for value in values])
        for key, found in first.items()
        if isinstance(key, tuple)
    }
    assert {int((values == 0).sum()) for values in flat.values()} == {28}
    expected = flat["ddp", "l1_unstructured"]
    for key in (("fsdp", "l1_unstructured"), ("fsdp", "resumed"), ("ddp", "resumed")):
        torch.testing.assert_close(flat[key], expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(flat["fsdp", "resumed"], flat["fsdp", "l1_unstructured"])


def sharded() -> None:
    fit(ModelPruning("l1_unstructured", make_pruning_permanent=False), strategy="fsdp")


def pipelined() -> None:
    fit(ModelPruning("l1_unstructured"), strategy=MeshStrategy(pp=2))


@pytest.mark.parametrize(
    ("function", "words"), [(sharded, "needs whole weights"), (pipelined, "gives no access to them")]
)
def test_strategies_without_whole_weights_raise(function: Any, words: str) -> None:
    assert any(words in str(error) for error in run_world(2, function, may_fail=True))


def test_several_prunings_in_one_fit_keep_their_own_masks(tmp_path: Path) -> None:
    def run(epochs: int, ckpt_path: Any = None) -> Any:
        module = Pruned()
        layers = [module.net[0], module.net[2]]
        callbacks = [ModelPruning("random_unstructured", [(layer, "weight")], amount=0.2) for layer in layers]
        trainer = Trainer(**QUIET, max_epochs=epochs, callbacks=callbacks)
        trainer.fit(module, data(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{epochs}")
        assert len({callback.state_key for callback in callbacks}) == 2
        return module

    straight = run(3)
    run(2)
    assert numbers_of(run(3, tmp_path / "2")) == numbers_of(straight)


def test_the_masks_of_an_earlier_version_are_loaded(tmp_path: Path) -> None:
    def rename(content: Any) -> None:
        (key,) = (key for key in content["tree"] if key.startswith("ModelPruning"))
        content["tree"] = {"ModelPruning": content["tree"][key]}

    half = Trainer(**QUIET, max_epochs=2, callbacks=ModelPruning("l1_unstructured", amount=0.2))
    half.fit(Pruned(), data())
    half.save_checkpoint(tmp_path / "half")
    forge_json(tmp_path / "half", "callbacks.json", rename)
    callback = ModelPruning("l1_unstructured", amount=0.0)
    assert sum(zeros(fit(callback, ckpt_path=tmp_path / "half"))) == 21

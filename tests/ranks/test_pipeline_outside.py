"""A model under a pipeline, used outside of its steps: refused in words, not nan; fitted, saved and copied as ever."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import Callback
from leyden.strategies import MeshStrategy
from leyden.strategies.errors import ConfigurationError

OUTSIDE = "was run outside of a step, and this rank holds only some stages of its pipeline"


class Generating(Callback):
    """Runs the model, its parts and a copy of it between epochs; copies it between steps too."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.of_copy: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: GPT, *_: Any) -> None:
        copied = copy.deepcopy(module)
        pairs = zip(copied.parameters(), module.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs if not pair[1].isnan().any())

    def on_train_epoch_end(self, trainer: Any, module: GPT) -> None:
        self.said = outside(module)
        self.of_copy = outside(copy.deepcopy(module))


def outside(module: GPT) -> list[str]:
    """What calls of the model and of its parts raise, and "" for those that nothing keeps from running."""
    x = torch.zeros(1, 4, 32)
    calls: list[Callable[[], Any]] = [
        lambda: module(torch.zeros(1, 4, dtype=torch.long)),
        lambda: module.forward(torch.zeros(1, 4, dtype=torch.long)),
        *(lambda block=block: block(x) for block in module.blocks),
        lambda: module.blocks[3].up(x),
        lambda: module.head(x),
    ]
    return [said_by(call) for call in calls]


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


class Taught(GPT):
    """Runs a copy of a block that the first stage holds between two blocks of it, and drops what it returns."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.teachers: list[nn.Module] = []

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 0:
            self.teachers.append(copy.deepcopy(self.blocks[1]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.teachers:
                self.teachers[0](torch.zeros_like(x))
        return self.head(self.norm(x))


class Nested(GPT):
    """The blocks and the norm are in a model of their own, which a step calls by its parts."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.net = nn.Sequential(self.blocks, nn.ModuleDict({"norm": self.norm}))
        del self.blocks, self.norm
        self.net.offset = nn.Parameter(torch.zeros(32))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])) + self.net.offset
        for block in self.net[0]:
            x = block(x)
        return self.head(self.net[1]["norm"](x))


def loader() -> DataLoader[Any]:
    return DataLoader(data(16), 8)


def trainer_of(strategy: dict[str, Any], **arguments: Any) -> Trainer:
    strategy = {"pp": 2, "dp_shard": 1, "microbatches": 2, **strategy}
    return Trainer(strategy=MeshStrategy(**strategy), **{**QUIET, "max_epochs": 1, **arguments})


def set_up_again(module: GPT, **strategy: Any) -> str:
    chosen = MeshStrategy(**strategy)
    chosen.setup_environment()
    return said_by(lambda: chosen.setup_modules([module]))


def used(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, callback = GPT(depth=4), Generating()
    trainer = trainer_of({}, callbacks=[callback])
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder)
    found: dict[str, Any] = {
        "within": callback.said,
        "copy within": callback.of_copy,
        "after": outside(module),
    }
    copied = copy.deepcopy(module)
    found["copy"] = outside(copied)
    found["unpickled"] = outside(pickle.loads(pickle.dumps(strip(copied))))
    trainer_of({}).fit(module, loader())
    found["losses"] = list(module.losses)
    found["again"] = outside(module)
    found["predicted"] = torch.cat(trainer_of({}).predict(module, loader()) or []).numpy()
    restored = trainer_of({}, max_epochs=2)
    restored.fit(module, loader(), ckpt_path=folder)
    found["restored"] = list(module.losses)
    found["other split"] = set_up_again(module, pp=2, split=["blocks.3"])
    found["other schedule"] = set_up_again(module, pp=2, schedule="Interleaved1F1B")
    found["no pipeline"] = set_up_again(module, dp_shard=2)
    whole = GPT(depth=4)
    assert not set_up_again(whole, dp_shard=2)
    found["pipeline after shards"] = set_up_again(whole, pp=2)
    torch.manual_seed(0)
    nested = Nested()
    trainer_of({"pipeline_module": "net.0", "last_stage": ["head"]}).fit(nested, loader())
    torch.manual_seed(0)
    taught = Taught()
    trainer_of({}).fit(taught, loader())
    found["taught"] = taught.losses
    found["nested"] = [*nested.losses, said_by(lambda: nested.net(torch.zeros(1, 4, 32)))]
    return found


def strip(module: GPT) -> GPT:
    """Without the Trainer, which no module is pickled with."""
    module.__dict__.pop("_trainer", None)
    return module


def single(kind: Callable[[], GPT], epochs: int) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    module = kind()
    trainer = Trainer(strategy="single_device", max_epochs=epochs, **QUIET)
    trainer.fit(module, loader())
    return module.losses, torch.cat(trainer.predict(module, loader()) or []).numpy()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, used, str(tmp_path_factory.mktemp("outside") / "saved"))


@pytest.mark.parametrize("when", ["within", "copy within", "after", "copy", "unpickled", "again"])
def test_the_model_and_what_other_ranks_hold_are_refused_outside_of_steps(
    ranks: list[dict[str, Any]], when: str
) -> None:
    for rank, found in enumerate(ranks):
        whole, forward, *blocks, part, head = found[when]
        assert whole.startswith(f"the model {OUTSIDE}")
        assert forward.startswith(f"'{'blocks.2' if rank == 0 else 'places'}' {OUTSIDE}")
        assert [bool(said) for said in blocks] == (
            [False, False, True, True] if rank == 0 else [True] * 2 + [False] * 2
        )
        assert part.startswith(f"'blocks.3.up' {OUTSIDE}") is (rank == 0)
        assert not head, "both stages hold the tied weights"


def test_a_model_is_fitted_predicted_and_restored_again(ranks: list[dict[str, Any]]) -> None:
    losses, predicted = single(lambda: GPT(depth=4), 2)
    assert ranks[1]["losses"] == pytest.approx(losses, abs=1e-5)
    # The checkpoint is that of the first epoch.
    assert ranks[1]["restored"] == pytest.approx(losses + losses[2:], abs=1e-5)
    for rank in ranks:
        assert abs(rank["predicted"] - predicted).max() < 1e-4


def test_a_copy_of_a_block_that_a_step_runs_is_no_part_of_the_pipeline(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["taught"] == pytest.approx(single(Taught, 1)[0], abs=1e-5)


def test_another_cut_of_a_model_that_is_cut_already_is_refused(ranks: list[dict[str, Any]]) -> None:
    at = "cut into 2 pipeline stages at blocks.0, blocks.2 by an earlier run, and would be"
    for rank in ranks:
        assert f"{at} cut into 2 pipeline stages at blocks.0, blocks.3 by this one" in rank["other split"]
        assert f"{at} cut into 4 pipeline stages at blocks.0, blocks.1, blocks.2, blocks.3" in rank["other schedule"]
        assert f"{at} left without pipeline stages by this one" in rank["no pipeline"]
        assert "left without pipeline stages by an earlier run, and would be cut" in rank["pipeline after shards"]


def test_a_step_may_call_parts_within_what_other_stages_hold(ranks: list[dict[str, Any]]) -> None:
    *losses, said = ranks[1]["nested"]
    assert losses == pytest.approx(single(Nested, 1)[0], abs=1e-5)
    assert said.startswith(f"'net' {OUTSIDE}")


def beside(strategy: dict[str, Any]) -> tuple[str, str, int]:
    module = GPT(depth=4)
    trainer = trainer_of(strategy)
    trainer.fit(module, loader())
    other = module.blocks[0 if trainer.strategy.ranks.global_rank > 1 else 3]
    whole = said_by(lambda: module(torch.zeros(1, 4, dtype=torch.long)))
    part = said_by(lambda: other(torch.zeros(1, 4, 32)))
    trainer_of(strategy).fit(module, loader())
    return whole, part, len(module.losses)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [{"dp_shard": 2}, {"tp": 2, "plan": PLAN}], ids=["fsdp", "tp"])
def test_a_model_is_refused_outside_of_steps_beside_other_dimensions(strategy: dict[str, Any]) -> None:
    for rank, (whole, part, steps) in enumerate(run_world(4, beside, strategy)):
        assert whole.startswith(f"the model {OUTSIDE}")
        assert part.startswith(f"'blocks.{3 if rank < 2 else 0}' {OUTSIDE}")
        assert steps == (0 if rank < 2 else 4 if "tp" in strategy else 2)

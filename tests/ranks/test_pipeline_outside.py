"""A model under a pipeline, used outside of its steps: running it raises; fitting, saving and copying it works."""

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
from leyden.core.errors import ConfigurationError
from leyden.strategies import MeshStrategy

OUTSIDE = "was run outside of a step, and this rank holds only some stages of its pipeline"


class RunsModelOutside(Callback):
    """Runs the model, its parts and a copy of it between epochs; also copies it between steps."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.copy_errors: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: GPT, *_: Any) -> None:
        copied = copy.deepcopy(module)
        pairs = zip(copied.parameters(), module.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs if not pair[1].isnan().any())

    def on_train_epoch_end(self, trainer: Any, module: GPT) -> None:
        self.errors = errors_outside(module)
        self.copy_errors = errors_outside(copy.deepcopy(module))


def errors_outside(module: GPT) -> list[str]:
    """Returns the errors of calls of the model and of its parts, "" for calls that succeed."""
    x = torch.zeros(1, 4, 32)
    calls: list[Callable[[], Any]] = [
        lambda: module(torch.zeros(1, 4, dtype=torch.long)),
        lambda: module.forward(torch.zeros(1, 4, dtype=torch.long)),
        *(lambda block=block: block(x) for block in module.blocks),
        lambda: module.blocks[3].up(x),
        lambda: module.head(x),
    ]
    return [error_of(call) for call in calls]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


class WithTeacher(GPT):
    """Runs a copy of a block of the first stage between two of its blocks, and drops the output."""

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
    """Holds its blocks and norm in a submodule, of which a step calls only parts."""

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
    return error_of(lambda: chosen.setup_modules([module]))


def run_all(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, callback = GPT(depth=4), RunsModelOutside()
    trainer = trainer_of({}, callbacks=[callback])
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder)
    found: dict[str, Any] = {
        "within": callback.errors,
        "copy within": callback.copy_errors,
        "after": errors_outside(module),
    }
    copied = copy.deepcopy(module)
    found["copy"] = errors_outside(copied)
    found["unpickled"] = errors_outside(pickle.loads(pickle.dumps(strip(copied))))
    trainer_of({}).fit(module, loader())
    found["losses"] = list(module.losses)
    found["again"] = errors_outside(module)
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
    with_teacher = WithTeacher()
    trainer_of({}).fit(with_teacher, loader())
    found["with_teacher"] = with_teacher.losses
    found["nested"] = [*nested.losses, error_of(lambda: nested.net(torch.zeros(1, 4, 32)))]
    return found


def strip(module: GPT) -> GPT:
    """Removes the Trainer, with which no module can be pickled, and returns the module."""
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
    return run_world(2, run_all, str(tmp_path_factory.mktemp("outside") / "saved"))


@pytest.mark.parametrize("when", ["within", "copy within", "after", "copy", "unpickled", "again"])
def test_running_the_model_or_parts_of_other_ranks_outside_of_steps_raises(
    ranks: list[dict[str, Any]], when: str
) -> None:
    for rank, found in enumerate(ranks):
        whole, forward, *blocks, part, head = found[when]
        assert whole.startswith(f"the model {OUTSIDE}")
        assert forward.startswith(f"'{'blocks.2' if rank == 0 else 'places'}' {OUTSIDE}")
        assert [bool(error) for error in blocks] == (
            [False, False, True, True] if rank == 0 else [True] * 2 + [False] * 2
        )
        assert part.startswith(f"'blocks.3.up' {OUTSIDE}") is (rank == 0)
        assert not head, "the tied head raised, although both stages hold it"


def test_a_pipelined_model_can_be_fitted_predicted_and_restored_again(ranks: list[dict[str, Any]]) -> None:
    losses, predicted = single(lambda: GPT(depth=4), 2)
    assert ranks[1]["losses"] == pytest.approx(losses, abs=1e-5)
    # The checkpoint was saved after the first epoch.
    assert ranks[1]["restored"] == pytest.approx(losses + losses[2:], abs=1e-5)
    for rank in ranks:
        assert abs(rank["predicted"] - predicted).max() < 1e-4


def test_a_copy_of_a_block_run_in_a_step_is_not_part_of_the_pipeline(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["with_teacher"] == pytest.approx(single(WithTeacher, 1)[0], abs=1e-5)


def test_cutting_a_pipelined_model_differently_raises(ranks: list[dict[str, Any]]) -> None:
    at = "cut into 2 pipeline stages at blocks.0, blocks.2 by an earlier run, and would be"
    for rank in ranks:
        assert f"{at} cut into 2 pipeline stages at blocks.0, blocks.3 by this one" in rank["other split"]
        assert f"{at} cut into 4 pipeline stages at blocks.0, blocks.1, blocks.2, blocks.3" in rank["other schedule"]
        assert f"{at} left without pipeline stages by this one" in rank["no pipeline"]
        assert "left without pipeline stages by an earlier run, and would be cut" in rank["pipeline after shards"]


def test_a_step_may_call_parts_of_a_submodule_that_spans_stages(ranks: list[dict[str, Any]]) -> None:
    *losses, error = ranks[1]["nested"]
    assert losses == pytest.approx(single(Nested, 1)[0], abs=1e-5)
    assert error.startswith(f"'net' {OUTSIDE}")


def fit_with_other_dimensions(strategy: dict[str, Any]) -> tuple[str, str, int]:
    module = GPT(depth=4)
    trainer = trainer_of(strategy)
    trainer.fit(module, loader())
    other = module.blocks[0 if trainer.strategy.ranks.global_rank > 1 else 3]
    whole = error_of(lambda: module(torch.zeros(1, 4, dtype=torch.long)))
    part = error_of(lambda: other(torch.zeros(1, 4, 32)))
    trainer_of(strategy).fit(module, loader())
    return whole, part, len(module.losses)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [{"dp_shard": 2}, {"tp": 2, "plan": PLAN}], ids=["fsdp", "tp"])
def test_running_the_model_outside_of_steps_raises_with_other_dimensions(strategy: dict[str, Any]) -> None:
    for rank, (whole, part, steps) in enumerate(run_world(4, fit_with_other_dimensions, strategy)):
        assert whole.startswith(f"the model {OUTSIDE}")
        assert part.startswith(f"'blocks.{3 if rank < 2 else 0}' {OUTSIDE}")
        assert steps == (0 if rank < 2 else 4 if "tp" in strategy else 2)

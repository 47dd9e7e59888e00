"""Experts divided over ranks within the stages of a pipeline: the numbers are those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mixture import PLAN, SGD, SPLIT_PLAN, TENSOR_PLAN, Mixture, data
from ranks.world import run_world
from same import differences
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leyden import Accelerator, Trainer
from leyden.callbacks import ExpertBalancing
from leyden.core.errors import ConfigurationError
from leyden.strategies import ExpertBalancer, MeshStrategy
from leyden.strategies.fsdp.sharding import local

GLOBAL_BATCH, SAMPLES, DEPTH = 8, 25, 4
"""The last global batch has a single sample, so a data rank has none, and the other one has fillers."""
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
CASES: dict[str, dict[str, Any]] = {
    "1F1B": {},
    "AdamW, GPipe": {"optimizer": ADAMW, "schedule": "GPipe", "microbatches": 2},
    "Interleaved1F1B, recomputed": {"schedule": "Interleaved1F1B", "activation_checkpointing_policy": {"Block"}},
    "accumulated": {"accumulate_grad_batches": 3},
    "by items": {"accumulate_grad_batches": 2, "by_items": True},
    "experts without a token": {"starved": 2},
    "recomputed experts": {"activation_checkpointing_policy": {"Experts"}},
    "freed after forward": {"reshard_after_forward": True},
    "biased": {"balances": True, "accumulate_grad_batches": 2, "log_every_n_steps": 1},
    "biased, recomputed": {"balances": True, "activation_checkpointing_policy": {"Block"}, "starved": 1},
}
"""Arguments of the module, the strategy and the Trainer."""
OF_MODULE = ("optimizer", "by_items", "starved", "has_bias")
OF_STRATEGY = ("schedule", "microbatches", "activation_checkpointing_policy", "reshard_after_forward")
Sizes = dict[str, Any] | None


class Validated(Mixture):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, _ = self(batch[0])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()))


def train(sizes: Sizes, arguments: dict[str, Any], plan: dict[str, str]) -> dict[str, Any]:
    """Trains for two epochs with validation, then predicts; in one process if `sizes` is None."""
    given = dict(arguments)
    of_module = {name: given.pop(name) for name in OF_MODULE if name in given}
    of_strategy = {name: given.pop(name) for name in OF_STRATEGY if name in given}
    balancing = ExpertBalancing(0.05) if given.pop("balances", False) else None
    chosen = {"microbatches": 4, **of_strategy, **(sizes or {}), "plan": plan}
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**chosen)
    torch.manual_seed(0)
    module = Validated(depth=DEPTH, **of_module)
    trainer = Trainer(
        strategy=strategy,
        max_epochs=2,
        precision="64-true",
        gradient_clip_val=0.5,
        callbacks=balancing,
        **QUIET,
        **given,
    )
    batch_size = GLOBAL_BATCH // trainer.strategy.data_size
    trainer.fit(module, DataLoader(data(SAMPLES), batch_size), DataLoader(data(9), batch_size))
    predicted = trainer.predict(module, DataLoader(data(3), batch_size)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    own = trainer.strategy.held(p for block in module.blocks for p in block.experts.parameters())
    return {
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "counts": {} if balancing is None else balancing.counts,
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).numpy(),
        "held": sum(local(p).numel() for p in own),
    }


def train_all(layouts: list[tuple[Sizes, dict[str, Any], dict[str, str]]]) -> list[dict[str, Any]]:
    return [{name: train(sizes, own, plan) for name, own in cases.items()} for sizes, cases, plan in layouts]


UNBIASED = {"unbiased": {"has_bias": False}}


@functools.cache
def expected(case: str) -> dict[str, Any]:
    return train(None, {**CASES, **UNBIASED}[case], {})


def check(ranks: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    for case in ranks[0]:
        single = expected(case)
        last = [rank[case]["losses"] for rank in ranks if rank[case]["losses"]]
        assert len(last) == len(ranks) // 2, case
        if case != "by items":
            # Whole global batches: the data ranks have as many samples each.
            means = [sum(losses) / len(last) for losses in zip(*(losses[:3] for losses in last), strict=True)]
            assert means == pytest.approx(single["losses"][:3], abs=1e-9), case
        for rank in ranks:
            assert rank[case]["metrics"] == pytest.approx(single["metrics"], abs=1e-6), case
            assert rank[case]["counts"] == single["counts"], case
            assert abs(rank[case]["predicted"] - single["predicted"]).max() < 1e-8, case
            for name, value in single["weights"].items():
                exact = 0.0 if name.endswith("expert_bias") else 1e-9
                assert abs(rank[case]["weights"][name] - value).max() <= exact, (case, name)
    # Half of the blocks, and of their experts one in `shards`.
    shards = 2 * sizes["dp_shard"]
    for case in ranks[0].keys() & {"1F1B"}:
        assert {rank[case]["held"] for rank in ranks} == {expected(case)["held"] // shards}, case


def only(*names: str) -> dict[str, dict[str, Any]]:
    return {name: CASES[name] for name in names}


SOME = only("1F1B", "Interleaved1F1B, recomputed", "accumulated", "freed after forward", "biased")
EP2_PP2 = {"dp_shard": 2, "ep": 2, "pp": 2}
WORLDS: dict[str, tuple[int, list[Any]]] = {
    "4": (4, [(EP2_PP2, CASES, PLAN)]),
    "8": (
        8,
        [
            ({"dp_shard": 4, "ep": 2, "pp": 2, "microbatches": 2}, SOME, PLAN),
            ({"dp_shard": 4, "ep": 4, "pp": 2, "microbatches": 2}, only("1F1B", "experts without a token"), PLAN),
            ({**EP2_PP2, "dp_replicate": 2, "microbatches": 2}, only("1F1B", "biased"), PLAN),
            ({**EP2_PP2, "tp": 2}, only("accumulated", "biased"), TENSOR_PLAN | PLAN),
            ({**EP2_PP2, "tp": 2}, UNBIASED, SPLIT_PLAN | PLAN),
        ],
    ),
}
"""Ranks, and the sizes, cases and plan of each mesh on them."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["4", pytest.param("8", marks=pytest.mark.full)])
def test_experts_in_stages_train_like_one_process(name: str) -> None:
    world, layouts = WORLDS[name]
    found = run_world(world, train_all, layouts, timeout=800)
    for number, (sizes, _, _) in enumerate(layouts):
        check([rank[number] for rank in found], sizes)


# batches of different shapes ------------------------------------------------------------------------------------------
class OfLengths(Dataset[tuple[Tensor, Tensor]]):
    """Windows of tokens whose length depends on the half of the global batch, and for the second half on the batch."""

    def __len__(self) -> int:
        return 4 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch, place = divmod(index, GLOBAL_BATCH)
        length = 8 if place < GLOBAL_BATCH // 2 else (6, 6, 5, 3)[batch]
        tokens, labels = data(4 * GLOBAL_BATCH)[index]
        return tokens[:length], labels[:length]


def train_lengths(strategy: Any, window: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Mixture(depth=DEPTH, by_items=True)
    trainer = Trainer(strategy=strategy, max_epochs=1, precision="64-true", accumulate_grad_batches=window, **QUIET)
    trainer.fit(module, DataLoader(OfLengths(), GLOBAL_BATCH // 2))
    return {name: t.numpy() for name, t in trainer.strategy.full_state_dict(module, rank0_only=False).items()}


def train_lengths_in_stages() -> dict[str, Any]:
    return train_lengths(MeshStrategy(**EP2_PP2, microbatches=2, plan=PLAN), 1)


def test_a_data_rank_meets_new_shapes_alone() -> None:
    single = train_lengths("single_device", 2)
    for rank in run_world(4, train_lengths_in_stages):
        assert all(abs(rank[name] - value).max() < 1e-9 for name, value in single.items())


# checkpoints ----------------------------------------------------------------------------------------------------------
LAYOUTS: dict[str, Callable[[], Any]] = {
    "ep × pp": lambda: MeshStrategy(**EP2_PP2, microbatches=2, plan=PLAN),
    "pp": lambda: MeshStrategy(pp=2, microbatches=2),
    "ep": lambda: MeshStrategy(ep=2, plan=PLAN),
    "one process": lambda: "single_device",
}


def steps(layout: str, until: int, load: str | None = None, save: str | None = None) -> dict[str, Any]:
    """Trains to a step, from a checkpoint or from the start. Returns the weights."""
    torch.manual_seed(0 if load is None else 9)
    module = Mixture(depth=DEPTH, optimizer=ADAMW)
    trainer = Trainer(
        **QUIET, strategy=LAYOUTS[layout](), precision="64-true", max_epochs=-1, callbacks=ExpertBalancing(0.02)
    )
    loader = DataLoader(data(16), GLOBAL_BATCH // trainer.strategy.data_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=load, max_steps=until)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: t.numpy().copy() for name, t in trainer.strategy.full_state_dict(module, rank0_only=False).items()}


def save_and_resume(folder: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns weights under ep × pp: of a whole run, of one resumed on this layout, and of those resumed on others."""
    whole = steps("ep × pp", 6)
    steps("ep × pp", 3, save=f"{folder}/ep × pp")
    moved = {}
    for layout in ("pp", "ep"):
        moved[f"to {layout}"] = steps(layout, 6, load=f"{folder}/ep × pp")
        steps(layout, 3, save=f"{folder}/{layout}")
    for layout in ("pp", "ep", "one process"):
        moved[f"from {layout}"] = steps("ep × pp", 6, load=f"{folder}/{layout}")
    return whole, steps("ep × pp", 6, load=f"{folder}/ep × pp"), moved


def test_checkpoints_of_experts_in_stages_resume_exactly_and_move_between_layouts(tmp_path: Path) -> None:
    steps("one process", 3, save=f"{tmp_path}/one process")
    found = run_world(4, save_and_resume, str(tmp_path))
    single = steps("one process", 6)
    # Of all ranks' tensors, none is missing and none is stored twice.
    resumed = steps("one process", 6, load=f"{tmp_path}/ep × pp")
    assert all(abs(resumed[name] - value).max() < 1e-9 for name, value in single.items())
    assert any(value.any() for name, value in single.items() if name.endswith("expert_bias"))
    for whole, same, moved in found:
        assert not differences(same, whole), "a resume on the same layout is not exact"
        for way, weights in moved.items():
            for name, value in single.items():
                exact = 0.0 if name.endswith("expert_bias") else 1e-9
                assert abs(weights[name] - value).max() <= exact, (way, name)


# a loop of one's own --------------------------------------------------------------------------------------------------
def own_loop(strategy: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Mixture(depth=DEPTH).double()
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(data(24), GLOBAL_BATCH // accelerator.strategy.data_size)
    model, optimizer, loader = accelerator.prepare(module, SGD(module.parameters()), loader)
    balancer = ExpertBalancer(model, accelerator.strategy, rate=0.05)

    def step(model: Any, batch: Any) -> Tensor:
        logits, _ = model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    for batch in loader:
        with accelerator.accumulate(model):
            if strategy == "single_device":
                accelerator.backward(step(model, batch))
            else:
                accelerator.pipeline_step(model, batch, step=step)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                balancer.step()
    return {name: tensor.numpy() for name, tensor in accelerator.get_state_dict(model).items()}


def own_loop_in_stages() -> dict[str, Any]:
    return own_loop(MeshStrategy(**EP2_PP2, microbatches=4, plan=PLAN))


def test_experts_in_stages_in_a_loop_of_ones_own() -> None:
    single = own_loop("single_device")
    # The main rank has the state.
    found = run_world(4, own_loop_in_stages)[0]
    assert found.keys() == single.keys()
    assert all(abs(found[name] - value).max() < 1e-9 for name, value in single.items())


# mistakes -------------------------------------------------------------------------------------------------------------
def fit(module: Mixture, **arguments: Any) -> str:
    """Returns the error of a fit, "" if there is none."""
    strategy = MeshStrategy(**{**EP2_PP2, "microbatches": 2, "plan": PLAN, **arguments})
    try:
        Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(module, DataLoader(data(16), 4))
    except ConfigurationError as error:
        return str(error)
    return ""


def balance() -> str:
    return fit(Mixture(depth=DEPTH, balances=0.1))


def run_zero_bubble() -> str:
    return fit(Mixture(depth=DEPTH), schedule="ZBVZeroBubble")


def divide_nothing() -> str:
    return fit(Mixture(), plan=None)


class Short(Mixture):
    """Raises for a sample of the second data rank only."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if torch.equal(tokens[0], data(16)[6][0]):
            raise ValueError("a sample that only one data rank has")
        return super().forward(tokens)


def fail_on_one_data_rank() -> str:
    return fit(Short())


MISTAKES: dict[Callable[[], str], str] = {
    balance: "balance_loss with pp=2: its counts are summed over the ranks in every forward",
    run_zero_bubble: "schedule='ZBVZeroBubble' computes weight gradients in separate passes",
    divide_nothing: "ep=2 needs a plan of the experts",
    fail_on_one_data_rank: "ValueError: a sample that only one data rank has",
}


@pytest.mark.parametrize("function", MISTAKES, ids=lambda function: function.__name__)
def test_mistakes_are_named(function: Callable[[], str]) -> None:
    # The first error ends all ranks, so some of them may report none.
    found = [outcome for outcome in run_world(4, function, timeout=100, may_fail=True) if isinstance(outcome, str)]
    assert found and all(MISTAKES[function] in text for text in found)

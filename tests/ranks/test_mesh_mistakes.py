"""Mistakes on a mesh: one clear error before the first step, the same on all ranks, with every weight unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN
from ranks.world import run_world
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from leyden import Trainer
from leyden.core.errors import ConfigurationError
from leyden.strategies import Float8Precision, MeshStrategy
from leyden.strategies.mesh.consistency import is_sampled

Mistake = Callable[[GPT], MeshStrategy]
TP2 = functools.partial(MeshStrategy, dp_shard=1, tp=2)
MISTAKES: dict[str, tuple[str, Mistake]] = {}


def mistake(message: str) -> Callable[[Mistake], Mistake]:
    def register(function: Mistake) -> Mistake:
        MISTAKES[function.__name__] = (message, function)
        return function

    return register


@mistake("a mesh of dp_shard=-1, tp=3 does not match 2 ranks: use dp_replicate=1, dp_shard=1, tp=2.")
def sizes_that_do_not_match_the_world(module: GPT) -> MeshStrategy:
    return MeshStrategy(tp=3, plan=PLAN)


@mistake("a mesh of dp_shard=-1, cp=3 does not match 2 ranks: use dp_replicate=1, dp_shard=1, tp=1, cp=2.")
def parts_of_sequences_that_do_not_match_the_world(module: GPT) -> MeshStrategy:
    return MeshStrategy(cp=3)


@mistake("ep=3 does not divide dp_shard=2: experts are divided over ranks that shard the model. Choose a dp_shard")
def experts_that_do_not_match_the_world(module: GPT) -> MeshStrategy:
    return MeshStrategy(ep=3)


@mistake("ep=4 does not divide dp_shard=1 × cp=2: experts are divided")
def experts_over_more_ranks_than_shard_the_model(module: GPT) -> MeshStrategy:
    return MeshStrategy(dp_shard=1, cp=2, ep=4)


@mistake("the plan's 'blocks.*.expert' matches no module of GPT.")
def experts_that_the_module_does_not_have(module: GPT) -> MeshStrategy:
    return MeshStrategy(ep=2, plan={"blocks.*.expert": "expert_parallel"})


@mistake("dp_shard and tp are both -1: only one dimension can fill the world.")
def two_sizes_left_open(module: GPT) -> MeshStrategy:
    return MeshStrategy(dp_shard=-1, tp=-1, plan=PLAN)


@mistake("device_mesh=(1, 2): MeshStrategy makes its own mesh. Pass dp_replicate, dp_shard and tp instead.")
def an_explicit_device_mesh(module: GPT) -> MeshStrategy:
    return MeshStrategy(device_mesh=(1, 2), plan=PLAN)


@mistake("tp=0: use a number of ranks from 1, or -1 to fill the world.")
def a_size_of_zero(module: GPT) -> MeshStrategy:
    return MeshStrategy(tp=0, plan=PLAN)


@mistake("a pipeline splits the first dimension into micro-batches, and sequence_dims has 'x': 0: put the samples")
def a_pipeline_on_parts_of_samples(module: GPT) -> MeshStrategy:
    return MeshStrategy(dp_shard=1, cp=2, pp=2, sequence_dims={"x": 0})


@mistake("cp_method='ring' is not known.")
def an_unknown_method(module: GPT) -> MeshStrategy:
    return MeshStrategy(dp_shard=1, cp=2, cp_method="ring")  # type: ignore[arg-type]


@mistake("cp_method='ulysses' without cp: only context parallelism uses it.")
def a_method_without_cp(module: GPT) -> MeshStrategy:
    return MeshStrategy(cp_method="ulysses")


@mistake(
    "tp=2 needs a plan of the layers to split: pass MeshStrategy(plan={pattern: style}), or define parallel_plan() on "
)
def no_plan(module: GPT) -> MeshStrategy:
    return TP2()


@mistake("the plan has the style 'colwize'. Did you mean 'colwise'?")
def an_unknown_style(module: GPT) -> MeshStrategy:
    return TP2(plan={**PLAN, "head": "colwize"})


@mistake("the plan's 'blocks.*.upp' matches no module of GPT. Did you mean 'blocks.*.up'?")
def a_pattern_that_matches_nothing(module: GPT) -> MeshStrategy:
    return TP2(plan={**PLAN, "blocks.*.upp": "colwise"})


@mistake("the plan makes 'norm' colwise, but it is a LayerNorm: only Linear and Embedding layers can be split.")
def a_split_norm(module: GPT) -> MeshStrategy:
    return TP2(plan={**PLAN, "norm": "colwise"})


@mistake("blocks.0.up.weight has 33 rows, which tp=2 does not divide: pad the layer")
def an_indivisible_dimension(module: GPT) -> MeshStrategy:
    module.blocks[0].up = nn.Linear(32, 33)
    return TP2(plan=PLAN)


@mistake("blocks.0.attention.n_kv_heads is 1, which tp=2 does not divide: choose a tp that divides it.")
def too_few_key_and_value_heads(module: GPT) -> MeshStrategy:
    module.blocks[0].attention.n_kv_heads = 1
    return TP2(plan=PLAN)


@mistake("'blocks.0.attention' has n_heads=4, n_kv_heads=2, and under tp=2 each rank has a share of its heads")
def heads_missing_from_the_plan(module: GPT) -> MeshStrategy:
    return TP2(plan={name: style for name, style in PLAN.items() if style != "heads"})


@mistake("'tokens.weight' and 'head.weight' are one tensor, and the plan splits it in two ways")
def tied_weights_split_in_two_ways(module: GPT) -> MeshStrategy:
    return TP2(plan={**PLAN, "tokens": "colwise"})


@mistake("'tokens' has max_norm, which works on whole rows")
def an_embedding_with_max_norm(module: GPT) -> MeshStrategy:
    module.tokens.max_norm = 1.0
    return TP2(plan=PLAN)


@mistake("'norm' is an LSTM, which keeps its weights in a list of its own")
def a_recurrent_layer(module: GPT) -> MeshStrategy:
    module.norm = nn.LSTM(32, 32)  # type: ignore[assignment]
    return TP2(plan=PLAN)


@mistake("tp=2 splits layers, and precision 'fp8 ")
def layers_that_a_precision_replaces(module: GPT) -> MeshStrategy:
    return TP2(plan=PLAN, precision=Float8Precision())


@mistake("cpu_offload is for shards, and tp 2 leaves none on 2 ranks: use dp_shard=2 or more")
def cpu_offload_without_shards(module: GPT) -> MeshStrategy:
    return TP2(plan=PLAN, cpu_offload=True)


@mistake("mp_policy is for shards, and tp 2 leaves none on 2 ranks")
def mp_policy_without_shards(module: GPT) -> MeshStrategy:
    return TP2(plan=PLAN, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@mistake("torch.optim.Muon orthogonalizes whole matrices, and a rank holds only some rows: use leyden.optim.Muon")
def an_optimizer_of_whole_matrices(module: GPT) -> MeshStrategy:
    module.make = lambda: torch.optim.Muon([p for p in module.parameters() if p.ndim == 2])  # type: ignore[assignment]
    return TP2(plan=PLAN)


@mistake("the ranks of a tp group received different batches, and they share one model")
def a_different_batch_on_each_rank(module: GPT) -> MeshStrategy:
    strategy = TP2(plan=PLAN)
    module.batch = lambda: torch.full((2, 16), strategy.ranks.global_rank)  # type: ignore[assignment]
    return strategy


@mistake("needs a sequence length divisible by 2, and this sequence has 15 tokens: pad it")
def an_indivisible_sequence(module: GPT) -> MeshStrategy:
    module.batch = lambda: torch.zeros(2, 15, dtype=torch.long)  # type: ignore[assignment]
    return TP2(plan=SEQUENCE_PLAN)


@mistake("a block with dropout is rerun in backward, and under a plan with 'sequence' layers it would drop other")
def dropout_that_cannot_be_repeated(module: GPT) -> MeshStrategy:
    for block in module.blocks:
        block.dropout.p = 0.2
    return TP2(plan=SEQUENCE_PLAN, activation_checkpointing_policy={"Block"})


@mistake("the gradients of 'blocks.0.up.1.weight' differ between the ranks of a tp group, although each rank")
def an_unsplit_layer_with_a_split_input(module: GPT) -> MeshStrategy:
    plan = {name: style for name, style in PLAN.items() if name != "blocks.*.up"}
    for block in module.blocks:
        block.up = nn.Sequential(block.up, nn.PReLU())  # type: ignore[assignment]
    return TP2(plan={**plan, "blocks.*.up.0": "colwise"})


def first_error(make: Mistake) -> tuple[str, bool]:
    """Returns the error of a run that begins with a mistake, and whether the weights are unchanged."""
    torch.manual_seed(0)
    module = GPT(counts_items=True)
    before: list[torch.Tensor] = []
    try:
        strategy = make(module)
        before = [p.detach().clone() for p in module.parameters()]
        begin(strategy, module)
    except ConfigurationError as error:
        after = [getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters()]
        # A strategy that cannot be created never sees the module.
        return str(error), not before or (len(before) == len(after) and all(map(torch.equal, before, after)))
    return "no error", True


def begin(strategy: MeshStrategy, module: Any) -> None:
    strategy.setup_environment()
    strategy.setup_modules([module])
    make = getattr(module, "make", None) or module.configure_optimizers
    [optimizer] = strategy.setup_optimizers([module], [make()])
    tokens = module.batch() if hasattr(module, "batch") else torch.zeros(2, 16, dtype=torch.long)
    outputs = strategy.forward(module.training_step, (tokens, tokens), (0,))
    strategy.backward(outputs["loss"])
    strategy.before_step(optimizer)


def all_errors() -> dict[str, tuple[str, bool]]:
    return {name: first_error(make) for name, (_, make) in MISTAKES.items()}


@pytest.fixture(scope="module")
def errors() -> list[dict[str, tuple[str, bool]]]:
    return run_world(2, all_errors)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_the_same_error_on_every_rank(errors: list[dict[str, tuple[str, bool]]], name: str) -> None:
    for found, unchanged in (rank[name] for rank in errors):
        assert MISTAKES[name][0] in found
        assert unchanged
    assert errors[0][name] == errors[1][name]


class TurnsOdd(GPT):
    """The ranks' batches, or the gradients of a layer that every rank holds whole, differ from the seventh step on."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    @property
    def is_odd(self) -> bool:
        return self.trainer.global_step >= 6 and self.trainer.global_rank == 1

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return tuple(tokens + self.is_odd for tokens in batch) if self.what == "batches" else batch

    def on_after_backward(self) -> None:
        if self.what == "gradients" and self.is_odd:
            [grad] = [p.grad for name, p in self.named_parameters() if name == "norm.weight"]
            assert grad is not None
            grad.mul_(2)


def error_of_a_late_difference(what: str) -> tuple[str, int]:
    torch.manual_seed(0)
    trainer = Trainer(**QUIET, strategy=TP2(plan=PLAN), max_epochs=1, gradient_clip_val=1.0)
    try:
        trainer.fit(TurnsOdd(what), [(torch.zeros(2, 16, dtype=torch.long),) * 2] * 20)
    except ConfigurationError as error:
        return str(error), trainer.global_step
    return "no error", trainer.global_step


@pytest.mark.parametrize(
    ("what", "message"),
    [("batches", "the ranks of a tp group received different batches"), ("gradients", "gradients of 'norm.weight'")],
)
def test_ranks_that_differ_later_are_found_at_the_next_sampled_step(what: str, message: str) -> None:
    # The first rank that raises ends the other one.
    found = [rank for rank in run_world(2, error_of_a_late_difference, what, may_fail=True) if isinstance(rank, tuple)]
    assert found
    for error, steps in found:
        # The eighth batch and step are checked.
        assert message in error
        assert steps == 7


def test_sampled_steps_double_up_to_a_thousand() -> None:
    assert [n for n in range(1, 5000) if is_sampled(n)] == [2**k for k in range(11)] + [2048, 3072, 4096]
